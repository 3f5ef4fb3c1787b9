"""Docker: where it comes from, what its daemon.json says, and who may reach what it publishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyinfra import logger
from pyinfra.api import OperationError, deploy
from pyinfra.context import ctx_host

from gpuwright import repository, sandbox, snapshot
from gpuwright.atomic import File, files
from gpuwright.ownership import Owned, retire
from gpuwright.packages import installed
from gpuwright.render import static, template
from roles.containers import daemon, diagnosis, operations
from roles.containers.facts import APPLIED, CONTAINERS, DOCKER_PACKAGES, TABLE, Docker
from roles.containers.gpus.facts import GPUS
from roles.containers.gpus.operations import gpus_kept
from roles.containers.gpus.toolkit import devices, toolkit
from roles.containers.operations import ROLE
from roles.containers.spec import ContainersSpec, Registry

# Debian splits the client off since 13 and only recommends it; apt runs without recommended packages.
# Where the kernel has AppArmor, dockerd needs apparmor_parser to load the profile of its containers.
_DISTRIBUTION = ("docker.io", "apparmor")
PACKAGES: dict[str, tuple[str, ...]] = {
    "debian-12": _DISTRIBUTION,
    "debian-13": (*_DISTRIBUTION, "docker-cli"),
    "ubuntu-22.04": _DISTRIBUTION,
    "ubuntu-24.04": _DISTRIBUTION,
    "ubuntu-26.04": _DISTRIBUTION,
}
DOCKER_REPOSITORY_PACKAGES = ("docker-ce", "docker-ce-cli", "containerd.io", "apparmor")

GUARD_FILES = (
    File(
        "/etc/gpuwright/containers/neighbour.nft",
        static("containers/etc/gpuwright/containers/neighbour.nft"),
    ),
    File(
        "/usr/local/lib/gpuwright/neighbour-guard",
        static("containers/usr/local/lib/gpuwright/neighbour-guard"),
        "0755",
    ),
    File(
        f"/etc/systemd/system/{operations.GUARD_UNIT}",
        template(
            f"containers/etc/systemd/system/{operations.GUARD_UNIT}.j2", sandbox=sandbox.neighbour_guard().lines()
        ),
    ),
    File(
        "/etc/systemd/system/nftables.service.d/gpuwright-containers.conf",
        static("containers/etc/systemd/system/nftables.service.d/gpuwright-containers.conf"),
    ),
)
SERVICE_FILES = (
    File(
        "/usr/local/lib/gpuwright/docker-config-record",
        static("containers/usr/local/lib/gpuwright/docker-config-record"),
        "0755",
    ),
    File(
        "/etc/systemd/system/docker.service.d/gpuwright.conf",
        static("containers/etc/systemd/system/docker.service.d/gpuwright.conf"),
    ),
)


@deploy("Containers")
def containers(spec: ContainersSpec, gpus: int = 0, firewall: bool = False) -> None:
    """Install Docker, configure it, and keep it from being upgraded by accident.

    + spec: the role's settings
    + gpus: how many GPUs containers shall reach (through CDI)
    + firewall: the node has a firewall, which keeps neighbours away from containers, too

    Raises OperationError before anything changes when the host has a Docker that cannot be made what is asked.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    docker = seen.read(CONTAINERS)
    system = seen.read(snapshot.SYSTEM)
    refuse(host.name, docker, spec, gpus, seen.read(snapshot.PACKAGES))
    for setting in operations.plan(host, docker, spec, gpus).kept:
        logger.warning(
            f"{host.print_prefix}daemon.json: {setting.name} was set by gpuwright once and changed on the host since; "
            "it is no longer in the node file and is left as it is"
        )

    if gpus:
        for told in diagnosis.diagnoses(daemon.parse(docker.live or ""), docker.version):
            logger.warning(f"{host.print_prefix}{daemon.PATH}: {told}")

    sources = repository_files(spec, system) if spec.source == "docker" else ()
    if sources:
        files(name=f"Add Docker's repository {spec.repository}", role=ROLE, files=sources)
    chosen = packages(spec, system)
    installed(name=f"Install Docker ({spec.source})", packages=chosen)
    operations.held(name="Hold Docker and containerd at their version", packages=chosen)
    owned = toolkit(spec.toolkit, system) if gpus else []

    wanted = [*SERVICE_FILES, *authorities(spec.registries)]
    files(name="Write Docker's drop-in and registry certificates", role=ROLE, files=wanted)
    if not firewall:
        operations.neighbour_guard(name="Keep neighbours away from containers (Docker before 28)", files=GUARD_FILES)
    operations.daemon_json(name="Merge /etc/docker/daemon.json", spec=spec, gpus=gpus)
    operations.docker_running(name="Run docker.service with its daemon.json")
    if gpus:
        devices(spec.toolkit)

    guard = [*(file.owned for file in GUARD_FILES), Owned("table", TABLE)]
    retire(
        ROLE,
        keep=[
            *(file.owned for file in (*sources, *wanted)),
            *(guard if not firewall and operations.guard_wanted(docker.oldest_version) else ()),
            Owned("file", APPLIED),
            *(Owned("hold", package) for package in DOCKER_PACKAGES),
            *owned,
        ],
    )


