"""What pyinfra's own ``--json`` document says became of a run, by host and operation."""

from __future__ import annotations

import json


class NoDocument(Exception):
    """pyinfra ended before it had anything to report: a refused inventory, no host reached."""


def operations(output: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Host to the names of operations that changed it (in a dry run: would), and that failed on it. Raises NoDocument."""
    try:
        document = json.loads(output)
    except ValueError:
        raise NoDocument(output) from None
    changed: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    results = document.get("results")
    for operation in results["operations"] if results else document["plan"]:
        would = operation.get("hosts_with_change", []) + operation.get("hosts_with_conditional_change", [])
        for name in operation["success"] if results else would:
            changed.setdefault(name, []).append(operation["name"])
        for name in operation.get("error", []):
            failed.setdefault(name, []).append(operation["name"])
    return changed, failed
