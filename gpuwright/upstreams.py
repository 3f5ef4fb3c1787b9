"""What the gateway needs to know of the engines: computed here, because no role reads another role's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roles.engine.spec import EngineSpec, VllmSettings


@dataclass(frozen=True)
class Upstream:
    """One engine as the gateway sees it."""

    engine: str
    served_name: str
    kind: Literal["vllm", "sglang"]
    port: int
    context_tokens: int | None
    """Longest prompt in tokens; None where the node file leaves it to the checkpoint."""
    multimodal: bool

    @property
    def address(self) -> str:
        """Where the engine listens: engines are published on loopback only."""
        return f"127.0.0.1:{self.port}"


def upstreams(spec: EngineSpec | None) -> tuple[Upstream, ...]:
    """The engines of a node in the order of its node file."""
    if spec is None:
        return ()
    found = []
    for name, engine in spec.engines.items():
        settings = engine.settings
        context = settings.max_model_len if isinstance(settings, VllmSettings) else settings.context_length
        found.append(Upstream(name, engine.served_name, settings.kind, engine.port, context, settings.multimodal))
    return tuple(found)


MIB = 1024**2


def body_limit(engines: tuple[Upstream, ...]) -> int:
    """Bytes a request may have: max(32 MiB, 8 bytes x context) and 64 MiB more for images (DESIGN section 3).

    A prompt of a million tokens is megabytes; a limit that is not derived from the context refuses it one day.
    """
    longest = max((engine.context_tokens or 0 for engine in engines), default=0)
    images = 64 * MIB if any(engine.multimodal for engine in engines) else 0
    return max(32 * MIB, 8 * longest) + images
