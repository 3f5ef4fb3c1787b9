"""Tables of nftables as the kernel has them, made comparable: ``nft -j list table``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Table = dict[str, list[Any]]
"""Chain name to what it has: its hook, then its rules in order. Sets and maps by name, too."""


def parse(text: str) -> Table | None:
    """``nft -j list table`` without what differs from load to load (handles, counts). None for no table. Raises ValueError."""
    if not text.strip():
        return None
    found: Table = {}
    for entry in json.loads(text)["nftables"]:
        [(kind, body)] = entry.items()
        if kind == "metainfo" or kind == "table":
            continue
        if kind == "rule":
            rule = {"comment": body["comment"]} if "comment" in body else {}
            found.setdefault(body["chain"], []).append(rule | {"expr": _stateless(body["expr"])})
            continue
        own = {key: value for key, value in body.items() if key not in ("family", "table", "name", "handle")}
        found[body["name"]] = [_stateless({kind: own})]
    return found


def _stateless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if key == "counter" else _stateless(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_stateless(inner) for inner in value]
    return value


def differences(name: str, live: Table | None, wanted: Table | None) -> list[str]:
    """One sentence per chain of table `name` (family and name) that is not what it should be; empty when the kernel has
    what the file says."""
    if wanted is None:
        return ["the rules in the file cannot be loaded"]
    if live is None:
        return [f"table {name} is not loaded"]
    found = []
    for chain in sorted(live.keys() | wanted.keys()):
        if chain not in live:
            found.append(f"chain {chain} is gone")
        elif chain not in wanted:
            found.append(f"chain {chain} is not ours")
        elif live[chain] != wanted[chain]:
            found.append(f"chain {chain}: {_first(live[chain], wanted[chain])}")
    return found


def _first(live: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Where two chains part."""
    if live[0] != wanted[0]:
        return f"hook or policy is {json.dumps(live[0])}"
    extra = [rule for rule in live[1:] if rule not in wanted[1:]]
    gone = [rule for rule in wanted[1:] if rule not in live[1:]]
    if extra:
        return f"{len(extra)} rule(s) that are not ours, the first: {json.dumps(extra[0]['expr'])}"
    if gone:
        return f"{len(gone)} rule(s) are gone, the first: {gone[0].get('comment') or json.dumps(gone[0]['expr'])}"
    return "its rules are in another order, or twice"
