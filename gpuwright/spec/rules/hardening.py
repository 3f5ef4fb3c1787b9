"""Cross-checks on how far a node is hardened."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def strict_has_a_console(spec: NodeSpec) -> Iterator[Found]:
    """Whoever closes this much needs another way in (security.md 3.3)."""
    if spec.hardening == "strict" and not spec.console:
        sentence = (
            "needs 'console: true' in the node file: say that somebody can reach this machine without its network, "
            "or use server-cis1"
        )
        yield Found(("hardening",), sentence)


RULES = (strict_has_a_console,)
