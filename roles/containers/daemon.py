"""What daemon.json must say, and how it is merged with what others put there.

The file has more than one owner: NVIDIA's toolkit writes ``runtimes``, sites add proxies and mirrors. So it is merged
three ways: what we last applied, what is there now, what is wanted. Pure functions on text; no host is touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roles.containers.spec import ContainersSpec

PATH = "/etc/docker/daemon.json"

Version = tuple[int, int]
"""Major and minor of a Docker engine, as in (26, 1)."""

# Arrays of "name=value": each name is a setting of its own. The other arrays are sets, merged entry by entry.
_OPTION_ARRAYS = ("exec-opts", "storage-opts", "labels")

# What dockerd takes over on SIGHUP (docs.docker.com, dockerd, "Configuration reload behavior"); all else needs a restart.
# `features` is listed there and missing here: the driver of CDI devices is registered at start only (seen with 26.1:
# "could not select device driver "cdi"" after a reload).
# `features` is in that list, too, but CDI devices are registered only when the daemon starts (moby, cmd/dockerd).
RELOADABLE = frozenset(
    """
    allow-nondistributable-artifacts authorization-plugins debug default-runtime insecure-registries labels
    live-restore max-concurrent-downloads max-concurrent-uploads max-download-attempts registry-mirrors runtimes
    shutdown-timeout
    """.split()  # noqa: SIM905
)


class BrokenDaemonJson(ValueError):
    """The live file cannot be merged; the message is one sentence for a user."""


def parse(text: str) -> dict[str, Any]:
    """The object that a daemon.json holds; an empty file is an empty object, as it is to dockerd.

    Raises BrokenDaemonJson for anything dockerd would refuse, or read differently from what is written.
    """
    if text.startswith("\ufeff"):
        raise BrokenDaemonJson(f"{PATH} starts with a byte order mark; save it as UTF-8 without one")
    if not text.strip():
        return {}

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BrokenDaemonJson(f"{PATH} has {json.dumps(twice[0])} twice and dockerd takes the last; remove one")
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise BrokenDaemonJson(f"{PATH} has {name}, which JSON does not know; write a number or remove the key")

    try:
        value = json.loads(text, object_pairs_hook=object_of, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise BrokenDaemonJson(f"{PATH} is not JSON: {_what_is_wrong(text, error)}") from None
    except RecursionError:
        raise BrokenDaemonJson(f"{PATH} is not a daemon.json: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise BrokenDaemonJson(f"{PATH} holds {_kind(value)}, and an object ({{...}}) is needed")
    return value


def _what_is_wrong(text: str, error: json.JSONDecodeError) -> str:
    """The fault in a sentence, with its line; the shapes people really write are named."""
    where = f"line {error.lineno}, column {error.colno}"
    rest = text[error.pos :].lstrip()
    before = text[: error.pos].rstrip()
    if rest.startswith(("//", "/*", "#")):
        return f"a comment in line {text[: len(text) - len(rest)].count(chr(10)) + 1}, and JSON has none; remove it"
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return f"a comma before the closing {rest[0]!r} ({where}); remove it"
    if not rest:
        return f"it ends too early ({where}); a closing brace, bracket or quote is missing"
    return f"{error.msg.lower()} ({where})"


def _kind(value: Any) -> str:
    return {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }[type(value)]


_MISSING: Any = object()
_Object = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One setting of daemon.json and what the merge makes of it. ``_MISSING`` is a value that is not there."""

    name: str  # as people write it: log-opts.max-size, exec-opts[native.umask]
    last: Any  # what we last applied
    live: Any  # what is there now
    wanted: Any  # what the node file asks for

    @property
    def key(self) -> str:
        """The top-level key of daemon.json that it belongs to."""
        return re.split(r"[.\[]", self.name)[0]

    @property
    def ours(self) -> bool:
        """There now as we left it, or never there before us."""
        return self.live is _MISSING or _same(self.live, self.last)

    def __str__(self) -> str:
        if self.wanted is _MISSING:
            return f"{self.name}: {show(self.live)} removed"
        if self.live is _MISSING:
            return f"{self.name}: {show(self.wanted)}"
        return f"{self.name}: {show(self.live)} -> {show(self.wanted)}"


