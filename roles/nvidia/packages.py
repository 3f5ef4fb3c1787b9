"""What the driver's packages are called, by source and distribution. The lab boots Debian 13 with NVIDIA's and with Debian's; the rest is data.

Sources: NVIDIA's driver installation guide (compute-only installation; "Ubuntu 590 and later packages": the branch leaves the
names), packages.debian.org and packages.ubuntu.com for the distributions' own.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.snapshot import System
from roles.nvidia.spec import NVIDIA_REPOSITORY, NvidiaSpec

# The branch left the names of Ubuntu's packages in NVIDIA's repository with this one.
_PLAIN_NAMES_FROM = 590
# The fabric manager's name has had no branch since (public notes on nvidia-fabricmanager-580).
_PLAIN_FABRIC_MANAGER_FROM = 580


class Unsupported(ValueError):
    """A distribution that this source is not known for; the message is one sentence."""


@dataclass(frozen=True)
class Packages:
    """What has to be installed, and what is wanted beside it where a machine needs it."""

    driver: tuple[str, ...]
    module: str
    """The one of them that brings the kernel module."""
    built: bool
    """The module is built on the node (DKMS), so it needs every kernel's headers."""
    fabric_manager: str


def branch(version: str) -> int:
    """580 of 580.95.05."""
    return int(version.partition(".")[0])


def packages(spec: NvidiaSpec, system: System) -> Packages:
    """The names for a node. Raises Unsupported."""
    assert spec.version
    number = branch(spec.version)
    plain = "nvidia-fabricmanager" if number >= _PLAIN_FABRIC_MANAGER_FROM else f"nvidia-fabricmanager-{number}"
    if system.id == "debian" and spec.source != "distribution":
        module = "nvidia-kernel-open-dkms" if spec.open_modules else "nvidia-kernel-dkms"
        return Packages(("nvidia-driver-cuda", module, "nvidia-persistenced"), module, True, plain)
    if system.id == "debian":
        module = "nvidia-open-kernel-dkms" if spec.open_modules else "nvidia-kernel-dkms"
        return Packages(("nvidia-smi", "libcuda1", module, "nvidia-persistenced"), module, True, plain)
    if system.id == "ubuntu" and spec.source != "distribution":
        of = "" if number >= _PLAIN_NAMES_FROM else f"-{number}"
        module = f"nvidia-dkms{of}-open" if spec.open_modules else f"nvidia-dkms{of}"
        names = (f"libnvidia-compute{of}", f"nvidia-utils{of}", f"nvidia-compute-utils{of}", module)
        return Packages(names, module, True, plain)
    if system.id == "ubuntu":
        # Built and signed by the distribution for each of its kernels: nothing is compiled here, and Secure Boot takes them.
        kind = f"{number}-server-open" if spec.open_modules else f"{number}-server"
        module = f"linux-modules-nvidia-{kind}-generic"
        names = (f"nvidia-headless-no-dkms-{kind}", f"nvidia-utils-{number}-server", module)
        return Packages(names, module, False, f"nvidia-fabricmanager-{number}")
    raise Unsupported(
        f"the host runs {system.id} {system.version_id}; the driver's packages are known for debian and ubuntu"
    )


def address(spec: NvidiaSpec, system: System) -> str:
    """The flat repository's address for a node; NVIDIA's has a folder per release and architecture, arm64 servers being sbsa."""
    if spec.source == "local":
        return f"{spec.repository}/"
    folder = f"{system.id}{system.version_id.replace('.', '')}"
    machine = {"x86_64": "x86_64", "aarch64": "sbsa"}[system.architecture]
    return f"{spec.repository or NVIDIA_REPOSITORY}/{folder}/{machine}/"


# Pins by name, with everything that one driver's release consists of; other versions of these stay as they are (a container
# toolkit is never of a driver's release). Above 1000: an older release is taken, too (apt_preferences(5)).
PINNED = "*nvidia* libcuda1 libcudadebugger1 cuda-drivers* libnv* xserver-xorg-video-nvidia*"
PRIORITY = 1001
