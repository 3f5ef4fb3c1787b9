"""What role `memory` asks of the kernel: the mode of coherent GPU memory, and whose file pages are taken back first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gpuwright.boot import ModuleOption, Sysctl, Wishes
from roles.memory import regime
from roles.memory.spec import MemorySpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware

ROLE = "memory"

_REGIME = {
    "numa": "the default differs between driver branches, so the mode is said (gpu-node.md, finding 1)",
    "driver": "the driver keeps GPU memory from the kernel's page allocator (gpu-node.md 3.2)",
}


def wishes(spec: MemorySpec, hardware: Hardware) -> Wishes:
    """Nothing for machines without HBM nodes. The driver reads its mode when it is loaded."""
    if not hardware.hbm_numa_nodes:
        return Wishes()
    # A driver that was told nothing, and shows its memory as asked, needs no reboot to be told.
    option = ModuleOption(
        "nvidia",
        "NVreg_CoherentGPUMemoryMode",
        spec.regime,
        ROLE,
        _REGIME[spec.regime],
        waits=partial(regime.pending, spec, hardware),
    )
    reclaim = Sysctl(
        "vm.zone_reclaim_mode",
        "1",
        ROLE,
        "a node's own clean file pages are taken back before others spill onto HBM (gpu-node.md 3.2)",
    )
    return Wishes(options=(option,), sysctls=(reclaim,) if spec.zone_reclaim == "auto" else ())
