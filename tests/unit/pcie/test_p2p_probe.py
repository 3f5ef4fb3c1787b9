"""The probe's own bounds and judgement. Its workers, which need GPUs and torch, are FAKES here; what it makes of wrong bytes
is in p2p_copiers.py, which needs torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from p2p_copiers import probe_at
from p2p_node import SCRIPTS, recorded

PROBE = SCRIPTS / "p2p-probe.py"
probe = probe_at(str(PROBE))

FAKE_WORKERS = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from p2p_copiers import probe_at
probe = probe_at({probe!r})
probe.__file__ = __file__
behaviour = os.environ["BEHAVIOUR"]

def copies(options):
    if behaviour == "no torch":
        import torch_that_is_not_there
    if behaviour == "slow torch":
        time.sleep(60)
    if behaviour == "no driver":
        raise RuntimeError("CUDA driver initialization failed")
    count = int(os.environ.get("GPUS", 2))
    probe.report(torch="fake", gpus=[dict(index=i, uuid=None, name="FAKE") for i in range(count)])
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    for a, b in pairs:
        probe.report(stage=f"copies from GPU {{a}} to GPU {{b}}")
        if behaviour == "copies hang" and (a, b) == (1, 0):
            time.sleep(60)
        if behaviour == "copies full":
            raise RuntimeError("CUDA out of memory. Tried to allocate 16.00 MiB")
        if behaviour == "copies killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "copies crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        faults = []
        if behaviour == "wrong one way" and (a, b) == (1, 0):
            faults = [dict(size=4096, pattern="address", wrong_bytes=8, bytes=4096, first_wrong=0, looks="zeros")]
        probe.report(pair=dict([("from", a), ("to", b), ("peer_access", True), ("faults", faults)]))
    probe.report(done=True)

def rank(options):
    without = os.environ.get("NCCL_P2P_DISABLE") == "1"
    last = options.rank == options.ranks - 1
    print("noise on standard output")
    if behaviour == "rank does not start" and last:
        time.sleep(60)
    probe.report(ready=True)
    probe.report(stage="all-reduce of 4 KiB of float32")
    if not without:
        if behaviour == f"rank stands aside at {{options.ranks}}":
            time.sleep(60)
        if behaviour == "rank fails" and last:
            raise RuntimeError("NCCL error: unhandled cuda error")
        if behaviour == "rank fails":
            time.sleep(60)
        if behaviour == "rank killed" and last:
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "wrong sums" and last:
            return probe.report(outcome="wrong", faults=[dict(size=4096, wrong=3)], gb_per_s=1.0)
    probe.report(outcome="right", faults=[], gb_per_s=1.0)
    sys.stdin.read()

probe.WORKERS.update(copies=copies, rank=rank)
sys.exit(probe.main())
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs the real probe over FAKE workers: (exit status, document, seconds)."""
    script = tmp_path / "probe.py"
    script.write_text(FAKE_WORKERS.format(here=str(Path(__file__).parent), probe=str(PROBE)))

    def run(behaviour: str, *arguments: str, gpus: int = 2) -> tuple[int, dict[str, Any], float]:
        began = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                script,
                "--hang-limit=2",
                "--start-limit=4",
                "--without-p2p=NCCL_P2P_DISABLE=1",
                *arguments,
            ],
            env={**os.environ, "BEHAVIOUR": behaviour, "GPUS": str(gpus)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout), time.monotonic() - began

    return run


