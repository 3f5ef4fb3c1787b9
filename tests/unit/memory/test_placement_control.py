"""GPW-MEMO-005: where an engine may run against where its GPUs hang."""

from __future__ import annotations

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.snapshot import CouldNotLook, Snapshot
from gpuwright.spec.node import Hardware, NodeSpec
from roles.engine.spec import EngineSpec
from roles.memory.checks import CONTROLS, JOBS, PLACED
from roles.memory.spec import MemorySpec

[CONTROL] = [control for control in CONTROLS if control.id == "GPW-MEMO-005"]
SYSTEM = "ID=ubuntu\nARCHITECTURE=x86_64\nKERNEL=6.8\nVIRTUALIZATION=none\nREBOOT=no"
SOCKETS = "online 0-1\nhas_memory 0-1\nhas_cpu 0-1\nnode 0|0-59,120-179|400|4|0\nnode 1|60-119,180-238|400|4|0\nend"
WITH_HBM = SOCKETS.replace("0-1\nhas_memory 0-1", "0-2\nhas_memory 0-2").replace("\nend", "\nnode 2||99|0|0\nend")
ONE = "online 0\nhas_memory 0\nhas_cpu 0\nnode 0|0-15|400|4|0\nend"
GPUS = "\ngpu 0 0\ngpu 1 1"


def runs(cpus: str, mems: str) -> str:
    return f"engine gpuwright-main Cpus_allowed_list: {cpus}\nengine gpuwright-main Mems_allowed_list: {mems}"


def judge(numa: str, placed: str, gpus: tuple[int, ...] = (1,), numa_nodes: str = "auto"):
    engine = {
        "image": f"registry.test/sim@sha256:{'b' * 64}",
        "model": "tiny",
        "served_name": "lab",
        "port": 18001,
        "gpus": gpus,
        "numa_nodes": numa_nodes,
        "settings": {"kind": "vllm"},
    }
    spec = NodeSpec(
        gpuwright=1,
        summary="two sockets",
        hardware=Hardware(cpu_numa_nodes=(0, 1)),
        memory=MemorySpec(),
        engine=EngineSpec(engines={"main": engine}),
    )
    return CONTROL.predicate(Snapshot({"system": (0, SYSTEM), "numa": (0, numa), PLACED.name: (0, placed)}), spec)


NEAR, EVERYWHERE = runs("60-119,180-238", "1"), runs("0-239", "0-1")


@pytest.mark.parametrize(
    ("numa", "placed", "settings", "outcome", "words"),
    [
        (SOCKETS, NEAR + GPUS, {}, Outcome.PASS, "memory nodes 1, CPUs 60-119,180-238 (its GPUs hang there)"),
        # what the kernel allows may name a CPU that is offline
        (SOCKETS, runs("60-119,180-239", "1") + GPUS, {}, Outcome.PASS, "CPUs 60-119,180-238"),
        (SOCKETS, EVERYWHERE + GPUS, {}, Outcome.FAIL, "expected: nodes 1, CPUs 60-119,180-238"),
        (SOCKETS, runs("0-59,120-179", "0") + GPUS, {}, Outcome.FAIL, "memory nodes 0"),
        (SOCKETS, runs("60-119", "1") + GPUS, {}, Outcome.FAIL, "CPUs 60-119"),
        (SOCKETS, EVERYWHERE + GPUS, {"gpus": (0, 1)}, Outcome.PASS, "hang on every memory node"),
        (SOCKETS, NEAR + GPUS, {"gpus": (0, 1)}, Outcome.FAIL, "expected: nodes 0-1"),
        (SOCKETS, EVERYWHERE + "\ngpu 0 0\ngpu 1 -1", {}, Outcome.PASS, "the firmware does not tell"),
        (SOCKETS, EVERYWHERE, {"gpus": ()}, Outcome.PASS, "it has no GPU"),
        (SOCKETS, NEAR, {"gpus": (), "numa_nodes": "1"}, Outcome.PASS, "memory nodes 1"),
        (SOCKETS, EVERYWHERE + GPUS, {"numa_nodes": "off"}, Outcome.PASS, "numa_nodes: off"),
        (SOCKETS, GPUS.strip(), {}, Outcome.FAIL, "no running container gpuwright-main"),
        (WITH_HBM, runs("0-239", "0-2") + GPUS, {}, Outcome.PASS, "HBM is a memory node"),
        (WITH_HBM, EVERYWHERE + GPUS, {}, Outcome.FAIL, "expected: nodes 0-2"),
        (ONE, runs("0-15", "0"), {"gpus": ()}, Outcome.NOT_APPLICABLE, "one memory node"),
    ],
)
def test_where_an_engine_runs(numa: str, placed: str, settings: dict, outcome: Outcome, words: str) -> None:
    verdict = judge(numa, placed, **settings)
    assert verdict.outcome is outcome, verdict
    assert words in verdict.actual


def test_a_gpu_that_nobody_lists_is_no_verdict() -> None:
    with pytest.raises(CouldNotLook, match="lists no GPU 1"):
        judge(SOCKETS, EVERYWHERE + "\ngpu 0 0")
    with pytest.raises(CouldNotLook):
        judge(SOCKETS, NEAR + "\ngpu 1")


def test_file_jobs_where_nothing_is_fetched() -> None:
    """GPW-MEMO-003 of a node whose file has hardware with HBM and no model and no engine yet."""
    [control] = [control for control in CONTROLS if control.id == "GPW-MEMO-003"]
    hbm = Hardware(cpu_numa_nodes=(0,), hbm_numa_nodes=(1,))
    spec = NodeSpec(gpuwright=1, summary="a node", hardware=hbm, memory=MemorySpec())
    seen = Snapshot({JOBS.name: (0, ""), "system": (0, SYSTEM)})
    assert control.predicate(seen, spec).outcome is Outcome.NOT_APPLICABLE
    with pytest.raises(CouldNotLook, match="no image job"):
        control.predicate(seen, spec.model_copy(update={"engine": EngineSpec(engines={})}))
