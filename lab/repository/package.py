"""One Debian package of the lab's repository: data in, a .deb made by dpkg-deb out, made once per recipe."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.command import run
from lab.paths import CACHE, locked

STAND_IN = (
    "A STAND-IN of gpuwright's lab, not the vendor's package: name, version and dependencies are the real ones, and\n"
    " what is inside drives no hardware. Never install it on a machine that has any."
)
MAINTAINER = "gpuwright lab <lab@example.invalid>"
_VERSION = 1  # raise when build() changes what it makes of the same recipe


@functools.cache
def architecture() -> str:
    """This machine's, as dpkg names it: the lab's hosts have the same."""
    return run(["dpkg", "--print-architecture"]).stdout.strip()


@functools.cache
def multiarch() -> str:
    """The folder of this architecture's libraries below /usr/lib."""
    return {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}[architecture()]


@dataclass(frozen=True)
class File:
    """What a package puts at one path: content with a mode, or a symbolic link."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


@dataclass(frozen=True)
class Package:
    """A recipe. ``relations``: control fields such as Depends and Provides. ``scripts``: maintainer scripts by name."""

    name: str
    version: str
    summary: str
    source: str = ""
    section: str = "non-free/libs"
    all: bool = False  # Architecture: all
    relations: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, File] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    conffiles: tuple[str, ...] = ()

    def control(self) -> str:
        """Its control file."""
        fields = {
            "Package": self.name,
            **({"Source": self.source} if self.source else {}),
            "Version": self.version,
            "Architecture": "all" if self.all else architecture(),
            "Maintainer": MAINTAINER,
            "Section": self.section,
            "Priority": "optional",
            **self.relations,
            "Description": f"{self.summary} (stand-in of gpuwright's lab)\n {STAND_IN}",
        }
        return "".join(f"{name}: {value}\n" for name, value in fields.items())

    def recipe(self) -> str:
        """Hash of everything that decides what the .deb holds."""
        files = {
            path: [hashlib.sha256(file.content).hexdigest(), file.mode, file.link] for path, file in self.files.items()
        }
        content = [_VERSION, self.control(), files, dict(self.scripts), list(self.conffiles)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def build(self) -> Path:
        """The .deb, from the cache if this recipe was built before. The same bytes every time."""
        deb = CACHE / "packages" / f"{self.recipe()}.deb"
        if deb.exists():
            return deb
        deb.parent.mkdir(parents=True, exist_ok=True)
        with locked(deb.parent / "lock"), tempfile.TemporaryDirectory(prefix=".draft-", dir=deb.parent) as draft:
            root = Path(draft) / "root"
            members = {
                "DEBIAN/control": File(self.control().encode()),
                **{f"DEBIAN/{name}": File(text.encode(), 0o755) for name, text in self.scripts.items()},
                **self.files,
            }
            if self.conffiles:
                members["DEBIAN/conffiles"] = File("".join(f"/{path}\n" for path in self.conffiles).encode())
            for name, file in members.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if file.link:
                    path.symlink_to(file.link)
                else:
                    path.write_bytes(file.content)
                    path.chmod(file.mode)
            for path in (root, *root.rglob("*")):
                if path.is_dir():
                    path.chmod(0o755)
                os.utime(path, (0, 0), follow_symlinks=False)
            made = Path(draft) / "made.deb"
            run(
                ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(made)],
                env={**os.environ, "SOURCE_DATE_EPOCH": "0"},
            )
            made.rename(deb)
        return deb


def script(name: str, **values: str) -> bytes:
    """A file of lab/repository/files, with ``@NAME@`` replaced by the value given for ``name``."""
    text = (Path(__file__).with_name("files") / name).read_text()
    for key, value in values.items():
        text = text.replace(f"@{key.upper()}@", value)
    return text.encode()
