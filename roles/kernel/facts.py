"""What this role reads from a node beside its boot (gpuwright.boot): the sysctl values it owns, as they are now."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from gpuwright.boot import Sysctl
from gpuwright.snapshot import Section, register

SYSCTL = "/etc/sysctl.d/zz-gpuwright.conf"


def same(value: str) -> str:
    """A value without differences in blanks: the kernel puts tabs between several numbers."""
    return " ".join(value.split())


def covers(asked: str, key: str) -> bool:
    """Whether a key that is asked for means this one: '*' stands for every interface."""
    return re.fullmatch(re.escape(asked).replace(r"\*", "[^.]+"), key) is not None


def of_each(asked: Iterable[Sysctl], there: Collection[str]) -> Iterator[Sysctl]:
    """Every value by the key of its own: for '*' those of `there`, a node's keys, that have no line of their own (sysctl.d(5))."""
    asked = list(asked)
    named = {one.key for one in asked}
    for one in asked:
        if "*" not in one.key:
            yield one
        else:
            yield from (replace(one, key=key) for key in sorted(there) if key not in named and covers(one.key, key))


def parse(text: str) -> dict[str, str | None]:
    """Key to value as the kernel shows it; None for a key that this kernel does not have."""
    values: dict[str, str | None] = {}
    for line in text.splitlines():
        if line.startswith("asked "):
            values.setdefault(line.removeprefix("asked "), None)
        else:
            key, _, value = line.partition(" = ")
            values[key] = same(value)
    return values


# --ignore leaves out keys that this kernel does not have; it reads no '*' (procps 4.0), so the shell does.
VALUES = register(
    Section(
        "sysctl",
        rf"""
[ -e {SYSCTL} ] || exit 0
cd /proc/sys || exit 1
keys=$(printf '%s\n' $(sed -n 's/^\([a-z][^ =]*\) = .*/\1/p' {SYSCTL} | tr ./ /.) | tr ./ /. | sort -u)
for key in $keys; do echo "asked $key"; done
[ -z "$keys" ] || sysctl --ignore $keys 2>/dev/null
exit 0
""",
        parse,
    )
)
