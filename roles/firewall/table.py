"""The table as text for ``nft -f``, and as what ``nft -j list table`` says of it, made comparable."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuwright.ingress import Ingress
from gpuwright.render import template
from roles.firewall.spec import FirewallSpec

TABLE = "inet gpuwright"
PATH = "/etc/gpuwright/firewall/table.nft"


@dataclass(frozen=True)
class Opening:
    """Ports that some networks may reach; `published`: a container may be what answers there."""

    comment: str
    protocol: str
    ports: tuple[int, ...]
    networks: tuple[str, ...]
    published: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """One nft match per address family that has networks."""
        found = []
        for family, protocol in ((4, "ip"), (6, "ip6")):
            networks = [n for n in map(ipaddress.ip_network, self.networks) if n.version == family]
            # nft refuses networks that overlap.
            merged = list(ipaddress.collapse_addresses(networks))  # type: ignore[type-var]
            if any(network.prefixlen == 0 for network in merged):
                found.append(f"meta nfproto ipv{family}")
            elif merged:
                found.append(f"{protocol} saddr {_set(_short(network) for network in merged)}")
        return tuple(found)

    @property
    def dport(self) -> str:
        """The ports as a value of nft."""
        return _set(self.ports)


def _short(network: Any) -> str:
    return str(network.network_address) if network.num_addresses == 1 else str(network)


def _set(values: Any) -> str:
    listed = [str(value) for value in values]
    return listed[0] if len(listed) == 1 else f"{{ {', '.join(listed)} }}"


def openings(spec: FirewallSpec, ports: Ingress) -> tuple[Opening, ...]:
    """What is let in, in the order of the rules."""
    found = [Opening("ssh", "tcp", ports.ssh, spec.ssh)]
    if ports.gateway:
        found.append(Opening("gateway", "tcp", ports.gateway, spec.gateway))
    found += [Opening(entry.reason, entry.protocol, (entry.port,), entry.networks, True) for entry in spec.ports]
    return tuple(found)


def rules(spec: FirewallSpec, ports: Ingress) -> bytes:
    """The file that is loaded."""
    return template(
        "firewall/etc/gpuwright/firewall/table.nft.j2",
        openings=openings(spec, ports),
        bridges=spec.container_interfaces,
        egress=spec.container_egress,
    )


# --- what the kernel has --------------------------------------------------------------------------------------------


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


def differences(live: Table | None, wanted: Table | None) -> list[str]:
    """One sentence per chain that is not what it should be; empty when the kernel has what the file says."""
    if wanted is None:
        return ["the rules in the file cannot be loaded"]
    if live is None:
        return [f"table {TABLE} is not loaded"]
    found = []
    for name in sorted(live.keys() | wanted.keys()):
        if name not in live:
            found.append(f"chain {name} is gone")
        elif name not in wanted:
            found.append(f"chain {name} is not ours")
        elif live[name] != wanted[name]:
            found.append(f"chain {name}: {_first(live[name], wanted[name])}")
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
