"""What apt reads of a repository: Packages and a signed InRelease, in the flat layout and in that of a distribution."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lab import tools
from lab.command import run
from lab.paths import locked, make_private, state
from lab.repository.package import architecture

_OWNER = "gpuwright lab repository (stand-in)"


class Deb(Protocol):
    """What an archive needs to know of a package."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    def control(self) -> str: ...
    def build(self) -> Path: ...


@dataclass(frozen=True)
class Archive:
    """One repository: where it is below the address, and what its Release says of itself. ``suite`` empty: the flat layout."""

    path: str
    origin: str
    label: str
    suite: str = ""
    component: str = "main"

    def source(self, address: str, key: str) -> str:
        """Its deb822 source. ``key``: a file on the host."""
        place = f"Suites: {self.suite}\nComponents: {self.component}\n" if self.suite else "Suites: /\n"
        return f"Types: deb\nURIs: {address}/{self.path}/\n{place}Signed-By: {key}\n"

    def write(self, root: Path, packages: Sequence[Deb]) -> None:
        """Make ``root``/path hold exactly these packages. InRelease last: before it, apt sees the old list."""
        base = root / self.path
        top = base / "dists" / self.suite if self.suite else base
        listed = top / self.component / f"binary-{architecture()}" if self.suite else top
        pool = base / "pool"
        listed.mkdir(parents=True, exist_ok=True)
        pool.mkdir(exist_ok=True)
        entries, kept = [], set()
        for package in sorted(packages, key=lambda package: (package.name, package.version)):
            deb = package.build()
            served = pool / f"{package.name}_{package.version.replace(':', '%3a')}_{architecture()}.deb"
            if not served.exists() or served.stat().st_size != deb.stat().st_size or not _same(served, deb):
                _link(deb, served)
            kept.add(served)
            filename = f"pool/{served.name}" if self.suite else f"./pool/{served.name}"
            about = f"Filename: {filename}\nSize: {deb.stat().st_size}\nSHA256: {_sha256(str(deb))}\n"
            head, _, description = package.control().partition("Description: ")
            entries.append(f"{head}{about}Description: {description}")
        content = "\n".join(entries).encode()
        (listed / "Packages").write_bytes(content)
        name = str((listed / "Packages").relative_to(top))
        fields = {
            "Origin": self.origin,
            "Label": self.label,
            **({"Suite": self.suite, "Codename": self.suite, "Components": self.component} if self.suite else {}),
            "Architectures": architecture(),
            "Date": f"{datetime.datetime.now(datetime.UTC):%a, %d %b %Y %H:%M:%S} UTC",
        }
        release = "".join(f"{key}: {value}\n" for key, value in fields.items())
        release += f"SHA256:\n {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
        _sign(release, top / "InRelease")
        for withdrawn in set(pool.iterdir()) - kept:
            withdrawn.unlink()


def key_file() -> Path:
    """The public key, armoured, made with its secret half if it is not there."""
    made = state() / "repository" / "key.asc"
    if not made.exists():
        tools.need({"gpg": "gpg", "gpg-agent": "gpg-agent"})
        with locked(make_private(made.parent) / "key.lock"):
            if not made.exists():
                _gpg(["--quick-generate-key", _OWNER, "ed25519", "sign", "never"])
                made.write_text(_gpg(["--armor", "--export", _OWNER]))
    return made


def fingerprint() -> str:
    """The key's, 40 hexadecimal digits."""
    key_file()
    lines = _gpg(["--with-colons", "--list-keys", _OWNER]).splitlines()
    return next(line.split(":")[9] for line in lines if line.startswith("fpr:"))


def binary_key() -> bytes:
    """The public key as a .gpg file has it."""
    draft = state() / "repository" / "key.gpg"
    if not draft.exists():
        key_file()
        _gpg(["--yes", "--output", str(draft), "--export", _OWNER])
    return draft.read_bytes()


def _sign(text: str, target: Path) -> None:
    key_file()
    draft = target.with_name(".InRelease")
    _gpg(["--yes", "--digest-algo", "SHA512", "--clearsign", "--output", str(draft)], stdin=text)
    draft.replace(target)


def _gpg(arguments: Sequence[str], stdin: str | None = None) -> str:
    home = make_private(state() / "repository" / "gnupg")
    environment = {**os.environ, "GNUPGHOME": str(home)}
    try:
        return run(
            ["gpg", "--batch", "--quiet", "--passphrase", "", *arguments], stdin=stdin, env=environment, timeout=120
        ).stdout
    finally:
        # It starts an agent and leaves it; nothing of the lab runs on its own.
        run(["gpgconf", "--kill", "gpg-agent"], check=False, env=environment)


@functools.cache
def _sha256(path: str) -> str:
    with Path(path).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _same(one: Path, other: Path) -> bool:
    return one.stat().st_ino == other.stat().st_ino or _sha256(str(other)) == _sha256_now(one)


def _sha256_now(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copy(source, target)
