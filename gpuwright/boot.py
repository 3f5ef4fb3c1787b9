"""What roles ask of the kernel: words of its command line, sysctl values, modules and their options.

Role `kernel` is the one owner of all four (DESIGN section 1); every other role only says what it needs and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

# Keys that may stand on a command line several times, each with a value of its own
# (Documentation/admin-guide/kernel-parameters.txt).
REPEATABLE = frozenset({"console", "earlycon", "hugepages", "hugepagesz", "module_blacklist"})


@dataclass(frozen=True)
class Word:
    """One word of the kernel command line: ``iommu=pt`` or, without a value, ``quiet``."""

    key: str
    value: str | None
    role: str
    reason: str

    @property
    def text(self) -> str:
        """As it stands in /proc/cmdline, before any quoting."""
        return self.key if self.value is None else f"{self.key}={self.value}"

    @property
    def subject(self) -> str:
        """What two roles can disagree about; where a key may be repeated, nothing."""
        return f"kernel word {self.text if self.key in REPEATABLE else self.key}"


@dataclass(frozen=True)
class Sysctl:
    """One kernel setting under /proc/sys, key written with dots."""

    key: str
    value: str
    role: str
    reason: str

    @property
    def subject(self) -> str:
        """What two roles can disagree about."""
        return f"sysctl {self.key}"


@dataclass(frozen=True)
class ModuleOption:
    """One ``options MODULE NAME=VALUE`` of modprobe.d; it takes effect when the module is loaded next."""

    module: str
    name: str
    value: str
    role: str
    reason: str

    @property
    def subject(self) -> str:
        """What two roles can disagree about."""
        return f"option {self.name} of module {self.module}"


@dataclass(frozen=True)
class BlockedModule:
    """A module that is never loaded, neither by an alias nor by name."""

    module: str
    role: str
    reason: str

    @property
    def value(self) -> None:
        """Blocked is blocked: two roles cannot disagree."""
        return None

    @property
    def subject(self) -> str:
        """What is asked for."""
        return f"block of module {self.module}"


@dataclass(frozen=True)
class Wishes:
    """Everything one role, or all of them together, asks of the kernel."""

    words: tuple[Word, ...] = ()
    sysctls: tuple[Sysctl, ...] = ()
    options: tuple[ModuleOption, ...] = ()
    blocked: tuple[BlockedModule, ...] = ()

    def all(self) -> Iterator[Word | Sysctl | ModuleOption | BlockedModule]:
        """Every single wish."""
        for field in fields(self):
            yield from getattr(self, field.name)


def together(parts: Iterable[Wishes]) -> Wishes:
    """The wishes of several roles in one, in order; what is asked for twice stands there once."""
    kept: dict[tuple[str, str | None], Word | Sysctl | ModuleOption | BlockedModule] = {}
    for part in parts:
        for wish in part.all():
            kept.setdefault((wish.subject, wish.value), wish)
    found = tuple(kept.values())
    return Wishes(
        tuple(wish for wish in found if isinstance(wish, Word)),
        tuple(wish for wish in found if isinstance(wish, Sysctl)),
        tuple(wish for wish in found if isinstance(wish, ModuleOption)),
        tuple(wish for wish in found if isinstance(wish, BlockedModule)),
    )


def conflicts(wishes: Wishes) -> list[str]:
    """One sentence for every subject on which two roles disagree."""
    first: dict[str, Word | Sysctl | ModuleOption | BlockedModule] = {}
    sentences = []
    for wish in wishes.all():
        other = first.setdefault(wish.subject, wish)
        if other.value != wish.value:
            sentences.append(
                f"{wish.subject}: {other.role} asks for {_value(other)} ({other.reason}), "
                f"{wish.role} for {_value(wish)} ({wish.reason}); only one can hold"
            )
    return sentences


def _value(wish: Word | Sysctl | ModuleOption | BlockedModule) -> str:
    return "no value" if wish.value is None else wish.value
