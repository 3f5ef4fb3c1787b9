"""Whether the parts of a driver are of one release. Each inequality is one finding, with a remedy of its own.

Pure: facts in, findings out. Three equal strings are a driver's health, module, library and packages, and the module must be
there for the kernel that boots next (gpu-node.md 4.1, reports 9 and 10 of section 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roles.nvidia.facts import Nvidia, Package

Kind = Literal[
    "package",  # one package is of another release than the rest
    "half-installed",  # dpkg has not finished with one
    "reboot",  # another module is loaded than the one that is installed
    "library",  # user space does not fit the loaded module, and a reboot alone does not mend it
    "module-missing",  # a kernel has no module
    "fabric-manager",  # of another release than the driver
    "fabric-manager-unwanted",  # there, without a switch to manage
    "signature",  # Secure Boot will not load the module
    "specification-stale",  # CDI hands in another release, or cards that are not there
    "specification-twice",  # two files for the same devices
]


@dataclass(frozen=True)
class Finding:
    """What was seen, what was expected, and what to do about it. ``subject``: the package, file or kernel it is about."""

    kind: Kind
    subject: str
    seen: str
    expected: str
    remedy: str


def release(seen: Nvidia) -> str:
    """The driver release that is installed: what most of its packages say, "" where there are none."""
    counted = Counter(package.driver for package in driver_packages(seen))
    return counted.most_common(1)[0][0] if counted else ""


def findings(seen: Nvidia) -> list[Finding]:
    """Everything that does not fit together, the causes before their consequences."""
    return [
        *_packages(seen),
        *_modules(seen),
        *_signatures(seen),
        *_library(seen),
        *_fabric_manager(seen),
        *_specifications(seen),
    ]


# Debian packages these by themselves, and leaves them at releases of their own (Debian 13: nvidia-modprobe 570.133.07 beside driver
# 550.163.01); NVIDIA's are of the driver's release. The script driver-change reads them from driver.conf.
DEBIANS_TOOLS = ("nvidia-modprobe", "nvidia-persistenced", "nvidia-settings", "nvidia-xconfig")


def driver_packages(seen: Nvidia) -> list[Package]:
    """The packages that make up the driver proper. What manages switches is judged on its own: it is wanted on few machines."""
    apart = ("fabricmanager", "fabric-manager", "nscq", "imex")
    # With NVIDIA's packages nvidia-smi is no package: it comes in nvidia-driver-cuda or nvidia-utils.
    tools = DEBIANS_TOOLS if "nvidia-smi" in seen.packages else ()
    return [
        package
        for package in every_driver_package(seen)
        if package.name not in tools and not any(word in package.name for word in apart)
    ]


def every_driver_package(seen: Nvidia) -> list[Package]:
    """The same with what manages switches."""
    # Pinning packages have the version of the branch's newest driver, whichever is installed. cuda-compat is another driver's
    # user space, laid by for containers and programs that ask for it (seen on an H200 node: cuda-compat-13-0 580.95.05 beside
    # driver 580.159.04).
    apart = ("pinning", "cuda-compat")
    return [
        package
        for package in seen.packages.values()
        if package.driver and package.status != "config-files" and not any(word in package.name for word in apart)
    ]


def _packages(seen: Nvidia) -> Iterator[Finding]:
    expected = release(seen)
    for package in driver_packages(seen):
        if package.status != "installed":
            yield Finding(
                "half-installed",
                package.name,
                f"{package.name} {package.version} is {package.status}",
                "installed",
                f"apt-get --reinstall install {package.name}: dpkg was stopped in the middle of it"
                if package.status == "half-installed"
                else "dpkg --configure -a; its log says why it stopped (a module that did not build: /var/lib/dkms/nvidia/*/build/make.log)",
            )
        if package.driver != expected:
            yield Finding(
                "package",
                package.name,
                f"{package.name} is {package.driver}",
                f"{expected}, as the other driver packages",
                f"put it back or move all of them at once, with the node drained: {package.name} alone stops every new process",
            )


def _modules(seen: Nvidia) -> Iterator[Finding]:
    if not release(seen):
        return
    for kernel in seen.kernels:
        if not kernel.module:
            why = "its headers are missing" if not kernel.headers else "it was not built"
            yield Finding(
                "module-missing",
                kernel.release,
                f"kernel {kernel.release} has no NVIDIA module: {why}",
                f"a module of {release(seen)}",
                f"apt-get install linux-headers-{kernel.release}, then dkms autoinstall -k {kernel.release}, before it boots",
            )
    installed = {kernel.release: kernel.module for kernel in seen.kernels}.get(seen.running_kernel, "")
    if seen.module and installed and seen.module.version != installed:
        yield Finding(
            "reboot",
            seen.running_kernel,
            f"module {seen.module.version} is loaded and {installed} is installed",
            "the same release",
            "drain the node and reboot it",
        )


def _signatures(seen: Nvidia) -> Iterator[Finding]:
    """Building and signing is not enrolment: the kernel's own rings are asked (gpu-node.md 4.1, report 20)."""
    for kernel in seen.kernels if seen.secure_boot else ():
        if kernel.module and not kernel.signer:
            found = "it is not signed"
        elif kernel.module and seen.trusted is not None and kernel.signer not in seen.trusted:
            found = f"the kernel does not trust the key of its signer, {kernel.signer}"
        else:
            continue
        yield Finding(
            "signature",
            kernel.release,
            f"Secure Boot is on, and module {kernel.module} of kernel {kernel.release} will not load: {found}",
            "a module signed with a key that the kernel trusts",
            "enrol the key at the console (mokutil --import, then a reboot), or take the distribution's signed modules "
            "(nvidia.source: distribution)",
        )


