"""A package repository of somebody else's on a node: its deb822 source, and the key that alone may sign for it.

The key is a file on the controller and told by its fingerprint: a key fetched from the address that it is to vouch for
proves nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuwright import render
from gpuwright.atomic import File

_BLOCK = "-----BEGIN PGP PUBLIC KEY BLOCK-----"
_PUBLIC_KEY = 6  # the packet of a primary key (RFC 9580, section 5)

# dpkg's name of what `uname -m` prints.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class BadKey(ValueError):
    """A file that is not the key it should be; the message is one sentence."""


@dataclass(frozen=True)
class Repository:
    """One deb822 source. `name` becomes part of the files' names; `suites` "/" is the flat layout, without components."""

    name: str
    address: str
    architecture: str
    """dpkg's name."""
    suites: str = "/"
    components: str = ""

    @property
    def key_path(self) -> str:
        """Where its key lies on the node."""
        return f"/etc/apt/keyrings/gpuwright-{self.name}.asc"

    @property
    def source_path(self) -> str:
        """Where its source lies on the node."""
        return f"/etc/apt/sources.list.d/gpuwright-{self.name}.sources"


def files(role: str, wanted: Repository, key: bytes) -> tuple[File, File]:
    """The two files that role `role` owns for it: the key first, so that the source never stands there without it."""
    source = render.template("sources.j2", role=role, repository=wanted)
    return File(wanted.key_path, key), File(wanted.source_path, source)


def read_key(path: str, fingerprint: str | None = None) -> bytes:
    """The ASCII-armoured public key in a file on the controller.

    + fingerprint: of the primary key, as gpg prints it; every key in the file must have it

    Raises BadKey for a file that cannot be read, is no such key, or is another one.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadKey(f"{path} cannot be read: {error.strerror}") from None
    if not content.lstrip().startswith(_BLOCK.encode()):
        raise BadKey(f"{path} is not an ASCII-armoured public key; it must start with {_BLOCK}")
    if fingerprint is None:
        return content
    wanted = fingerprint.replace(" ", "").upper()
    try:
        found = fingerprints(content.decode(errors="replace"))
    except ValueError as error:
        raise BadKey(f"{path} cannot be read as a public key: {error}") from None
    if strangers := [key for key in found if key != wanted]:
        raise BadKey(f"{path} holds the key {strangers[0]}, and the node file names {wanted}; one of the two is wrong")
    return content


def fingerprints(armoured: str) -> list[str]:
    """The fingerprints of the primary keys in ASCII armour, in order. Raises ValueError for what is not such a text.

    Version 4 only: SHA-1 over the packet with a two-byte length before it (RFC 9580, section 5.5.4.2). apt's own
    repositories of today have no other.
    """
    found = []
    for block in re.findall(rf"{_BLOCK}\s*\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", armoured, re.DOTALL):
        for tag, body in _packets(_decoded(block)):
            if tag != _PUBLIC_KEY:
                continue
            if body[:1] != b"\x04":
                raise ValueError("only keys of version 4 are known")
            found.append(hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper())
    if not found:
        raise ValueError("there is no public key in it")
    return found


def _decoded(block: str) -> bytes:
    # Headers ("Version: …") end with an empty line, the checksum is a line that begins with "=".
    lines = [line.strip() for line in block.splitlines()]
    if any(": " in line for line in lines) and "" in lines:
        lines = lines[lines.index("") + 1 :]
    text = "".join(line for line in lines if not line.startswith("="))
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("its armour is damaged") from None


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and body of every packet, in both formats of a packet's head (RFC 9580, section 4.2)."""
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise ValueError("it is damaged")
        if head & 0x40:
            tag, first = head & 0x3F, data[at + 1 : at + 2]
            if first < b"\xc0":
                width, length = 1, int.from_bytes(first, "big")
            elif first < b"\xe0":
                width, length = 2, ((first[0] - 192) << 8) + data[at + 2] + 192
            elif first == b"\xff":
                width, length = 5, int.from_bytes(data[at + 2 : at + 6], "big")
            else:
                raise ValueError("it has a packet of unknown length")
        else:
            tag, kind = (head >> 2) & 0x0F, head & 3
            if kind == 3:
                raise ValueError("it has a packet of unknown length")
            width = 1 << kind
            length = int.from_bytes(data[at + 1 : at + 1 + width], "big")
        start = at + 1 + width
        if start + length > len(data):
            raise ValueError("it is cut short")
        yield tag, data[start : start + length]
        at = start + length
