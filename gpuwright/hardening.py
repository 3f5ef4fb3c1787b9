"""How far a node is hardened: the three profiles, and what a setting of one is.

Each role has its own table (``roles/<role>/hardening.py``); from it come the files, the controls and docs/hardening.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.audit.references import NONE, References
from gpuwright.spec.base import Profile

PROFILES: tuple[Profile, ...] = ("baseline", "server-cis1", "strict")


@dataclass(frozen=True)
class Setting:
    """One thing that a profile sets on a node.

    `values` are those of the three profiles, None where the node is left as it is. `waiver` says how a node file keeps the
    node from it; the audit then lists the control as waived, with the node file's reason.
    """

    name: str
    values: tuple[str | None, str | None, str | None]
    reason: str
    may_break: str
    waiver: str
    references: References = NONE

    def value(self, profile: Profile) -> str | None:
        """The profile's."""
        return self.values[PROFILES.index(profile)]


@dataclass(frozen=True)
class LeftOut:
    """What benchmarks ask for and no profile sets, because it breaks a node that serves from GPUs."""

    name: str
    breaks: str
    instead: str


def everywhere(value: str) -> tuple[str, str, str]:
    """The same in every profile."""
    return (value, value, value)


def from_cis1(value: str) -> tuple[None, str, str]:
    """In server-cis1 and strict."""
    return (None, value, value)


def in_strict(value: str) -> tuple[None, None, str]:
    """In strict alone."""
    return (None, None, value)
