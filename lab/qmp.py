"""QEMU's own control socket: one command, one answer (QEMU Machine Protocol)."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.command import LabError


class Qmp:
    """A connection to one QEMU. ``path``: its socket. Raises LabError when nobody answers there."""

    def __init__(self, path: Path, timeout: float = 30) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._rest = b""
        self._events: list[str] = []
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise LabError(f"QEMU does not answer on {path}: {error.strerror}") from None
        self._message()  # its greeting
        self.command("qmp_capabilities")

    def __enter__(self) -> Qmp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def command(self, name: str, **arguments: Any) -> Any:
        """Run a command; returns what it returned. Raises LabError with QEMU's words when it refuses."""
        self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        while True:
            message = self._message()
            if "error" in message:
                raise LabError(f"QEMU refused {name}: {message['error']['desc']}")
            if "return" in message:
                return message["return"]
            self._events.append(message["event"])

    def monitor(self, line: str) -> str:
        """Run a command of the human monitor, for what has no command of its own; returns what it printed."""
        return str(self.command("human-monitor-command", **{"command-line": line})).strip()

    def event(self, name: str, seconds: float) -> bool:
        """Wait for an event; whether it came since the connection was made, or within ``seconds``. False as well when QEMU ended."""
        if name in self._events:
            return True
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                if self._message().get("event") == name:
                    return True
            except LabError:
                return False
        return False

    def _message(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            try:
                more = self._socket.recv(65536)
            except OSError as error:
                raise LabError(f"QEMU stopped answering on {self._path}: {error}") from None
            if not more:
                raise LabError(f"QEMU ended while it was asked on {self._path}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
