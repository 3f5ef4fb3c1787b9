"""The blank Debian a host starts from: built once per release with mmdebstrap, cached until its recipe changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab import proxy
from lab.command import LabError, run
from lab.debian import RELEASES, mirror
from lab.network import Segment
from lab.paths import CACHE, locked
from lab.progress import step

# What a server has after the smallest network installation with an SSH server. No Docker, Caddy, Python, curl, jq, sudo.
_PACKAGES = (
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "dbus",
    "udev",
    "kmod",
    "procps",
    "iproute2",
    "openssh-server",
    "ca-certificates",
)

# What must not be the same on every host, or says something about this machine.
_PERSONAL = (
    "etc/ssh/ssh_host_*",
    "etc/hostname",
    "etc/resolv.conf",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d/*",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "var/log/apt/*",
    "var/log/*.log",
)
_VERSION = 1  # raise when install() changes what it makes


def recipe(release: str, *more: object) -> str:
    """Hash of everything that decides what the image holds, apart from the archive's state on the day.

    ``more``: what else decides it, for an image that is made from this one's recipe.
    """
    content = json.dumps([_VERSION, release, _PACKAGES, _PERSONAL, *more], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def image(release: str, segment: Segment) -> Path:
    """The root directory of a release's image, built if it is not cached (about half a minute). Raises LabError for an unknown release."""
    if release not in RELEASES:
        raise LabError(f"release {release!r} is not one the lab knows; allowed: {', '.join(RELEASES)}")
    target = CACHE / "blank" / f"{release}-{recipe(release)}"
    with locked(CACHE / "blank" / f"{release}.lock"):
        if not target.is_dir():
            # Images of former recipes stay: a host of another lab may have one below its disk.
            with step(f"Building the blank {release} image (once)"):
                build(release, segment, target)
    return target


def build(release: str, segment: Segment, target: Path) -> None:
    """Install the packages into ``target``; nothing is left there when it fails."""
    draft = Path(tempfile.mkdtemp(prefix=f".{release}-", dir=target.parent))
    try:
        root = draft / "root"
        install(release, segment, root)
        root.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def install(release: str, segment: Segment, root: Path, more: Sequence[str] = ()) -> None:
    """Make ``root`` a Debian with the packages of a blank server and ``more``. Natively: nothing is booted."""
    archive = mirror()
    sources = root.with_name(f"{root.name}-sources.list")
    sources.write_text(archive.sources(release))
    options = [f'Acquire::http::Proxy "{proxy.address(segment)}";', *archive.settings.splitlines()]
    run(
        [
            "mmdebstrap",
            "--variant=minbase",
            "--mode=root",
            "--format=directory",
            f"--include={','.join([*_PACKAGES, *more])}",
            *[f"--aptopt={option.rstrip(';')}" for option in options],
            release,
            str(root),
            str(sources),
        ],
        timeout=900,
        env={**os.environ, "SOURCE_DATE_EPOCH": "0", "LC_ALL": "C.UTF-8"},
    )
    for pattern in _PERSONAL:
        for path in root.glob(pattern):
            path.unlink()
    # Debian's image has no network configuration at all; lab hosts get theirs from networkd.
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    (wants / "systemd-networkd.service").symlink_to("/usr/lib/systemd/system/systemd-networkd.service")
    # Tells systemd that caches (ldconfig, message catalogue) are up to date: systemd-update-done.service(8).
    for name in ("etc/.updated", "var/.updated"):
        (root / name).touch()
