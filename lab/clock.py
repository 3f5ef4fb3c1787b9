"""The lab's time server, ``time.lab``: what machines set their clocks by. It tells this machine's own time (SNTP, RFC 4330)."""

from __future__ import annotations

import argparse
import socket
import socketserver
import struct
import sys
import threading
import time
from pathlib import Path

from lab.network import Segment
from lab.service import Service

NAME = "time.lab"
PORT = 123
_EPOCH = 2208988800  # seconds from 1900, where NTP begins, to 1970
_PACKET = struct.Struct("!BBbb II4s 8s8s8s8s")
_MODE_CLIENT, _MODE_SERVER = 3, 4


def start(segment: Segment) -> None:
    """Start it on the lab's bridge unless it runs."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from lab.clock import main; main()"
    argv = [sys.executable, "-c", code, "--address", segment.gateway, "--port", str(PORT)]
    Service("clock", argv, segment.gateway, PORT).start()


def answer(question: bytes, received: float, sent: float) -> bytes | None:
    """What a server says to a client's packet; None for anything else. Times are seconds since 1970."""
    if len(question) < _PACKET.size or question[0] & 7 != _MODE_CLIENT:
        return None
    version = question[0] >> 3 & 7
    origin = question[40:48]
    # Stratum 2, a second's 2^-20 of precision, a millisecond of distance from a stratum 1 that nobody asks for.
    head = (version << 3 | _MODE_SERVER, 2, question[2], -20, 66, 66, b"LAB\0")
    return _PACKET.pack(*head, _stamp(received), origin, _stamp(received), _stamp(sent))


def _stamp(seconds: float) -> bytes:
    whole, part = divmod(seconds + _EPOCH, 1)
    return struct.pack("!II", int(whole) % 2**32, int(part * 2**32))


class _Question(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        received = time.time()
        question, from_here = self.request
        said = answer(question, received, time.time())
        if said is not None:
            from_here.sendto(said, self.client_address)


def main() -> None:
    """Serve until killed. TCP on the same port answers nothing: a connection says that the program is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    place = (options.address, options.port)
    socketserver.UDPServer.max_packet_size = 1024
    with socketserver.UDPServer(place, _Question) as server, socket.create_server(place) as presence:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while True:
            presence.accept()[0].close()
