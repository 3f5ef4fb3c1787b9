"""Cross-checks on the firewall."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.ingress import ingress
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def gateway_is_open_to_somebody(spec: NodeSpec) -> Iterator[Found]:
    if spec.firewall is None:
        return
    ports = ingress(spec).gateway
    if ports and not spec.firewall.gateway:
        listed = ", ".join(map(str, ports))
        sentence = (
            f"names no network, so nobody would reach the gateway on port {listed}; everybody is [0.0.0.0/0, '::/0']"
        )
        yield Found(("firewall", "gateway"), sentence)
    if spec.firewall.gateway and not ports:
        what = "listens on loopback only" if spec.gateway else "is not a role of this node"
        yield Found(("firewall", "gateway"), f"opens nothing, because the gateway {what}; leave it out")


def ports_are_opened_once_and_on_purpose(spec: NodeSpec) -> Iterator[Found]:
    if spec.firewall is None:
        return
    served = ingress(spec)
    taken = {("tcp", port): "firewall.ssh opens that port already; name the network there" for port in served.ssh}
    taken |= {("tcp", p): "firewall.gateway opens that port already; name the network there" for p in served.gateway}
    for name, engine in (spec.engine.engines if spec.engine else {}).items():
        taken["tcp", engine.port] = (
            f"is where engine {name} answers without a key; clients reach it through the gateway"
        )
    if spec.gateway:
        taken["tcp", spec.gateway.health_port] = "is the gateway's own health port, for this node alone"
    for index, entry in enumerate(spec.firewall.ports):
        key = (entry.protocol, entry.port)
        if key in taken:
            yield Found(("firewall", "ports", index, "port"), taken[key])
        taken.setdefault(key, "is opened twice; keep one entry with all its networks")


def ssh_and_gateway_have_ports_of_their_own(spec: NodeSpec) -> Iterator[Found]:
    """A gateway on a port of sshd: the firewall could not tell them apart."""
    if spec.firewall is None:
        return
    served = ingress(spec)
    for index, port in enumerate(spec.firewall.ssh_ports):
        if port in served.gateway:
            yield Found(("firewall", "ssh_ports", index), "is where the gateway listens; sshd needs a port of its own")


RULES = (
    gateway_is_open_to_somebody,
    ports_are_opened_once_and_on_purpose,
    ssh_and_gateway_have_ports_of_their_own,
)
