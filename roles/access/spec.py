"""Settings of role `access`: who may log in, with which key, and what sshd has to say about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from gpuwright.spec.base import Reason, Strict


def _account(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,30}", value):
        raise ValueError("an account has 1 to 31 of a-z, 0-9, '-' and '_', and starts with a letter")
    return value


def _key(value: str, info: ValidationInfo) -> str:
    """A public key as it stands in authorized_keys is text; anything else is a file on the controller."""
    if "PRIVATE KEY" in value:
        raise ValueError("is a private key, which never leaves its owner; use the line of the .pub file")
    if "\n" in value.strip():
        raise ValueError("is one public key, one line")
    if " " in value.strip():
        return value.strip()
    directory = (info.context or {}).get("directory")
    return str(Path(directory, Path(value).expanduser())) if directory is not None else value


Account = Annotated[str, AfterValidator(_account)]
"""The name of a login account."""
KeySource = Annotated[str, AfterValidator(_key)]
"""A public key, or a file on the controller that holds public keys."""


class User(Strict):
    """One account that may log in."""

    keys: tuple[KeySource, ...] = Field(
        min_length=1, description="public keys as in authorized_keys, or files on the controller that hold some"
    )
    sudo: Literal["all", "audit", "none"] = Field(
        default="none",
        description="all: everything as root, without a password (deploys); audit: the one audit script; none: nothing",
    )


class Deviation(Strict):
    """Another value for one keyword of sshd than the profile's, and why; the audit lists it as waived."""

    value: str | None = Field(default=None, description="as sshd_config has it; left out: what sshd does by itself")
    reason: Reason = Field(description="who needs it, and until when")


class AccessSpec(Strict):
    """Who may log in over SSH and become root. Keys, sudo and sshd change under the lock-out guard; accounts that are no longer
    named are locked after its proof, but for the one that the run is logged in as."""

    users: dict[Account, User] = Field(
        min_length=1, description="accounts by name; root is one, too, while the profile lets it in"
    )
    only_users: bool | None = Field(
        default=None,
        description="nobody but `users` may log in; left out: false in baseline, true in server-cis1 and strict",
    )
    password_users: dict[Account, Reason] = Field(
        default={}, description="accounts of `users` that may log in by password, each with its reason"
    )
    console_passwords: dict[Account, Reason] = Field(
        default={},
        description="accounts, root among them, that keep a password for the console and su, each with its reason; ssh does not "
        "take it",
    )
    banner: str | None = Field(default=None, description="shown before login; the site's lawyers know the words")
    deviations: dict[str, Deviation] = Field(
        default={}, description="other values for keywords of sshd than the profile's, by keyword"
    )
