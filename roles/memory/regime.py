"""Which regime a machine's GPU memory is in, and what only a reboot can change about it.

Two witnesses: what the loaded driver was told, and which memory nodes the kernel has. Memory that became a node does not
leave the kernel again, so where the two disagree the driver was told something else since the last boot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpuwright import numa
from gpuwright.snapshot import NUMA, MemoryNode, Snapshot, hbm_nodes
from roles.memory.facts import COHERENCE, Coherence
from roles.memory.spec import MemorySpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware


def running(driver: Coherence, nodes: Mapping[int, MemoryNode], others: Sequence[str] = ()) -> tuple[str | None, str]:
    """(regime, what it was told by), or (None, why nobody can tell or why a reboot is pending).

    `others`: sentences about drivers that are loaded in place of NVIDIA's.

    The driver takes every mode but ``driver`` for NUMA; without one its default depends on its branch (gpu-node.md, finding 1).
    """
    hbm = numa.listed(hbm_nodes(nodes))
    told = f"the driver was told CoherentGPUMemoryMode={driver.mode}"
    if hbm:
        if driver.mode == "driver":
            return None, f"{told}, and memory node {hbm} still has memory without CPUs: a reboot is pending"
        return "numa", f"memory node {hbm} has memory and no CPUs"
    if not driver.driver and others:
        return None, f"no NVIDIA driver is loaded, and {'; '.join(others)}: a reboot is pending"
    if not driver.driver:
        return None, "no NVIDIA driver is loaded; HBM becomes a memory node, or does not, when it is"
    if driver.mode is None:
        return None, "this driver has no CoherentGPUMemoryMode, and no memory node is without CPUs"
    if driver.mode == "":
        return "driver", "no memory node is without CPUs, and the driver was told nothing: its own default"
    if driver.mode == "driver":
        return "driver", f"{told}, and no memory node is without CPUs"
    return None, f"{told}, and no memory node is without CPUs: a reboot is pending"


def faults(
    spec: MemorySpec,
    hardware: Hardware,
    driver: Coherence,
    nodes: Mapping[int, MemoryNode],
    others: Sequence[str] = (),
) -> tuple[str, ...]:
    """One sentence for everything about this machine's GPU memory that is not as its node file says.

    `others`: sentences about drivers that are loaded in place of NVIDIA's.
    """
    found, described = hbm_nodes(nodes), frozenset(hardware.hbm_numa_nodes)
    if not described:
        if not found:
            return ()
        listed = numa.listed(found)
        return (
            f"seen: memory node {listed} has memory and no CPUs; expected: none, as hardware.hbm_numa_nodes says; do: if it is "
            f"GPU memory, write hbm_numa_nodes: [{listed.replace(',', ', ')}] into the node file, so that file I/O stays off it",
        )
    regime, witness = running(driver, nodes, others)
    if regime is None:
        return (f"seen: {witness}; expected: regime {spec.regime}; do: {_remedy(witness)}",)
    if regime != spec.regime:
        return (f"seen: regime {regime} ({witness}); expected: {spec.regime}; do: reboot, a reboot is pending",)
    if regime == "numa" and found != described:
        return (
            f"seen: HBM is memory node {numa.listed(found)}; expected: {numa.listed(described)}, as hardware.hbm_numa_nodes says; "
            "do: put the node file right",
        )
    return ()


def _remedy(witness: str) -> str:
    return "reboot" if "pending" in witness else "look at the driver: cat /proc/driver/nvidia/version, journalctl -k"


def pending(spec: MemorySpec, hardware: Hardware, seen: Snapshot) -> tuple[str, ...]:
    """Why this machine's memory needs a reboot: those of its faults that one brings right. Raises CouldNotLook."""
    found = faults(spec, hardware, seen.read(COHERENCE), seen.read(NUMA))
    return tuple(fault for fault in found if waits_for_reboot(fault))


def waits_for_reboot(fault: str) -> bool:
    """Whether a reboot brings right what this sentence says."""
    return "a reboot is pending" in fault
