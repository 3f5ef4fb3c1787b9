"""Which memory nodes are HBM, read by the real script from trees of the shape of /sys/devices/system/node.

Shapes of GH200, GB200 and GB300 machines in NUMA mode (gpu-node.md 3.1); the sizes are this test's own.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from gpuwright import numa
from gpuwright.snapshot import NUMA, CouldNotLook, MemoryNode, Snapshot, hbm_nodes

GIB = 1024**2  # KiB
Nodes = dict[int, tuple[str, int]]


def machine(cpus: dict[int, str], memory: dict[int, int], count: int) -> Nodes:
    """Node to (CPU list, KiB); nodes that neither names are the empty ones that wait for MIG."""
    return {node: (cpus.get(node, ""), memory.get(node, 0)) for node in range(count)}


GRACE = {0: "0-71"}
TWO_GRACE = {0: "0-71", 1: "72-143"}
HBM = (2, 10, 18, 26)
MACHINES: dict[str, tuple[Nodes, set[int]]] = {
    "GH200": (machine(GRACE, {0: 470 * GIB, 1: 94 * GIB}, 9), {1}),
    "GB200 tray": (machine(TWO_GRACE, {0: 460 * GIB, 1: 461 * GIB, **dict.fromkeys(HBM, 180 * GIB)}, 34), {*HBM}),
    "GB300 tray": (machine(TWO_GRACE, {0: 450 * GIB, 1: 449 * GIB, **dict.fromkeys(HBM, 270 * GIB)}, 34), {*HBM}),
    "DGX Station": (machine(GRACE, {0: 480 * GIB, 1: 250 * GIB}, 2), {1}),
    "GH200 in driver mode": (machine(GRACE, {0: 470 * GIB}, 9), set()),
    "two sockets": (machine({0: "0-59,120-179", 1: "60-119,180-238"}, {0: 380 * GIB, 1: 381 * GIB}, 2), set()),
    "one node": (machine({0: "0-15"}, {0: 64 * GIB}, 1), set()),
    "first of all": (machine({1: "0-15"}, {0: 8 * GIB, 1: 64 * GIB}, 2), {0}),
}


def answer(root: Path, nodes: Nodes) -> str:
    """What the script prints on a machine with these nodes."""
    folder = root / "sys/devices/system/node"
    for index, (cpus, size) in nodes.items():
        node = folder / f"node{index}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        lines = {"MemTotal": size, "MemFree": size // 2, "FilePages": size // 8, "Shmem": size // 64}
        (node / "meminfo").write_text("".join(f"Node {index} {key}: {value:14} kB\n" for key, value in lines.items()))
    (folder / "online").write_text(f"{numa.listed(set(nodes))}\n")
    (folder / "has_memory").write_text(f"{numa.listed({i for i, (_, size) in nodes.items() if size})}\n")
    (folder / "has_cpu").write_text(f"{numa.listed({i for i, (cpus, _) in nodes.items() if cpus})}\n")
    script = NUMA.script.replace("/sys/devices", f"{root}/sys/devices")
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def read(text: str) -> dict[int, MemoryNode]:
    return Snapshot({"numa": (0, text)}).read(NUMA)


@pytest.mark.parametrize("name", MACHINES)
def test_hbm_is_memory_without_cpus(name: str, tmp_path: Path) -> None:
    nodes, hbm = MACHINES[name]
    seen = read(answer(tmp_path, nodes))
    assert {index: (node.cpus, node.mem_total_kib) for index, node in seen.items()} == nodes
    assert hbm_nodes(seen) == hbm


def test_a_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    script = NUMA.script.replace("/sys/devices", f"{tmp_path}/sys/devices")
    assert read(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout) == {}


@pytest.mark.parametrize(
    "line",
    ["node 3..9|||0|0", "node 3..9|(no cpus)|0|0|0", "node 2||283 GB|0|0", "node 3-9||0|0|0", "node 1 size: 97280 MB"],
)
def test_an_abridged_list_is_refused_not_guessed(line: str, tmp_path: Path) -> None:
    text = answer(tmp_path, MACHINES["GB300 tray"][0])
    with pytest.raises(CouldNotLook):
        read(text.replace("\nend", f"\n{line}\nend"))
    lines = text.splitlines()
    with pytest.raises(CouldNotLook):  # the empty nodes left out, as people do when they show one
        read("\n".join(line for line in lines if "||0|0|0" not in line))


def test_a_failed_look_is_not_a_machine_without_hbm() -> None:
    for text in ("", "\n", "online 0-1"):
        with pytest.raises(CouldNotLook):
            read(text)


def mutations(text: str, chance: random.Random) -> str:
    """Damage of one kind: a line lost, twice, cut or moved; a character lost, changed or added; the end lost."""
    lines = text.splitlines()
    at = chance.randrange(len(lines))
    kind = chance.randrange(7)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(chance.randrange(len(lines)), lines[at])
    elif kind == 2:
        lines[at] = lines[at][: chance.randrange(len(lines[at]))]
    elif kind == 3:
        lines.append(lines.pop(at))
    elif kind == 4:
        return text[: chance.randrange(len(text))]
    else:
        place = chance.randrange(len(lines[at]))
        new = chance.choice(["", *"0179-,| x\t"]) + (lines[at][place] if kind == 5 else "")
        lines[at] = lines[at][:place] + new + lines[at][place + 1 :]
    return "\n".join(lines)


@pytest.mark.parametrize("name", MACHINES)
def test_damage_is_seen_or_does_not_matter(name: str, tmp_path: Path) -> None:
    """400 mutations each: which nodes are HBM comes out right, or not at all."""
    nodes, hbm = MACHINES[name]
    text = answer(tmp_path, nodes)
    chance = random.Random(name)
    refused = 0
    for _ in range(400):
        damaged = mutations(text, chance)
        try:
            seen = read(damaged)
        except CouldNotLook:
            refused += 1
            continue
        assert hbm_nodes(seen) == hbm, damaged
        assert seen.keys() == nodes.keys()
    assert 100 < refused < 400


LISTS = ["", "0", "0-71", "0-59,120-178", "0-59,120-179,181,200-238", "2,10,18,26", "0-1"]


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_numbers_come_back_as_they_were(text: str) -> None:
    assert numa.listed(numa.indices(text)) == text


def test_irregular_ranges_leave_offline_cpus_out() -> None:
    assert 239 not in numa.indices("60-119,180-238")
    assert len(numa.indices("60-119,180-238")) == 119


@pytest.mark.parametrize(
    "text",
    ["-", "0-", "-3", "3-1", "1-1", "0,0", "0-3,2", "4,1", "0-3,", ",1", "01", "0 1", "0x1", "٣", "99999", "0..3"],
)
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list"):
        numa.indices(text)
