"""Questions put to a gateway from outside: is it closed without a key, open with one, and shut where it should be?"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from roles.gateway.spec import GatewaySpec, Listen, TlsOff

UNREACHABLE = (ConnectionRefusedError, TimeoutError, socket.gaierror)


@dataclass(frozen=True)
class Question:
    """One request, and the status codes that are right."""

    method: str
    path: str
    with_key: bool
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.method} {self.path} {'with' if self.with_key else 'without'} a key"


def questions() -> tuple[Question, ...]:
    """401 without a key; 200 (503 while no engine is ready) with one; 404 for what stays shut, key or not."""
    return (
        Question("GET", "/v1/models", False, (401,)),
        Question("GET", "/v1/models", True, (200, 503)),
        Question("GET", "/metrics", True, (404,)),
    )


@dataclass(frozen=True)
class Answers:
    """What came back: faults as sentences, whether an engine answered, whether the gateway was reached at all."""

    faults: tuple[str, ...]
    engine_answered: bool
    unreachable: str | None = None


class _Connection(http.client.HTTPSConnection):
    """TLS to an address, with the server name that clients use."""

    def __init__(self, address: str, port: int, name: str, context: ssl.SSLContext, timeout: float) -> None:
        super().__init__(address, port, timeout=timeout, context=context)
        self._name = name
        self._tls = context

    def connect(self) -> None:
        sock = socket.create_connection((self.host, self.port), self.timeout)
        self.sock = self._tls.wrap_socket(sock, server_hostname=self._name)


def context(roots: bytes | None) -> ssl.SSLContext:
    """Trust the machine's roots and `roots` (PEM; a leaf may stand for itself)."""
    result = ssl.create_default_context()
    if roots:
        result.load_verify_locations(cadata=roots.decode())
        result.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return result


def ask(
    spec: GatewaySpec, listen: Listen, address: str, key: str, roots: bytes | None, patience: float = 15
) -> Answers:
    """Put every question to one listener at `address`.

    `patience` is how many seconds a handshake may fail first: a certificate is made (or fetched) after the start.
    """
    plain = isinstance(spec.tls, TlsOff)
    name = spec.hostnames[0]
    deadline = time.monotonic() + patience
    faults: list[str] = []
    engine_answered = False
    for question in questions():
        while True:
            connection: http.client.HTTPConnection
            if plain:
                connection = http.client.HTTPConnection(address, listen.port, timeout=20)
            else:
                connection = _Connection(address, listen.port, name, context(roots), timeout=20)
            headers = {"Host": f"{name}:{listen.port}" if ":" not in name else f"[{name}]:{listen.port}"}
            if question.with_key:
                headers["Authorization"] = f"Bearer {key}"
            try:
                connection.request(question.method, question.path, headers=headers)
                status = connection.getresponse().status
            except ssl.SSLError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.5)
                    continue
                faults.append(f"TLS with {name} at {address}:{listen.port} fails: {error.reason or error}")
                return Answers(tuple(faults), engine_answered)
            except UNREACHABLE as error:
                return Answers((), False, f"{address}:{listen.port} ({error.__class__.__name__})")
            except (OSError, http.client.HTTPException) as error:
                faults.append(f"{question} at {address}:{listen.port}: no answer ({error})")
                break
            finally:
                connection.close()
            if status not in question.expected:
                wanted = " or ".join(str(code) for code in question.expected)
                faults.append(f"{question} at {address}:{listen.port}: {status}, expected {wanted}")
            engine_answered = engine_answered or status == 200
            break
    return Answers(tuple(faults), engine_answered)


def curl(spec: GatewaySpec, listens: Sequence[Listen], key: str) -> tuple[str, str]:
    """The same questions for curl on the node: its configuration (for standard input), and the codes expected of it.

    The certificate is not judged here: it is asked for from the node itself, and only where outside cannot reach.
    """
    scheme = "http" if isinstance(spec.tls, TlsOff) else "https"
    name = spec.hostnames[0]
    host = f"[{name}]" if ":" in name else name
    blocks: list[str] = []
    expected: list[str] = []
    for listen in listens:
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.address, listen.address)
        target = f"[{address}]" if ":" in address else address
        for question in questions():
            lines = [
                f'url = "{scheme}://{host}:{listen.port}{question.path}"',
                f'connect-to = "{host}:{listen.port}:{target}:{listen.port}"',
                f'request = "{question.method}"',
                'output = "/dev/null"',
                r'write-out = "%{http_code}\n"',
                "insecure",
                "retry = 5",
                "retry-all-errors",
            ]
            if question.with_key:
                lines.append(f'header = "Authorization: Bearer {key}"')
            blocks.append("\n".join(lines))
            codes = "|".join(str(code) for code in question.expected)
            expected.append(f"({codes})")
    return "\nnext\n".join(blocks) + "\n", " ".join(expected)
