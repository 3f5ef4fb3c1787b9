"""What roles ask of the kernel: words of its command line, sysctl values, modules and their options.

Role `kernel` is the one owner of all four (DESIGN section 1); every other role only says what it needs and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

from gpuwright.snapshot import Snapshot

# Keys that may stand on a command line several times, each with a value of its own
# (Documentation/admin-guide/kernel-parameters.txt; modprobe(8); kernel-command-line(7)). With every other key the kernel
# keeps the last value it reads.
REPEATABLE = frozenset(
    [
        "console",
        "crashkernel",
        "earlycon",
        "hugepages",
        "hugepagesz",
        "ip",
        "memmap",
        "modprobe.blacklist",
        "pci",
        "systemd.mask",
        "systemd.setenv",
        "systemd.wants",
        "video",
    ]
)

# Words whose "off" the kernel never takes back, whatever comes later on the line (arch/x86/kernel/pci-dma.c, iommu_setup;
# drivers/iommu/amd/init.c, parse_amd_iommu_options). Asked for another mode, a node must not have them at all.
_AMD_OFF = ("amd_iommu=off", "amd-iommu=off")
_NEVER_TAKEN_BACK = {"iommu": ("iommu=off", *_AMD_OFF), "amd_iommu": _AMD_OFF}


def plain_key(key: str) -> str:
    """A parameter's name as the kernel compares it: '-' and '_' are the same (kernel/params.c, parameq)."""
    return key.replace("-", "_")


@dataclass(frozen=True)
class Word:
    """One word of the kernel command line: ``iommu=pt`` or, without a value, ``quiet``."""

    key: str
    value: str | None
    role: str
    reason: str

    @property
    def text(self) -> str:
        """As it stands in /proc/cmdline; a value with blanks is quoted there."""
        if self.value is None:
            return self.key
        return f'{self.key}="{self.value}"' if " " in self.value else f"{self.key}={self.value}"

    @property
    def subject(self) -> str:
        """What two roles can disagree about; where a key may be repeated, nothing."""
        return f"kernel word {self.text if self.key in REPEATABLE else plain_key(self.key)}"


@dataclass(frozen=True)
class Sysctl:
    """One kernel setting under /proc/sys, key written with dots."""

    key: str
    value: str
    role: str
    reason: str
    may_lack: bool = False
    """A kernel without the key does not have what it would close, so nothing is missing there."""

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
    waits: Callable[[Snapshot], tuple[str, ...]] | None = None
    """Why only a reboot brings it, where the machine itself tells that better than the option of the loaded module."""

    @property
    def text(self) -> str:
        """As modprobe.d has it; a value with blanks or ';' is quoted there."""
        quoted = re.search(r"[^A-Za-z0-9_.,:=/@+%-]", self.value)
        return f'{self.name}="{self.value}"' if quoted else f"{self.name}={self.value}"

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
    spared_when_used: bool = False
    """Left alone while the node uses it: a file system that is mounted would be missing at the next boot."""

    @property
    def value(self) -> None:
        """Blocked is blocked: two roles cannot disagree."""
        return None

    @property
    def subject(self) -> str:
        """What is asked for."""
        return f"block of module {self.module}"


@dataclass(frozen=True)
class Change:
    """What is exchanged between the drain and the one reboot, because nothing runs well beside half of it: a driver.

    `script` runs on the node. ``check KERNEL`` (the one that boots next, "" unknown) says whether a reboot is safe; ``apply``
    exchanges what it has to, and undoes it and starts the engines again where that fails; after the reboot the node itself
    verifies or goes back, and ``outcome`` says "pending", "good", or "failed" and a sentence.
    """

    role: str
    reason: str
    what: str
    pending: Callable[[Snapshot], tuple[str, ...]] = field(compare=False)
    """Why it waits for a reboot; empty where it does not. Raises CouldNotLook."""
    script: str

    @property
    def value(self) -> None:
        """Two roles cannot disagree about it."""
        return None

    @property
    def subject(self) -> str:
        """What is asked for."""
        return f"change of {self.what}"


Wish = Word | Sysctl | ModuleOption | BlockedModule | Change


@dataclass(frozen=True)
class Wishes:
    """Everything one role, or all of them together, asks of the kernel."""

    words: tuple[Word, ...] = ()
    sysctls: tuple[Sysctl, ...] = ()
    options: tuple[ModuleOption, ...] = ()
    blocked: tuple[BlockedModule, ...] = ()
    changes: tuple[Change, ...] = ()

    def all(self) -> Iterator[Wish]:
        """Every single wish."""
        for part in fields(self):
            yield from getattr(self, part.name)


def together(parts: Iterable[Wishes]) -> Wishes:
    """The wishes of several roles in one, in order; what is asked for twice stands there once."""
    kept: dict[tuple[str, str | None], Wish] = {}
    for part in parts:
        for wish in part.all():
            kept.setdefault((wish.subject, wish.value), wish)
    found = tuple(kept.values())
    return Wishes(
        tuple(wish for wish in found if isinstance(wish, Word)),
        tuple(wish for wish in found if isinstance(wish, Sysctl)),
        tuple(wish for wish in found if isinstance(wish, ModuleOption)),
        tuple(wish for wish in found if isinstance(wish, BlockedModule)),
        tuple(wish for wish in found if isinstance(wish, Change)),
    )


def clashes(wishes: Wishes) -> list[tuple[Wish, Wish]]:
    """Every two wishes of which only one can hold, the earlier first: they disagree about one subject, or one makes the other void."""
    first: dict[str, Wish] = {}
    found = []
    for wish in wishes.all():
        other = first.setdefault(wish.subject, wish)
        if other.value != wish.value:
            found.append((other, wish))
    blocked = {block.module: block for block in wishes.blocked}
    found += [(blocked[option.module], option) for option in wishes.options if option.module in blocked]
    found += [
        (word, void)
        for void in wishes.words
        for word in wishes.words
        if word.subject != void.subject and word.text in _off_for_good(void)
    ]
    return found


def clash(one: Wish, other: Wish) -> str:
    """What a person needs to know of a clash."""
    if isinstance(one, BlockedModule):
        return (
            f"{other.subject}: {other.role} sets it ({other.reason}), and {one.role} blocks the module ({one.reason}); "
            "only one can hold"
        )
    if one.subject != other.subject:
        return (
            f"{other.subject}: {other.role} asks for {_value(other)} ({other.reason}), and {one.role} for a word that makes it "
            f"void wherever it stands on the line: {one.subject.removeprefix('kernel word ')}={_value(one)} ({one.reason}); "
            "only one can hold"
        )
    return (
        f"{other.subject}: {one.role} asks for {_value(one)} ({one.reason}), "
        f"{other.role} for {_value(other)} ({other.reason}); only one can hold"
    )


def conflicts(wishes: Wishes) -> list[str]:
    """One sentence for every two wishes of which only one can hold."""
    return [clash(one, other) for one, other in clashes(wishes)]


def _value(wish: Wish) -> str:
    return "no value" if wish.value is None else wish.value


def in_the_way(wishes: Wishes) -> tuple[str, ...]:
    """Words of others that would make a wished one void although it comes later; they give way to it."""
    asked = {word.text for word in wishes.words}
    return tuple(sorted({text for word in wishes.words for text in _off_for_good(word)} - asked))


def _off_for_good(word: Word) -> tuple[str, ...]:
    """Words beside which this one has no effect."""
    return () if word.value == "off" else _NEVER_TAKEN_BACK.get(plain_key(word.key), ())
