"""Secrets on the controller: looked up late, masked everywhere, compared by fingerprint."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import subprocess
from pathlib import Path
from typing import NoReturn

from gpuwright.spec.base import SecretRef

_SALT = secrets.token_bytes(32)
# One run compares fingerprints with each other; across runs they mean nothing, so that a short password cannot be found
# by hashing guesses (security.md 6).

_COMMAND_TIMEOUT = 30


class SecretError(Exception):
    """A secret that could not be looked up; the message is one sentence and holds nothing of the value."""


class Secret:
    """A value that shows as its name and a fingerprint. Only `reveal` gives it away."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str, value: str | bytes) -> None:
        self.name = name
        self._value = value.encode() if isinstance(value, str) else value

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits, equal for equal values within one run."""
        return hmac.new(_SALT, self._value, hashlib.sha256).hexdigest()[:8]

    def reveal(self) -> bytes:
        """The value itself."""
        return self._value

    def __str__(self) -> str:
        return f"[secret {self.name} {self.fingerprint}]"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"secret {self.name} cannot be pickled")


def resolve(ref: SecretRef, name: str) -> Secret:
    """Look a reference up on the controller. Line ends after it are not part of the secret. Raises SecretError."""
    if ref.env is not None:
        value = os.environ.get(ref.env, "").encode()
        if not value:
            raise SecretError(f"{name}: environment variable {ref.env} is not set; set it, or change the reference")
    elif ref.file is not None:
        try:
            value = Path(ref.file).expanduser().read_bytes()
        except OSError as error:
            raise SecretError(
                f"{name}: cannot read {ref.file} ({error.strerror}); put the secret there, or change the reference"
            ) from None
    else:
        value = _run(str(ref.command), name)
    if not (value := value.rstrip(b"\r\n")):
        raise SecretError(f"{name}: the secret is empty")
    return Secret(name, value)


def _run(command: str, name: str) -> bytes:
    """Standard output of a shell line. Its standard error is not repeated: password tools may say too much there."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SecretError(f"{name}: the command that fetches it gave no answer in {_COMMAND_TIMEOUT} s") from None
    if done.returncode != 0:
        raise SecretError(
            f"{name}: the command that fetches it ended with status {done.returncode}; run it by hand to see why"
        )
    return done.stdout
