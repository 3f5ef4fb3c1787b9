"""Programs the lab needs on its own machine: named when missing, installed when we may."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lab.command import LabError, run
from lab.progress import step

# program: Debian package. ip and ssh are there on any server, yet not in every container.
HOSTS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "apt-cacher-ng": "apt-cacher-ng",
    "ip": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
REGISTRY = {"docker-registry": "docker-registry", "openssl": "openssl"}

MACHINES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "sfdisk": "fdisk",
    "mformat": "mtools",
    "mke2fs": "e2fsprogs",
}
MACHINE_FILES = {"/usr/share/OVMF/OVMF_CODE_4M.fd": "ovmf"}


def need(programs: Mapping[str, str]) -> None:
    """Make sure the programs are here. Raises LabError naming the command that installs what is missing."""
    missing = {package for program, package in programs.items() if shutil.which(program) is None}
    _install(sorted(missing))


def need_files(files: Mapping[str, str]) -> None:
    """Make sure the files are here, as `need` does for programs."""
    _install(sorted({package for file, package in files.items() if not Path(file).exists()}))


def _install(missing: list[str]) -> None:
    if not missing:
        return
    # Two labs may begin on one machine at once.
    install = ["apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"the lab needs {', '.join(missing)}; install with: {' '.join(install)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"Installing {', '.join(missing)} on this machine"):
        if run(install, check=False, timeout=1200, env=quiet).returncode != 0:
            run(["apt-get", "update"], timeout=300, env=quiet)
            run(install, timeout=1200, env=quiet)
    # Debian starts what it installs. The lab runs its own instances, on its own bridge only.
    if systemd_is_init():
        for service in sorted({"apt-cacher-ng", "docker-registry"} & set(missing)):
            run(["systemctl", "disable", "--now", service], check=False)


def need_root() -> None:
    """Raises LabError for anybody but root: namespaces, mounts and bridges are root's."""
    if os.geteuid() != 0:
        raise LabError("the lab boots containers and makes a bridge; run it as root")


def systemd_is_init() -> bool:
    """Whether systemd is PID 1 of this machine (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()
