"""First contact: reads the SSH host keys of an inventory's hosts and records them after somebody looked at them."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paramiko

KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512")
TIMEOUT = 15
"""Seconds without an answer."""


class CannotLook(Exception):
    """A host whose keys could not be read. One sentence."""


@dataclass(frozen=True)
class HostKey:
    """One key of one host; `name` is as known_hosts has it: ``host`` or ``[host]:port``."""

    name: str
    kind: str
    base64: str
    state: Literal["new", "known", "changed"] = "new"

    @property
    def fingerprint(self) -> str:
        """As ``ssh-keygen -l`` prints it."""
        digest = hashlib.sha256(base64.b64decode(self.base64)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    @property
    def line(self) -> str:
        return f"{self.name} {self.kind} {self.base64}"


def scan(host: str, port: int) -> list[HostKey]:
    """Every kind of key a host shows. Raises CannotLook."""
    # a kind of key that a host lacks is no news, and paramiko would log it with a traceback
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    name = known_name(host, port)
    found: dict[str, HostKey] = {}
    for kind in KEY_TYPES:
        try:
            connection = socket.create_connection((host, port), timeout=TIMEOUT)
        except OSError as error:
            raise CannotLook(f"cannot reach {name}: {error.strerror or error}") from None
        with connection:
            transport = paramiko.Transport(connection)
            try:
                transport.get_security_options().key_types = (kind,)
                transport.start_client(timeout=TIMEOUT)
                key = transport.get_remote_server_key()
            except paramiko.SSHException as error:
                if "Incompatible" in str(error) or "no acceptable" in str(error).lower():
                    continue  # the host has no key of this kind
                raise CannotLook(f"{name} is no SSH server that can be talked to: {error}") from None
            except (OSError, EOFError) as error:
                raise CannotLook(f"{name} ends the connection before it shows a key: {error}") from None
            finally:
                transport.close()
            found[key.get_name()] = HostKey(name, key.get_name(), key.get_base64())
    if not found:
        raise CannotLook(f"{name} shows no key of a kind that is used today ({', '.join(KEY_TYPES)})")
    return list(found.values())


def known_name(host: str, port: int) -> str:
    """As known_hosts names it."""
    return host if port == 22 else f"[{host}]:{port}"


def is_recorded(name: str, known: Path) -> bool:
    """Whether known_hosts has any key of a host, hashed names included."""
    keys = paramiko.HostKeys()
    if known.is_file():
        keys.load(str(known))
    return keys.lookup(name) is not None


def compared(keys: list[HostKey], known: Path) -> list[HostKey]:
    """The keys with their state against a known_hosts file."""
    recorded = _recorded(known)
    return [
        HostKey(key.name, key.kind, key.base64, _state(recorded.get((key.name, key.kind)), key.base64)) for key in keys
    ]


def _state(recorded: str | None, seen: str) -> Literal["new", "known", "changed"]:
    if recorded is None:
        return "new"
    return "known" if recorded == seen else "changed"


def _recorded(known: Path) -> dict[tuple[str, str], str]:
    entries: dict[tuple[str, str], str] = {}
    for line in known.read_text().splitlines() if known.exists() else ():
        words = line.split()
        if len(words) >= 3 and not line.startswith(("#", "@")):
            for name in words[0].split(","):
                entries[(name, words[1])] = words[2]
    return entries


def record(keys: list[HostKey], known: Path) -> None:
    """Put keys into a known_hosts file; the old file or the new one is there.

    A host of which one key changed was rebuilt: all its old keys go, so `keys` has all of its new ones.
    """
    replaced = {(key.name, key.kind) for key in keys}
    rebuilt = {key.name for key in keys if key.state == "changed"}
    kept = [
        line
        for line in (known.read_text().splitlines() if known.exists() else ())
        if len(line.split()) < 3 or (line.split()[0] not in rebuilt and tuple(line.split()[:2]) not in replaced)
    ]
    descriptor, temporary = tempfile.mkstemp(dir=known.parent, prefix=f".{known.name}.")
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write("\n".join([*kept, *(key.line for key in keys)]) + "\n")
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(known)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
