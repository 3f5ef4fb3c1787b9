"""How systemd prints what it runs with."""

from __future__ import annotations

import re

from gpuwright import numa

_UNITS = {
    "y": 31_557_600,
    "month": 2_629_800,
    "w": 604_800,
    "d": 86_400,
    "h": 3600,
    "min": 60,
    "s": 1,
    "ms": 1e-3,
    "us": 1e-6,
}


def seconds(text: str) -> float:
    """``1h 30min`` as ``systemctl show`` prints a time span (systemd.time(7)); ``infinity`` is one. Raises ValueError."""
    if text == "infinity":
        return float("inf")
    total = 0.0
    for part in text.split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(y|month|w|d|h|min|s|ms|us)?", part)
        if not match or not (match[2] or match[1] == "0"):
            raise ValueError(f"{text!r} is not a time span of systemd")
        total += float(match[1]) * _UNITS[match[2] or "s"]
    return total


def blocks(text: str) -> dict[str, dict[str, str]]:
    """The properties of several units, by Id, as ``systemctl show`` prints them."""
    units = {}
    for block in text.split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in properties:
            units[properties["Id"]] = properties
    return units


def mask(text: str) -> frozenset[int]:
    """``0-2 4`` as ``systemctl show`` prints NUMAMask= and CPUAffinity=; "" is none. Raises ValueError."""
    return numa.indices(text.replace(" ", ","))
