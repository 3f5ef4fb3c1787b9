"""The controls as a table for people: ``python -m gpuwright.audit.catalogue`` prints what docs/audit.md ends with."""

from __future__ import annotations

from gpuwright.audit.control import Control
from gpuwright.audit.controls import ROLES, of_role
from gpuwright.audit.references import References

_SHORT = {
    "cis-debian-12": "CIS Debian 12",
    "cis-docker": "CIS Docker",
    "nist-800-171-r2": "r2",
    "nist-800-171-r3": "r3",
    "bsi-it-grundschutz": "BSI",
}


def table() -> str:
    """Markdown: one table per role."""
    parts = []
    for role in ROLES:
        rows = "\n".join(_row(control) for control in of_role(role))
        parts.append(f"### {role}\n\n| id | promise | severity | evidence for |\n| --- | --- | --- | --- |\n{rows}\n")
    return "\n".join(parts)


def evidence(references: References) -> str:
    """The ids that something is technical evidence for, or why no catalogue has any; "" where neither is known."""
    ids = references.ids
    if not ids and references.none:
        return f"none: {references.none}"
    named = "; ".join(f"{words} {', '.join(ids[name])}" for name, words in _SHORT.items() if name in ids)
    return f"{named} (inferred)" if named and references.inferred else named


def _row(control: Control) -> str:
    return f"| {control.id} | {control.title} | {control.severity} | {evidence(control.references) or '-'} |"


if __name__ == "__main__":
    print(table(), end="")
