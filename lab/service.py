"""Background programs of the lab (package proxy, registry, hub): started once, found again, ended by their own pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError
from lab.paths import make_private, state


@dataclass(frozen=True)
class Service:
    """A program listening on ``address``:``port``. ``argv`` must stay in the foreground."""

    name: str
    argv: Sequence[str]
    address: str
    port: int

    @property
    def directory(self) -> Path:
        return state() / "services" / self.name

    def start(self) -> None:
        """Start it unless it runs; returns when it accepts connections. Raises LabError with its last words."""
        if alive(self.directory / "pid") is not None and self._answers():
            return
        stop(self.directory)
        make_private(self.directory)
        if self._answers():
            raise LabError(
                f"{self.address}:{self.port} is answered by a program that is not this lab's {self.name}; end it"
            )
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                list(self.argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
        (self.directory / "pid").write_text(f"{process.pid} {birth(process.pid)}\n")
        deadline = time.monotonic() + 15
        while not self._answers():
            if process.poll() is not None or time.monotonic() > deadline:
                words = (self.directory / "log").read_text(errors="replace").strip().splitlines()[-3:]
                raise LabError(f"{self.name} of the lab did not start: {' | '.join(words) or 'it said nothing'}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.address, self.port), timeout=1).close()
        except OSError:
            return False
        return True


def stop(directory: Path) -> None:
    """End the service that keeps its pid in ``directory``, with its process group; killed after five seconds."""
    pid_file = directory / "pid"
    for sign in (signal.SIGTERM, signal.SIGKILL):
        pid = alive(pid_file)
        if pid is None:
            break
        os.killpg(pid, sign)
        deadline = time.monotonic() + 5
        while alive(pid_file) is not None and time.monotonic() < deadline:
            time.sleep(0.02)
    pid_file.unlink(missing_ok=True)


def alive(pid_file: Path) -> int | None:
    """The pid in the file, if that very process (pid and time of birth) still runs."""
    try:
        pid, born = pid_file.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if birth(int(pid)) == born else None


def birth(pid: int) -> str:
    """Start time of a process in clock ticks since boot, "" when it is gone or a zombie (proc(5), stat fields 3 and 22)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
