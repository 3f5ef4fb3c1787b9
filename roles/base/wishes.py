"""What role `base` asks of the kernel: in strict, that everything is audited from the first process on."""

from __future__ import annotations

from gpuwright.boot import Wishes, Word
from gpuwright.spec.base import Profile
from roles.base.spec import BaseSpec

ROLE = "base"


def wishes(spec: BaseSpec, profile: Profile) -> Wishes:
    """The role's own wishes. Processes that started before the audit daemon are not audited without the first word."""
    if profile != "strict" or "audit" in spec.deviations:
        return Wishes()
    return Wishes(
        words=(
            Word("audit", "1", ROLE, "processes that start before the audit daemon are audited, too (CIS 6.2.1.3)"),
            Word(
                "audit_backlog_limit",
                "8192",
                ROLE,
                "what happens before the audit daemon starts has room (CIS 6.2.1.4)",
            ),
        )
    )
