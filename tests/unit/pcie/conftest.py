"""A PCI bus below a temporary directory, with a FAKE setpci in the path; the scripts are the real ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuwright.render import REPOSITORY, template
from roles.pcie import facts

# What setpci does with ECAP_ACS+6.w, on files instead of registers. It dies like setpci where there is no capability.
_SETPCI = r"""#!/bin/sh
device=$2 operation=$3
file=$FAKE/$device
[ -e "$file" ] || { echo "setpci: $device: Instance #0 of Extended capability 000d not found" >&2; exit 1; }
case $operation in
  ECAP_ACS+6.w) cat "$file" ;;
  ECAP_ACS+6.w=0:2c) [ -e "$file.locked" ] || printf '%04x\n' $((0x$(cat "$file") & ~0x2c)) >"$file.new"
    [ ! -e "$file.new" ] || mv "$file.new" "$file"; echo "$device" >>"$FAKE/written" ;;
  *) echo "setpci: $operation" >&2; exit 2 ;;
esac
"""

_TOOLS = ["awk", "cat", "find", "grep", "id", "mkdir", "mv", "od", "readlink", "sed", "sort", "stat", "tr"]


class Bus:
    """Functions below `root`/sys, as the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fake = root / "fake"
        self.bin = root / "bin"
        self.devices = root / "sys/bus/pci/devices"
        for directory in (self.fake, self.bin, self.devices, root / "sys/class"):
            directory.mkdir(parents=True)
        self.install_setpci()
        # Nothing else is in the path: this machine may have a setpci of its own.
        for tool in _TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        (root / "etc/gpuwright/pcie").mkdir(parents=True)
        self.configure()

    def install_setpci(self) -> None:
        program = self.bin / "setpci"
        program.write_text(_SETPCI)
        program.chmod(0o755)

    def configure(self, vendor="10de", classes=("0300", "0302"), accepted=None) -> None:
        settings = template(
            "pcie/etc/gpuwright/pcie/acs.conf.j2", vendor=vendor, classes=classes, vfio_guests_accepted=accepted
        )
        (self.root / "etc/gpuwright/pcie/acs.conf").write_bytes(settings)

    def add(self, path, kind, vendor="8086", device="0001", acs=None, express=True, **more) -> None:
        """`path` is the addresses from the root bus down: ``00:01.0/01:00.0``."""
        addresses = [f"0000:{part}" for part in path.split("/")]
        directory = self.root / "sys/devices/pci0000:00" / "/".join(addresses)
        directory.mkdir(parents=True, exist_ok=True)
        address = addresses[-1]
        target = "/".join(["..", "..", "..", "devices", "pci0000:00", *addresses])
        (self.devices / address).symlink_to(target)
        said = {
            "class": f"0x{kind}00",
            "vendor": f"0x{vendor}",
            "device": f"0x{device}",
            "numa_node": more.pop("node", -1),
        }
        if express:
            said |= {"max_link_width": 16, "current_link_width": 16, "current_link_speed": "2.5 GT/s PCIe"}
        for name, value in said.items():
            (directory / name).write_text(f"{value}\n")
        (directory / "config").write_bytes(b"\x01\x00" * 2048 if express else b"\x01" * 256)
        (directory / "resource").write_text(more.pop("resource", "0x0000000000000000 0x0000000000000000 0x0\n" * 13))
        for name, value in more.items():  # driver, iommu_group, physfn
            (directory / name).symlink_to(f"../somewhere/{value}")
        if acs is not None:
            (self.fake / address).write_text(f"{acs:04x}\n")

    def word(self, address) -> int:
        return int((self.fake / f"0000:{address}").read_text(), 16)

    def written(self) -> list[str]:
        file = self.fake / "written"
        return file.read_text().split() if file.exists() else []

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "GPUWRIGHT_ROOT": str(self.root),
            "FAKE": str(self.fake),
            "PATH": str(self.bin),
        }
        return subprocess.run(
            [str(shutil.which("dash")), *command], env=environment, capture_output=True, text=True, check=False
        )

    def clear(self) -> subprocess.CompletedProcess[str]:
        return self.run(str(REPOSITORY / "files/pcie/usr/local/lib/gpuwright/acs-clear"))

    def topology(self) -> facts.Topology:
        done = self.run("-c", facts.script(str(self.root)))
        assert done.returncode == 0, done.stderr
        return facts.parse(done.stdout)


@pytest.fixture
def bus(tmp_path):
    """A switch with two GPUs, a GPU of its own, and a network card, each below a root port."""
    found = Bus(tmp_path)
    found.add("00:01.0", "0604", acs=0x1D)
    found.add("00:01.0/10:00.0", "0604")  # the upstream port of a switch has no ACS
    found.add("00:01.0/10:00.0/11:00.0", "0604", acs=0x1D)
    found.add("00:01.0/10:00.0/11:04.0", "0604", acs=0x5D)
    found.add("00:01.0/10:00.0/11:08.0", "0604", acs=0x1D)  # an empty slot
    found.add(
        "00:01.0/10:00.0/11:00.0/12:00.0", "0302", vendor="10de", device="2bb5", node=0, iommu_group=14, driver="nvidia"
    )
    found.add("00:01.0/10:00.0/11:04.0/13:00.0", "0300", vendor="10de", device="2bb5", node=0, iommu_group=15)
    found.add("00:01.0/10:00.0/11:04.0/13:00.1", "0403", vendor="10de", device="22e8")
    found.add("00:02.0", "0604", acs=0x11)
    found.add("00:02.0/20:00.0", "0302", vendor="10de", device="2bb5", node=1, iommu_group=16)
    found.add("00:03.0", "0604", acs=0x1D)
    found.add("00:03.0/30:00.0", "0200", vendor="15b3", acs=0x1D)
    found.add("00:1f.0", "0604", express=False)
    return found
