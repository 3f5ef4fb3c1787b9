"""The hosts and machines of the lab (``gpuwright lab up``), as an ordinary inventory: a deploy does not know that it is a lab.

What only a booted lab can say comes from it: addresses, host keys, its certificate authority, and the digests of the
images and models that its registry and hub serve. Everything else is in inventory/nodes/lab.yaml, and lab-machine.yaml for machines.
"""

import os as _os

import lab as _lab
from gpuwright.spec.fleet import fleet as _fleet
from lab.inventory import describe as _describe

# Which engine answers on hosts: the simulated one, or real vLLM on the CPU (./run lab --engine vllm).
_node = {"sim": "lab", "vllm": "lab-vllm"}[_os.environ.get("GPUWRIGHT_LAB_ENGINE", "sim")]

gpu_nodes = _fleet(
    {_server.name: _describe(_server, _node if _server.kind == "host" else None) for _server in _lab.known()},
    __file__,
    pins=_lab.pins.read(),
    empty="has no hosts; boot one with: gpuwright lab up",
)
