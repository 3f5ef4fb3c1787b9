"""Cross-checks: what single settings cannot tell. One function per rule: it blames a path and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuwright.spec.document import Document
from gpuwright.spec.fault import Fault, dotted, shown
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules import (
    access,
    compatibility,
    containers,
    engines,
    firewall,
    gateway,
    hardening,
    hardware,
    kernel,
    memory,
    models,
    nvidia,
    p2p,
    pcie,
    repositories,
)
from gpuwright.spec.rules.found import Found

RULES: tuple[Callable[[NodeSpec], Iterator[Found]], ...] = (
    *hardening.RULES,
    *access.RULES,
    *hardware.RULES,
    *kernel.RULES,
    *pcie.RULES,
    *p2p.RULES,
    *memory.RULES,
    *nvidia.RULES,
    *containers.RULES,
    *repositories.RULES,
    *models.RULES,
    *engines.RULES,
    *gateway.RULES,
    *firewall.RULES,
    compatibility.check,
)


def check(spec: NodeSpec, source: Document) -> Iterator[Fault]:
    """Every cross-check on one description, each fault at the line of the setting it blames."""
    for rule in RULES:
        for found in rule(spec):
            mark = source.mark(found.path)
            seen = shown(found.path, _written(source.data, found), mark.raw) if found.show else ""
            yield Fault(mark.file, mark.line, dotted(found.path), seen, found.sentence, unfinished=found.unfinished)


def _written(data: Any, found: Found) -> Any:
    for part in found.path:
        inside = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if not inside:
            return {}  # a default: there is nothing the person wrote
        data = data[part]
    return data
