"""What ``nvidia-smi topo -m`` and ``nvidia-smi topo -p2p r|w`` print, read without guessing.

A matrix checks itself: as many rows as columns, itself on the diagonal and nowhere else, both halves alike. One that
does not is refused as a whole. What it says is a kind of link and what the driver thinks of it, never that copies arrive
(gpu-node.md 0.4, 2.5). The columns of affinity are not read: nvidia-smi cuts long lists of CPUs, and sysfs has them whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roles.pcie.captured import CannotTell, is_clean, lines

_LINKS = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV[1-9]\d?")
_STATUSES = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
# Columns of GPUs and of network cards; older drivers name cards as the kernel does (mlx5_0, mlx5_bond_0, rocep65s0f0).
_NAME = re.compile(r"(?:GPU|NIC)\d+|[a-z][a-z0-9_]*\d")
_AFFINITIES = re.compile(r"(CPU Affinity)?( ?NUMA Affinity)?( ?GPU NUMA ID)?")


@dataclass(frozen=True)
class Matrix:
    """What lies between every two GPUs, by their index: ``PIX``, ``NV18``, or ``OK``, ``GNS``."""

    gpus: int
    between: dict[tuple[int, int], str]


def links(text: str | bytes) -> Matrix:
    """What ``nvidia-smi topo -m`` says. Raises CannotTell."""
    return _matrix(lines(text), _LINKS)


def statuses(text: str | bytes) -> Matrix:
    """What ``nvidia-smi topo -p2p r`` (or ``w``) says. Raises CannotTell."""
    return _matrix(lines(text), _STATUSES)


def _matrix(text: list[str], cell: re.Pattern[str]) -> Matrix:
    names, affinities, rows = _read(text)
    gpus = [name for name in names if name.startswith("GPU")]
    if gpus != [f"GPU{index}" for index in range(len(gpus))]:
        raise CannotTell(f"the columns are {', '.join(names)}, not GPU0 and up")
    between: dict[tuple[int, int], str] = {}
    for row, tokens in rows.items():
        cells, rest = tokens[: len(names)], tokens[len(names) :]
        if len(cells) != len(names) or not all(cell.fullmatch(value) for value in cells):
            raise CannotTell(f"the row of {row} is not a row of {len(names)} known values")
        if [name for name, value in zip(names, cells, strict=True) if value == "X"] != [row]:
            raise CannotTell(f"the row of {row} has itself in another column")
        if rest and not affinities:
            raise CannotTell(f"the row of {row} has more values than there are columns")
        if row in gpus:
            for name, value in zip(names, cells, strict=True):
                if name in gpus:
                    between[int(row[3:]), int(name[3:])] = value
    if missing := [name for name in gpus if name not in rows]:
        raise CannotTell(f"there is no row of {', '.join(missing)}")
    for (one, other), value in between.items():
        if between[other, one] != value:
            raise CannotTell(f"GPU{one} to GPU{other} is {value}, and back {between[other, one]}")
    return Matrix(len(gpus), between)


def _read(text: list[str]) -> tuple[list[str], bool, dict[str, list[str]]]:
    """Names of the columns, whether columns of affinity follow them, and the rows, as far as they are rows."""
    names: list[str] = []
    affinities = False
    rows: dict[str, list[str]] = {}
    for line in text:
        tokens = line.split()
        if not tokens:
            continue
        before = tokens[: tokens.index("CPU")] if "CPU" in tokens else tokens
        if tokens[0] == "GPU0" and all(_NAME.fullmatch(token) for token in before):
            rest = " ".join(tokens[len(before) :])
            if names:
                raise CannotTell("there are two matrices")
            if not _AFFINITIES.fullmatch(rest) or len(set(before)) != len(before) or not is_clean(line):
                raise CannotTell("the line of column names is damaged")
            names, affinities = before, bool(rest)
        elif tokens[0] in names:
            if tokens[0] in rows:
                raise CannotTell(f"there are two rows of {tokens[0]}")
            if not is_clean(line):
                raise CannotTell(f"the row of {tokens[0]} is damaged")
            rows[tokens[0]] = tokens[1:]
    if not names:
        raise CannotTell("there is no line of GPU0 and up")
    return names, affinities, rows
