"""What this role reads from a node beside its boot (gpuwright.boot): the sysctl values it owns, as they are now."""

from __future__ import annotations

from gpuwright.snapshot import Section, register

SYSCTL = "/etc/sysctl.d/zz-gpuwright.conf"


def same(value: str) -> str:
    """A value without differences in blanks: the kernel puts tabs between several numbers."""
    return " ".join(value.split())


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


# --ignore leaves out keys that this kernel does not have.
VALUES = register(
    Section(
        "sysctl",
        rf"""
[ -e {SYSCTL} ] || exit 0
keys=$(sed -n 's/^\([a-z][^ =]*\) = .*/\1/p' {SYSCTL})
for key in $keys; do echo "asked $key"; done
[ -z "$keys" ] || sysctl --ignore $keys 2>/dev/null
exit 0
""",
        parse,
    )
)
