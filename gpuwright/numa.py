"""Lists of CPUs and memory nodes as the kernel writes them, and where file I/O keeps its page cache."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, which import this library
    from gpuwright.spec.node import Hardware

# The kernel's own bound on both is far below (CONFIG_NR_CPUS, CONFIG_NODES_SHIFT); a number beyond is damage.
_HIGHEST = 65_535


def indices(text: str) -> frozenset[int]:
    """``0-59,120-178`` as numbers; "" is none. Raises ValueError for anything that the kernel does not print.

    The kernel lists each number once and in ascending order (bitmap_print_to_pagebuf).
    """
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(0|[1-9]\d{0,4})(?:-([1-9]\d{0,4}))?", part, re.ASCII)
        if not match:
            raise ValueError(f"{text!r} is not a list of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if last > _HIGHEST or (match[2] and last <= first) or (found and first <= found[-1]):
            raise ValueError(f"{text!r} is not a list in ascending order")
        found += range(first, last + 1)
    return frozenset(found)


def listed(numbers: frozenset[int] | set[int] | tuple[int, ...]) -> str:
    """The inverse of `indices`: the shortest text, ``0-2,4``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def io_nodes(setting: str | None, hardware: Hardware) -> str | None:
    """Memory nodes that downloads, copies, hashing and image jobs are bound to, as ``NUMAMask=`` takes them.

    `setting` (``models.numa_nodes``) wins; otherwise the nodes with CPUs where others have none (seed 2), and no binding
    anywhere else.
    """
    if setting is None and hardware.hbm_numa_nodes:
        return listed(hardware.cpu_numa_nodes)
    return setting
