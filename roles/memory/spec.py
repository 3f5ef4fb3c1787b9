"""Settings of role `memory`: how the GPU's memory is shown to the kernel, and where file pages go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuwright.spec.base import Strict


class MemorySpec(Strict):
    """For machines whose GPU memory is coherent with the CPUs' (Grace); on others the role has nothing to do."""

    regime: Literal["numa", "driver"] = Field(
        default="numa",
        description="`numa`: GPU memory is memory nodes without CPUs (HBM nodes), as seed 2 ran it; `driver`: the driver keeps "
        "it from the kernel, so that no file page gets there, and the CPUs cannot use it, nor can MIG (gpu-node.md 3.2). "
        "NOT RUN BY US: no machine of ours has such a GPU. A change takes effect at a reboot",
    )
    zone_reclaim: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: vm.zone_reclaim_mode=1 where the node file names HBM nodes: a node's own clean file pages are taken "
        "back before those of the next are taken, which may be HBM (gpu-node.md 3.2). It keeps off no page that is still to "
        "be written, so binding and drop are what counts",
    )
