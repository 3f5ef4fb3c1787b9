"""What roles ask of the kernel: words of its command line, sysctl values, modules and their options; and what of it
only a reboot can bring.

Role `kernel` is the one owner of all four (DESIGN section 1); every other role only says what it needs and why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

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


Wish = Word | Sysctl | ModuleOption | BlockedModule


@dataclass(frozen=True)
class Wishes:
    """Everything one role, or all of them together, asks of the kernel."""

    words: tuple[Word, ...] = ()
    sysctls: tuple[Sysctl, ...] = ()
    options: tuple[ModuleOption, ...] = ()
    blocked: tuple[BlockedModule, ...] = ()

    def all(self) -> Iterator[Wish]:
        """Every single wish."""
        for field in fields(self):
            yield from getattr(self, field.name)


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
    )


def clashes(wishes: Wishes) -> list[tuple[Wish, Wish]]:
    """Every two wishes that disagree about one subject, the earlier first."""
    first: dict[str, Wish] = {}
    found = []
    for wish in wishes.all():
        other = first.setdefault(wish.subject, wish)
        if other.value != wish.value:
            found.append((other, wish))
    blocked = {block.module: block for block in wishes.blocked}
    found += [(blocked[option.module], option) for option in wishes.options if option.module in blocked]
    return found


def clash(one: Wish, other: Wish) -> str:
    """What a person needs to know of a clash."""
    if isinstance(one, BlockedModule):
        return (
            f"{other.subject}: {other.role} sets it ({other.reason}), and {one.role} blocks the module ({one.reason}); "
            "only one can hold"
        )
    return (
        f"{other.subject}: {one.role} asks for {_value(one)} ({one.reason}), "
        f"{other.role} for {_value(other)} ({other.reason}); only one can hold"
    )


def conflicts(wishes: Wishes) -> list[str]:
    """One sentence for every subject on which two roles disagree."""
    return [clash(one, other) for one, other in clashes(wishes)]


def _value(wish: Wish) -> str:
    return "no value" if wish.value is None else wish.value


# --- words as the kernel and GRUB read them ---------------------------------------------------------------------------

Given = tuple[str, str | None]
"""A word as the kernel takes it: key and value, without quotes."""


def parse_word(text: str) -> Given:
    """One word as somebody writes it: ``iommu=pt``, ``quiet``, ``dyndbg="file foo.c +p"``.

    Raises ValueError for what no boot loader can hand to the kernel unchanged: GRUB puts a backslash before quotes and
    backslashes (grub-core/lib/cmdline.c), and the kernel knows no backslash (lib/cmdline.c, next_arg).
    """
    if not text.isascii() or not text.isprintable():
        raise ValueError("a word of the kernel command line is printable ASCII")
    key, equals, value = text.partition("=")
    if len(value) > 1 and value.startswith('"') and value.endswith('"'):
        value = value[1:-1]
    elif " " in value:
        raise ValueError(f'holds a blank; write one word a line, or quote the value: {key}="…"')
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", key):
        raise ValueError(
            "a word of the kernel command line is NAME or NAME=VALUE; a name has letters, digits, '_', '.' and '-'"
        )
    if re.search(r"[\"'\\]", value):
        raise ValueError(
            "a value cannot hold quotes or backslashes: GRUB puts a backslash before each, which the kernel takes as part of it"
        )
    return key, value if equals else None


def parse_line(text: str) -> tuple[Given, ...]:
    """A command line as the kernel splits it (lib/cmdline.c, next_arg): blanks within double quotes belong to the value."""
    given: list[Given] = []
    for match in re.finditer(r'(?:[^\s"]|"[^"]*(?:"|$))+', text):
        word = match[0]
        if word.startswith('"'):
            word = word.strip('"')
        key, equals, value = word.partition("=")
        if value.startswith('"'):
            value = value[1:].removesuffix('"')
        given.append((key, value if equals else None))
    return tuple(given)


def same_key(one: str, other: str) -> bool:
    """The kernel takes '-' and '_' in a parameter's name for the same (kernel/params.c, parameq)."""
    return one.replace("-", "_") == other.replace("-", "_")


def holds(line: Iterable[Given], word: Word) -> bool:
    """Whether `word` is in force on a command line: the last of its key, or one of them where a key may be repeated."""
    values = [value for key, value in line if same_key(key, word.key)]
    if word.key in REPEATABLE:
        return word.value in values
    return bool(values) and values[-1] == word.value
