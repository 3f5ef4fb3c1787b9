"""Role `nvidia`: one release of the GPU driver, its cards as they should be set, and changes of it that cannot break a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyinfra import logger
from pyinfra.api import OperationError, deploy
from pyinfra.context import ctx_host

from gpuwright import boot, repository, sandbox, snapshot
from gpuwright.atomic import File, files
from gpuwright.ownership import Owned, recorded_of, retire
from gpuwright.packages import installed
from gpuwright.render import static, template
from gpuwright.units import enabled, running
from roles.nvidia import equality, judgement, operations
from roles.nvidia.facts import NVIDIA, STATE, Nvidia
from roles.nvidia.packages import PINNED, PRIORITY, Packages, Unsupported, address, packages
from roles.nvidia.spec import NvidiaSpec
from roles.nvidia.wishes import ROLE, SCRIPT

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

SETTINGS_UNIT = "gpuwright-gpu-settings.service"
SETTLE_UNIT = "gpuwright-driver-settle.service"
_UNITS = "/etc/systemd/system"
_SETTER = "/usr/local/lib/gpuwright/gpu-settings"
_CARDS_CONF = "/etc/gpuwright/nvidia/cards.conf"
_DRIVER_CONF = "/etc/gpuwright/nvidia/driver.conf"
_PREFERENCES = "/etc/apt/preferences.d/gpuwright-nvidia"
_ENGINES = f"{_UNITS}/gpuwright-engine-.service.d/gpuwright-nvidia.conf"


@deploy("NVIDIA driver")
def nvidia(spec: NvidiaSpec, hardware: Hardware) -> None:
    """Put the driver's source and pins in place, and its packages where that needs no reboot; what does is laid by, and
    exchanged between the drain and the one reboot of role kernel.

    + spec: the role's settings
    + hardware: how many cards the machine has

    Raises OperationError, before anything changes, for a host that cannot have the driver in this way.
    """
    host = ctx_host.get()
    whole = snapshot.read(host)
    try:
        seen = whole.read(NVIDIA)
    except snapshot.CouldNotLook as error:
        raise OperationError(f"{host.name}: the driver cannot be looked at ({error}). Nothing was changed.") from None
    system = whole.read(snapshot.SYSTEM)
    written = setting_files(spec)
    if not spec.ours:
        _write(written, [], spec)
        return
    try:
        names = packages(spec, system)
    except Unsupported as error:
        raise OperationError(f"{host.name}: {error}. Nothing was changed.") from None
    refuse(host.name, spec, seen)
    written += driver_files(spec, hardware, names, system)
    if spec.hold:
        logger.warning(
            f"{host.print_prefix}nvidia.hold: the driver is frozen; nothing of it is installed, changed or repaired"
        )
    # Whether Secure Boot takes a module can be told with these alone.
    tools = [] if system.is_container else ["keyutils", "mokutil"]
    if tools:
        installed(name="Install what tells whether Secure Boot takes the driver", packages=tools)
    _write(written, [Owned("directory", STATE)], spec)
    if not spec.hold:
        operations.driver(name=f"Bring the driver to {spec.version}", spec=spec)
        enabled(name=f"Have {SETTLE_UNIT} look at every boot", units=[SETTLE_UNIT])


def _write(written: list[File], claims: list[Owned], spec: NvidiaSpec) -> None:
    if written:
        files(name="Write the driver's source, pins and scripts", role=ROLE, files=written, claims=claims)
    holds = [owned for owned in recorded_of(ctx_host.get(), ROLE) if owned.kind == "hold"] if spec.ours else []
    retire(ROLE, keep=[*(file.owned for file in written), *claims, *holds])


@deploy("NVIDIA driver verified")
def nvidia_verified(spec: NvidiaSpec, hardware: Hardware, others: boot.Wishes, reboots: bool) -> None:
    """Hold what is installed, set the cards, and read the driver back, after the one reboot of role kernel.

    + spec: the role's settings
    + hardware: how many cards the machine has
    + others: drivers that may keep NVIDIA's from its cards until a reboot
    + reboots: this run could reboot the node, so nothing is left to wait for one
    """
    host = ctx_host.get()
    if spec.ours and not spec.hold:
        names = packages(spec, snapshot.read(host).read(snapshot.SYSTEM)).driver
        operations.held(name="Hold the driver's packages at their version", names=names)
    if spec.ours and not spec.hold and hardware.gpus.count:
        operations.daemons_running(name="Run what runs beside the driver: persistence, fabric manager", spec=spec)
    if sets_cards(spec) and hardware.gpus.count and not reboots and kept_out(others):
        enabled(name=f"Have {SETTINGS_UNIT} set the cards once their driver has them", units=[SETTINGS_UNIT])
    elif sets_cards(spec) and hardware.gpus.count:
        running(
            name=f"Run {SETTINGS_UNIT}: {said(spec)}",
            units=[SETTINGS_UNIT],
            stale=lambda later: [SETTINGS_UNIT] if judgement.settings(spec, later.read(NVIDIA)) else (),
        )
    if hardware.gpus.count and spec.ours:
        operations.cards_known(name=f"Know the cards of {host.name} by their UUIDs", hardware=hardware)
    operations.verified(
        name=f"Read back the driver of {host.name}", spec=spec, hardware=hardware, others=others, may_wait=not reboots
    )


def kept_out(others: boot.Wishes) -> bool:
    """Whether the cards wait for a reboot. What cannot be seen is told when the driver is read back."""
    try:
        return bool(judgement.kept_out(snapshot.read(ctx_host.get()), others))
    except snapshot.CouldNotLook:
        return False


def sets_cards(spec: NvidiaSpec) -> bool:
    """Whether the node file asks for anything that cards forget. On a vendor's machine MIG is only looked at."""
    return spec.power_limit_watts is not None or (spec.mig == "off" and spec.ours)


