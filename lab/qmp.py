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

    def __init__(self, path: Path, timeout: float | None = 30) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._rest = b""
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

    def monitor(self, line: str) -> str:
        """Run a command of the human monitor, for what has no command of its own; returns what it printed."""
        return str(self.command("human-monitor-command", **{"command-line": line})).strip()

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for an event; returns its data. Raises LabError when QEMU ends before."""
        while (message := self._message()).get("event") != event:
            pass
        data: dict[str, Any] = message["data"]
        return data

    def wait_until_it_ends(self, seconds: float) -> None:
        """Wait until this QEMU is gone. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                if not self._socket.recv(65536):
                    return
            except ConnectionError:
                return
        raise TimeoutError

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
