"""What a node looks like now, read through one exchange and typed on arrival.

Every role registers the sections it needs (``roles/<role>/facts.py``); one script runs them all. A section that
failed is an observation of its own: "could not look" is never "off" (security.md 4.2).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pyinfra.api import FactBase, StringCommand
from pyinfra.api.state import BaseStateCallback
from pyinfra.context import ctx_state

from gpuwright import numa

T = TypeVar("T")

# A section that waits longer is reported as "could not look": an audit must not hang on a stuck daemon
# (CISOfy/lynis issue 643).
SECTION_TIMEOUT_SECONDS = 20


class CouldNotLook(Exception):
    """A section could not be observed; the message says which and why."""


@dataclass(frozen=True)
class Section(Generic[T]):
    """One observation: a POSIX sh script run as root, and the parser of what it prints.

    A non-zero exit status, a timeout or a parser's ValueError means "could not look".
    """

    name: str
    script: str
    parse: Callable[[str], T]


_sections: dict[str, Section[Any]] = {}


def register(section: Section[T]) -> Section[T]:
    """Add a section to every snapshot read from now on. Names are unique."""
    if section.name in _sections and _sections[section.name] is not section:
        raise ValueError(f"snapshot section {section.name!r} is registered twice")
    _sections[section.name] = section
    return section


@dataclass(frozen=True)
class Snapshot:
    """The raw answers of one exchange: section name to (exit status, standard output)."""

    answers: dict[str, tuple[int, str]]

    def read(self, section: Section[T]) -> T:
        """The typed observation. Raises CouldNotLook."""
        if section.name not in self.answers:
            raise CouldNotLook(f"{section.name}: the node gave no answer")
        status, text = self.answers[section.name]
        if status:
            reason = (
                f"took longer than {SECTION_TIMEOUT_SECONDS} s" if status in (124, 137) else f"exit status {status}"
            )
            raise CouldNotLook(f"{section.name}: {reason}")
        try:
            return section.parse(text)
        except (ValueError, KeyError, IndexError) as error:
            raise CouldNotLook(f"{section.name}: unexpected answer ({error})") from error

    def to_json(self) -> str:
        """The raw answers, to be stored and judged again later."""
        return json.dumps({"schema": 1, "answers": self.answers}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """The inverse of `to_json`."""
        return cls({name: (int(status), answer) for name, (status, answer) in json.loads(text)["answers"].items()})


def script(sections: list[Section[Any]] | None = None) -> str:
    """One POSIX sh script that prints a line per section: name, exit status, base64 of its output."""
    lines = ["LC_ALL=C; export LC_ALL"]
    for section in sections if sections is not None else list(_sections.values()):
        lines.append(
            f"o=$(timeout -k 2 {SECTION_TIMEOUT_SECONDS} sh -c {shlex.quote(section.script)} 2>/dev/null </dev/null); s=$?; "
            f"printf '%s %s ' {section.name} $s; printf '%s' \"$o\" | base64 -w0; echo"
        )
    return "\n".join([*lines, "exit 0"])


def parse(text: str) -> Snapshot:
    """The inverse of `script`'s output; lines of another shape are ignored (login banners)."""
    answers: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        status, _, encoded = rest.partition(" ")
        if not status.isdecimal():
            continue
        try:
            answers[name] = (int(status), base64.b64decode(encoded, validate=True).decode(errors="replace"))
        except (binascii.Error, ValueError):
            continue
    return Snapshot(answers)


class NodeSnapshot(FactBase[Snapshot]):
    """The snapshot as a pyinfra fact: the sections of these names, separated by blanks, or all of them."""

    def command(self, names: str = "") -> StringCommand:
        """One remote command for all of them."""
        return StringCommand(script([_sections[name] for name in names.split()] or None))

    def process(self, output: Any) -> Snapshot:
        """Lines to Snapshot."""
        return parse("\n".join(output))

    @staticmethod
    def default() -> Snapshot:
        """A node that gave no answer."""
        return Snapshot({})


# A section is one exchange, three times the way to the node and back; all of them are one, and up to a second of the node's work.
_ONE_BY_ONE = 5


@dataclass(frozen=True)
class _Since(Snapshot):
    """What a node looks like since something changed it: read as it is asked for.

    The next change is seldom far, and takes with it whatever nobody had asked for: a first run of all roles would read everything
    two dozen times.
    """

    host: Any

    def read(self, section: Section[T]) -> T:
        if section.name in _sections and section.name not in self.answers:
            missing = [name for name in _sections if name not in self.answers]
            names = [section.name] if len(self.answers) < _ONE_BY_ONE else missing
            self.answers.update(self.host.get_fact(NodeSnapshot, names=" ".join(names)).answers)
        return super().read(section)


_cache: dict[tuple[str, bool], Snapshot] = {}
_changed: set[str] = set()
"""Hosts that something has changed since the run began to execute."""