def said(spec: NvidiaSpec) -> str:
    """What the cards are set to, for people."""
    power = f"{spec.power_limit_watts} W a card" if spec.power_limit_watts else ""
    return ", ".join(part for part in (power, "no MIG" if spec.mig == "off" and spec.ours else "") if part)


def setting_files(spec: NvidiaSpec) -> list[File]:
    """What sets the cards at every boot; none where nothing is asked."""
    if not sets_cards(spec):
        return []
    mig = spec.mig if spec.ours else "kept"
    conf = template(f"nvidia{_CARDS_CONF}.j2", power_limit=spec.power_limit_watts, mig=mig)
    unit = f"{_UNITS}/{SETTINGS_UNIT}"
    return [
        File(_CARDS_CONF, conf),
        File(_SETTER, static(f"nvidia{_SETTER}"), "0755"),
        File(unit, template(f"nvidia{unit}.j2", sandbox=sandbox.gpu_settings().lines())),
    ]


def driver_files(spec: NvidiaSpec, hardware: Hardware, names: Packages, system: snapshot.System) -> list[File]:
    """The source with its key, the pins, and what changes the driver. Raises OperationError for a key that is not the one named."""
    conf = template(
        f"nvidia{_DRIVER_CONF}.j2",
        version=spec.version,
        names=names,
        debians_tools=equality.DEBIANS_TOOLS,
        fabric=spec.fabric_manager,
        cards=hardware.gpus.count,
        persistence=spec.persistence,
    )
    pins = template(f"nvidia{_PREFERENCES}.j2", pinned=PINNED, version=spec.version, priority=PRIORITY)
    unit = f"{_UNITS}/{SETTLE_UNIT}"
    found = [
        File(_DRIVER_CONF, conf),
        File(_PREFERENCES, pins),
        File(SCRIPT, static(f"nvidia{SCRIPT}"), "0755"),
        File(unit, template(f"nvidia{unit}.j2", sandbox=sandbox.driver_settle().lines())),
        File(_ENGINES, static(f"nvidia{_ENGINES}")),
    ]
    if spec.repository_key is not None:
        try:
            key = repository.read_key(spec.repository_key, spec.fingerprint)
        except repository.BadKey as error:
            raise OperationError(f"nvidia.repository_key: {error}") from None
        flat = repository.Repository("nvidia", address(spec, system), repository.ARCHITECTURES[system.architecture])
        found = [*repository.files(ROLE, flat, key), *found]
    return found


def refuse(name: str, spec: NvidiaSpec, seen: Nvidia) -> None:
    """Raise OperationError, in one sentence, for a driver that came in another way than through packages."""
    if seen.runfile:
        raise OperationError(
            f"{name}: a driver was installed here with NVIDIA's .run file ({seen.runfile}), which no package manager knows of; "
            f"run it as root with --silent and deploy again, or set nvidia.source: vendor to have it checked only."
        )