@dataclass(frozen=True)
class Merge:
    """The file as it must be, and how it got there."""

    result: _Object
    changes: tuple[Setting, ...] = ()  # what differs between the live file and the result
    drifted: tuple[Setting, ...] = ()  # ours, changed by somebody else since; put back
    kept: tuple[Setting, ...] = ()  # ours once, no longer wanted, changed by somebody else since; left alone
    conflicts: tuple[Setting, ...] = ()  # never ours, and not what is wanted; nothing is written

    @property
    def text(self) -> str:
        """The result as it is written."""
        return json.dumps(self.result, indent=2) + "\n"


def merge(applied: _Object, live: _Object, wanted: _Object) -> Merge:
    """Three ways: keys of others stay, ours become what is wanted, ours of old go unless somebody changed them since.

    A value that we never applied and that differs from what is wanted has an owner already: a conflict.
    Raises BrokenDaemonJson where the live file has, say, a string in the place of an object.
    """
    seen: dict[str, list[Setting]] = {"changes": [], "drifted": [], "kept": [], "conflicts": []}

    def value(name: str, last: Any, live: Any, want: Any) -> Any:
        shapes = {type(v) if isinstance(v, dict | list) else None for v in (live, want) if v is not _MISSING}
        if len(shapes) > 1:
            raise BrokenDaemonJson(
                f"{name} in {PATH} is {_kind(live)}, and {_kind(want)} is wanted; correct or remove it"
            )
        if None in shapes or not shapes:
            return scalar(Setting(name, last, live, want))
        if dict in shapes:
            result: Any = objects(name, *({} if not isinstance(v, dict) else v for v in (last, live, want)))
        else:
            result = arrays(name, *([] if not isinstance(v, list) else v for v in (last, live, want)))
        # What was only ever ours goes with its last setting; an empty object of others stays.
        return result if result or live in ({}, []) or want in ({}, []) else _MISSING

    def scalar(setting: Setting) -> Any:
        if setting.wanted is _MISSING:
            if setting.last is _MISSING or setting.live is _MISSING:
                return setting.live
            if not setting.ours:
                seen["kept"].append(setting)
                return setting.live
        elif setting.live is not _MISSING and _same(setting.live, setting.wanted):
            return setting.live
        elif setting.last is _MISSING and setting.live is not _MISSING:
            seen["conflicts"].append(setting)
            return setting.live
        elif setting.last is not _MISSING and not _same(setting.last, setting.live):
            seen["drifted"].append(setting)
        seen["changes"].append(setting)
        return setting.wanted

    def objects(name: str, last: _Object, live: _Object, want: _Object) -> _Object:
        result = {}
        for key in [*live, *(key for key in want if key not in live)]:
            below = f"{name}.{key}" if name else key
            result[key] = value(below, *(v.get(key, _MISSING) for v in (last, live, want)))
        return {key: v for key, v in result.items() if v is not _MISSING}

    def arrays(name: str, last: list[Any], live: list[Any], want: list[Any]) -> list[Any]:
        last_, live_, want_ = ({_entry(name, entry): entry for entry in entries} for entries in (last, live, want))
        result = [
            scalar(Setting(f"{name}[{key}]", *(v.get(key, _MISSING) for v in (last_, live_, want_))))
            for key in [*live_, *(key for key in want_ if key not in live_)]
        ]
        return [v for v in result if v is not _MISSING]

    return Merge(objects("", applied, live, wanted), **{kind: tuple(found) for kind, found in seen.items()})


def _entry(name: str, entry: Any) -> str:
    """What tells the entries of an array apart: the name of an option, else the whole entry."""
    if name in _OPTION_ARRAYS and isinstance(entry, str) and "=" in entry:
        return entry.partition("=")[0]
    return entry if isinstance(entry, str) else json.dumps(entry, sort_keys=True)


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1, and "5" is not 5."""
    if one is _MISSING or other is _MISSING:
        return one is other
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def show(value: Any) -> str:
    """A value for a sentence; the user and password in a proxy's address are not shown."""
    if value is _MISSING:
        return "nothing"
    return re.sub(r"://[^/@\s\"]+@", "://***@", json.dumps(value, sort_keys=True))