class _ForgetAfterChange(BaseStateCallback):
    """Whatever an operation did, the snapshot read before it is history; so it is after a reconnect."""

    @staticmethod
    def operation_host_success(state: Any, host: Any, op_hash: str, retry_count: int = 0) -> None:
        # This is called before pyinfra marks the operation complete, so the commands are not known yet:
        # the operations of this library call forget() themselves, anything else is treated as a change.
        if not state.get_op_meta(op_hash).names & _own_operations:
            forget(host)

    @staticmethod
    def operation_host_error(state: Any, host: Any, op_hash: str, retry_count: int = 0, max_retries: int = 0) -> None:
        forget(host)

    @staticmethod
    def host_connect(state: Any, host: Any) -> None:
        forget(host)


_own_operations: set[str] = set()


def read(host: Any) -> Snapshot:
    """The node's snapshot, cached until something changes the node: one exchange when it is not, and from its first change on
    the sections that are asked for."""
    state = ctx_state.get()
    if not any(isinstance(handler, _ForgetAfterChange) for handler in state.callback_handlers):
        state.add_callback_handler(_ForgetAfterChange())
    key = (host.name, bool(state.is_executing))
    if key not in _cache:
        # With --yes nothing waits between preparing and executing, so the first look is still true; a person at the
        # prompt may take minutes.
        first_look = (
            _cache.pop((host.name, False), None) if state.is_executing and not state.check_for_changes else None
        )
        _cache[key] = first_look or (_Since({}, host) if host.name in _changed else host.get_fact(NodeSnapshot))
    if host.current_op_hash:
        _own_operations.update(state.get_op_meta(host.current_op_hash).names)
    return _cache[key]


def forget(host: Any) -> None:
    """An operation calls this before its first command: what was read before is not true any more."""
    _cache.pop((host.name, True), None)
    if ctx_state.isset() and ctx_state.get().is_executing:  # the first look, too, where nobody has used it yet
        _cache.pop((host.name, False), None)
        _changed.add(host.name)


# --- what the library itself looks at -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One thing recorded as ours, and the file behind it as it is now (None where there is none)."""

    role: str
    kind: str
    name: str
    sha256: str | None = None
    mode: str | None = None
    user: str | None = None
    group: str | None = None


def _parse_owned(text: str) -> list[Found]:
    recorded: list[tuple[str, str, str]] = []
    stats: dict[str, tuple[str, str, str]] = {}
    sums: dict[str, str] = {}
    for line in text.splitlines():
        tag, _, rest = line.partition(" ")
        if tag == "R":
            role, kind, name = rest.split("\t", 2)
            recorded.append((role, kind, name))
        elif tag == "S":
            mode, user, group, path = rest.split(" ", 3)
            stats[path] = (mode.rjust(4, "0"), user, group)
        elif tag == "H":
            digest, _, path = rest.partition("  ")
            sums[path] = digest
    found = []
    for role, kind, name in recorded:
        path = f"/etc/systemd/system/{name}" if kind == "unit" else name
        found.append(Found(role, kind, name, sums.get(path), *stats.get(path, ())))
    return found


# One awk, one stat and one sha256sum for all files: a fork per file would cost more than all the rest.
OWNED = register(
    Section(
        "owned",
        r"""
cd /var/lib/gpuwright/owned 2>/dev/null || exit 0
set -- *
[ -e "$1" ] || exit 0
awk '{print "R " FILENAME "\t" $0}' "$@"
awk -F '\t' '$1 == "file" {print $2} $1 == "unit" {print "/etc/systemd/system/" $2}' "$@" | sort -u >/run/gpuwright-owned.$$
xargs -r -d '\n' stat -c 'S %a %U %G %n' -- </run/gpuwright-owned.$$
xargs -r -d '\n' sha256sum -- </run/gpuwright-owned.$$ | sed 's/^/H /'
rm -f /run/gpuwright-owned.$$
exit 0
""",
        _parse_owned,
    )
)


def _parse_packages(text: str) -> dict[str, str]:
    packages = {}
    for line in text.splitlines():
        status, name, version = line.split(" ", 2)
        if status == "installed":
            packages[name] = version
    if not packages:
        raise ValueError("no package at all")
    return packages


PACKAGES = register(
    Section("packages", r"dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n'", _parse_packages)
)


def _parse_units(text: str) -> dict[str, dict[str, str]]:
    units = {}
    for block in text.split("\n\n"):
        properties = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in properties:
            units[properties["Id"]] = properties
    return units


_UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID,Result,NRestarts,FragmentPath,"
    "ExecMainStartTimestamp,ExecMainStatus,ConditionResult"
)
UNITS = register(
    Section(
        "units",
        rf"""
# A template has no state of its own, and asking for one fails the whole question.
own=$(awk -F '\t' '$1 == "unit" && $2 !~ /@[.]/ {{print $2}}' /var/lib/gpuwright/owned/* 2>/dev/null)
systemctl show --no-pager --property={_UNIT_PROPERTIES} docker.service docker.socket containerd.service \
  systemd-timesyncd.service systemd-journald.service unattended-upgrades.service ssh.service nftables.service \
  apparmor.service auditd.service $own
""",
        _parse_units,
    )
)


