"""The verdict on P2P: what is on the node for it. Engines ask for it on every start; see docs/roles/pcie.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuwright import atomic, render, sandbox
from gpuwright.ownership import Owned
from gpuwright.peers import PeerGroup
from roles.pcie.p2p_spec import P2pSpec

_SCRIPTS = {"p2p-common": "0644", "p2p-probe.py": "0644", "p2p-verdict": "0755", "p2p-verify": "0755"}

CLAIMS = (Owned("directory", "/var/lib/gpuwright/pcie/p2p"),)
"""Verdicts go with the role: without its files nobody could tell whether they still hold."""


def files(spec: P2pSpec, groups: Sequence[PeerGroup]) -> list[atomic.File]:
    """Scripts, one configuration per engine of several GPUs, and the unit. None where nothing is judged."""
    if spec.mode == "off" or not groups:
        return []
    directory = "usr/local/lib/gpuwright"
    # Two ranks can hang on a host where four complete (vllm#51513), so every group size that occurs is tried everywhere.
    sizes = sorted({2, *(len(group.gpus) for group in groups)})
    return [
        *(
            atomic.File(f"/{directory}/{name}", render.static(f"pcie/{directory}/{name}"), mode=mode)
            for name, mode in _SCRIPTS.items()
        ),
        *(
            atomic.File(
                f"/etc/gpuwright/pcie/p2p/{group.engine}.conf",
                render.template(
                    "pcie/etc/gpuwright/pcie/p2p/engine.conf.j2",
                    group=group,
                    spec=spec,
                    settings=_assignments(group.environment),
                    without_p2p=_assignments(group.separation.nccl),
                    groups=[size for size in sizes if size <= len(group.gpus)],
                ),
            )
            for group in groups
        ),
        atomic.File(
            "/etc/systemd/system/gpuwright-p2p.service",
            render.template(
                "pcie/etc/systemd/system/gpuwright-p2p.service.j2",
                spec=spec,
                groups=groups,
                sandbox=sandbox.p2p().lines(),
            ),
        ),
    ]


def _assignments(environment: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in environment.items()]
