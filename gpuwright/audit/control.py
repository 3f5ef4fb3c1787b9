"""What a control is, and the six ways in which looking can end.

Controls are data next to the role whose promise they prove (``roles/<role>/checks.py``). A predicate judges what a node
says of itself now; it never asks which file the role wrote, so a promise broken by somebody else is seen too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuwright.audit.references import NONE, References
from gpuwright.snapshot import Section, Snapshot
from gpuwright.spec.node import NodeSpec

# Evidence goes into reports and terminals: a node full of faults must not make a page of one line.
_LONGEST = 1500


class Outcome(enum.Enum):
    """How looking ended. The six are never merged: "could not look" is not "pass", and not "fail" either."""

    PASS = "pass"
    FAIL = "fail"
    WAIVED = "waived"
    NOT_APPLICABLE = "not applicable"
    MANUAL = "manual"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """What a predicate says: the outcome, what was expected, and what was seen (never a secret's value).

    For "not applicable", `actual` is the fact that made it so; for "manual", what a person has to do; for "error", why
    nothing could be said.
    """

    outcome: Outcome
    expected: str
    actual: str

    def __post_init__(self) -> None:
        for name in ("expected", "actual"):
            text = getattr(self, name)
            if len(text) > _LONGEST:
                object.__setattr__(self, name, f"{text[:_LONGEST]} … ({len(text)} characters)")


def judged(right: bool, expected: str, actual: str) -> Verdict:
    """Pass or fail."""
    return Verdict(Outcome.PASS if right else Outcome.FAIL, expected, actual)


def without(faults: Sequence[str], expected: str, looked_at: str) -> Verdict:
    """Pass when there is no fault; `looked_at` says what was seen then, so that a pass is evidence too."""
    return judged(not faults, expected, "; ".join(faults) or looked_at)


def waived(verdict: Verdict, reasons: Sequence[str]) -> Verdict:
    """A pass that only an accepted deviation makes one is a waiver, and says whose."""
    if verdict.outcome is Outcome.PASS and reasons:
        return Verdict(Outcome.WAIVED, verdict.expected, "; ".join(reasons))
    return verdict


def not_applicable(fact: str) -> Verdict:
    """The promise does not arise here, because of `fact`."""
    return Verdict(Outcome.NOT_APPLICABLE, "", fact)


def manual(what_to_do: str) -> Verdict:
    """Only a person can say."""
    return Verdict(Outcome.MANUAL, "", what_to_do)


Severity = Literal["low", "medium", "high", "critical"]
Predicate = Callable[[Snapshot, NodeSpec], Verdict]


@dataclass(frozen=True)
class Control:
    """One promise and how it is proven.

    `id` is ``GPW-<ROLE>-<number>`` and never given to another promise. `title` is the promise, one plain sentence.
    `observed` are the sections the predicate may read, and no others: together they are the one script that a node runs.
    `risk` is what putting the remedy into effect can break.
    """

    id: str
    title: str
    reason: str
    severity: Severity
    observed: tuple[Section[Any], ...]
    predicate: Predicate
    remedy: str
    risk: str
    references: References = NONE

    @property
    def how(self) -> str:
        """How it is looked at: the shell text of its sections."""
        return "\n".join(section.script.strip() for section in self.observed)
