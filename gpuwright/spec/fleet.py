"""Turns an inventory's description of its hosts into what pyinfra reads, or into one report of everything wrong.

An inventory file looks like this; the underscore keeps pyinfra from reading the helper as a group of hosts::

    from gpuwright.spec.fleet import fleet as _fleet

    gpu_nodes = _fleet({"gpu-01.example.net": {"node": "dgx-station-gb300", "ssh_user": "root"}}, __file__)
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from gpuwright import connect
from gpuwright.spec import load, pins
from gpuwright.spec.document import Mark
from gpuwright.spec.fault import Fault, Refused, SettingPath, relative, report, shown
from gpuwright.spec.names import exists, is_host_name
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.sentence import nearest
from roles.access import sshd

SETTINGS = {
    # what a host may say besides ssh_*: and of which type
    "node": str,
    "set": dict,
    "_sudo": bool,
    "_sudo_user": str,
    "_use_sudo_login": bool,
}
SSH_SETTINGS = {
    # pyinfra's own names (pyinfra.connectors.ssh.ConnectorData); passwords are left to an agent
    "ssh_hostname": str,
    "ssh_port": int,
    "ssh_user": str,
    "ssh_key": str,
    "ssh_allow_agent": bool,
    "ssh_look_for_keys": bool,
    "ssh_forward_agent": bool,
    "ssh_config_file": str,
    "ssh_known_hosts_file": str,
    "ssh_strict_host_key_checking": str,
    "ssh_connect_retries": int,
    "ssh_file_transfer_protocol": str,
}

HOW_TO_ADD = (
    'has no hosts; add one between the braces: "gpu-01.example.net": {"node": "dgx-station-gb300", "ssh_user": "root"},'
)

Host = tuple[str, dict[str, Any]]


class _PyinfraHost(Protocol):
    name: str
    data: Any


@dataclass
class Collected:
    """What one inventory file describes; filled by its calls of `fleet`."""

    file: Path
    known: pins.Pins | None = None
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    specs: dict[str, NodeSpec] = field(default_factory=dict)
    wanted: dict[str, tuple[pins.Wanted, ...]] = field(default_factory=dict)
    node_files: dict[str, Path] = field(default_factory=dict)
    addresses: dict[tuple[str, int], str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


_collecting: Collected | None = None
_loaded: dict[Path, tuple[dict[str, Any], Collected]] = {}


def fleet(
    nodes: Mapping[str, Mapping[str, Any]],
    inventory: str,
    pins: Mapping[str, Any] | str | None = None,
    empty: str = HOW_TO_ADD,
) -> list[Host]:
    """Hosts with JSON-plain data, for pyinfra.

    `nodes` maps a host's name to its settings: ``node`` (a file of nodes/), ``ssh_*`` (as pyinfra names them) and
    ``set`` (single settings by dotted path, over the node file's). `inventory` is the inventory's ``__file__``. `pins`
    replaces inventory/pins.lock.yaml: another file's path, or its content. `empty` is what to say when there are no
    hosts.

    Faults of all hosts end the run with one report and exit status 1, before any connection.
    """
    connect.quiet()
    file = Path(inventory).resolve()
    collected = _collecting if _collecting is not None else _of_this_run(file, sys._getframe(1).f_globals)
    before = list(collected.faults)
    _read(collected, nodes, pins, empty)
    if _collecting is None and collected.faults != before:
        # This file may go on to describe more hosts. Read it again to its end, so that one report has everything.
        del _loaded[file]
        print(report(collect(file).faults or collected.faults), file=sys.stderr)
        raise SystemExit(1)
    return [(name, collected.hosts[name]) for name in nodes if name in collected.hosts]


def _of_this_run(file: Path, namespace: dict[str, Any]) -> Collected:
    """What earlier calls of the same run of the file described; a file that is run again starts anew."""
    if file not in _loaded or _loaded[file][0] is not namespace:
        _loaded[file] = (namespace, Collected(file))
    return _loaded[file][1]


def collect(inventory: Path) -> Collected:
    """Run an inventory file and return everything it describes and every fault; stops at nothing."""
    global _collecting
    collected = _collecting = Collected(inventory.resolve())
    try:
        # an inventory may print; its words belong to the person, not into --json
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(inventory))
        if not collected.hosts and not collected.faults:
            collected.faults.append(Fault(relative(inventory), 0, "", "", HOW_TO_ADD))
    except SyntaxError as error:
        collected.faults.append(Fault(relative(inventory), error.lineno or 0, "", "", f"is not Python: {error.msg}"))
    except (Exception, SystemExit) as error:
        words = f"stops with {type(error).__name__}: {error}"
        collected.faults.append(Fault(relative(inventory), _line_of(error, inventory), "", "", words))
    finally:
        _collecting = None
    return collected


def node(host: _PyinfraHost) -> NodeSpec:
    """The typed description of a pyinfra host; built once per host. Raises Refused for a host without one."""
    data = host.data.get("gpuwright")
    if data is None:
        sentence = "is described by no node file; name it in an inventory through gpuwright.spec.fleet"
        raise Refused([Fault(host.name, 0, "", "", sentence)])
    return _typed(json.dumps(data["spec"]))


@cache
def _typed(text: str) -> NodeSpec:
    return load.typed(json.loads(text))


def _read(
    collected: Collected, nodes: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any] | str | None, empty: str
) -> None:
    name = relative(collected.file)
    positions = _positions(collected.file)
    if not isinstance(nodes, Mapping):
        sentence = 'describes hosts as something else than {"name": {"node": "…"}, …}'
        collected.faults.append(Fault(name, _call_line(collected.file), "", "", sentence))
        return
    if not nodes:
        collected.faults.append(Fault(name, _call_line(collected.file), "", "", empty))
        return
    try:
        known = pins.read(given, collected.file)
    except Refused as refused:
        collected.faults += refused.faults
        return
    collected.known = known
    for host, settings in nodes.items():
        if not isinstance(host, str):
            words = "describes a host whose name is not text"
            collected.faults.append(Fault(name, _call_line(collected.file), "", str(host), words))
            continue
        place = _Place(name, host, positions)
        collected.faults += _host_faults(collected, place, settings)
        if not isinstance(settings, Mapping) or not isinstance(settings.get("node"), str):
            continue
        file = load.node_file(settings["node"], collected.file)
        if not exists(file):
            collected.faults.append(place.fault(("node",), settings["node"], f"names no node file{_known(file)}"))
            continue
        wanted = settings.get("set", {})
        if not isinstance(wanted, Mapping):
            continue
        if strange := [path for path in wanted if not isinstance(path, str)]:
            words = 'is not the dotted path of a setting, as in "gateway.hostnames"'
            collected.faults.append(place.fault(("set",), strange[0], words))
            continue
        overrides = {path: (value, place.mark(("set", path))) for path, value in wanted.items()}
        try:
            loaded = load.load(file, collected.file, overrides, known)
        except Refused as refused:
            collected.faults += refused.faults
            continue
        spec = loaded.spec
        collected.faults += loaded.unfinished
        collected.faults += _login_faults(place, settings, spec)
        collected.specs[host] = spec
        collected.wanted[host] = loaded.wanted
        collected.node_files[host] = file
        collected.hosts[host] = _data(collected.file, file, settings, spec)


def _data(inventory: Path, file: Path, settings: Mapping[str, Any], spec: NodeSpec) -> dict[str, Any]:
    """What pyinfra keeps for the host. Unknown host keys are refused unless the inventory says otherwise."""
    own = {key: value for key, value in settings.items() if key not in ("node", "set")}
    return {
        "ssh_strict_host_key_checking": "yes",
        "ssh_known_hosts_file": str(inventory.parent / "known_hosts"),
        **own,
        "gpuwright": {"node": file.stem, "spec": load.plain(spec)},
    }


@dataclass(frozen=True)
class _Place:
    """Where an inventory describes one host."""

    file: str
    host: str
    positions: dict[SettingPath, int]

    def mark(self, path: SettingPath) -> Mark:
        whole = (self.host, *path)
        for length in range(len(whole), 0, -1):
            if whole[:length] in self.positions:
                return Mark(self.file, self.positions[whole[:length]])
        return Mark(self.file, 0)

    def fault(self, path: SettingPath, seen: object, sentence: str) -> Fault:
        value = "" if seen is None else shown(path, seen)
        return Fault(self.file, self.mark(path).line, ".".join((self.host, *map(str, path))), value, sentence)


def _host_faults(collected: Collected, place: _Place, settings: object) -> list[Fault]:
    found: list[Fault] = []
    host = place.host
    if not (host == "@local" or is_host_name(host)):
        found.append(place.fault((), None, "is not a host name: letters, digits, '-' and '.', or an IP address"))
    if not isinstance(settings, Mapping):
        return [*found, place.fault((), None, 'must be a mapping such as {"node": "dgx-station-gb300"}')]
    if "node" not in settings:
        found.append(place.fault((), None, 'names no node file: add "node": "…"'))
    allowed = {**SETTINGS, **SSH_SETTINGS}
    for key, value in settings.items():
        if key in ("ssh_password", "ssh_key_password"):
            found.append(place.fault((key,), None, "would put a password into host data; use an SSH key or an agent"))
        elif key not in allowed:
            found.append(place.fault((key,), None, "is not a setting of a host" + nearest(str(key), list(allowed))))
        elif not isinstance(value, allowed[key]) or (isinstance(value, bool) and allowed[key] is not bool):
            kind = {str: "text", int: "a whole number", bool: "True or False", dict: "a mapping"}[allowed[key]]
            found.append(place.fault((key,), value, f"must be {kind}"))
    strict = settings.get("ssh_strict_host_key_checking", "yes")
    if strict not in ("yes", "accept-new"):
        sentence = "must be 'yes' or 'accept-new'; a changed host key is never accepted"
        found.append(place.fault(("ssh_strict_host_key_checking",), strict, sentence))
    port = settings.get("ssh_port", 22)
    if isinstance(port, int) and not 1 <= port <= 65535:
        found.append(place.fault(("ssh_port",), port, "must be from 1 to 65535"))
    return [*found, *_address_faults(collected, place, settings)]


def _login_faults(place: _Place, settings: Mapping[str, Any], spec: NodeSpec) -> list[Fault]:
    """The run's own user must be able to come back after role `access` has been at work."""
    if spec.access is None or place.host == "@local":
        return []
    name = settings.get("ssh_user")
    if name is None:
        sentence = "is missing: role access has to know whom it must not lock out"
        return [place.fault(("ssh_user",), None, sentence)]
    path: SettingPath = ("ssh_user",)
    users = spec.access.users
    deployers = [user for user, what in users.items() if what.sudo == "all"]
    instead = f"connect as {deployers[0]}" if deployers else "give one of access.users 'sudo: all'"
    if name == "root":
        if sshd.keywords(spec.access, spec.hardening).get("PermitRootLogin") == "no":
            sentence = f"could not log in any more: hardening {spec.hardening} refuses root over SSH; {instead}"
            return [place.fault(path, name, sentence)]
        if sshd.only_users(spec.access, spec.hardening) and name not in users:
            sentence = f"could not log in any more: access.users does not name root; {instead}, or add it"
            return [place.fault(path, name, sentence)]
        return []
    if name not in users:
        if not sshd.only_users(spec.access, spec.hardening):
            return []
        sentence = f"could not log in any more: it is none of access.users{nearest(str(name), list(users))}"
        return [place.fault(path, name, sentence)]
    if users[name].sudo != "all":
        return [place.fault(path, name, f"may not become root (access.users.{name}.sudo); {instead}")]
    if not settings.get("_sudo"):
        sentence = 'is missing: this user becomes root through sudo, so the host needs "_sudo": True'
        return [place.fault(("_sudo",), None, sentence)]
    return []


def _address_faults(collected: Collected, place: _Place, settings: Mapping[str, Any]) -> list[Fault]:
    address = (str(settings.get("ssh_hostname", place.host)).lower().rstrip("."), settings.get("ssh_port", 22))
    if not isinstance(address[1], int):
        return []
    other = collected.addresses.setdefault(address, place.host)
    if other == place.host and place.host in collected.hosts:
        return [place.fault((), None, "is described twice in this inventory")]
    if other != place.host:
        path: SettingPath = ("ssh_hostname",) if "ssh_hostname" in settings else ()
        return [place.fault(path, None, f"has the same address as {other}: {address[0]} port {address[1]}")]
    return []


def _known(file: Path) -> str:
    names = sorted(other.stem for other in file.parent.glob("*.yaml"))
    return nearest(file.stem, names)


def _positions(file: Path) -> dict[SettingPath, int]:
    """Lines of the string keys in the dictionaries of a Python file, by path from each outermost dictionary."""
    found: dict[SettingPath, int] = {}

    def walk(tree: ast.AST, path: SettingPath) -> None:
        if isinstance(tree, ast.Dict):
            for key, value in zip(tree.keys, tree.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    found.setdefault((*path, key.value), key.lineno)
                    walk(value, (*path, key.value))
                else:
                    walk(value, path)
        else:
            for child in ast.iter_child_nodes(tree):
                walk(child, path)

    try:
        walk(ast.parse(file.read_text()), ())
    except (SyntaxError, OSError, ValueError):
        return {}
    return found


def _call_line(file: Path) -> int:
    """The line of the inventory that called us."""
    frame = sys._getframe()
    while frame is not None:
        if Path(frame.f_code.co_filename).resolve() == file:
            return frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return 0


def _line_of(error: BaseException, file: Path) -> int:
    trace, line = error.__traceback__, 0
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).resolve() == file.resolve():
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