def test_good(run) -> None:
    status, document, _ = run("right", "--groups=2,3,4,8", gpus=4)
    assert (status, document["verdict"], document["reasons"]) == (0, "good", [])
    assert len(document["copies"]) == 12
    tried = [(result["gpus"], result["p2p"]) for result in document["collectives"]]
    assert sorted(tried[:6]) == [([a, b], True) for a in range(4) for b in range(a + 1, 4)]
    assert tried[6:] == [([0, 1, 2], True), ([0, 1, 2, 3], True), ([0, 1, 2, 3], False)]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("wrong one way", "GPU 1 to GPU 0: 8 of 4096 bytes wrong in a copy of 4096 bytes (pattern address, zeros)"),
        ("copies hang", "hangs in copies from GPU 1 to GPU 0: no end after 2 s"),
        ("copies crash", "failed in copies from GPU 0 to GPU 1: signal 11"),
        ("rank stands aside at 2", "all-reduce of 2 GPUs (0, 1) hangs: no end after 2 s at rank"),
        (
            "rank fails",
            "all-reduce of 2 GPUs (0, 1) failed: rank 1, all-reduce of 4 KiB of float32: RuntimeError: NCCL error",
        ),
        ("wrong sums", "all-reduce of 2 GPUs (0, 1) returned wrong sums: rank 1"),
    ],
)
def test_bad(run, behaviour: str, reason: str) -> None:
    status, document, seconds = run(behaviour, "--hang-limit=2")
    assert (status, document["verdict"]) == (0, "bad")
    assert document["reasons"][0].startswith(reason)
    assert seconds < 20
    # It shows whether the engine can do without P2P.
    if not behaviour.startswith("copies"):
        assert [r["outcome"] for r in document["collectives"] if not r["p2p"]] == ["right"]


@pytest.mark.parametrize("size", [2, 4])
def test_hangs_at_one_size_and_not_at_the_other(run, size: int) -> None:
    """vllm#51513: two ranks hung on a host where four completed."""
    _, document, _ = run(f"rank stands aside at {size}", "--hang-limit=2", gpus=4)
    outcomes = {(len(r["gpus"]), r["outcome"]) for r in document["collectives"] if r["p2p"]}
    assert outcomes == {(size, "hangs"), (6 - size, "right")}
    assert document["verdict"] == "bad"


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("no torch", "the image has no usable torch (No module named 'torch_that_is_not_there')"),
        ("slow torch", "torch did not start within 4 s"),
        ("no driver", "the GPUs cannot be used: RuntimeError: CUDA driver initialization failed"),
        (
            "copies full",
            "a GPU is out of memory (CUDA out of memory. Tried to allocate 16.00 MiB); the probe needs idle GPUs",
        ),
        ("copies killed", "a process of the probe was killed (signal 9): out of memory, or by hand"),
        ("rank killed", "a process of the probe was killed (signal 9): out of memory, or by hand"),
        ("rank does not start", "a process of the all-reduce did not start within 4 s"),
    ],
)
def test_not_judged(run, behaviour: str, reason: str) -> None:
    limits = ["--start-limit=4"] if "4 s" in reason else []
    status, document, _ = run(behaviour, *limits)
    assert (status, document["verdict"]) == (69, "none")
    assert document["reasons"][0].startswith(reason)


def test_one_gpu_and_other_than_expected(run) -> None:
    assert run("right", gpus=1)[:2][1]["reasons"] == recorded("one-gpu")["reasons"]
    status, document, _ = run("right", "--gpus=4")
    assert (status, document["reasons"]) == (69, ["2 GPUs are visible in the container; expected: 4"])


@pytest.mark.parametrize("name", ["good-2", "good-4", "corrupt-one-way", "hang-2", "hang-at-2-not-4", "hang-at-4"])
def test_judges_recorded_documents_as_they_were_judged(name: str) -> None:
    document = recorded(name)
    assert probe.judge(document) == (document["verdict"], document["reasons"])


@pytest.mark.parametrize("count", range(2, 17))
def test_every_pair_meets_once_and_no_gpu_twice_in_a_round(count: int) -> None:
    rounds = probe.rounds_of_pairs(count)
    assert all(len({gpu for pair in one for gpu in pair}) == 2 * len(one) for one in rounds)
    assert sorted(pair for one in rounds for pair in one) == [[a, b] for a in range(count) for b in range(a + 1, count)]
