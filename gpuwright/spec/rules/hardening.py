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


def a_hardened_node_has_a_firewall(spec: NodeSpec) -> Iterator[Found]:
    """What these profiles promise ends at a port that anybody reaches (CIS Debian 12, 4.3.8)."""
    if spec.hardening != "baseline" and spec.firewall is None:
        sentence = (
            "needs 'firewall:' in the node file: name the networks that reach ssh there (firewall.ssh), or use baseline"
        )
        yield Found(("hardening",), sentence)


RULES = (strict_has_a_console, a_hardened_node_has_a_firewall)
