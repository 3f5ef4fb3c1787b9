"""What this role reads from a node: Docker as it runs, its configuration, the neighbour guard, the holds."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

from gpuwright.snapshot import Section, register
from roles.containers.daemon import PATH, Version
from roles.containers.gpus.facts import PACKAGES as TOOLKIT_PACKAGES

APPLIED = "/var/lib/gpuwright/containers/daemon.applied.json"
STARTED = "/run/gpuwright/containers/daemon.started.json"
GUARD_LOADED = "/run/gpuwright/containers/neighbour.loaded"
TABLE = "inet gpuwright_containers"

# Every package that stops or replaces a running engine when it is upgraded, whatever its source.
DOCKER_PACKAGES = ("docker.io", "docker-cli", "containerd", "docker-ce", "docker-ce-cli", "containerd.io")

# One line per observation, "name base64", so that any content survives. `docker info` is asked only of a running
# daemon: the question would start it through docker.socket.
_SCRIPT = rf"""
put() {{ printf '%s ' "$1"; base64 -w0; echo; }}
file() {{ if [ -e "$2" ]; then put "$1" <"$2"; fi; }}
file live {PATH}
[ ! -e {PATH} ] || stat -c '%a %U %G' {PATH} | put owner
file applied {APPLIED}
file started {STARTED}
file guard {GUARD_LOADED}
if [ -e /snap/bin/docker ] || [ -d /var/snap/docker ]; then echo yes | put snap; fi
dpkg-query -W -f '${{db:Status-Want}} ${{Package}}\n' {" ".join((*DOCKER_PACKAGES, *TOOLKIT_PACKAGES))} 2>/dev/null | sed -n 's/^hold //p' | put holds
if table=$(nft -s list table {TABLE} 2>/dev/null); then printf '%s\n' "$table" | sha256sum | put table; fi
if dockerd=$(command -v dockerd); then
  "$dockerd" --version | put version
  systemctl show docker.service --property=ActiveState,MainPID,ExecStart,NeedDaemonReload | put unit
  sed -n 's/^DOCKER_OPTS=//p' /etc/default/docker 2>/dev/null | tr -d "\"'" | put options
  pid=$(systemctl show docker.service --property=MainPID --value)
  if [ "${{pid:-0}}" -gt 0 ] && [ -r "/proc/$pid/cmdline" ]; then
    tr '\0' '\n' <"/proc/$pid/cmdline" | put command
    if info=$(timeout 8 docker info --format '{{{{json .}}}}' 2>/dev/null); then printf '%s' "$info" | put info; fi
  fi
fi
exit 0
"""


@dataclass(frozen=True)
class Docker:
    """Docker on one node. Everything may be missing: a blank host has nothing of it."""

    version: Version | None  # of the installed dockerd
    version_text: str  # as dockerd prints it
    snap: bool  # a Docker from the snap store is (also) there
    active: bool
    main_pid: int
    needs_daemon_reload: bool
    arguments: tuple[str, ...]  # dockerd's command line: of the running process, and of the unit
    info: dict[str, Any] | None  # `docker info`; None: not running, or no answer
    live: str | None  # daemon.json as it is
    owner: tuple[str, str, str]  # its mode, user and group
    applied: str | None  # what we last applied
    started: str | None  # daemon.json as it was when this daemon started or was last reloaded
    holds: frozenset[str]
    guard_loaded: tuple[str, str] | None  # sha256 of the rules last loaded, and of the table they made
    guard_table: str | None  # sha256 of the table as it is now

    @property
    def oldest_version(self) -> Version | None:
        """The older of the installed dockerd and the running one: after an upgrade they differ until a restart."""
        running = parse_version(str((self.info or {}).get("ServerVersion", "")))
        return min(filter(None, (self.version, running)), default=None)


def parse_version(text: str) -> Version | None:
    """(26, 1) of ``Docker version 26.1.5+dfsg1, build a72d7cd``; None of anything else."""
    match = re.search(r"\b(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def parse(text: str) -> Docker:
    """What the script prints, typed. Raises ValueError for an answer of another shape."""
    said: dict[str, str] = {}
    for line in text.splitlines():
        name, _, encoded = line.partition(" ")
        said[name] = base64.b64decode(encoded, validate=True).decode(errors="replace")
    unit = dict(line.split("=", 1) for line in said.get("unit", "").splitlines() if "=" in line)
    started_with = re.search(r"argv\[\]=(.*?) ; ignore_errors=", unit.get("ExecStart", ""))
    loaded = said.get("guard", "").split()
    return Docker(
        version=parse_version(said.get("version", "")),
        version_text=said.get("version", "").strip(),
        snap="snap" in said,
        active=unit.get("ActiveState") in ("active", "reloading"),
        main_pid=int(unit.get("MainPID") or 0),
        needs_daemon_reload=unit.get("NeedDaemonReload") == "yes",
        arguments=(
            *said.get("command", "").splitlines(),
            *(started_with[1].split() if started_with else ()),
            *said.get("options", "").split(),
        ),
        info=json.loads(said["info"]) if "info" in said else None,
        live=said.get("live"),
        owner=_owner(said.get("owner", "644 root root")),
        applied=said.get("applied"),
        started=said.get("started"),
        holds=frozenset(said.get("holds", "").split()),
        guard_loaded=(loaded[0], loaded[1]) if len(loaded) == 2 else None,
        guard_table=said["table"].split()[0] if "table" in said else None,
    )


def _owner(text: str) -> tuple[str, str, str]:
    mode, user, group = text.split()
    return mode.rjust(4, "0"), user, group


CONTAINERS = register(Section("containers", _SCRIPT, parse))
