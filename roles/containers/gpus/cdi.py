"""Whether the CDI specification fits the node. Each thing that does not is one finding, with a remedy of its own. Pure.

A specification names the cards and the driver's files at the moment it was made. Docker takes devices from every file in
/etc/cdi and /var/run/cdi: the same device twice in one folder is refused, in two folders the one below /var/run wins, and a
hand-made file that nobody renews goes on naming what is gone (gpu-node.md 4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from roles.containers.gpus.facts import PATH, SERVICE, SPECIFICATION, GpuContainers, Specification

Kind = Literal[
    "toolkit-missing",  # nobody writes a specification
    "refresh-missing",  # a toolkit before 1.18: nobody renews it
    "refresh-off",  # it is there and is not started at boot, or does not watch
    "specification-missing",  # the driver is loaded, and no file names its cards
    "specification-stale",  # another driver, or cards that are not there
    "card-unnamed",  # the driver knows a card that the specification does not name: NVML does not list it
    "specification-twice",  # a second file for the same devices, or one that nobody renews
]


@dataclass(frozen=True)
class Finding:
    """What was seen, what was expected, and what to do about it. ``subject``: the file or unit it is about."""

    kind: Kind
    subject: str
    seen: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.seen}; expected: {self.expected}; do: {self.remedy}"


def foreign(seen: GpuContainers) -> list[Specification]:
    """Specifications of NVIDIA's GPUs that are not the one that the refresh unit keeps."""
    return [one for one in seen.specifications if one.path != SPECIFICATION]


def findings(seen: GpuContainers) -> list[Finding]:
    """Everything that does not fit, causes before consequences."""
    return [*_refresh(seen), *_twice(seen), *_stale(seen)]


def needs_refresh(seen: GpuContainers) -> bool:
    """Whether the kept specification is to be made again: only a loaded driver can be asked."""
    kept = [one for one in seen.specifications if one.path == SPECIFICATION]
    return bool(seen.module) and (not kept or bool([*_faults(kept[0], seen), *_unnamed(kept[0], seen)]))


def _refresh(seen: GpuContainers) -> Iterator[Finding]:
    if not seen.toolkit:
        yield Finding(
            "toolkit-missing",
            "nvidia-container-toolkit",
            "nvidia-ctk is not installed",
            "NVIDIA's container toolkit, 1.18 or later",
            "set containers.toolkit in the node file, or install it",
        )
        return
    units = {name: seen.units.get(name) for name in (SERVICE, PATH)}
    missing = [name for name, unit in units.items() if unit is None or not unit.loaded]
    if missing:
        yield Finding(
            "refresh-missing",
            missing[0],
            f"toolkit {seen.toolkit} has no {' and no '.join(missing)}",
            "units that renew the specification, which 1.18 and later have",
            "set containers.toolkit.version to 1.18.2 or later, or install it",
        )
        return
    for name, unit in units.items():
        assert unit
        if not unit.enabled or (name == PATH and unit.active != "active"):
            state = f"{'enabled' if unit.enabled else 'not enabled'}, {unit.active}"
            yield Finding(
                "refresh-off",
                name,
                f"{name} is {state}",
                "enabled, and the path unit active",
                f"systemctl enable --now {PATH} && systemctl enable {SERVICE}",
            )


def _twice(seen: GpuContainers) -> Iterator[Finding]:
    for one in foreign(seen):
        shared = [
            other.path for other in seen.specifications if other is not one and set(other.devices) & set(one.devices)
        ]
        said = f"{one.path} defines devices that {shared[0]} has, too" if shared else f"{one.path} is renewed by nobody"
        yield Finding(
            "specification-twice",
            one.path,
            said,
            f"one specification of {len(seen.cards) or 'the'} GPUs, {SPECIFICATION}, which {SERVICE} renews",
            f"move {one.path} away, then systemctl restart {SERVICE}",
        )


def _stale(seen: GpuContainers) -> Iterator[Finding]:
    if seen.module and not seen.specifications:
        yield Finding(
            "specification-missing",
            SPECIFICATION,
            f"driver {seen.module} is loaded and no file in /etc/cdi or /var/run/cdi names a GPU",
            f"a specification in {SPECIFICATION}",
            f"systemctl restart {SERVICE}; journalctl -u {SERVICE}",
        )
    for one in seen.specifications:
        for fault, expected in _faults(one, seen):
            yield Finding("specification-stale", one.path, f"{one.path} {fault}", expected, _remedy(one))
        for uuid in _unnamed(one, seen):
            yield Finding(
                "card-unnamed",
                uuid,
                f"{one.path} does not name {uuid}",
                "every card that the driver has",
                f"systemctl restart {SERVICE}; if that changes nothing, the card does not answer: journalctl -k | grep -i xid",
            )


def _unnamed(one: Specification, seen: GpuContainers) -> list[str]:
    return [uuid for uuid in seen.cards if uuid not in one.devices] if one.path == SPECIFICATION else []


def _faults(one: Specification, seen: GpuContainers) -> Iterator[tuple[str, str]]:
    """What is wrong with one specification: what it says, and what it should."""
    others = [driver for driver in one.drivers if driver != seen.module]
    if seen.module and others:
        yield f"hands in files of driver {', '.join(others)}", f"those of {seen.module}, which is loaded"
    if not seen.cards:
        return  # the driver does not say which cards there are
    gone = [uuid for uuid in one.uuids if uuid not in seen.cards]
    if gone:
        yield f"names {', '.join(gone)}", "only cards that the driver has"


def _remedy(one: Specification) -> str:
    refresh = f"systemctl restart {SERVICE}"
    return refresh if one.path == SPECIFICATION else f"move {one.path} away, then {refresh}"
