"""A stand-in engine: it answers like one and keeps the raw head and body of every request that arrives."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from dataclasses import dataclass, field


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Arrived:
    """One request as it came over the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


@dataclass
class Stub:
    """Listens on a loopback port. `GET /health` is answered and not counted."""

    name: str
    port: int = field(default_factory=free_port)
    requests: list[Arrived] = field(default_factory=list)
    healthy: bool = True

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        stub = self
        self.connections: set[socket.socket] = set()

        class Handler(socketserver.StreamRequestHandler):
            def setup(self):
                super().setup()
                stub.connections.add(self.connection)

            def finish(self):
                stub.connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def handle(self):
                try:
                    while stub.serve(self):
                        pass
                except (OSError, ValueError):  # the gateway cut the request short
                    pass

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128

        self.server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def kill(self) -> None:
        """As `docker kill`: the port closes, and so does every connection."""
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve(self, handler: socketserver.StreamRequestHandler) -> bool:
        line = handler.rfile.readline().decode("latin-1").rstrip("\r\n")
        if not line:
            return False
        headers = []
        while header := handler.rfile.readline().decode("latin-1").rstrip("\r\n"):
            name, _, value = header.partition(":")
            headers.append((name, value.strip()))
        request = Arrived(line, headers)
        if length := request.all("Content-Length"):
            request.body = handler.rfile.read(int(length[0]))
        elif request.all("Transfer-Encoding"):
            while size := int(handler.rfile.readline().split(b";")[0], 16):
                request.body += handler.rfile.read(size)
                handler.rfile.readline()
            handler.rfile.readline()
        path = line.split(" ")[1]
        if path == "/health":
            status = b"200 OK" if self.healthy else b"500 Internal Server Error"
            handler.wfile.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
            return True
        self.requests.append(request)
        asked = json.loads(request.body) if request.body.startswith(b"{") else {}
        if asked.get("stream"):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            for number in range(asked.get("events", 10)):
                handler.wfile.write(f"data: {self.name} {number}\n\n".encode())
                handler.wfile.flush()
                time.sleep(asked.get("pause", 0.05))
            handler.wfile.write(b"data: [DONE]\n\n")
            return False
        body = json.dumps({"engine": self.name, "path": path}).encode()
        handler.wfile.write(
            b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        return True
