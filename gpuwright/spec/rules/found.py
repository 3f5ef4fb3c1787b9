"""What a rule finds."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.spec.fault import SettingPath


@dataclass(frozen=True)
class Found:
    """The setting a rule blames and one sentence: what is allowed, what to do."""

    path: SettingPath
    sentence: str
    unfinished: bool = False
    """The description is right as far as it goes; something only the site knows is still missing."""
    show: bool = True
    """False where the value may be a secret."""


def sizes(value: float) -> str:
    """Bytes for people: ``35.4 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