def _library(seen: Nvidia) -> Iterator[Finding]:
    # nvidia-smi shows two of the release's three numbers ("580.95"), so a third that differs is found by the packages.
    if not (seen.module and seen.library) or _starts(seen.module.version, seen.library):
        return
    if any(
        finding.kind == "reboot" and _starts(finding.seen.split(" ")[5], seen.library) for finding in _modules(seen)
    ):
        return  # the reboot mends it
    yield Finding(
        "library",
        "libnvidia-ml",
        f"the library is {seen.library} and the loaded module {seen.module.version}",
        "the same release",
        f"install the packages of one release (installed: {release(seen) or 'none'}), with the node drained, and reboot",
    )


def _starts(version: str, prefix: str) -> bool:
    return version == prefix or version.startswith(f"{prefix}.")


def _fabric_manager(seen: Nvidia) -> Iterator[Finding]:
    if not seen.fabric_manager:
        return
    if not seen.nvswitches:
        yield Finding(
            "fabric-manager-unwanted",
            "nvidia-fabricmanager",
            "a fabric manager is installed and this machine has no NVSwitch",
            "none: it ends with NV_WARN_NOTHING_TO_DO and stays a failed unit",
            "remove nvidia-fabricmanager",
        )
    elif seen.module and seen.fabric_manager != seen.module.version:
        yield Finding(
            "fabric-manager",
            "nvidia-fabricmanager",
            f"fabric manager {seen.fabric_manager}, driver {seen.module.version}",
            "the same release, to the last number",
            f"install nvidia-fabricmanager of {seen.module.version}, then restart it; no GPU of these computes before",
        )


def _specifications(seen: Nvidia) -> Iterator[Finding]:
    cards = {card.uuid for card in seen.cards}
    by_device: dict[str, list[str]] = {}
    for specification in seen.specifications:
        for name in specification.devices:
            by_device.setdefault(name, []).append(specification.path)
        if seen.module and specification.driver and specification.driver != seen.module.version:
            yield Finding(
                "specification-stale",
                specification.path,
                f"{specification.path} hands in {specification.driver}, loaded is {seen.module.version}",
                "the loaded release",
                _refresh(specification.path),
            )
        gone = [uuid for uuid in specification.uuids if uuid not in cards]
        if gone and cards:
            yield Finding(
                "specification-stale",
                specification.path,
                f"{specification.path} names {', '.join(gone)}",
                "cards that nvidia-smi lists",
                _refresh(specification.path),
            )
    paths = sorted({path for paths in by_device.values() if len(paths) > 1 for path in paths})
    if paths:
        by_hand = [path for path in paths if path.startswith("/etc/")]
        yield Finding(
            "specification-twice",
            ", ".join(paths),
            f"{' and '.join(paths)} define the same devices",
            "one specification, which nvidia-cdi-refresh keeps in /var/run/cdi",
            f"move {', '.join(by_hand) or 'all but one of them'} away: it goes stale, and Docker refuses or picks one",
        )


def _refresh(path: str) -> str:
    if path.startswith("/etc/"):
        return f"move {path} away (nobody refreshes it), then systemctl restart nvidia-cdi-refresh"
    return "systemctl restart nvidia-cdi-refresh"
