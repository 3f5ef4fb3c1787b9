"""The steps of the GPU half: the toolkit at its version, and the CDI specification."""

from __future__ import annotations

from pyinfra import logger
from pyinfra.api import OperationError
from pyinfra.context import ctx_host

from gpuwright import repository, snapshot
from gpuwright.atomic import File, files
from gpuwright.ownership import Owned
from gpuwright.packages import installed
from gpuwright.render import template
from roles.containers.gpus import cdi
from roles.containers.gpus.facts import GPUS, PACKAGES
from roles.containers.gpus.operations import specification
from roles.containers.gpus.spec import ToolkitSpec
from roles.containers.operations import ROLE, held

PREFERENCES = "/etc/apt/preferences.d/gpuwright-toolkit"


def toolkit_files(spec: ToolkitSpec, system: snapshot.System) -> tuple[File, ...]:
    """The toolkit's pin and, from NVIDIA, its source with its key. Raises OperationError for a key that is none."""
    if spec.source == "vendor":
        return ()
    pin = File(
        PREFERENCES,
        template(f"containers{PREFERENCES}.j2", packages=PACKAGES, version=package_version(spec)),
    )
    if spec.source == "local":
        return (pin,)
    wanted = repository.Repository("toolkit", spec.repository, repository.ARCHITECTURES[system.architecture])
    try:
        key = repository.read_key(str(spec.repository_key), spec.repository_fingerprint)
    except repository.BadKey as error:
        raise OperationError(f"containers.toolkit.repository_key: {error}") from None
    return (*repository.files(ROLE, wanted, key), pin)


def package_version(spec: ToolkitSpec) -> str:
    """The version of the packages: NVIDIA builds each release once."""
    return f"{spec.version}-1"


def toolkit(spec: ToolkitSpec, system: snapshot.System) -> list[Owned]:
    """Install the four packages at exactly the version asked for, and hold them there. Returns what is owned for it."""
    owned = toolkit_files(spec, system)
    if not owned:
        return []
    version = package_version(spec)
    files(name=f"Pin the container toolkit at {version}", role=ROLE, files=owned)
    installed(
        name=f"Install the container toolkit {version} ({spec.source})",
        packages=[f"{package}={version}" for package in PACKAGES],
    )
    held(name="Hold the container toolkit", packages=PACKAGES, among=PACKAGES)
    return [*(file.owned for file in owned), *(Owned("hold", package) for package in PACKAGES)]


def devices(spec: ToolkitSpec) -> None:
    """The CDI specification as it must be; where the machine's vendor keeps it, what is wrong with it is only told."""
    host = ctx_host.get()
    if spec.source != "vendor":
        specification(name="Keep one CDI specification, of the loaded driver")
        return
    for finding in cdi.findings(snapshot.read(host).read(GPUS)):
        logger.warning(f"{host.print_prefix}CDI (containers.toolkit.source: vendor, so nothing is touched): {finding}")
