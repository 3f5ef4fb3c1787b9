"""The lab's package repository: signed, real apt, and in it STAND-INS of NVIDIA's and Docker's packages.

What is offered is a set of releases, and a test makes a newer one appear or go:

>>> from lab import repository
>>> repository.publish("driver-580.95.05", "toolkit-1.18.2")
>>> repository.publish("driver-595.58.03")  # a newer version has come out
>>> repository.withdraw("driver-595.58.03")
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab import network
from lab.command import LabError
from lab.paths import locked, make_private, state, write_json
from lab.progress import step
from lab.repository import debian, docker, driver, index, module, toolkit
from lab.repository.index import Archive, Deb, fingerprint, key_file
from lab.service import Service

__all__ = ["ARCHIVES", "NAME", "fingerprint", "key_file", "known", "publish", "published", "source", "withdraw"]

NAME = "repository.lab"
PORT = 80
_MACHINE = {"x86_64": "x86_64", "aarch64": "sbsa"}.get(os.uname().machine, os.uname().machine)

# Paths as the vendors' servers have them; what the Release files say of themselves is what apt's pins and unattended-upgrades match.
ARCHIVES = {
    "nvidia": Archive(f"compute/cuda/repos/debian13/{_MACHINE}", "NVIDIA", "NVIDIA CUDA"),
    "toolkit": Archive("libnvidia-container/stable/deb", "NVIDIA CORPORATION", "NVIDIA Container Toolkit"),
    "docker": Archive("linux/debian", "Docker", "Docker CE", docker.RELEASE, "stable"),
    # Not the vendor's: its own archive, so that Debian's dkms builds what is in it and not the vendor's stand-in of dkms.
    "module": Archive("gpuwright-lab/module", "gpuwright lab", "gpuwright lab modules"),
    "security": Archive("debian-security", "Debian", "Debian-Security", "trixie-security"),
}


def known() -> list[str]:
    """Every release that can be published."""
    drivers = [version for _, versions in driver.BRANCHES.values() for version in versions]
    versions = {
        "driver": drivers,
        "module": module.VERSIONS,
        "toolkit": toolkit.VERSIONS,
        "docker": docker.VERSIONS,
    }
    return [
        *(f"{kind}-{version}" for kind, found in versions.items() for version in found),
        *("kernel-running", "kernel-newer", "harmless-1.0-1", "harmless-1.0-1+deb13u1"),
    ]


def published() -> list[str]:
    """What is offered now."""
    try:
        found: list[str] = json.loads((state() / "repository" / "published.json").read_text())
    except FileNotFoundError:
        return []
    return found


def publish(*releases: str) -> None:
    """Offer these as well, and serve the repository. A driver, and a module alone, can be offered broken: ``driver-595.71.05/build``
    does not compile, ``driver-595.71.05/probe`` finds no card. Raises LabError for a release it does not know."""
    _offer(lambda offered: [*(name for name in offered if name.partition("/")[0] not in _bare(releases)), *releases])


def withdraw(*releases: str) -> None:
    """Offer these no longer; without a name, nothing at all. What hosts have installed stays."""
    _offer(lambda offered: [name for name in offered if releases and name.partition("/")[0] not in _bare(releases)])


def resume() -> None:
    """Serve again what was offered when the lab went down; nothing happens when that was nothing."""
    if published():
        _serve(state() / "repository" / "www")


def source(archive: str, key: str = "/etc/apt/keyrings/gpuwright-lab.asc") -> str:
    """The deb822 source of one of the archives. ``key``: where the host has ``key_file()``."""
    return ARCHIVES[archive].source(f"http://{NAME}", key)


def _bare(releases: Sequence[str]) -> set[str]:
    return {name.partition("/")[0] for name in releases}


def _offer(change: Callable[[list[str]], list[str]]) -> None:
    home = make_private(state() / "repository")
    with locked(home / "lock"):
        wanted = sorted(set(change(published())))
        for name in wanted:
            bare, _, fault = name.partition("/")
            if bare not in known() or (
                fault and (fault not in driver.FAULTS or not bare.startswith(("driver-", "module-")))
            ):
                raise LabError(
                    f"the lab's repository has no release {name!r}; it has: {', '.join(known())}; "
                    f"drivers and modules also with {' or '.join(f'/{fault}' for fault in driver.FAULTS)}"
                )
        with step(f"Publishing {', '.join(wanted) or 'nothing'}"):
            held: dict[str, list[Deb]] = {name: [] for name in ARCHIVES}
            for name in wanted:
                where, packages = _made(name)
                held[where] += packages
            if held["nvidia"]:
                held["nvidia"] += _shared(wanted)
            for place, archive in ARCHIVES.items():
                archive.write(home / "www", held[place])
        write_json(home / "published.json", wanted)
        _serve(home / "www")


def _made(release: str) -> tuple[str, Sequence[Deb]]:
    """A release's archive and packages."""
    bare, _, fault = release.partition("/")
    kind, _, version = bare.partition("-")
    match kind:
        case "driver":
            return "nvidia", driver.packages(version, fault)
        case "module":
            return "module", [module.package(version, fault)]
        case "toolkit":
            return "toolkit", toolkit.packages(version)
        case "docker":
            return "docker", docker.packages(version)
        case "kernel" if version == "running":
            return "security", debian.kernel(os.uname().release, "9.99.8-1")
        case "kernel":
            return "security", debian.kernel()
        case _:
            return "security", debian.update(version)


def _shared(wanted: Sequence[str]) -> list[Deb]:
    """What NVIDIA's repository has once: its keyring, dkms, and for each branch the package that pins it."""
    address = f"http://{NAME}/{ARCHIVES['nvidia'].path}/"
    found: list[Deb] = [driver.dkms(), driver.keyring(index.binary_key(), address)]
    for branch, (_, versions) in driver.BRANCHES.items():
        offered = [version for version in versions if f"driver-{version}" in _bare(wanted)]
        found += [driver.pinning_of_branch(branch, offered[-1])] if offered else []
    return found


def _serve(root: Path) -> None:
    segment = network.segment()
    argv = [sys.executable, "-m", "http.server", "--bind", segment.gateway, "--directory", str(root), str(PORT)]
    make_private(state() / "services")
    Service("repository", argv, segment.gateway, PORT).start()
