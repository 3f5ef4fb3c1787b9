"""What the driver of a node lacks of what its node file asks, and how that is brought: in place, or by an exchange with a reboot.

Pure: facts in, sentences out. What is loaded decides. Packages beside a module of their own release are put right in place;
a module of another release goes on until a reboot, so then everything waits for the drain (gpu-node.md 4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwright import boot
from gpuwright.snapshot import System
from roles.nvidia import equality
from roles.nvidia.facts import NVIDIA, Nvidia
from roles.nvidia.packages import Packages, packages
from roles.nvidia.spec import NvidiaSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.snapshot import Snapshot
    from gpuwright.spec.node import Hardware


def loaded(seen: Nvidia) -> str:
    """The release of the module in the kernel, "" for none."""
    return seen.module.version if seen.module else ""


def must_exchange(spec: NvidiaSpec, seen: Nvidia) -> bool:
    """Whether the loaded module is another one than the node file's: only a reboot brings that one."""
    return seen.module is not None and (seen.module.version, seen.module.open) != (spec.version, spec.open_modules)


def rejected(spec: NvidiaSpec, seen: Nvidia) -> str | None:
    """Why the node file's release is not tried again on this node; None where it never failed here."""
    for line in seen.exchange.rejected:
        version, _, why = line.partition(" ")
        if version == spec.version and loaded(seen) != version:
            return why
    return None


def fabric_manager(spec: NvidiaSpec, seen: Nvidia, names: Packages) -> tuple[str, ...]:
    """The package that manages switches, where there are some and the role cares."""
    return (names.fabric_manager,) if spec.fabric_manager == "auto" and seen.nvswitches else ()


def wrong(spec: NvidiaSpec, seen: Nvidia, system: System) -> list[str]:
    """One sentence for everything about packages and built modules that is not as asked. Raises Unsupported."""
    names = packages(spec, system)
    wanted = (*names.driver, *fabric_manager(spec, seen, names))
    found = []
    for name in wanted:
        package = seen.packages.get(name)
        if package is None or package.status in ("config-files", "not-installed"):
            found.append(f"{name} is not installed")
    for package in (*equality.driver_packages(seen), *_fabric_managers(seen, wanted)):
        if package.status != "installed":
            found.append(f"{package.name} is {package.status}")
        elif package.driver and package.driver != spec.version:
            found.append(f"{package.name} is {package.driver} instead of {spec.version}")
    found += [f"{name} is installed and there is no NVSwitch" for name in unwanted(spec, seen)]
    for kernel in seen.kernels:
        # Where headers can be had from nowhere, no run can mend it: that is a finding of the audit's.
        if names.built and kernel.module != spec.version and (kernel.headers or kernel.offered):
            found.append(f"kernel {kernel.release} has {kernel.module or 'no module'} instead of {spec.version}")
    return found


def unwanted(spec: NvidiaSpec, seen: Nvidia) -> list[str]:
    """Packages of a fabric manager on a machine without a switch."""
    if spec.fabric_manager == "kept" or seen.nvswitches:
        return []
    return [package.name for package in _fabric_managers(seen, ()) if package.status == "installed"]


def _fabric_managers(seen: Nvidia, wanted: tuple[str, ...]) -> list[equality.Package]:
    return [
        package
        for name, package in seen.packages.items()
        if name.startswith("nvidia-fabricmanager")
        and package.status != "config-files"
        and (not wanted or name in wanted)
    ]


def unheld(seen: Nvidia) -> list[str]:
    """Driver packages that a passing apt may move."""
    return sorted(package.name for package in equality.every_driver_package(seen) if not package.held)


def pending(spec: NvidiaSpec, seen: Snapshot) -> tuple[str, ...]:
    """Why the driver waits for a reboot. Raises CouldNotLook."""
    if spec.hold or not spec.ours:
        return ()
    now = seen.read(NVIDIA)
    if rejected(spec, now) or not must_exchange(spec, now):
        return ()
    assert now.module
    kind = "the open modules" if spec.open_modules else "NVIDIA's own modules"
    if now.module.version == spec.version:
        return (f"driver {spec.version} is loaded, and not with {kind} (nvidia: nvidia.open_modules)",)
    installed = equality.release(now)
    what = "is installed" if installed == spec.version else "is wanted"
    return (f"driver {now.module.version} is loaded and {spec.version} {what} (nvidia: nvidia.version)",)


def kept_out(seen: Snapshot, others: boot.Wishes) -> tuple[str, ...]:
    """Why no module of NVIDIA's is loaded before a reboot: another driver is, and may have the cards. Raises CouldNotLook."""
    return () if seen.read(NVIDIA).module else boot.drivers_pending(seen.read(boot.BOOT), others)


def cards(spec: NvidiaSpec, hardware: Hardware, seen: Nvidia) -> list[str]:
    """One sentence for every card that is not there, or not as asked. A card is told by its UUID: a hidden one renumbers the rest."""
    expected = hardware.gpus.count
    if seen.smi_failed is not None:
        return [f"nvidia-smi fails: {seen.smi_failed}"]
    found = [
        f"card {index} ({uuid} at {bus}) does not answer any more; indices after it have moved"
        for index, uuid, bus in missing(seen)
    ]
    if len(seen.cards) != expected and not (found and len(seen.cards) + len(found) == expected):
        found.append(f"{len(seen.cards)} cards answer; expected {expected} (hardware.gpus.count)")
    found += [
        f"{device.address} is bound to {device.driver or 'no driver'}"
        for device in seen.devices
        if device.gpu and device.driver != "nvidia"
    ]
    return found


def missing(seen: Nvidia) -> list[tuple[int, str, str]]:
    """Cards that were there when all were, and do not answer now."""
    here = {card.uuid for card in seen.cards}
    return [known for known in seen.known if known[1] not in here]


def settings(spec: NvidiaSpec, seen: Nvidia) -> list[str]:
    """One sentence for every card that is set otherwise than asked, of what gpu-settings sets: power and MIG."""
    found = []
    for card in seen.cards:
        if spec.power_limit_watts is not None and card.power != float(spec.power_limit_watts):
            has = "does not tell its power limit" if card.power is None else f"is limited to {card.power:g} W"
            found.append(f"{card.uuid} {has} instead of {spec.power_limit_watts} W")
        if spec.mig == "off" and spec.ours and (card.mig or card.mig_pending):
            found.append(
                f"{card.uuid} is in MIG mode" if card.mig else f"{card.uuid} goes into MIG mode at its next reset"
            )
    return found


def options(spec: NvidiaSpec, seen: Nvidia) -> list[str]:
    """One sentence for every module option that the loaded driver does not run with, as it says itself."""
    if seen.module is None:
        return []
    found = []
    if spec.registry:
        runs = seen.module.params.get("RegistryDwords", "")
        if runs != registry(spec):
            found.append(f"the driver runs with RegistryDwords={runs or 'nothing'} instead of {registry(spec)}")
    if spec.uvm_hmm == "off" and seen.module.hmm_disabled is False:
        found.append("nvidia_uvm runs with uvm_disable_hmm=N instead of Y")
    return found


def registry(spec: NvidiaSpec) -> str:
    """The value of NVreg_RegistryDwords."""
    return ";".join(f"{name}={value}" for name, value in spec.registry.items())
