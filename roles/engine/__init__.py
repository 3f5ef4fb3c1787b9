"""Role `engine`: one systemd unit, one container, one bridge network and one loopback port per engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pyinfra.api import deploy
from pyinfra.context import ctx_host, ctx_state

from gpuwright import atomic, numa, ownership, packages, render, sandbox
from gpuwright.boot import Barrier
from gpuwright.ownership import Owned
from roles.engine import container, operations
from roles.engine.spec import Engine, EngineSpec
from roles.models.spec import ModelsSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

SCRIPTS = (
    "engine-await",
    "engine-common",
    "engine-evidence",
    "engine-gate",
    "engine-prestart",
    "engine-replace",
    "engine-run",
    "engine-stop",
    "image-fetch",
)


@deploy("Engine")
def engine(
    spec: EngineSpec, models: ModelsSpec, hardware: Hardware, barrier: Barrier, judged: Collection[str] = ()
) -> None:
    """Make the node's engines what `spec` says, and leave alone what serves as it should.

    `judged` are the engines between whose GPUs role pcie judges P2P: they run without it unless the verdict is good.
    Evidence is nobody's to remove: an engine that is retired leaves its folder in /var/lib/gpuwright/evidence.
    """
    count = hardware.gpus.count
    engines = [wanted(name, one, spec, models, name in judged, count) for name, one in spec.engines.items()]
    scripts = [
        atomic.File(f"{operations.SCRIPTS}/{name}", render.static(f"engine{operations.SCRIPTS}/{name}"), mode="0755")
        for name in SCRIPTS
    ]
    jobs = [image_job(name, one, numa.io_nodes(models.numa_nodes, hardware)) for name, one in spec.engines.items()]
    owned = [file.owned for file in [*scripts, *jobs]]
    for one in engines:
        owned += [*(file.owned for file in one.files), *one.claims]

    # First, so that GPUs and ports are free for those that stay.
    ownership.retire("engine", keep=owned)
    packages.installed(name="Install what engine scripts use: curl, jq", packages=["curl", "jq"])
    atomic.files(name="Write the engine scripts and image jobs", role="engine", files=[*scripts, *jobs])
    operations.images(name=f"Fetch images of engines {', '.join(spec.engines)}", engines=engines)
    operations.start(name="Start engines that are down", engines=engines, wait_for_weights=models.wait, barrier=barrier)
    # One operation per host, in the order of the inventory: pyinfra keeps hosts in a set, so that `_serial` alone takes
    # them in any order, and nobody could say which hosts a failure leaves untouched.
    host = ctx_host.get()
    for turn in host.loop([other.name for other in ctx_state.get().inventory]):
        if turn == host.name and operations.may_have_to_replace(host, engines):
            why = operations.verdicts_that_replace(host, engines)
            operations.replace(
                name=f"Replace serving engines on {turn}{why}", engines=engines, barrier=barrier, _serial=True
            )


def model_directory(name: str, models: ModelsSpec) -> str:
    """Where the weights of a model lie. Raises ValueError when it has no commit."""
    model = models.items[name]
    if model.commit is None:
        raise ValueError(f"model {name} has no commit; run: gpuwright pin")
    return f"{models.store}/{model.repo}/{model.commit}"


def image_job(name: str, one: Engine, nodes: str | None) -> atomic.File:
    """The unit that fetches the image of engine `name`."""
    text = render.template(
        "engine/etc/systemd/system/image.service.j2",
        name=name,
        engine=one,
        numa_nodes=nodes,
        sandbox=sandbox.image(name, one.image.archive).lines(),
    )
    return atomic.File(f"/etc/systemd/system/gpuwright-image-{name}.service", text)


def wanted(
    name: str, one: Engine, spec: EngineSpec, models: ModelsSpec, judged: bool = False, gpu_count: int = 0
) -> operations.Wanted:
    """Engine `name` as it must be on the node: its files and everything else that is owned with it."""
    directory = model_directory(one.model, models)
    config = container.configuration(name, one, directory)
    separation = container.separation(one) if judged else None
    conf = render.template(
        "engine/etc/gpuwright/engines/engine.conf.j2",
        name=name,
        engine=one,
        spec=spec,
        config=config,
        model_directory=directory,
        gpu_count=gpu_count,
        cache=container.cache_directory(name, one),
        container=container.docker_arguments(name, one, directory),
        command=container.command_line(one),
        tool_choice=container.tool_choice(one),
        separation=separation,
        without_p2p=[f"--env={key}={value}" for key, value in separation.all_environment.items()] if separation else [],
    )
    unit = render.template(
        "engine/etc/systemd/system/engine.service.j2",
        name=name,
        engine=one,
        model_directory=directory,
        separation=separation,
        sandbox=sandbox.engine(name, bool(one.gpus), judged, spec.page_cache_drop == "auto", models.store).lines(),
    )
    return operations.Wanted(
        name=name,
        repository=one.image.repository,
        digest=one.image.digest or "",
        config=config,
        separation=separation.label if separation else None,
        manifest=f"{directory}.manifest.json",
        files=(
            atomic.File(f"/etc/gpuwright/engines/{name}.conf", conf),
            atomic.File(f"/etc/systemd/system/gpuwright-engine-{name}.service", unit),
        ),
        claims=(
            Owned("container", f"gpuwright-{name}"),
            Owned("network", f"gpuwright-{name}"),
            Owned("directory", f"/var/lib/gpuwright/cache/{name}"),
            Owned("directory", f"/var/lib/gpuwright/engines/{name}"),
            Owned("directory", f"/run/gpuwright/engines/{name}"),
        ),
    )
