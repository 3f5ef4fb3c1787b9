"""Which regime GPU memory is in: what the driver was told against the memory nodes there are."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mutations
import pytest

from gpuwright import numa
from gpuwright.boot import BOOT, Boot, conflicts, together
from gpuwright.snapshot import NUMA, CouldNotLook, MemoryNode, Snapshot
from gpuwright.spec.node import Hardware
from gpuwright.wishes import other_gpu_drivers
from roles.kernel import wishes as kernel
from roles.kernel.spec import KernelSpec
from roles.memory import operations, regime
from roles.memory.facts import COHERENCE, Coherence
from roles.memory.spec import MemorySpec
from roles.memory.wishes import wishes

STATION = Hardware(architecture="arm64", hbm_numa_nodes=(1,))
LPDDR, HBM, EMPTY = MemoryNode("0-71", 500_000_000, 5, 1), MemoryNode("", 260_000_000, 0, 0), MemoryNode("", 0, 0, 0)
AS_NODES, KEPT = {0: LPDDR, 1: HBM}, {0: LPDDR, 1: EMPTY}


def told(mode: str | None) -> Coherence:
    return Coherence(driver=True, mode=mode, zone_reclaim=0)


@pytest.mark.parametrize(
    ("driver", "nodes", "found", "because"),
    [
        (told("numa"), AS_NODES, "numa", "memory node 1 has memory and no CPUs"),
        (told(""), AS_NODES, "numa", "memory node 1"),  # branches before R610: the default
        (told(None), AS_NODES, "numa", "memory node 1"),  # branches without the option
        (Coherence(), AS_NODES, "numa", "memory node 1"),  # whatever put the memory there
        (told("driver"), KEPT, "driver", "CoherentGPUMemoryMode=driver"),
        (told(""), KEPT, "driver", "its own default"),  # later branches
        (told("driver"), AS_NODES, None, "memory node 1 still has memory without CPUs: a reboot is pending"),
        (
            told("numa"),
            KEPT,
            None,
            "CoherentGPUMemoryMode=numa, and no memory node is without CPUs: a reboot is pending",
        ),
        (told(None), KEPT, None, "no CoherentGPUMemoryMode"),
        (Coherence(), KEPT, None, "no NVIDIA driver is loaded"),
        (Coherence(), {}, None, "no NVIDIA driver is loaded"),
    ],
)
def test_two_witnesses(driver: Coherence, nodes: dict[int, MemoryNode], found: str | None, because: str) -> None:
    seen, witness = regime.running(driver, nodes)
    assert seen == found
    assert because in witness


@pytest.mark.parametrize(
    ("wanted", "hardware", "driver", "nodes", "faults", "waits"),
    [
        ("numa", STATION, told(""), AS_NODES, [], 0),
        ("driver", STATION, told("driver"), KEPT, [], 0),
        ("numa", Hardware(), Coherence(), {0: LPDDR}, [], 0),
        ("driver", STATION, told(""), AS_NODES, ["seen: regime numa (memory node 1", "expected: driver", "pending"], 1),
        ("numa", STATION, told(""), KEPT, ["seen: regime driver", "expected: numa; do: reboot"], 1),
        ("driver", STATION, told("driver"), AS_NODES, ["still has memory", "do: reboot"], 1),
        ("numa", STATION, Coherence(), KEPT, ["no NVIDIA driver", "do: look at the driver"], 0),
        ("numa", STATION, told(""), {0: LPDDR, 2: HBM}, ["HBM is memory node 2; expected: 1"], 0),
        ("numa", Hardware(), told(""), AS_NODES, ["memory node 1 has memory and no CPUs", "hbm_numa_nodes: [1]"], 0),
    ],
)
def test_what_is_wrong_and_what_waits_for_a_reboot(
    wanted: str, hardware: Hardware, driver: Coherence, nodes: dict[int, MemoryNode], faults: list[str], waits: int
) -> None:
    spec = MemorySpec(regime=wanted)
    found = regime.faults(spec, hardware, driver, nodes)
    assert len(found) == bool(faults)
    for words in faults:
        assert words in found[0]
    assert len(regime.pending(spec, hardware, looked(driver, nodes))) == waits


NOUVEAU = "module nouveau is loaded and must not be (kernel: only NVIDIA's own driver may bind the GPUs)"


def test_another_driver_that_has_the_gpus_is_a_pending_reboot() -> None:
    [fault] = regime.faults(MemorySpec(), STATION, Coherence(), KEPT, [NOUVEAU])
    assert fault == (
        f"seen: no NVIDIA driver is loaded, and {NOUVEAU}: a reboot is pending; expected: regime numa; do: reboot"
    )
    assert regime.waits_for_reboot(fault)
    # NVIDIA's driver is loaded all the same: the other one has some other card.
    assert regime.faults(MemorySpec(), STATION, told(""), AS_NODES, [NOUVEAU]) == ()


class Station:
    """A host whose run went as far as the verification, and what that says."""

    name = "gpu-1"

    def __init__(self, driver: Coherence, *modules: str) -> None:
        self.values = {COHERENCE: driver, NUMA: KEPT, BOOT: Boot(modules=tuple((module, 0) for module in modules))}
        self.said: list[tuple[str, str]] = []

    def read(self, section: Any) -> Any:
        return self.values[section]

    def log_styled(self, text: str, fg: str, log_func: Any) -> None:
        self.said.append((fg, text))


@pytest.mark.parametrize(("module", "goes_on"), [("nouveau", True), ("nova_core", True), ("ext4", False)])
def test_the_run_warns_and_goes_on_where_another_driver_waits_for_the_reboot(
    monkeypatch: pytest.MonkeyPatch, module: str, goes_on: bool
) -> None:
    host = Station(Coherence(), module)
    monkeypatch.setattr(operations.snapshot, "read", lambda host: host)
    monkeypatch.setattr(operations.snapshot, "forget", lambda host: None)
    gpus = STATION.model_copy(update={"gpus": STATION.gpus.model_copy(update={"count": 1})})
    others = other_gpu_drivers(kernel.wishes(KernelSpec(), gpus, "baseline"))
    assert operations._tell(None, host, MemorySpec(), STATION, others) is goes_on
    [(color, said)] = host.said
    assert color == ("yellow" if goes_on else "red")
    assert (f"module {module} is loaded" in said) is goes_on


def looked(driver: Coherence, nodes: dict[int, MemoryNode]) -> Snapshot:
    """What a machine would have said."""
    memory = [f"driver={'yes' if driver.driver else 'no'}"]
    memory += ["mode=none" if driver.mode is None else f'mode="{driver.mode}"', "zone_reclaim=0", "END"]
    lists = {
        "online": frozenset(nodes),
        "has_memory": frozenset(index for index, node in nodes.items() if node.mem_total_kib),
        "has_cpu": frozenset(index for index, node in nodes.items() if node.cpus),
    }
    lines = [f"{key} {numa.listed(value)}" for key, value in lists.items()]
    lines += [
        f"node {index}|{node.cpus}|{node.mem_total_kib}|{node.file_pages_kib}|{node.shmem_kib}"
        for index, node in nodes.items()
    ]
    return Snapshot({"memory": (0, "\n".join(memory)), "numa": (0, "\n".join([*lines, "end"]) if nodes else "end")})


def test_the_barrier_waits_for_what_the_machine_shows_not_for_what_the_driver_was_told() -> None:
    """A Station whose driver was told nothing and that shows its memory as nodes needs no reboot to be in regime numa."""
    asked = wishes(MemorySpec(), STATION).options[0]
    assert asked.waits is not None
    assert asked.waits(looked(told(""), AS_NODES)) == ()
    other = wishes(MemorySpec(regime="driver"), STATION).options[0]
    assert other.waits is not None
    assert len(other.waits(looked(told(""), AS_NODES))) == 1
    assert other.waits(looked(told("driver"), KEPT)) == ()
    with pytest.raises(CouldNotLook):
        asked.waits(Snapshot({}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("driver=no\nmode=none\nzone_reclaim=0\nEND", Coherence(False, None, 0)),
        ("driver=no\nmode=none\nzone_reclaim=none\nEND", Coherence()),
        ('driver=yes\nmode=""\nzone_reclaim=1\nEND', Coherence(True, "", 1)),
        ('driver=yes\nmode="driver"\nzone_reclaim=1\nEND', Coherence(True, "driver", 1)),
        ("driver=yes\nmode=none\nzone_reclaim=1\nEND", Coherence(True, None, 1)),
    ],
)
def test_what_the_driver_says_is_read(text: str, found: Coherence) -> None:
    assert Snapshot({"memory": (0, text)}).read(COHERENCE) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "driver=no\nmode=none\nzone_reclaim=0",
        "driver=yes\nzone_reclaim=1\nEND",
        'driver=yes\nmode="driver"\nEND',
        "driver=yes\nmode=driver\nzone_reclaim=1\nEND",
        'driver=yes\nmode="driver\nzone_reclaim=1\nEND',
        "driver=yes\nmode=none\nzone_reclaim=\nEND",
        "driver=no\nmode=none\nzone_reclaim=0\nx\nEND",
    ],
)
def test_damage_is_no_answer(text: str) -> None:
    with pytest.raises(CouldNotLook):
        Snapshot({"memory": (0, text)}).read(COHERENCE)


@pytest.mark.parametrize("mode", ["none", '""', '"driver"', '"numa"'])
def test_a_mutated_answer_is_read_right_or_not_at_all(mode: str) -> None:
    text = f"driver=yes\nmode={mode}\nzone_reclaim=1\nEND\n"
    truth = Snapshot({"memory": (0, text)}).read(COHERENCE)
    right = refused = 0
    for mutant in mutations.mutants(text, rounds=24):
        said = mutant if isinstance(mutant, str) else mutant.decode(errors="replace")
        try:
            seen = Snapshot({"memory": (0, said)}).read(COHERENCE)
        except CouldNotLook:
            refused += 1
            continue
        assert seen == truth, mutant
        right += 1
    assert right + refused >= 200
    assert min(right, refused) >= 40


@pytest.mark.parametrize(
    ("params", "reclaim", "found"),
    [
        (None, None, Coherence()),
        ("ResmanDebugLevel: 4294967295\n", "1\n", Coherence(True, None, 1)),
        ('ResmanDebugLevel: 1\nCoherentGPUMemoryMode: "numa"\n', "0\n", Coherence(True, "numa", 0)),
        ('CoherentGPUMemoryMode: ""\n', None, Coherence(True, "", None)),
    ],
)
def test_the_script_asks_the_driver_and_the_kernel(
    tmp_path: Path, params: str | None, reclaim: str | None, found: Coherence
) -> None:
    for name, text in (("driver/nvidia/params", params), ("sys/vm/zone_reclaim_mode", reclaim)):
        if text is not None:
            file = tmp_path / name
            file.parent.mkdir(parents=True)
            file.write_text(text)
    script = COHERENCE.script.replace("/proc/", f"{tmp_path}/")
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert Snapshot({"memory": (0, said)}).read(COHERENCE) == found


def test_what_the_kernel_is_asked_for() -> None:
    found = wishes(MemorySpec(), STATION)
    assert [(o.module, o.name, o.value) for o in found.options] == [("nvidia", "NVreg_CoherentGPUMemoryMode", "numa")]
    assert [(s.key, s.value) for s in found.sysctls] == [("vm.zone_reclaim_mode", "1")]
    assert wishes(MemorySpec(regime="driver"), STATION).options[0].value == "driver"
    assert wishes(MemorySpec(zone_reclaim="off"), STATION).sysctls == ()
    assert not list(wishes(MemorySpec(), Hardware()).all())
    assert conflicts(together([kernel.wishes(KernelSpec(), STATION, "baseline"), found])) == []
