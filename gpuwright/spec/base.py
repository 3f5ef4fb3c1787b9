"""The building blocks of a node description: strict models, sizes, names, pins and secret references."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

GIB = 1024**3


class Strict(BaseModel):
    """A part of a node description: unknown keys are refused, values never change after load."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _written(info: ValidationInfo) -> bool:
    """Whether a person wrote the value; host data and defaults hold plain bytes and seconds."""
    return bool(info.context and info.context.get("written"))


def _size(value: Any, info: ValidationInfo) -> Any:
    """``"64 GiB"`` as bytes; a bare number is refused because its unit would be a guess."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|TiB)", value)
        if match:
            return int(float(match[1]) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(match[2]))
    elif isinstance(value, bool) or not isinstance(value, int | float) or not _written(info):
        return value
    raise ValueError('a size is a number and a binary unit (B, KiB, MiB, GiB, TiB), as in "64 GiB"')


def _duration(value: Any, info: ValidationInfo) -> Any:
    """``"90 s"``, ``"30 min"`` or ``"1 h"`` as seconds; a bare number is refused because its unit would be a guess."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+) ?(s|min|h)", value)
        if match:
            return int(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]
    elif isinstance(value, bool) or not isinstance(value, int | float) or not _written(info):
        return value
    raise ValueError('a duration is a whole number and a unit (s, min, h), as in "30 min"')


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", value):
        raise ValueError(
            "a name is 1 to 31 of a-z, 0-9 and '-', and starts with a letter (it becomes part of a unit name)"
        )
    return value


def _digest(value: str) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
        raise ValueError("a digest is sha256: and 64 hexadecimal digits")
    return value


def _commit(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError("a commit is 40 hexadecimal digits")
    return value


def _sha256(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("a sha256 is 64 hexadecimal digits")
    return value


def _controller_path(value: str, info: ValidationInfo) -> str:
    """A relative path on the controller starts at the inventory's folder; host data holds it absolute."""
    directory = (info.context or {}).get("directory")
    return str(Path(directory, Path(value).expanduser())) if directory is not None else value


def _fingerprint(value: str) -> str:
    digits = value.replace(" ", "").upper()
    if not re.fullmatch(r"[0-9A-F]{40}", digits):
        raise ValueError("a fingerprint is 40 hexadecimal digits, as `gpg --show-keys` prints it")
    return digits


def _repository_url(value: str) -> str:
    if not re.fullmatch(r"(https?|file)://\S+", value):
        raise ValueError("a package repository is an address that starts with https://, http:// or file:///")
    return value.rstrip("/")


def _absolute(value: str) -> str:
    if not value.startswith("/") or "//" in value or re.search(r"[\s\"'\\$%]|/\.\.?(/|$)", value):
        raise ValueError("a path on the node is absolute and has no spaces, quotes, '$', '%', '.' or '..' in it")
    return value.rstrip("/") or "/"


Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
"""Bytes, written with a binary unit."""
Seconds = Annotated[int, BeforeValidator(_duration), Field(gt=0)]
"""Seconds, written with a unit."""
Name = Annotated[str, AfterValidator(_name)]
Digest = Annotated[str, AfterValidator(_digest)]
Commit = Annotated[str, AfterValidator(_commit)]
Sha256 = Annotated[str, AfterValidator(_sha256)]
NodePath = Annotated[str, AfterValidator(_absolute)]
ControllerPath = Annotated[str, AfterValidator(_controller_path)]
Fingerprint = Annotated[str, AfterValidator(_fingerprint)]
"""Of an OpenPGP key, without blanks."""
RepositoryUrl = Annotated[str, AfterValidator(_repository_url)]
"""The address of a package repository, without a slash at its end."""
"""A file on the controller; written relative to the inventory's folder, absolute after load."""
Profile = Literal["baseline", "server-cis1", "strict"]
"""How far a node is hardened; each role has its own table of what that means."""
Port = Annotated[int, Field(ge=1, le=65535)]
Tier = Annotated[int, Field(ge=0)]
Reason = Annotated[str, Field(min_length=10)]
"""Why a node file leaves a profile; the audit repeats it."""


class SecretRef(Strict):
    """Where the controller finds a secret. Exactly one of the three; a literal is refused at load.

    The value is looked up late, on the controller, and never becomes part of host data (security.md 6).
    """

    env: str | None = None
    file: ControllerPath | None = None
    command: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_literal(cls, value: Any) -> Any:
        if isinstance(value, str | int | float):
            raise ValueError("a secret is a reference, never the value: {env: NAME}, {file: path} or {command: line}")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> SecretRef:
        if sum(source is not None for source in (self.env, self.file, self.command)) != 1:
            raise ValueError("a secret names exactly one source: {env: NAME}, {file: path} or {command: line}")
        return self


class Image(Strict):
    """A container image. Serving needs a digest: inline, or resolved from ``tag`` into pins.lock.yaml."""

    repository: str = Field(description="registry/name without tag, as in docker.io/vllm/vllm-openai")
    tag: str | None = Field(default=None, description="what `gpuwright pin` resolves; never used to run")
    digest: Digest | None = Field(default=None, description="digest of the manifest or index that runs")
    archive: NodePath | None = Field(
        default=None, description="docker archive on the node, for sites without a registry"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """``repo@sha256:…`` and ``repo:tag`` as short forms."""
        if not isinstance(value, str):
            return value
        if "@" in value:
            repository, digest = value.split("@", 1)
            return {"repository": repository, "digest": digest}
        head, colon, tag = value.rpartition(":")
        return {"repository": head, "tag": tag} if colon and "/" not in tag else {"repository": value}

    @property
    def reference(self) -> str:
        """``repository@sha256:…``. Raises ValueError when unpinned."""
        if self.digest is None:
            raise ValueError(f"{self.repository} has no digest; run: gpuwright pin")
        return f"{self.repository}@{self.digest}"
