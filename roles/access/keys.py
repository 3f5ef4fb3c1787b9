"""Public keys as authorized_keys has them: read on the controller, and refused where they are too weak."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from gpuwright.spec.base import Profile

TYPES = (
    "ssh-ed25519",
    "sk-ssh-ed25519@openssh.com",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ecdsa-sha2-nistp256@openssh.com",
    "ssh-rsa",
)
SMALLEST_RSA: dict[Profile, int] = {"baseline": 2048, "server-cis1": 3072, "strict": 3072}
"""Bits, of user and host keys: NIST SP 800-131A allows no less than 2048; 3072 is what ssh-keygen makes since OpenSSH 8.0."""


class BadKey(Exception):
    """A key that cannot be used; the message says why, and never holds the key."""


@dataclass(frozen=True)
class Key:
    """One line of authorized_keys: options before the key, its type, its bytes in base64, its comment."""

    options: str
    type: str
    blob: str
    comment: str

    @property
    def line(self) -> str:
        """As it is written."""
        return " ".join(part for part in (self.options, self.type, self.blob, self.comment) if part)

    @property
    def fingerprint(self) -> str:
        """``SHA256:…`` as ssh-keygen and sshd's log have it."""
        digest = hashlib.sha256(base64.b64decode(self.blob)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")

    @property
    def bits(self) -> int | None:
        """Of an RSA key."""
        if self.type != "ssh-rsa":
            return None
        fields = _fields(base64.b64decode(self.blob))
        return int.from_bytes(fields[2], "big").bit_length()


def _fields(blob: bytes) -> list[bytes]:
    """The strings of a key in SSH's wire format (RFC 4253 section 6.6): a length of four bytes, then as many."""
    fields = []
    while blob:
        length = int.from_bytes(blob[:4], "big")
        if len(blob) < 4 + length:
            raise ValueError("cut short")
        fields.append(blob[4 : 4 + length])
        blob = blob[4 + length :]
    return fields


# Options may hold spaces inside quotes: from="a b",command="c d".
_LINE = re.compile(
    r'(?:(?P<options>(?:[a-zA-Z0-9-]+(?:="(?:[^"\\]|\\.)*")?,?)+) +)?(?P<type>[a-z0-9@.-]+) +(?P<blob>[A-Za-z0-9+/]+=*)(?: +(?P<comment>[^\x00-\x1f]*))?'
)


def parse(line: str, smallest_rsa: int = 2048) -> Key:
    """One line. Raises BadKey."""
    words = line.strip()
    match = re.fullmatch(_LINE, words)
    if match is None or not any(f"{kind} " in words for kind in (*TYPES, "ssh-dss")):
        raise BadKey("is no public key: it needs a type, the key and a comment, as in 'ssh-ed25519 AAAA… alice@laptop'")
    key = Key(match["options"] or "", match["type"], match["blob"], match["comment"] or "")
    if key.type == "ssh-dss":
        raise BadKey("is a DSA key, which OpenSSH no longer accepts; make a new one: ssh-keygen -t ed25519")
    if key.type not in TYPES:
        raise BadKey(f"has type {key.type}; allowed: {', '.join(TYPES)}")
    try:
        fields = _fields(base64.b64decode(key.blob, validate=True))
    except (binascii.Error, ValueError):
        fields = []
    if not fields or fields[0].decode(errors="replace") != key.type:
        raise BadKey("is damaged: what is inside does not match its type; copy the whole line of the .pub file")
    if key.bits is not None and key.bits < smallest_rsa:
        raise BadKey(
            f"is an RSA key of {key.bits} bits; {smallest_rsa} is the least here, or use: ssh-keygen -t ed25519"
        )
    return key


def read(source: str, smallest_rsa: int = 2048) -> list[Key]:
    """The keys of one entry: itself, or the lines of the file it names. Raises BadKey."""
    if " " in source:
        return [parse(source, smallest_rsa)]
    try:
        text = Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadKey(
            f"is no readable file on this controller ({error.strerror if isinstance(error, OSError) else 'not text'}); "
            "name a .pub file or paste its line"
        ) from None
    if "PRIVATE KEY" in text:
        raise BadKey("is a private key, which never leaves its owner; name the .pub file beside it")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        raise BadKey("holds no key")
    return [parse(line, smallest_rsa) for line in lines]


def authorized(sources: tuple[str, ...]) -> list[Key]:
    """All keys of one user, each once, in order. Raises BadKey."""
    found: dict[str, Key] = {}
    for source in sources:
        for key in read(source):
            found.setdefault(key.blob, key)
    return list(found.values())