def differing_keys(one: _Object, other: _Object) -> list[str]:
    """Top-level keys whose values differ."""
    return sorted(
        key for key in one.keys() | other.keys() if not _same(one.get(key, _MISSING), other.get(key, _MISSING))
    )


def wanted(spec: ContainersSpec, gpus: int = 0, version: Version | None = None) -> _Object:
    """daemon.json as the node file asks for it. `version` is the installed engine's: None before there is one."""
    ours: _Object = {
        "data-root": spec.data_root,
        # A port published without an address is reachable from this machine only. Published ports bypass the input
        # chain of every firewall (moby issue 4737), so the default must not be 0.0.0.0.
        "ip": "127.0.0.1",
        # Containers outlive a restart of the daemon (security.md 3.3).
        "live-restore": True,
        # Not `local`: evidence is also needed when the daemon is down, and only json-file is a format others can read.
        "log-driver": "json-file",
        # Plain bytes: Docker reads "64m" as 64,000,000 (go-units, FromHumanSize).
        "log-opts": {"max-size": str(spec.log_max_size), "max-file": str(spec.log_max_files)},
        # docker-proxy dies with the daemon and would cut every stream to a published port; without it the kernel
        # forwards, and a stream outlives a restart of Docker. It makes Docker set route_localnet on its bridges,
        # which the neighbour guard (or Docker 28's own rules) answers.
        "userland-proxy": False,
    }
    if version and version >= (24, 0):
        # `ip` above is for the default bridge only; networks of one's own have this key since Docker 24.
        ours["default-network-opts"] = {"bridge": {"com.docker.network.bridge.host_binding_ipv4": "127.0.0.1"}}
    if gpus:
        # On by default since 28.3, an opt-in since 25 (docs.docker.com, CDI).
        ours["features"] = {"cdi": True}
    return _overlay(ours, spec.daemon)


def size(text: str) -> int | None:
    """Bytes of a size as Docker reads it: "64m" is 64,000,000 (go-units, FromHumanSize). None for another shape."""
    match = re.fullmatch(r"(\d+)\s?([kmg]?)b?", text.strip().lower())
    return int(match[1]) * 1000 ** " kmg".index(match[2] or " ") if match else None


def as_written(wanted: _Object, live: _Object) -> _Object:
    """`wanted`, with a size in the words of the live file where both mean the same: "100m" there is 100000000 here."""
    there = live["log-opts"].get("max-size") if isinstance(live.get("log-opts"), dict) else None
    options = wanted.get("log-opts", {})
    if isinstance(there, str) and isinstance(options, dict) and size(there) == size(str(options.get("max-size", ""))):
        return {**wanted, "log-opts": {**options, "max-size": there}}
    return wanted


def _overlay(base: _Object, top: _Object) -> _Object:
    result = dict(base)
    for key, v in top.items():
        both = isinstance(v, dict) and isinstance(result.get(key), dict)
        result[key] = _overlay(result[key], v) if both else v
    return result


# dockerd's flags are named like the keys; those that may be repeated are singular, their keys plural.
_PLURAL = frozenset(
    """
    allow-nondistributable-artifact authorization-plugin default-address-pool default-network-opt default-ulimit dns
    dns-opt exec-opt feature host insecure-registry label log-opt node-generic-resource registry-mirror storage-opt
    """.split()  # noqa: SIM905
)
_IRREGULAR = {
    "dns": "dns",
    "dns-search": "dns-search",
    "insecure-registry": "insecure-registries",
    "add-runtime": "runtimes",
}
_SHORT = {"D": "debug", "H": "host", "G": "group", "b": "bridge", "g": "data-root", "l": "log-level", "p": "pidfile", "s": "storage-driver"}  # fmt: skip


def keys_of_flags(arguments: Sequence[str]) -> dict[str, str]:
    """daemon.json keys that a dockerd command line sets already, each with the flag that does it.

    dockerd refuses to start when a setting is in both (moby issue 22339).
    """
    found = {}
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument[2:].partition("=")[0]
        elif argument.startswith("-") and argument[1:2] in _SHORT:
            flag = _SHORT[argument[1]]
        else:
            continue
        found[_IRREGULAR.get(flag, f"{flag}s" if flag in _PLURAL else flag)] = argument.partition("=")[0]
    return found
