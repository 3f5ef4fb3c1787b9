"""A secret that cannot be printed by accident."""

from __future__ import annotations

import hashlib
import os
import secrets as _random
import subprocess
from pathlib import Path

from gpuwright.spec.base import SecretRef

# Fingerprints are compared within one run only; the salt keeps a short secret from being guessed from its fingerprint.
_RUN_SALT = _random.token_bytes(16)


class SecretError(Exception):
    """A secret could not be looked up; one sentence, never the value."""


class Secret:
    """The bytes of a secret. Everything that prints it prints its name and a fingerprint."""

    __slots__ = ("_value", "name")

    def __init__(self, name: str, value: bytes) -> None:
        self.name = name
        self._value = value

    def reveal(self) -> bytes:
        """The value. Only `gpuwright.atomic` has a reason to call this."""
        return self._value

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits, comparable within one run."""
        return hashlib.sha256(_RUN_SALT + self._value).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"[secret {self.name} {self.fingerprint}]"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce__(self) -> str:
        raise TypeError(f"{self!r} is never pickled")


def resolve(ref: SecretRef, name: str) -> Secret:
    """Look a reference up on the controller. A trailing newline is not part of the secret. Raises SecretError."""
    if ref.env is not None:
        if not (value := os.environ.get(ref.env)):
            raise SecretError(f"{name}: environment variable {ref.env} is not set; set it, or change the reference")
        return Secret(name, value.encode())
    if ref.file is not None:
        try:
            content = Path(ref.file).expanduser().read_bytes()
        except OSError as error:
            raise SecretError(
                f"{name}: cannot read {ref.file} ({error.strerror}); put the secret there, or change the reference"
            ) from None
    else:
        run = subprocess.run(str(ref.command), shell=True, capture_output=True, check=False)
        if run.returncode:
            raise SecretError(
                f"{name}: the command that fetches it ended with status {run.returncode}; run it by hand to see why"
            )
        content = run.stdout
    if not (content := content.rstrip(b"\r\n")):
        raise SecretError(f"{name}: the secret is empty")
    return Secret(name, content)
