"""What a lab machine is made of: processors and memory by NUMA node, and a PCIe tree as a GPU server has it, as QEMU arguments.

Its accelerators are STAND-INS: virtio entropy devices, which are PCIe endpoints with memory windows and a link, sit below root
ports and a switch as GPUs do, and compute nothing. A node file finds them by vendor 1af4 and class 00ff, as it finds GPUs by 10de.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError

QEMU = "qemu-system-x86_64"
_FIRMWARE = (  # code, variables: Debian's ovmf package
    Path("/usr/share/OVMF/OVMF_CODE_4M.fd"),
    Path("/usr/share/OVMF/OVMF_VARS_4M.fd"),
)


@dataclass(frozen=True)
class Node:
    """One NUMA node. ``accelerators``: the groups on its PCIe root; each group is on a root port, or below one switch."""

    memory: int  # MiB
    cpus: int = 0
    accelerators: tuple[int, ...] = ()


# A group of 1 hangs on a root port of its own; a larger one shares a root port and a switch.
KINDS: dict[str, tuple[Node, ...]] = {
    # A coherent accelerator's memory is a node without processors (gpu-node.md, section 3). Linux numbers nodes with
    # processors first. 2 GiB on node 0: a download of 2.4 GB spills onto node 2, which Linux prefers to node 1 because
    # nobody computes there (mm/page_alloc.c, find_next_best_node).
    "hbm": (Node(2048, cpus=1, accelerators=(1, 1, 2)), Node(512, cpus=1), Node(1024)),
    # Two sockets, each with its own accelerators.
    "pairs": (Node(1536, cpus=2, accelerators=(1, 1)), Node(1536, cpus=2, accelerators=(2,))),
}
KIND_TITLES = {
    "hbm": "node 0: 1 CPU, 2 GiB, 4 accelerators; node 1: 1 CPU, 0.5 GiB; node 2: 1 GiB without CPUs",
    "pairs": "nodes 0 and 1: 2 CPUs, 1.5 GiB and 2 accelerators each",
}


def arguments(kind: str, accelerator: Sequence[str]) -> list[str]:
    """QEMU's command line for the hardware of a kind, without disk, network and console backends.

    Expects drives ``disk`` and a network ``net``. ``accelerator``: from ``acceleration``.
    """
    nodes = KINDS[kind]
    processors = sum(node.cpus for node in nodes)
    argv = [
        *accelerator,
        *("-m", f"{sum(node.memory for node in nodes)}M"),
        # A socket per node: Linux warns where processors that share one are on different nodes, and is "tainted" from then on.
        *("-smp", f"{processors},sockets={sum(1 for node in nodes if node.cpus)}"),
        *("-nodefaults", "-display", "none", "-vga", "none"),
        *("-drive", f"if=pflash,unit=0,format=raw,readonly=on,file={_FIRMWARE[0]}"),
        *("-drive", "if=pflash,unit=1,format=qcow2,file=firmware.qcow2"),
        # Without interrupt remapping: with it, Linux gives up at boot ("timer doesn't work through Interrupt-remapped
        # IO-APIC") when an emulated processor is starved for a moment (seen on two busy cores).
        *("-device", "intel-iommu,intremap=off,device-iotlb=on"),
    ]
    first = 0
    for number, node in enumerate(nodes):
        argv += ["-object", f"memory-backend-ram,id=memory{number},size={node.memory}M"]
        cpus = f",cpus={first}-{first + node.cpus - 1}" if node.cpus else ""
        argv += ["-numa", f"node,nodeid={number},memdev=memory{number}{cpus}"]
        first += node.cpus
    return [*argv, *_tree(nodes)]


def _tree(nodes: Sequence[Node]) -> list[str]:
    tree = _Tree()
    # Disk and network are behind root ports with ACS of their own: no accelerator's path, so nobody's to change.
    tree.add("virtio-blk-pci,drive=disk,bootindex=0", tree.root_port("pcie.0"))
    tree.add("virtio-net-pci,netdev=net,romfile=", tree.root_port("pcie.0"))
    for number, node in enumerate(nodes):
        if not node.accelerators:
            continue
        # A host bridge that says which node it is near; the bus numbers leave room for what is below it.
        root = f"root{number}"
        tree.add(f"pxb-pcie,id={root},bus_nr={64 * (number + 1)},numa_node={number}", "pcie.0")
        for group in node.accelerators:
            port = tree.root_port(root)
            if group == 1:
                tree.accelerator(port)
                continue
            switch = f"switch{number}"
            tree.add(f"x3130-upstream,id={switch}", port)
            for _ in range(group):
                tree.accelerator(tree.downstream_port(switch))
    return tree.argv


class _Tree:
    """PCIe devices as they are added: every port needs a slot number of its own."""

    def __init__(self) -> None:
        self.argv: list[str] = []
        self._ports = 0
        self._accelerators = 0

    def add(self, device: str, bus: str) -> None:
        self.argv += ["-device", f"{device},bus={bus}"]

    def root_port(self, bus: str) -> str:
        self._ports += 1
        self.add(f"pcie-root-port,id=port{self._ports},chassis={self._ports},slot={self._ports}", bus)
        return f"port{self._ports}"

    def downstream_port(self, bus: str) -> str:
        self._ports += 1
        self.add(f"xio3130-downstream,id=port{self._ports},chassis={self._ports},slot={self._ports}", bus)
        return f"port{self._ports}"

    def accelerator(self, port: str) -> None:
        self._accelerators += 1
        self.add(f"virtio-rng-pci,id=accelerator{self._accelerators},rng=entropy", port)


def firmware_variables() -> Path:
    """The firmware's variables as they are from the factory."""
    return _FIRMWARE[1]


def acceleration() -> list[str]:
    """KVM where it works, else emulation, as QEMU arguments."""
    if _kvm_works():
        return ["-machine", "q35,kernel-irqchip=split", "-accel", "kvm", "-cpu", "host"]
    # Four levels of page tables instead of five, each of which is walked by the emulator. Not svm=off: QEMU 7.2 then gave a
    # processor on which Linux printed /proc/mounts a letter short, and no mount was found again.
    return ["-machine", "q35,kernel-irqchip=off", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off"]


@functools.cache
def _kvm_works() -> bool:
    """Whether a guest really runs: /dev/kvm may open, make a machine and boot a BIOS, and still fail in the firmware of these.

    Boots that firmware without a disk until it says that it looks for one; two seconds where it works.
    """
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said"
        argv = [
            QEMU,
            "-machine",
            "q35",
            "-accel",
            "kvm",
            "-cpu",
            "host",
            "-m",
            "256",
            "-nodefaults",
            "-display",
            "none",
        ]
        argv += ["-drive", f"if=pflash,format=raw,readonly=on,file={_FIRMWARE[0]}", "-serial", "stdio"]
        with said.open("wb") as file:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and process.poll() is None:
                text = said.read_text(errors="replace")
                if "BdsDxe" in text or "KVM internal error" in text:
                    return "KVM internal error" not in text
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    return False


def check_kind(kind: str) -> None:
    """Raise LabError for a kind of machine that the lab does not have."""
    if kind not in KINDS:
        raise LabError(f"kind {kind!r} is not one the lab has; allowed: {', '.join(KINDS)}")
