"""Whether systemd runs the units that we ship as confined as they were shipped: what it says of itself, not what the files say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuwright import sandbox
from gpuwright.audit import systemd
from gpuwright.audit.control import Verdict, without
from gpuwright.snapshot import Section, Snapshot
from gpuwright.spec.node import NodeSpec

_SETS = "-- sets of system calls --"


def _parse(text: str) -> tuple[dict[str, dict[str, str]], dict[str, list[str]]]:
    """Units to their properties, and the sets of system calls that this systemd knows, to what is in them."""
    shown, found, listed = text.partition(f"{_SETS}\n")
    if not found:
        raise ValueError("no sets of system calls")
    sets: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if line.startswith("@"):
            sets[line.strip()] = []
        elif sets and (name := line.strip()) and not name.startswith("#"):
            list(sets.values())[-1].append(name)
    return systemd.blocks(shown), sets


# Units that are not running have settings, too, and so has what a template makes.
SHOWN = Section(
    "audit-base-confinement",
    rf"""
set -f
units=$(systemctl list-unit-files --plain --no-legend 'gpuwright-*.service' |
  awk '$2 != "transient" {{sub(/@[.]service/, "@audit.service", $1); print $1}}')
[ -z "$units" ] || systemctl show --no-pager --property=Id,{",".join(sandbox.BASE)} $units || exit 1
echo '{_SETS}'
systemd-analyze --no-pager syscall-filter
""",
    _parse,
)


def _calls(names: list[str], sets: Mapping[str, list[str]]) -> set[str]:
    """Names and sets of system calls, as names."""
    found: set[str] = set()
    for name in names:
        found |= _calls(sets[name], sets) if name.startswith("@") else {name}
    return found


def _filter(value: str, sets: Mapping[str, list[str]]) -> set[str]:
    """What our lines of SystemCallFilter= allow, read in their order (systemd.exec(5)). Raises KeyError."""
    allowed: set[str] = set()
    for part in value.split():
        if part.startswith("~"):
            allowed -= _calls([part[1:]], sets)
        else:
            allowed |= _calls([part], sets)
    return allowed


_NETWORKS = {"any": "0.0.0.0/0 ::/0"}
_LISTS: dict[str, Callable[[str], str]] = {
    "CapabilityBoundingSet": str.upper,
    "RestrictAddressFamilies": str,
    "ReadWritePaths": str,
    "SystemCallErrorNumber": lambda value: value.replace("EPERM", "1"),
    "IPAddressDeny": lambda value: " ".join(_NETWORKS.get(word, word) for word in value.split()),
}


def _differences(shown: Mapping[str, str], wanted: Mapping[str, str], sets: Mapping[str, list[str]]) -> list[str]:
    faults = []
    for key, value in wanted.items():
        now = shown.get(key)
        if now is None:
            faults.append(f"systemd does not say {key}=")
        elif key == "SystemCallFilter":
            # A set has names of other architectures, which systemd does not list where they do not exist.
            more = set(now.split()) - _filter(value, sets)
            if more or not now:
                faults.append(f"{key}= also lets through {', '.join(sorted(more)[:5]) or 'everything'}")
        elif key in _LISTS:
            seen, asked = (set(_LISTS[key](text).split()) for text in (now, value))
            if seen != asked:
                faults.append(f"{key}={' '.join(sorted(seen))} (shipped: {' '.join(sorted(asked)) or 'none'})")
        elif now != value:
            faults.append(f"{key}={now} (shipped: {value or 'none'})")
    return faults


def as_shipped(seen: Snapshot, spec: NodeSpec) -> Verdict:
    """Every unit of ours that systemd knows has the confinement of the table, whatever drop-ins say."""
    units, sets = seen.read(SHOWN)
    wanted = {confined.unit.replace("@.", "@audit."): confined.values for confined in sandbox.of_node(spec)}
    faults = [f"{unit}: not in the table of units" for unit in units if unit not in wanted]
    for unit, values in wanted.items():
        if unit in units:
            faults += [f"{unit}: {fault}" for fault in _differences(units[unit], values, sets)]
    return without(faults, "every unit of ours confined as it was shipped", f"{len(units)} units, as shipped")
