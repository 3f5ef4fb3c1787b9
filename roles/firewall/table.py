"""The table as text for ``nft -f``."""

from __future__ import annotations

import ipaddress
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
