"""Docker's own packages for Debian 13, by its names and versions. STAND-INS: what is in them is Debian's Docker, whatever the version says.

Names and layout: docs.docker.com/engine/install/debian. The programs are real, so Docker really runs; `docker version` tells Debian's.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab import debian, network, proxy
from lab.command import run
from lab.paths import CACHE, locked
from lab.progress import step
from lab.repository.package import MAINTAINER, STAND_IN

RELEASE = "trixie"
# Docker's release, and the containerd.io of the same time.
VERSIONS = {"28.5.1": "1.7.28-1", "28.5.2": "1.7.29-1", "29.1.3": "2.2.0-2"}
_NAMES = {"docker.io": "docker-ce", "docker-cli": "docker-ce-cli", "containerd": "containerd.io"}


@dataclass(frozen=True)
class Repacked:
    """A package of the distribution under another name and version."""

    name: str
    version: str
    original: Path

    def control(self) -> str:
        """The distribution's control file with the names and version changed."""
        text = run(["dpkg-deb", "--field", str(self.original)]).stdout
        kept = re.split(r"\n(?!\s)", text.strip())
        dropped = (
            "Source",
            "Breaks",
            "Replaces",
            "Conflicts",
            "Provides",
            "Description",
            "Maintainer",
            "Installed-Size",
        )
        lines = [line for line in kept if line.partition(":")[0] not in dropped]
        changed = {"Package": self.name, "Version": self.version}
        lines = [f"{key}: {changed.get(key, value)}" for key, _, value in (line.partition(": ") for line in lines)]
        text = "\n".join(lines)
        text = re.sub(r"\bdocker-cli\b", "docker-ce-cli", text)
        text = re.sub(r"\bcontainerd \([^)]*\)|\bcontainerd\b(?!\.io)", "containerd.io", text)
        others = [name for name, ours in _NAMES.items() if ours == self.name]
        text += f"\nConflicts: {', '.join(others)}\nReplaces: {', '.join(others)}\nMaintainer: {MAINTAINER}"
        return f"{text}\nDescription: {self.name} with the distribution's programs (stand-in of gpuwright's lab)\n {STAND_IN}\n"

    def build(self) -> Path:
        """The .deb, from the cache if it is there."""
        recipe = hashlib.sha256(f"{self.original.name}\n{self.control()}".encode()).hexdigest()
        deb = CACHE / "packages" / f"{recipe}.deb"
        with locked(CACHE / "packages" / "lock"):
            if not deb.exists():
                with tempfile.TemporaryDirectory(prefix=".draft-", dir=deb.parent) as draft:
                    root, made = Path(draft) / "root", Path(draft) / "made.deb"
                    run(["dpkg-deb", "--raw-extract", str(self.original), str(root)], timeout=300)
                    (root / "DEBIAN/control").write_text(self.control())
                    (root / "DEBIAN/md5sums").unlink(missing_ok=True)
                    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
                    argv = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(made)]
                    run(argv, timeout=300, env=environment)
                    made.rename(deb)
        return deb


def packages(version: str) -> list[Repacked]:
    """docker-ce, docker-ce-cli and containerd.io of one release."""
    originals = _distribution()
    suffix = f"debian.13~{RELEASE}"
    return [
        Repacked("docker-ce", f"5:{version}-1~{suffix}", originals["docker.io"]),
        Repacked("docker-ce-cli", f"5:{version}-1~{suffix}", originals["docker-cli"]),
        Repacked("containerd.io", f"{VERSIONS[version]}~{suffix}", originals["containerd"]),
    ]


def _distribution() -> Mapping[str, Path]:
    """The distribution's packages, downloaded through the lab's proxy once."""
    folder = CACHE / "packages" / f"docker-{RELEASE}"
    with locked(CACHE / "packages" / "docker.lock"):
        if not folder.is_dir():
            with (
                step("Fetching the distribution's Docker"),
                tempfile.TemporaryDirectory(prefix=".draft-", dir=folder.parent) as draft,
            ):
                _download(Path(draft))
                made = Path(draft) / "debs"
                made.rename(folder)
    return {name: next(folder.glob(f"{name}_*.deb")) for name in _NAMES}


def _download(draft: Path) -> None:
    archive = debian.mirror()
    (draft / "sources.list").write_text(archive.sources(RELEASE))
    for part in ("state/lists/partial", "cache/archives/partial", "debs"):
        (draft / part).mkdir(parents=True)
    (draft / "status").touch()
    (draft / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{draft}/sources.list";\nDir::Etc::sourceparts "/dev/null";\nDir::Etc::parts "/dev/null";\n'
        f'Dir::State "{draft}/state";\nDir::State::status "{draft}/status";\nDir::Cache "{draft}/cache";\n'
        f'Acquire::http::Proxy "{proxy.address(network.segment())}";\nAPT::Sandbox::User "root";\n{archive.settings}'
    )
    environment = {**os.environ, "APT_CONFIG": str(draft / "apt.conf")}
    run(["apt-get", "-q", "update"], timeout=300, env=environment)
    argv = ["sh", "-c", 'cd "$1" && shift && exec apt-get -q download "$@"', "sh", str(draft / "debs"), *_NAMES]
    run(argv, timeout=600, env=environment)
