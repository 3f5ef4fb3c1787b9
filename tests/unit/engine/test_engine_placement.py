"""Where pre-start puts an engine: next to its GPUs, or nowhere, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_node import Node
from test_engine_prestart import GPU, OTHER, accepted, hbm, refused, with_gpus

# Two sockets with 120 threads each; CPU 239 is offline (gpu-node.md, finding 5).
SOCKETS = {0: "0-59,120-179", 1: "60-119,180-238"}
NEAR, FAR = "0000:01:00.0", "0000:c1:00.0"


def machine(node: Node, nodes: dict[int, str], gpus: dict[str, str], memory: int = 64 * 1024**2) -> None:
    """Memory nodes with their online CPUs, and PCI devices with the number in their numa_node."""
    for number, cpus in nodes.items():
        base = f"sys/devices/system/node/node{number}"
        node.write(f"{base}/cpulist", f"{cpus}\n")
        lines = {
            "MemTotal": memory,
            "MemFree": memory // 4,
            "Active(file)": 1000,
            "Inactive(file)": 24,
            "FilePages": 5000,
        }
        node.write(f"{base}/meminfo", "".join(f"Node {number} {key}: {value} kB\n" for key, value in lines.items()))
    for address, number in gpus.items():
        node.write(f"sys/bus/pci/devices/{address}/numa_node", f"{number}\n")


def placement(node: Node) -> list[str]:
    return node.read("run/gpuwright/engines/main/placement").split()


def started_with(node: Node) -> list[str]:
    """What docker create got."""
    node.begin("engine-run")
    while not (node.fake / "id").exists():
        pass
    return [word for word in (node.fake / "create").read_text().splitlines() if "cpuset" in word]


def test_an_engine_sits_next_to_its_gpu(node: Node) -> None:
    machine(node, SOCKETS, {NEAR: "0", FAR: "1"})
    with_gpus(node)
    node.configure(gpus=[1])
    assert "placed on NUMA node 1, CPUs 60-119,180-238" in accepted(node)
    assert placement(node) == ["--cpuset-cpus=60-119,180-238", "--cpuset-mems=1"]
    assert started_with(node) == placement(node)


def test_an_engine_on_some_of_many_nodes(node: Node) -> None:
    machine(node, {0: "0-15", 1: "16-31", 2: "32-47", 3: "48-63"}, {NEAR: "3", FAR: "0"})
    with_gpus(node)
    node.configure(gpus=[0, 1])
    accepted(node)
    assert placement(node) == ["--cpuset-cpus=0-15,48-63", "--cpuset-mems=0,3"]


def test_a_pci_domain_beyond_four_digits(node: Node) -> None:
    machine(node, SOCKETS, {"10000:c1:00.0": "1"})
    with_gpus(node)
    (node.fake / "bus").write_text(f"{GPU}, 00010000:C1:00.0\n")
    node.configure(gpus=[1])
    accepted(node)
    assert placement(node)[1] == "--cpuset-mems=1"


@pytest.mark.parametrize(
    ("nodes", "gpus", "settings", "said"),
    [
        ({0: "0-15"}, {NEAR: "0", FAR: "0"}, {}, None),  # one node: nothing to choose
        (SOCKETS, {NEAR: "0", FAR: "1"}, {"gpus": []}, None),
        (SOCKETS, {NEAR: "0", FAR: "1"}, {"numa_nodes": "off"}, None),
        (SOCKETS, {NEAR: "0", FAR: "1"}, {"gpus": [0, 1]}, "not confined: its GPUs hang on all memory nodes, 0,1"),
        (SOCKETS, {NEAR: "0", FAR: "-1"}, {}, "the firmware tells no NUMA node of GPU 0000:c1:00.0 (numa_node is -1;"),
        (SOCKETS, {NEAR: "0"}, {}, "the firmware tells no NUMA node of GPU 0000:c1:00.0 (numa_node is absent;"),
        (SOCKETS, {NEAR: "0", FAR: "7"}, {}, "node7 of its GPUs has no memory"),
    ],
)
def test_where_there_is_no_place_there_is_no_binding(
    node: Node, nodes: dict[int, str], gpus: dict[str, str], settings: dict[str, object], said: str | None
) -> None:
    machine(node, nodes, gpus)
    with_gpus(node)
    node.configure(**{"gpus": [1], **settings})
    output = accepted(node)
    assert placement(node) == []
    assert (said or "") in output
    assert (said is not None) == ("placed" in output or "confined" in output)
    assert started_with(node) == []


@pytest.mark.parametrize("bus", ["", f"{OTHER}, 00000000:01:00.0\n", f"{GPU}, [N/A]\n", f"{GPU}, zz:01:00.0\n"])
def test_an_nvidia_smi_that_tells_no_address(node: Node, bus: str) -> None:
    machine(node, SOCKETS, {FAR: "1"})
    with_gpus(node)
    (node.fake / "bus").write_text(bus)
    node.configure(gpus=[1])
    assert f"not placed on a NUMA node: nvidia-smi names no PCI address of GPU {GPU}" in accepted(node)
    assert placement(node) == []


def test_the_node_file_says_where(node: Node) -> None:
    machine(node, SOCKETS, {})
    node.configure(numa_nodes="1")
    accepted(node)
    assert placement(node) == ["--cpuset-cpus=60-119,180-238", "--cpuset-mems=1"]


def test_a_node_that_is_not_there_is_refused(node: Node) -> None:
    machine(node, SOCKETS, {})
    node.configure(numa_nodes="0,2")
    sentence = refused(node)
    assert sentence.startswith(
        "seen: no memory node 2 on this machine; expected: the nodes of engine.engines.main.numa_nodes"
    )


def test_a_configuration_that_is_not_in_place_yet_is_checked_and_leaves_no_trace(node: Node) -> None:
    machine(node, SOCKETS, {})
    node.configure(numa_nodes="1")
    accepted(node)
    before = placement(node)
    node.configure(numa_nodes="0,2")
    status, output = node.run("engine-prestart", "--check", str(node.path("etc/gpuwright/engines/main.conf")))
    assert status == 1
    assert output.startswith("seen: no memory node 2 on this machine")
    assert placement(node) == before


def test_where_hbm_is_a_memory_node_nothing_is_confined(node: Node) -> None:
    machine(node, {0: "0-71", 2: "72-143"}, {NEAR: "0", FAR: "2"})
    hbm(node, 1, file_pages_kib=0)
    with_gpus(node)
    node.configure(gpus=[1])
    accepted(node)
    assert placement(node) == []
    node.configure(gpus=[1], numa_nodes="0")
    assert "error 802; do: take engine.engines.main.numa_nodes out" in refused(node)


def test_a_kernel_without_the_controller(node: Node) -> None:
    machine(node, SOCKETS, {FAR: "1"})
    with_gpus(node)
    node.configure(gpus=[1])
    (node.fake / "no-cpuset").touch()
    assert "not placed on NUMA node 1: Docker has no cpuset controller here" in accepted(node)
    assert placement(node) == []


def test_memory_that_the_engine_cannot_use_does_not_count(node: Node) -> None:
    machine(node, SOCKETS, {FAR: "1"})  # 16 GiB and 1 MiB free on each node
    with_gpus(node)
    node.configure(gpus=[1], min_free_memory=17 * 1024**3)
    status, output = node.run("engine-prestart")
    assert status == 75
    assert "memory that is free or holds files on node1 is 16385 MiB; expected: at least 17408 MiB" in output


def test_the_placement_is_part_of_what_runs(tmp_path: Path) -> None:
    first, second = Node(tmp_path / "a"), Node(tmp_path / "b", numa_nodes="off")
    second.configure(port=first.port, numa_nodes="off")
    assert first.wanted.config != second.wanted.config
