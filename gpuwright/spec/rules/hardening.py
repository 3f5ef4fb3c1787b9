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


# What the profiles above baseline are made of beside role base, and the least that a node file says of each.
_HARDENING = {
    "access": "name there who may log in, and with which keys (access.users)",
    "firewall": "name the networks that reach ssh there (firewall.ssh)",
    "kernel": "'kernel: {}' brings the profile's sysctls and modules",
}


def a_hardened_node_has_the_roles_that_harden_it(spec: NodeSpec) -> Iterator[Found]:
    """Without one of them the controls that prove the profile do not arise, and the audit of an open node would be green."""
    for role, what in _HARDENING.items() if spec.hardening != "baseline" else ():
        if getattr(spec, role) is None:
            yield Found(("hardening",), f"needs '{role}:' in the node file: {what}, or use baseline")


RULES = (strict_has_a_console, a_hardened_node_has_the_roles_that_harden_it)
