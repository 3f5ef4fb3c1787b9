"""Text that a program printed, as it comes: with escapes of a terminal, other line ends, cut off, pasted from elsewhere."""

from __future__ import annotations

import re


class CannotTell(ValueError):
    """The text does not say it, or not without doubt. Never to be read as "no"."""


# Colours, erasing, modes (ECMA-48, 8.3). No others: a sequence that was cut off would take a letter of the text for its end.
_ESCAPES = re.compile(r"\x1b\[(?:[0-9;]+m|[0-2]?[JK]|\?[0-9]+[hl])")


def lines(text: str | bytes) -> list[str]:
    """Its whole lines, without escapes and line ends.

    What comes after the last line end was cut off somewhere, and is left out: ``Width x1`` may have been ``x16``. A
    caller that knows its program to have ended well adds the line end that a shell took away.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    plain = _ESCAPES.sub("", text.removeprefix("\ufeff"))
    return re.sub(r"\r+\n", "\n", plain).split("\n")[:-1]


def is_clean(line: str) -> bool:
    """No control character but the tab, and nothing that could not be decoded."""
    return not any((ord(c) < 32 and c != "\t") or c in "\x7f\ufffd" for c in line)
