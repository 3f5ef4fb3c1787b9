"""Wishes and boots for tests, with what does not matter left out."""

from __future__ import annotations

from gpuwright.boot import Boot, Entry, Wishes, Word, grub_words, parse_line, parse_word


def word(text: str, role: str = "pcie", reason: str = "a reason") -> Word:
    return Word(*parse_word(text), role, reason)


def words(*texts: str) -> Wishes:
    return Wishes(words=tuple(word(text) for text in texts))


def booted(
    line: str = "", menu: str | None = None, site: str | None = "", recorded: tuple[str, ...] = (), **more
) -> Boot:
    """A machine with GRUB that booted `line`, whose menu's one kernel has `menu` (the same by default)."""
    entries = (
        Entry(
            "menuentry 'Debian' $menuentry_id_option 'gnulinux-simple-1'",
            "6.12",
            grub_words(line if menu is None else menu),
        ),
    )
    given = {
        "boot_id": "now",
        "kernel": "6.12",
        "loader": "grub",
        "entries": entries,
        "default": "6.12",
        "line": parse_line(line),
        "site": None if site is None else grub_words(site),
        "recorded": recorded,
    }
    return Boot(**(given | more))
