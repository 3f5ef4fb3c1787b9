"""Production hosts. One line per host: its name, the node file it follows, and how to reach it.

"gpu-01.example.net": {
    "node": "dgx-station-gb300",                             # inventory/nodes/dgx-station-gb300.yaml
    "ssh_user": "root",                                      # ssh_hostname, ssh_port, ssh_key, … as pyinfra names them
    "set": {"gateway.hostnames": ["llm.example.net"]},       # single settings over the node file's
},
"""

from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet(
    {
        # hosts go here
    },
    __file__,
)
