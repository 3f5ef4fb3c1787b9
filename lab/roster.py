"""Everything this lab has, hosts and machines: found by name, listed, and taken down together."""

from __future__ import annotations

from lab import hosts, machines, network, service, tools
from lab.command import LabError
from lab.paths import locked, state
from lab.server import Server


def known() -> list[Server]:
    """All hosts and machines of this lab, running or not, hosts first."""
    return [*hosts.known(), *machines.known()]


def find(name: str) -> Server:
    """One host or machine by name. Raises LabError listing those there are."""
    servers = {server.name: server for server in known()}
    if name not in servers:
        has = ", ".join(servers) or "none, start with gpuwright lab up"
        raise LabError(f"the lab has no host or machine {name!r}; it has: {has}")
    return servers[name]


def down() -> list[str]:
    """Take all hosts, machines, services and the bridge away; caches and keys stay. Returns the names of those that were there."""
    tools.need_root()
    segment = network.recorded()
    if segment is None:
        return []
    servers = known()
    for server in servers:
        server.destroy()
    with locked(state() / "lock"):
        hosts.sweep(segment)
        machines.sweep()
        for directory in (state() / "services").glob("*"):
            service.stop(directory)
        network.remove(segment)
    return [server.name for server in servers]
