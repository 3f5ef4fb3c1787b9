"""The kernel command line as the kernel and GRUB read it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuwright.boot.asked import REPEATABLE, Word, plain_key

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


END: Given = ("--", None)
"""What comes after it on a command line goes to init, and none of it to the kernel (kernel/params.c, parse_args)."""


def _of_the_kernel(given: list[Given]) -> tuple[Given, ...]:
    """Up to END, which is kept so that it can be said."""
    return tuple(given[: given.index(END) + 1] if END in given else given)


def parse_line(text: str) -> tuple[Given, ...]:
    """A command line as the kernel splits it (lib/cmdline.c, next_arg): blanks within double quotes belong to the value. It ends
    with END where the kernel reads no further."""
    given: list[Given] = []
    for match in re.finditer(r'(?:[^\s"]|"[^"]*(?:"|$))+', text):
        word = match[0]
        if word.startswith('"'):
            word = word.strip('"')
        key, equals, value = word.partition("=")
        if value.startswith('"'):
            value = value[1:].removesuffix('"')
        given.append((key, value if equals else None))
    return _of_the_kernel(given)


def same_key(one: str, other: str) -> bool:
    """Whether the kernel takes two names for the same parameter."""
    return plain_key(one) == plain_key(other)


def holds(line: Iterable[Given], word: Word) -> bool:
    """Whether `word` is in force on a command line: the last of its key, or one of them where a key may be repeated."""
    values = [value for key, value in line if same_key(key, word.key)]
    if word.key in REPEATABLE:
        return word.value in values
    return bool(values) and values[-1] == word.value


def grub_text(word: Word) -> str:
    """A word in GRUB's own script language, as it must stand on a generated ``linux`` line.

    Within single quotes GRUB's parser takes everything as it is: ``;``, ``$``, ``{`` and blanks end or change nothing
    (GRUB manual, section "Quoting"). A value with blanks goes in as one argument; GRUB's loader puts double quotes
    around it for the kernel (grub-core/lib/cmdline.c).
    """
    text = word.key if word.value is None else f"{word.key}={word.value}"
    return text if re.fullmatch(r"[A-Za-z0-9_.,:=/@+%-]+", text) else f"'{text}'"


def grub_words(text: str) -> tuple[Given, ...]:
    """The words on a ``linux`` line of grub.cfg, read as GRUB's parser reads them: quotes and backslashes taken away. It
    ends with END where the kernel reads no further."""
    given: list[Given] = []
    for match in re.finditer(r"(?:[^\s'\"\\;]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")+", text):
        plain = re.sub(
            r"\\(.)|'([^']*)'|\"((?:[^\"\\]|\\.)*)\"",
            lambda part: part[1] or part[2] or re.sub(r"\\([$\"\\])", r"\1", part[3] or ""),
            match[0],
        )
        key, equals, value = plain.partition("=")
        given.append((key, value if equals else None))
    return _of_the_kernel(given)
