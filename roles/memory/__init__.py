"""Role `memory`: GPU memory that the kernel sees, and file pages that stay off it.

What it needs of the kernel it asks role `kernel` for (``wishes.py``). File jobs are bound where they are written (roles
`models` and `engine`), from the same node file; here it is read back what the machine has become.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyinfra import logger
from pyinfra.api import deploy
from pyinfra.context import ctx_host

from gpuwright import boot, snapshot
from roles.memory import operations
from roles.memory.facts import COHERENCE
from roles.memory.spec import MemorySpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

__all__ = ["COHERENCE", "memory_verified"]


@deploy("Memory verified")
def memory_verified(spec: MemorySpec, hardware: Hardware, others: boot.Wishes) -> None:
    """Read back the regime of GPU memory, after the one reboot of role kernel.

    + spec: the role's settings
    + hardware: which memory nodes the machine has
    + others: drivers that may keep NVIDIA's from its cards until a reboot
    """
    host = ctx_host.get()
    if snapshot.read(host).read(snapshot.SYSTEM).is_container:
        logger.info(f"{host.print_prefix}memory: not applicable, the host is a container and has its machine's memory")
        return
    operations.regime_is(
        name=f"GPU memory in regime {spec.regime} on {host.name}"
        if hardware.hbm_numa_nodes
        else f"No HBM node on {host.name}",
        spec=spec,
        hardware=hardware,
        others=others,
    )
