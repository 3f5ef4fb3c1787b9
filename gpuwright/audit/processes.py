"""What the kernel says of a process (proc(5), /proc/PID/status)."""

from __future__ import annotations

from collections.abc import Mapping


def unfiltered(status: Mapping[str, str]) -> str:
    """Why a process has no system call filter of its own, or "".

    ``Init_filters`` is the number that process 1 has: where the node itself is a container, every process carries the
    filters of what is around it, and ``Seccomp: 2`` alone would say nothing.
    """
    if status["Seccomp"] != "2":
        return f"Seccomp {status['Seccomp']}"
    filters, inherited = int(status.get("Seccomp_filters", "1")), int(status.get("Init_filters", "0"))
    return "" if filters > inherited else f"{filters} filters, as many as process 1"
