"""Role `models`: weights at a pinned commit, fetched by jobs of the node's own and verified byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyinfra.api import OperationError, deploy

from gpuwright import atomic, numa, ownership, packages, render, sandbox
from gpuwright.spec.secret import SecretError, resolve
from roles.models import operations
from roles.models.operations import SCRIPTS, Job
from roles.models.spec import Model, ModelsSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

ROLE = "models"
SETTINGS = "/etc/gpuwright/models"
HUB_CA = f"{SETTINGS}/hub-ca.pem"
HUB_TOKEN = f"{SETTINGS}/hub-token"


@deploy("Models: start")
def models_start(spec: ModelsSpec, hardware: Hardware) -> None:
    """Install what downloads need and start them side by side; they go on while the rest of the node is made.

    Weights of a model that the node file no longer names stay on disk: they are removed only on request.
    """
    jobs = wanted(spec, hardware)
    common = files(spec, hardware)
    every = [*common, *(file for job in jobs for file in (job.settings, job.unit_file))]

    ownership.retire(ROLE, keep=[file.owned for file in every])
    packages.installed(
        name="Install what downloads use: curl, jq, openssl, CA certificates",
        packages=["curl", "jq", "openssl", "ca-certificates"],
    )
    atomic.files(name=f"Write the download jobs of {', '.join(spec.items)}", role=ROLE, files=every)
    operations.store(name=f"Make the store {spec.store}", path=spec.store)
    operations.started(name=f"Start downloads that are not complete: {', '.join(spec.items)}", jobs=jobs)


@deploy("Models: verified")
def models_verified(spec: ModelsSpec, hardware: Hardware) -> None:
    """Wait until every model is verified, with progress; ``wait: false`` leaves that to the node."""
    operations.verified(
        name=f"Verified weights of {', '.join(spec.items)}", jobs=wanted(spec, hardware), wait=spec.wait
    )


def wanted(spec: ModelsSpec, hardware: Hardware) -> list[Job]:
    """One job per model. Raises ValueError for a model without a commit."""
    return [job(name, model, spec, numa.io_nodes(spec.numa_nodes, hardware)) for name, model in spec.items.items()]


def job(name: str, model: Model, spec: ModelsSpec, nodes: str | None) -> Job:
    """The settings and the unit of one model. Raises ValueError when it has no commit."""
    if model.commit is None:
        raise ValueError(f"model {name} has no commit; run: gpuwright pin")
    settings = render.template(
        "models/etc/gpuwright/models/model.conf.j2", name=name, model=model, spec=spec, hub_ca=HUB_CA
    )
    unit = render.template(
        "models/etc/systemd/system/model.service.j2",
        name=name,
        model=model,
        spec=spec,
        numa_nodes=nodes,
        token=spec.token is not None and model.source is None,
        sandbox=sandbox.model(name, spec.store, model.source).lines(),
    )
    return Job(
        name,
        atomic.File(f"{SETTINGS}/{name}.conf", settings),
        atomic.File(f"/etc/systemd/system/gpuwright-model-{name}.service", unit),
    )


def files(spec: ModelsSpec, hardware: Hardware) -> list[atomic.File]:
    """What all jobs share. Raises OperationError when the token or the hub's CA cannot be read on the controller."""
    found = [
        *(
            atomic.File(f"{SCRIPTS}/{name}", render.static(f"models{SCRIPTS}/{name}"), "0755")
            for name in ("model-fetch", "model-await")
        ),
        atomic.File(
            "/etc/sysusers.d/gpuwright-models.conf", render.static("models/etc/sysusers.d/gpuwright-models.conf")
        ),
        atomic.File(
            "/etc/systemd/system/gpuwright-model-verify@.service",
            render.template(
                "models/etc/systemd/system/gpuwright-model-verify@.service.j2",
                spec=spec,
                numa_nodes=numa.io_nodes(spec.numa_nodes, hardware),
                sandbox=sandbox.verification(spec.store).lines(),
            ),
        ),
    ]
    if spec.hub_ca:
        try:
            found.append(atomic.File(HUB_CA, Path(spec.hub_ca).expanduser().read_bytes()))
        except OSError as error:
            raise OperationError(
                f"models.hub_ca: cannot read {spec.hub_ca} ({error.strerror}); put the hub's CA there, as PEM"
            ) from None
    if spec.token:
        try:
            found.append(atomic.File(HUB_TOKEN, resolve(spec.token, "models.token"), "0600"))
        except SecretError as error:
            raise OperationError(str(error)) from None
    return found
