"""What an emulated arm64 machine said (QEMU's `virt`, SMMUv3, Debian 13's kernel 6.12), read by the sections that nodes are read by.

Once started by firmware and described by ACPI, as servers are, and once by a device tree. Accelerators are STAND-INS.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuwright.boot import parse_line
from gpuwright.snapshot import NUMA, Snapshot, hbm_nodes
from gpuwright.spec.node import Hardware
from roles.pcie import judgement
from roles.pcie.facts import TOPOLOGY
from roles.pcie.spec import PcieSpec

CAPTURES = Path(__file__).parent / "captures/arm64"
HARDWARE = Hardware(architecture="arm64", accelerators={"vendor": "1af4", "classes": ["00ff"], "count": 2})


def seen(name: str) -> Snapshot:
    said = json.loads((CAPTURES / f"{name}.json").read_text())
    return Snapshot({section: (0, text) for section, text in said.items()})


@pytest.mark.parametrize("name", ["acpi-passthrough", "device-tree-passthrough"])
def test_the_smmu_passes_through_where_it_was_told_to(name: str):
    topology = seen(name).read(TOPOLOGY)
    assert topology.units == ("smmu3.0x0000000009050000",)
    assert judgement.iommu_fault(PcieSpec(iommu="pt"), HARDWARE, topology, parse_line("iommu.passthrough=1")) is None


def test_a_translating_smmu_waits_for_the_word_and_a_reboot():
    fault = judgement.iommu_fault(PcieSpec(iommu="pt"), HARDWARE, seen("acpi-translated").read(TOPOLOGY), [])
    assert fault is not None
    assert fault.waits_for_reboot
    assert "seen: IOMMU translated" in fault.sentence
    assert "iommu.passthrough=1" in fault.sentence
    assert (
        judgement.iommu_fault(PcieSpec(iommu="translated"), HARDWARE, seen("acpi-translated").read(TOPOLOGY), [])
        is None
    )


def test_bridges_above_accelerators_are_found_and_redirect():
    topology = seen("acpi-translated").read(TOPOLOGY)
    assert [found.address for found in topology.accelerators(HARDWARE.accelerators)] == ["0000:41:00.0", "0000:42:00.0"]
    assert [line.partition(": ")[0] for line in judgement.redirecting(topology, HARDWARE)] == [
        "0000:40:00.0",
        "0000:40:01.0",
    ]


def test_a_memory_node_without_processors_is_told_from_a_device_tree():
    nodes = seen("device-tree-passthrough").read(NUMA)
    assert sorted(nodes) == [0, 1, 2]
    assert hbm_nodes(nodes) == {2}


def test_where_the_kernel_believes_the_firmware_nothing_there_is_one_node_and_no_hbm():
    """Linux made up one node: QEMU's firmware lists 64 MiB of flash as memory that no node covers ("no nodes coverage")."""
    nodes = seen("acpi-passthrough").read(NUMA)
    assert sorted(nodes) == [0]
    assert hbm_nodes(nodes) == frozenset()