# systemd-detect-virt(1)
_CONTAINERS = frozenset(
    [
        "openvz",
        "lxc",
        "lxc-libvirt",
        "systemd-nspawn",
        "docker",
        "podman",
        "rkt",
        "wsl",
        "proot",
        "pouch",
        "container-other",
    ]
)


@dataclass(frozen=True)
class System:
    """The running operating system."""

    id: str
    version_id: str
    codename: str
    architecture: str
    kernel: str
    virtualization: str
    reboot_required: bool

    @property
    def is_container(self) -> bool:
        """What `systemd-detect-virt --container` says: the kernel, its clock and its reboots are the machine's around it."""
        return self.virtualization in _CONTAINERS


def _parse_system(text: str) -> System:
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return System(
        values["ID"],
        values.get("VERSION_ID", ""),
        values.get("VERSION_CODENAME", ""),
        values["ARCHITECTURE"],
        values["KERNEL"],
        values["VIRTUALIZATION"],
        values["REBOOT"] == "yes",
    )


SYSTEM = register(
    Section(
        "system",
        r"""
. /etc/os-release
printf 'ID=%s\nVERSION_ID=%s\nVERSION_CODENAME=%s\n' "$ID" "${VERSION_ID:-}" "${VERSION_CODENAME:-}"
printf 'ARCHITECTURE=%s\nKERNEL=%s\n' "$(uname -m)" "$(uname -r)"
printf 'VIRTUALIZATION=%s\n' "$(systemd-detect-virt || true)"
[ -e /run/reboot-required ] && echo REBOOT=yes || echo REBOOT=no
""",
        _parse_system,
    )
)


@dataclass(frozen=True)
class MemoryNode:
    """One NUMA node. An HBM node has memory and no CPUs, wherever it is numbered (gpu-node.md 3.1)."""

    cpus: str
    """Online CPUs, as the kernel lists them."""
    mem_total_kib: int
    file_pages_kib: int
    shmem_kib: int

    @property
    def is_hbm(self) -> bool:
        """Memory without CPUs."""
        return self.mem_total_kib > 0 and not self.cpus


def hbm_nodes(nodes: Mapping[int, MemoryNode]) -> frozenset[int]:
    """The nodes with memory and without CPUs."""
    return frozenset(index for index, node in nodes.items() if node.is_hbm)


def _parse_numa(text: str) -> dict[int, MemoryNode]:
    """Nodes by index; {} where the kernel knows none. What the kernel says twice must agree, or it is not believed."""
    *lines, end = text.splitlines() or [""]
    if end != "end":
        raise ValueError("the list of memory nodes is cut short")
    if not lines:
        return {}
    said: dict[str, frozenset[int]] = {}
    nodes: dict[int, MemoryNode] = {}
    for line in lines:
        key, _, value = line.partition(" ")
        if key in ("online", "has_memory", "has_cpu") and key not in said:
            said[key] = numa.indices(value)
        elif match := re.fullmatch(r"node (\d+)\|([\d,-]*)\|(\d+)\|(\d+)\|(\d+)", line, re.ASCII):
            numa.indices(match[2])
            node = MemoryNode(match[2], int(match[3]), int(match[4]), int(match[5]))
            if int(match[1]) in nodes:
                raise ValueError(line)
            nodes[int(match[1])] = node
        else:
            raise ValueError(line)
    seen = {
        "online": frozenset(nodes),
        "has_memory": frozenset(index for index, node in nodes.items() if node.mem_total_kib),
        "has_cpu": frozenset(index for index, node in nodes.items() if node.cpus),
    }
    for key, expected in seen.items():
        if said.get(key) != expected:
            raise ValueError(f"{key} does not agree with the nodes themselves")
    return nodes


# Sizes are not compared with one another: the kernel's counters drift by some pages per CPU.
NUMA = register(
    Section(
        "numa",
        r"""
cd /sys/devices/system/node 2>/dev/null || { echo end; exit 0; }
for list in online has_memory has_cpu; do
  printf '%s %s\n' "$list" "$(cat "$list")"
done
for node in node[0-9]*; do
  cpus=$(cat "$node/cpulist") || exit 1
  awk -v node="${node#node}" -v cpus="$cpus" '
    $3 == "MemTotal:" {total = $4} $3 == "FilePages:" {pages = $4} $3 == "Shmem:" {shmem = $4}
    END {printf "node %s|%s|%s|%s|%s\n", node, cpus, total, pages, shmem}' "$node/meminfo"
done
echo end
""",
        _parse_numa,
    )
)
