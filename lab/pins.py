"""What the lab's registry and hub hold, in the form of inventory/pins.lock.yaml: the digests of this lab's own making."""

from __future__ import annotations

import json

from lab.paths import locked, state, write_json

Pins = dict[str, dict[str, str]]


def read() -> Pins:
    """``{"images": {"registry.lab:5000/sim:lab": "sha256:…"}, "models": {"lab/tiny@main": "<commit>"}}``."""
    try:
        content: Pins = json.loads((state() / "pins.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def record(section: str, name: str, value: str) -> None:
    """Remember what a tag or branch resolves to; ``section`` is ``images`` or ``models``."""
    with locked(state() / "pins.lock"):
        content = read()
        content.setdefault(section, {})[name] = value
        write_json(state() / "pins.json", content)
