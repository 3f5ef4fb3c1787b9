"""Which GPUs must reach each other's memory, and what the node says of it: shared by roles `pcie` and `engine`.

Role `pcie` judges peer-to-peer between the GPUs of an engine and keeps the verdict; role `engine` runs without it unless
the verdict is good. Both ask the same program on the node, so that a deploy, an audit and a start come to one answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from gpuwright.snapshot import Section, register

if TYPE_CHECKING:  # role engine imports this library
    from gpuwright.spec.node import NodeSpec
    from roles.engine.container import Separation

Word = Literal["good", "bad", "none", "expired", "missing", "unknown"]


@dataclass(frozen=True)
class PeerGroup:
    """One engine whose GPUs work together."""

    engine: str
    image: str
    """``repository@sha256:…``: the NCCL in it is the one that serves."""
    digest: str
    gpus: tuple[int, ...]
    gpu_count: int
    """Of the whole node: with one that does not answer, the numbers of the others mean other cards."""
    environment: dict[str, str]
    """What the engine sets for NCCL and CUDA: another setting is another way between GPUs."""
    separation: Separation


def judged_engines(spec: NodeSpec) -> tuple[str, ...]:
    """The engines of more than one GPU, in the order of their node file; none where role pcie does not judge P2P."""
    if spec.engine is None or spec.pcie is None or spec.pcie.p2p.mode == "off":
        return ()
    return tuple(name for name, engine in spec.engine.engines.items() if len(engine.gpus) > 1)


def peer_groups(spec: NodeSpec) -> tuple[PeerGroup, ...]:
    """The GPUs of each engine of `judged_engines`. Raises ValueError for an unpinned image."""
    from roles.engine.container import separation

    if spec.engine is None:
        return ()
    found = {name: spec.engine.engines[name] for name in judged_engines(spec)}
    return tuple(
        PeerGroup(
            name,
            engine.image.reference,
            engine.image.digest or "",
            engine.gpus,
            spec.hardware.gpus.count,
            {key: value for key, value in engine.environment.items() if key.startswith(("NCCL_", "CUDA_"))},
            separation(engine),
        )
        for name, engine in found.items()
    )


@dataclass(frozen=True)
class PeerVerdict:
    """What ``p2p-verdict`` says of one engine's GPUs, as things are now. Only ``good`` leaves P2P on."""

    word: Word
    sentence: str

    @property
    def tried(self) -> bool:
        """Whether the probe ran as things are now; a further try would come to the same."""
        return self.word in ("good", "bad", "none")


def _parse(text: str) -> dict[str, PeerVerdict]:
    found = {}
    for line in text.splitlines():
        engine, word, sentence = line.split("\t", 2)
        if word not in get_args(Word):
            raise ValueError(line)
        found[engine] = PeerVerdict(word, sentence)  # type: ignore[arg-type]
    return found


VERDICTS = register(
    Section(
        "p2p-verdicts",
        r"""
[ -x /usr/local/lib/gpuwright/p2p-verdict ] || exit 0
/usr/local/lib/gpuwright/p2p-verdict
""",
        _parse,
    )
)
