"""Cross-checks on P2P between the GPUs of an engine."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def off_has_a_reason(spec: NodeSpec) -> Iterator[Found]:
    if spec.pcie and spec.pcie.p2p.mode == "off" and not (spec.pcie.p2p.off_reason or "").strip():
        yield Found(("pcie", "p2p", "mode"), "needs off_reason: why nobody has to judge P2P between these GPUs")


def one_verdict_sets_every_flag(spec: NodeSpec) -> Iterator[Found]:
    """Some programs look whether NCCL_P2P_DISABLE is set, not at its value (unsloth#10613)."""
    judges = spec.pcie is not None and spec.pcie.p2p.mode == "verify"
    for name, engine in (spec.engine.engines if spec.engine else {}).items():
        path = ("engine", "engines", name, "environment", "NCCL_P2P_DISABLE")
        value = engine.environment.get("NCCL_P2P_DISABLE")
        if value is not None and judges and len(engine.gpus) > 1:
            sentence = "is refused: the verdict of pcie.p2p sets it, with all that belongs to it; leave it out"
            yield Found(path, sentence)
        elif value == "0":
            yield Found(path, "is refused: some programs only look whether it is set; leave it out to keep P2P")


RULES = (off_has_a_reason, one_verdict_sets_every_flag)
