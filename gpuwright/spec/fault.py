"""What is wrong with an inventory or a node file, one sentence per fault, all of them in one report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SettingPath = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the top of its file."""

_SECRET_NAME = re.compile(r"(?i)token|secret|passw|credential|authorization|api_?key|private_?key|(^|\.)key$")
_SECRET_VALUE = re.compile(r"hf_\w{8,}|sk-\w{8,}|ghp_\w{8,}|-----BEGIN|eyJ[\w-]{10,}\.|\$2[aby]\$")


@dataclass(frozen=True, order=True)
class Fault:
    """One fault. `seen` is already fit to be shown: never a secret."""

    file: str
    line: int
    path: str
    seen: str
    sentence: str
    unfinished: bool = False
    """True where the description is right as far as it goes: a pin or the site's own name is still missing."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return "  ".join(part for part in (where, self.path, self.seen, self.sentence) if part)


class Refused(Exception):
    """A file or an inventory that was refused; carries its faults."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = sorted(set(faults))
        super().__init__(report(self.faults))


def dotted(path: SettingPath) -> str:
    """``('gateway', 'listen', 0, 'port')`` as ``gateway.listen.0.port``."""
    return ".".join(str(part) for part in path)


def shown(path: SettingPath, value: object, raw: str | None = None) -> str:
    """The value as a report may show it: short, on one line, and never a secret (by its name or by its form)."""
    if isinstance(value, dict | list):
        return ""
    text = raw if raw is not None else ("null" if value is None else str(value))
    if _SECRET_NAME.search(dotted(path)) or _SECRET_VALUE.search(text):
        return "(hidden)"
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"'{text}'" if isinstance(value, str) else text


def relative(file: Path) -> str:
    """The file as the person who runs this would name it."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def report(faults: Iterable[Fault]) -> str:
    """All faults, one a line, under a count."""
    lines = [str(fault) for fault in sorted(set(faults))]
    return "\n".join([f"{len(lines)} fault{'s' if len(lines) != 1 else ''}; no host was contacted:", *lines])