@deploy("Containers, verified")
def containers_verified(gpus: int) -> None:
    """At the end of a run: whether running containers still have their GPUs, if systemd read its units again in between.

    + gpus: how many GPUs containers shall reach
    """
    if gpus:
        began = snapshot.read(ctx_host.get()).read(GPUS).reloaded
        gpus_kept(name="See that running containers have their GPUs", reloaded=began)


def packages(spec: ContainersSpec, system: snapshot.System) -> tuple[str, ...]:
    """The packages that bring Docker. Raises OperationError for a distribution that is not supported."""
    if spec.source == "docker":
        return DOCKER_REPOSITORY_PACKAGES
    name = f"{system.id}-{system.version_id}"
    if name not in PACKAGES:
        raise OperationError(f"the host runs {name}; supported are {', '.join(PACKAGES)}")
    return PACKAGES[name]


def refuse(name: str, docker: Docker, spec: ContainersSpec, gpus: int, present: dict[str, str]) -> None:
    """Raise OperationError, in one sentence, for a host whose Docker cannot become what the node file asks."""
    if docker.snap:
        raise OperationError(
            f"{name}: Docker is installed as a snap, which reads neither /etc/docker nor GPU drivers; move its data, "
            "run `snap remove docker` and deploy again."
        )
    other = "docker-ce" if spec.source == "distribution" else "docker.io"
    if other in present:
        wanted = "docker.io from the distribution" if spec.source == "distribution" else "docker-ce from Docker"
        raise OperationError(
            f"{name}: {other} {present[other]} is installed and the node file wants {wanted}; they replace each other. "
            f"Set containers.source to {'docker' if spec.source == 'distribution' else 'distribution'}, or stop the "
            f"engines, run `apt-get remove --allow-change-held-packages {other}` and deploy again."
        )
    if old := operations.without_cdi(name, docker, gpus):
        raise OperationError(old)
    swarm = ((docker.info or {}).get("Swarm") or {}).get("LocalNodeState")
    if swarm == "active":
        raise OperationError(
            f"{name}: Docker is a member of a swarm, and a swarm excludes live-restore, without which a restart of "
            "Docker ends every engine; run `docker swarm leave` and deploy again."
        )


def repository_files(spec: ContainersSpec, system: snapshot.System) -> tuple[File, ...]:
    """Docker's repository as a deb822 source with its key. Raises OperationError for a key file that is none."""
    wanted = repository.Repository(
        "docker",
        f"{spec.repository.rstrip('/')}/{system.id}",
        repository.ARCHITECTURES[system.architecture],
        suites=system.codename,
        components="stable",
    )
    try:
        key = repository.read_key(str(spec.repository_key))
    except repository.BadKey as error:
        raise OperationError(f"containers.repository_key: {error}") from None
    return repository.files(ROLE, wanted, key)


def authorities(registries: Sequence[Registry]) -> tuple[File, ...]:
    """One ca.crt per registry. Docker reads them at every pull: nothing is restarted. Raises OperationError."""
    found = []
    for registry in registries:
        path = Path(registry.ca)
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise OperationError(
                f"containers.registries: {registry.host}: {path} cannot be read: {error.strerror}"
            ) from None
        if b"-----BEGIN CERTIFICATE-----" not in pem or b"PRIVATE KEY" in pem:
            raise OperationError(
                f"containers.registries: {registry.host}: {path} must hold PEM certificates and nothing secret"
            )
        found.append(File(f"/etc/docker/certs.d/{registry.host}/ca.crt", pem))
    return tuple(found)
