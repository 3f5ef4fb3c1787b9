"""Asking a node from the controller, as a client or an attacker would."""

from __future__ import annotations

import errno
import http.client
import os
import resource
import secrets
import select
import socket
import ssl
import string
import time
from collections.abc import Iterable
from dataclasses import dataclass

import paramiko

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.secret import Secret

TIMEOUT_SECONDS = 8.0


@dataclass(frozen=True)
class Place:
    """Where a gateway is asked: an address and port that the controller reaches, and the name the client uses."""

    address: str
    port: int
    hostname: str
    tls: bool


def anybody() -> ssl.SSLContext:
    """A TLS client that does not look who answers. For questions without a secret in them only."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def trusting(roots: str | None) -> ssl.SSLContext:
    """A TLS client as a user has it; `roots` are PEM certificates to trust, None the controller's own."""
    return ssl.create_default_context(cadata=roots)


class NotReached(Exception):
    """A place that could not be asked; the message says which and why."""


def status(place: Place, context: ssl.SSLContext, method: str, path: str, key: Secret | None = None) -> int | None:
    """The status of one request; None when the connection was closed without an answer.

    Raises ssl.SSLError when the handshake fails, NotReached when there is no connection or no answer in time.
    """
    try:
        plain = socket.create_connection((place.address, place.port), TIMEOUT_SECONDS)
        with plain:
            sock = context.wrap_socket(plain, server_hostname=place.hostname) if place.tls else plain
            client = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_SECONDS)
            client.sock = sock
            # The key is in no local variable, and "from None" below keeps frames that have it out of what is shown:
            # pytest prints arguments of a failing call, and with -l everything local.
            client.request(method, path, headers=_bearer(key))
            return client.getresponse().status
    except ssl.SSLError:
        raise
    except (http.client.HTTPException, ConnectionResetError, BrokenPipeError):
        return None
    except OSError as fault:
        raise NotReached(f"{place.address} port {place.port}: {fault}") from None


def _bearer(key: Secret | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key.reveal().decode()}"}


def handshake(place: Place, context: ssl.SSLContext) -> str:
    """The end of validity of the certificate that `context` accepted. Raises ssl.SSLError, OSError."""
    with (
        socket.create_connection((place.address, place.port), TIMEOUT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=place.hostname) as sock,
    ):
        return str((sock.getpeercert() or {}).get("notAfter", ""))


def is_open(address: str, port: int) -> bool:
    """Whether a TCP connection is accepted. Refused, filtered and unreachable are all "not"."""
    try:
        with socket.create_connection((address, port), timeout=2.0):
            return True
    except OSError:
        return False


def open_ports(address: str, ports: Iterable[int], wait: float = 1.5, at_once: int = 10_000) -> list[int]:
    """The TCP ports of `ports` where a connection is accepted, ascending; thousands are asked at the same time.

    `wait` is how many seconds an answer may take. Refused and filtered are both "not". Raises OSError when the address
    itself cannot be asked (no route, no such family).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, at_once + 256)), hard))
    at_once = min(at_once, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64)
    remaining = sorted(set(ports))
    found: list[int] = []
    while remaining:
        batch, remaining = remaining[:at_once], remaining[at_once:]
        waiting: dict[int, tuple[socket.socket, int]] = {}
        with select.epoll() as answers:
            for port in batch:
                asked = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                status = asked.connect_ex((address, port))
                if status not in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
                    raise OSError(status, os.strerror(status), address)
                waiting[asked.fileno()] = asked, port
                answers.register(asked, select.EPOLLOUT)
            deadline = time.monotonic() + wait
            while waiting and (left := deadline - time.monotonic()) > 0:
                for number, _ in answers.poll(left):
                    asked, port = waiting.pop(number)
                    if asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                        found.append(port)
                    asked.close()
        for asked, _ in waiting.values():
            asked.close()
    return sorted(found)


def ssh_methods(address: str, port: int) -> tuple[str, ...]:
    """What sshd offers somebody who has nothing: the methods by name. Raises OSError, paramiko.SSHException."""
    with socket.create_connection((address, port), TIMEOUT_SECONDS) as plain:
        transport = paramiko.Transport(plain)
        try:
            transport.start_client(timeout=TIMEOUT_SECONDS)
            try:
                transport.auth_none("root")
            except paramiko.BadAuthenticationType as refusal:
                return tuple(sorted(refusal.allowed_types))
            return ("none",)
        finally:
            transport.close()


# A keyword of sshd_config and the method of RFC 4252 that its yes turns on.
_METHODS = {
    "PasswordAuthentication": "password",
    "KbdInteractiveAuthentication": "keyboard-interactive",
    "HostbasedAuthentication": "hostbased",
    "GSSAPIAuthentication": "gssapi-with-mic",
}


def ssh_methods_allowed(spec: NodeSpec) -> set[str] | None:
    """What sshd may offer somebody who has nothing, by name; None where the node file says nothing of sshd.

    Keys, and what a deviation or a user with a password brings: sshd may say so to anybody.
    """
    if spec.access is None:
        return None
    asked = set(spec.access.deviations) | ({"PasswordAuthentication"} if spec.access.password_users else set())
    return {"publickey"} | {method for keyword, method in _METHODS.items() if keyword in asked}


def unknown_key() -> Secret:
    """Something with the shape of a key that nobody was ever given."""
    return Secret(
        "unknown key", "sk-" + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(68))
    )
