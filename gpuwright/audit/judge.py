"""From a snapshot to one result per control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from gpuwright.audit.control import Control, Outcome, Verdict
from gpuwright.snapshot import CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec

T = TypeVar("T")


class _Undeclared(Exception):
    """A predicate read what its control does not name: its evidence would claim another source than it has."""


@dataclass(frozen=True)
class _Declared(Snapshot):
    """A snapshot that shows a predicate only the sections its control names."""

    names: frozenset[str] = frozenset()

    def read(self, section: Section[T]) -> T:
        if section.name not in self.names:
            raise _Undeclared(f"reads section {section.name!r}, which its control does not name")
        return super().read(section)


@dataclass(frozen=True)
class Result:
    """One control judged on one node."""

    control: Control
    verdict: Verdict

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return self.verdict.outcome


def judge(control: Control, snapshot: Snapshot, spec: NodeSpec) -> Result:
    """Look at one promise. Whatever goes wrong in looking is an error of this control, never a pass."""
    seen = _Declared(snapshot.answers, frozenset(section.name for section in control.observed))
    try:
        verdict = control.predicate(seen, spec)
    except CouldNotLook as reason:
        verdict = Verdict(Outcome.ERROR, "an observation", f"could not look: {reason}")
    except Exception as fault:
        # A node in a state nobody thought of must not end the whole audit; the control says so itself.
        verdict = Verdict(
            Outcome.ERROR, "an observation", f"{control.id} failed in judging: {type(fault).__name__}: {fault}"
        )
    return Result(control, verdict)


def unseen(control: Control, reason: str) -> Result:
    """A node that could not be reached: an error for every control, for those that would not arise there too."""
    return Result(control, Verdict(Outcome.ERROR, "an observation", f"could not look: {reason}"))


def judge_all(controls: tuple[Control, ...], snapshot: Snapshot, spec: NodeSpec) -> list[Result]:
    """One result per control, in their order."""
    return [judge(control, snapshot, spec) for control in controls]
