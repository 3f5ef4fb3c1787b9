"""Cross-checks: what single settings cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.document import Document
from gpuwright.spec.fault import Fault
from gpuwright.spec.node import NodeSpec


def check(spec: NodeSpec, source: Document) -> Iterator[Fault]:
    """Every cross-check on one description."""
    yield from ()
