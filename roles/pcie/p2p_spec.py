"""Settings of role `pcie`: the verdict on peer-to-peer between the GPUs of an engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpuwright.spec.base import Seconds, Size, Strict

_MIB = 1024**2


def _words(size: int) -> int:
    if size % 4 or size > 2048 * _MIB:
        raise ValueError("a copy is a multiple of 4 bytes, and at most 2 GiB")
    return size


CopySize = Annotated[Size, AfterValidator(_words)]


class P2pSpec(Strict):
    """Copies with compared bytes and bounded all-reduces, in the engine's own image, before it starts."""

    mode: Literal["verify", "off"] = Field(
        default="verify",
        description="verify: engines of several GPUs use P2P only while a verdict of compared bytes says good and nothing it "
        "depends on has changed (`topo -p2p` OK has meant hangs and silent corruption, gpu-node.md 0.4); "
        "off: NCCL and engines decide for themselves, unjudged",
    )
    off_reason: str | None = Field(
        default=None, pattern=r"^[^\x00-\x1f]*$", description="why nobody has to judge P2P here; needed with off"
    )
    sizes: tuple[CopySize, ...] = Field(
        default=(4096, 65536, _MIB, 16 * _MIB, 256 * _MIB),
        min_length=1,
        max_length=12,
        description="of the copies; bandwidth is measured with the last (gpu-node.md 2.5: 4 KiB to 256 MiB)",
    )
    hang_limit: Seconds = Field(
        default=60,
        description="how long one step may take before it counts as a hang; on two H200 the longest took 1 s",
    )
    limit: Seconds = Field(
        default=900, description="how long the whole probe of one engine may take; beyond it counts as a hang, too"
    )
