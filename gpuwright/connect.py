"""Connection tuning shared by deploys and audits."""

from __future__ import annotations

import getpass
import logging
import socket
from typing import Any

from pyinfra.api.state import BaseStateCallback


def quiet() -> None:
    """Keep paramiko's own log off the terminal: it has a traceback for every server that hangs up, as one does that boots.

    pyinfra says in a sentence what came of the connection. Called from an inventory: that is read before connecting.
    """
    logging.getLogger("paramiko").addHandler(logging.NullHandler())


def without_delay(transport: Any) -> bool:
    """Set TCP_NODELAY on a paramiko transport's socket; False where there is no TCP socket (`@local`, a proxy command).

    paramiko leaves Nagle's algorithm on: each command then waits some 44 ms for nothing (pyinfra.md section 3).
    """
    sock = getattr(transport, "sock", None)
    if not isinstance(sock, socket.socket):
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        return False
    return True


class _OnEveryConnect(BaseStateCallback):
    """A reboot or a lost line brings a new transport; it needs the option again."""

    @staticmethod
    def host_connect(state: Any, host: Any) -> None:
        tune(host)


def tune(host: Any) -> bool:
    """Tune the host's present connection. True when the option is set."""
    client = getattr(getattr(host, "connector", None), "client", None)
    return client is not None and without_delay(client.get_transport())


def account(host: Any) -> str | None:
    """The account of the node that the run is logged in as; None when nothing says so.

    The connection is asked first: ssh_user may be left out, and then ssh's own configuration decides. At @local the run
    is a process of this very account.
    """
    if host.name == "@local":
        return getpass.getuser()
    client = getattr(getattr(host, "connector", None), "client", None)
    transport = client.get_transport() if client is not None else None
    name: str | None = transport.get_username() if transport is not None else None
    return name or host.data.get("ssh_user") or None


def keep_tuned(state: Any, host: Any) -> None:
    """Tune this connection and every later one. Called once per host from deploy.py: connecting comes before it."""
    if not any(isinstance(handler, _OnEveryConnect) for handler in state.callback_handlers):
        state.add_callback_handler(_OnEveryConnect())
    tune(host)
