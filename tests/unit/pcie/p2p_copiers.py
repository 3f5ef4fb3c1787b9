"""What the probe makes of copies that go wrong. FAKE copiers on CPU tensors stand in for GPUs that lie.

Needs torch, which is in engine images and not in this project's environment: tests/lab/test_vllm_openai.py runs it inside the
image, `python3 p2p_copiers.py PROBE` runs it anywhere else.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

SIZES = [4096, 1024 * 1024]


def probe_at(path: str) -> ModuleType:
    """The probe as a module."""
    spec = importlib.util.spec_from_file_location("p2p_probe", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def right(target: Any, sent: Any) -> None:
    target.copy_(sent)


def zeros(target: Any, sent: Any) -> None:
    target.zero_()


def stale(target: Any, sent: Any) -> None:
    """Every call succeeds, nothing arrives."""


def partial(target: Any, sent: Any) -> None:
    target[: len(target) // 2] = sent[: len(sent) // 2]


def last_word(target: Any, sent: Any) -> None:
    target[:-1] = sent[:-1]


def shifted(target: Any, sent: Any) -> None:
    target[16:] = sent[:-16]


def rotated(target: Any, sent: Any) -> None:
    target.copy_(sent.roll(1))


def one_bit(target: Any, sent: Any) -> None:
    target.copy_(sent)
    target[len(target) // 3] ^= 1 << 20


def beyond(target: Any, sent: Any) -> None:
    """The right bytes, and one page more."""
    target.copy_(sent)
    target.as_strided((len(target) + 8,), (1,))[len(target) :] = 7


def previous(target: Any, sent: Any, kept: list[Any] = []) -> None:  # noqa: B006
    """What the copy before this one should have brought."""
    if kept and len(kept[0]) == len(sent):
        target.copy_(kept[0])
    kept[:] = [sent.clone()]


def check(probe: ModuleType, torch: Any) -> None:
    def faults(copy: Any) -> list[dict[str, Any]]:
        return list(probe.copy_faults(torch, SIZES, "cpu", "cpu", copy))

    every = len(SIZES) * len(probe.PATTERNS)
    assert faults(right) == []

    # A source of zeros cannot show a copier of zeros; all others do.
    found = faults(zeros)
    assert len(found) == every - len(SIZES), found
    assert {fault["looks"] for fault in found} == {"zeros"}
    assert all(fault["first_wrong"] == 0 for fault in found)

    found = faults(stale)
    assert len(found) == every
    assert {fault["looks"] for fault in found} == {"stale: what was there before"}
    assert all(fault["wrong_bytes"] > 0.99 * fault["bytes"] for fault in found)

    found = faults(partial)
    assert len(found) == every
    assert all(fault["first_wrong"] == fault["bytes"] // 2 for fault in found)
    assert {fault["looks"] for fault in found} == {"stale: what was there before"}

    found = faults(last_word)
    assert len(found) == every
    assert all(fault["first_wrong"] == fault["bytes"] - 4 for fault in found)

    # Only a pattern without repeated words shows by how much; that something is wrong, all show.
    found = faults(shifted)
    assert len(found) == every
    assert [f["looks"] for f in found if f["pattern"] == "address"] == ["shifted by 64 bytes"] * len(SIZES)
    assert [f["looks"] for f in faults(rotated) if f["pattern"] == "address"] == ["shifted by 4 bytes"] * len(SIZES)

    found = faults(one_bit)
    assert len(found) == every
    assert all(fault["wrong_bytes"] == 1 for fault in found)

    found = faults(beyond)
    assert len(found) == every
    assert {fault["looks"] for fault in found} == {"written outside of the destination"}

    assert faults(previous)


if __name__ == "__main__":
    import torch

    check(probe_at(sys.argv[1]), torch)
    print(f"torch {torch.__version__}: every FAKE copier is found out")
