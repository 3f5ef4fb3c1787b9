"""What is wrong with the PCIe state of a node, and what of it a reboot will bring right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuwright import boot
from roles.pcie.facts import Topology
from roles.pcie.spec import PcieSpec
from roles.pcie.wishes import wishes

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware


@dataclass(frozen=True)
class Fault:
    """One thing that is not as the node file says."""

    sentence: str
    waits_for_reboot: bool = False


def faults(spec: PcieSpec, hardware: Hardware, seen: Topology, line: Sequence[boot.Given]) -> list[Fault]:
    """Everything that is not as asked; empty where all of it was seen and is right. `line`: what the kernel runs with."""
    found = []
    if fault := iommu_fault(spec, hardware, seen, line):
        found.append(fault)
    if spec.acs_redirect == "cleared":
        found += [
            Fault(f"seen: {bridge}; expected: no redirect on it; do: journalctl -u gpuwright-acs.service")
            for bridge in redirecting(seen, hardware)
        ]
    return found


def iommu_fault(spec: PcieSpec, hardware: Hardware, seen: Topology, line: Sequence[boot.Given]) -> Fault | None:
    """What is wrong with the IOMMU's mode. The state is judged; the running command line (`line`) says whether a reboot is due."""
    now = seen.iommu(seen.accelerators(hardware.accelerators))
    if now.mode == spec.iommu:
        return None
    missing = [word.text for word in wishes(spec, hardware).words if not boot.holds(line, word)]
    expected = f"seen: IOMMU {now.mode} ({now.evidence}); expected: {spec.iommu}"
    if missing:
        return Fault(f"{expected}; do: reboot; the kernel runs without {', '.join(missing)}", waits_for_reboot=True)
    if now.mode == "off":
        return Fault(
            f"{expected}; do: turn the IOMMU on in the firmware (VT-d, AMD-Vi, SMMU), or say pcie.iommu: off; a virtual "
            "machine often has none"
        )
    return Fault(f"{expected}, as the kernel was told; do: look at what the kernel's log says of DMAR, AMD-Vi or SMMU")


def redirecting(seen: Topology, hardware: Hardware) -> list[str]:
    """Bridges above accelerators that redirect, or of which that cannot be seen; each with what was seen."""
    above = seen.paths(seen.accelerators(hardware.accelerators))
    return [f"{bridge}: {seen.acs[bridge]}" for bridge in above if seen.acs[bridge].redirects is not False]
