"""What we own on a node, and how it is taken away again.

The record lies on the node itself, ``/var/lib/gpuwright/owned/<role>``, one ``kind<TAB>name`` per line. A thing is
recorded before it exists and forgotten after it is gone, so a run killed anywhere leaves nothing unrecorded.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot

RECORD = "/var/lib/gpuwright/owned"

Kind = Literal["file", "unit", "container", "network", "volume", "table", "user", "account", "directory", "hold"]

# Whole trees are removed only where nobody else keeps anything.
_OUR_TREES = ("/var/lib/gpuwright/", "/etc/gpuwright/", "/run/gpuwright/", "/usr/local/lib/gpuwright/")

_SCRIPTS = "/usr/local/lib/gpuwright"

# What nobody reads before it is told to: the command makes it anew without the file, while our script for it is still there.
_MADE_FROM = {
    "/etc/default/grub.d/": "boot-menu grub",
    "/etc/kernel/install.d/": "boot-menu systemd-boot",
    "/etc/modprobe.d/": "initramfs-modprobe none",
    "/etc/audit/rules.d/": "audit-rules",
}

# Units first: nothing may still run from what is taken away next.
_ORDER: tuple[Kind, ...] = (
    "unit",
    "container",
    "network",
    "volume",
    "table",
    "file",
    "directory",
    "user",
    "account",
    "hold",
)


@dataclass(frozen=True, order=True)
class Owned:
    """One thing a role owns. `name` is a path, a unit name, ``family name`` of a table, a held package, …"""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def _removal(thing: Owned) -> str:
    name = shlex.quote(thing.name)
    if thing.kind == "unit":
        path = shlex.quote(f"/etc/systemd/system/{thing.name}")
        if "@." in thing.name:  # a template: its instances are what runs
            instances = shlex.quote(thing.name.replace("@.", "@*."))
            return f"systemctl stop {instances} || exit 1; rm -rf {path} {path}.d"
        # A unit that is gone already is what we want; a unit that does not stop is an error.
        return (
            f"if [ -e {path} ]; then systemctl disable -q --now {name} || exit 1; fi; systemctl reset-failed {name} "
            f"2>/dev/null; rm -rf {path} {path}.d"
        )
    if thing.kind == "file":
        parent = thing.name.rpartition("/")[0]
        if parent.startswith(_OUR_TREES) or parent.endswith((".service.d", ".socket.d", ".timer.d")):
            return f"rm -f {name}; rmdir --ignore-fail-on-non-empty {shlex.quote(parent)} 2>/dev/null || true"
        if again := _MADE_FROM.get(f"{parent}/"):
            script = f"{_SCRIPTS}/{again}"
            return f"rm -f {name} || exit 1; [ ! -x {script.split()[0]} ] || {script}"
        return f"rm -f {name}"
    if thing.kind == "directory":
        if not thing.name.startswith(_OUR_TREES):
            return f"rmdir --ignore-fail-on-non-empty {name} 2>/dev/null || true"
        return f"rm -rf {name}"
    if thing.kind == "user":
        return f"! id -u {name} >/dev/null 2>&1 || userdel {name}"
    if thing.kind == "account":
        # A person's: files and log lines keep a name, and nobody else is given its number. Who is logged in is out.
        return (
            f"! id -u {name} >/dev/null 2>&1 || {{ usermod --lock --expiredate 1 --shell /usr/sbin/nologin {name} && "
            f"{{ pkill -KILL -u {name} || true; }}; }}"
        )
    if thing.kind == "hold":
        return f"apt-mark unhold -q {name} >/dev/null"
    if thing.kind == "table":
        return f"! nft list table {thing.name} >/dev/null 2>&1 || nft delete table {thing.name}"
    forced = " -f" if thing.kind == "container" else ""
    return f"! docker {thing.kind} inspect {name} >/dev/null 2>&1 || docker {thing.kind} rm{forced} {name} >/dev/null"


def removal(role: str, things: Sequence[Owned]) -> StringCommand:
    """The command that stops and removes `things`, then forgets them. Safe to repeat: every step accepts that it is done already."""
    steps = ["set -u"]
    steps += [
        f"( {_removal(thing)} ) || {{ echo {shlex.quote(f'gpuwright: cannot remove {thing}')} >&2; exit 1; }}"
        for kind in _ORDER
        for thing in sorted(things)
        if thing.kind == kind
    ]
    steps.append("systemctl daemon-reload")
    record = shlex.quote(f"{RECORD}/{role}")
    gone = shlex.quote("\n".join(f"{thing.kind}\t{thing.name}" for thing in things))
    steps.append(
        f"umask 077; printf '%s\\n' {gone} | grep -vxFf - {record} >{record}.new || true; "
        f"if [ -s {record}.new ]; then mv -f {record}.new {record}; else rm -f {record}.new {record}; fi"
    )
    return StringCommand("sh", "-c", shlex.quote("\n".join(steps)))


@operation()
def _remove(role: str, things: Sequence[Owned]) -> Generator[StringCommand, None, None]:
    snapshot.forget(ctx_host.get())
    yield removal(role, things)


def paths(things: Sequence[Owned]) -> list[str]:
    """The files behind `things`."""
    places = {"file": "", "unit": "/etc/systemd/system/"}
    return [f"{places[thing.kind]}{thing.name}" for thing in things if thing.kind in places]


def recorded(host: object) -> list[Owned]:
    """Everything recorded on the node, of all roles. A node never touched has nothing."""
    try:
        return [Owned(f.kind, f.name) for f in snapshot.read(host).read(snapshot.OWNED)]  # type: ignore[arg-type]
    except snapshot.CouldNotLook:
        return []


def recorded_of(host: object, role: str) -> list[Owned]:
    """What is recorded on the node for one role."""
    try:
        return [Owned(f.kind, f.name) for f in snapshot.read(host).read(snapshot.OWNED) if f.role == role]  # type: ignore[arg-type]
    except snapshot.CouldNotLook:
        return []


def retire(role: str, keep: Sequence[Owned]) -> None:
    """Remove what is recorded for `role` and not in `keep`; the operation's name lists it, in a dry run too."""
    host = ctx_host.get()
    wanted = set(keep)
    gone = [thing for thing in recorded_of(host, role) if thing not in wanted]
    if gone:
        listed = ", ".join(str(thing) for thing in gone)
        _remove(
            name=f"Remove from {host.name} what its node file no longer names ({role}): {listed}",
            role=role,
            things=gone,
        )


# A role is taken away after those that need it.
_ROLE_ORDER = (
    "monitoring",
    "gateway",
    "router",
    "engine",
    "models",
    "containers",
    "memory",
    "pcie",
    "nvidia",
    "kernel",
    "firewall",
)


def retire_roles(present: Sequence[str], but: Sequence[str] = ()) -> None:
    """Remove everything of roles that the node file no longer has. Evidence and weights are never recorded, so they stay.

    `but` are roles whose turn comes later, when another has taken over what they do.
    """
    host = ctx_host.get()
    try:
        roles = {f.role for f in snapshot.read(host).read(snapshot.OWNED)}
    except snapshot.CouldNotLook:
        return
    gone = sorted(roles - {*present, *but}, key=lambda role: _ROLE_ORDER.index(role) if role in _ROLE_ORDER else 99)
    for role in gone:
        retire(role, keep=())
