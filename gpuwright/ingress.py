"""Which ports of a node are meant for others: computed here, because no role reads another role's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a node file is made of the roles' parts, and role firewall is one of them
    from gpuwright.spec.node import NodeSpec


@dataclass(frozen=True)
class Ingress:
    """Ports of the roles that serve others, as the firewall opens them; numbers, ascending."""

    ssh: tuple[int, ...]
    gateway: tuple[int, ...]


def ingress(spec: NodeSpec) -> Ingress:
    """What the firewall of a node has to let in. A gateway that listens on loopback only needs nothing."""
    ssh = spec.firewall.ssh_ports if spec.firewall else ()
    listen = spec.gateway.listen if spec.gateway else ()
    return Ingress(
        tuple(sorted(set(ssh))),
        tuple(sorted({place.port for place in listen if not place.is_loopback})),
    )
