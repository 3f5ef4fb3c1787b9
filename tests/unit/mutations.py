"""Output of a program after what terminals, shells, pastes and people do to it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

# What takes the place of a damaged character. No digit, letter or sign: another right answer cannot be told from the first.
_DAMAGE = "?#~§\x00\x07\ufffd|"


def _truncated(text: str, dice: random.Random) -> str:
    return text[: dice.randrange(len(text))]


def _lines_dropped(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(dice.randint(1, 6)):
        if lines:
            del lines[dice.randrange(len(lines))]
    return "".join(lines)


def _part_dropped(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    start = dice.randrange(len(lines))
    del lines[start : start + dice.randint(2, 20)]
    return "".join(lines)


def _columns_swapped(text: str, dice: random.Random) -> str:
    """In one line, or at the same places in all."""
    lines = text.split("\n")
    one, other = dice.sample(range(6), 2)
    chosen = range(len(lines)) if dice.random() < 0.5 else [dice.randrange(len(lines))]
    for index in chosen:
        for separator in ("\t", None):
            cells = lines[index].split(separator)
            if max(one, other) < len(cells):
                cells[one], cells[other] = cells[other], cells[one]
                lines[index] = ("\t" if separator else " ").join(cells)
                break
    return "\n".join(lines)


def _garbled(text: str, dice: random.Random) -> str:
    characters = list(text)
    for _ in range(dice.randint(1, 40)):
        place = dice.randrange(len(characters))
        if characters[place] != "\n":
            characters[place] = dice.choice(_DAMAGE)
    return "".join(characters)


def _coloured(text: str, dice: random.Random) -> str:
    whole = [match.start() for match in re.finditer(r"\x1b\[[0-?]*[ -/]*[@-~]|.|\n", text)]
    for place in sorted(dice.choices(whole, k=dice.randint(1, 30)), reverse=True):
        text = text[:place] + dice.choice(("\x1b[0m", "\x1b[4m", "\x1b[1;31m", "\x1b[K", "\x1b[?25l")) + text[place:]
    return text


def _escape_cut(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + dice.choice(("\x1b", "\x1b[", "[4m", "[0m")) + text[place:]


def _crlf(text: str, dice: random.Random) -> str:
    return text.replace("\n", "\r\n")


def _other_encoding(text: str, dice: random.Random) -> bytes:
    plain = text.replace("\ufffd", "?")
    return dice.choice(
        (
            lambda: plain.encode("utf-16"),
            lambda: plain.replace(" ", "\xa0").encode("latin-1", errors="replace"),
            lambda: b"\xef\xbb\xbf" + plain.encode(),
            lambda: plain[: len(plain) // 2].encode() + plain[len(plain) // 2 :].encode("utf-16-le"),
            lambda: plain.encode("cp500", errors="replace"),
        )
    )()


def _in_a_session(text: str, dice: random.Random) -> str:
    return f"Last login: Mon Jan  5 08:00:00\n\n$ command\n{text}$ logout\n"


def _twice(text: str, dice: random.Random) -> str:
    return text + text


def _last_line_end_lost(text: str, dice: random.Random) -> str:
    return text.rstrip("\n")


def _unprivileged(text: str, dice: random.Random) -> str:
    """As lspci prints it without root: one line instead of all capabilities."""
    kept, hidden = [], False
    for line in text.split("\n"):
        if "Capabilities: [" in line:
            if not hidden:
                kept.append("\tCapabilities: <access denied>")
            hidden = True
        elif not (hidden and line.startswith("\t\t")):
            hidden = hidden and bool(line)
            kept.append(line)
    return "\n".join(kept)


# Those that leave everything readable.
HARMLESS: tuple[Callable[[str, random.Random], str | bytes], ...] = (_coloured, _crlf, _in_a_session)
KINDS: tuple[Callable[[str, random.Random], str | bytes], ...] = (
    *HARMLESS,
    _truncated,
    _lines_dropped,
    _part_dropped,
    _columns_swapped,
    _garbled,
    _escape_cut,
    _other_encoding,
    _twice,
    _last_line_end_lost,
    _unprivileged,
)


def mutants(
    text: str, rounds: int, kinds: tuple[Callable[[str, random.Random], str | bytes], ...] = KINDS
) -> Iterator[str | bytes]:
    """`rounds` of every kind; and of every two kinds, one after the other, in the last third."""
    dice = random.Random(20)
    for turn in range(rounds):
        for kind in kinds:
            changed = kind(text, dice)
            if turn % 3 == 2 and isinstance(changed, str) and changed:
                changed = dice.choice(kinds)(changed, dice)
            yield changed
