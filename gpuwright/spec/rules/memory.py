"""Cross-checks on GPU memory that the kernel sees."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found
from roles.memory.wishes import wishes


def hbm_has_its_role(spec: NodeSpec) -> Iterator[Found]:
    """Seed 2: file pages on HBM stop an engine from starting, and come back after every download."""
    if spec.hardware.hbm_numa_nodes and spec.memory is None:
        sentence = "names memory nodes without CPUs, which file pages must stay off: add 'memory:' to the node file"
        yield Found(("hardware", "hbm_numa_nodes"), sentence)


def memory_can_ask_the_kernel(spec: NodeSpec) -> Iterator[Found]:
    if spec.memory is None or spec.kernel is not None:
        return
    if any(wishes(spec.memory, spec.hardware).all()):
        sentence = "asks for a module option and a sysctl, which role kernel writes: add 'kernel:' to the node file"
        yield Found(("memory",), sentence)


def driver_regime_has_something_to_hide(spec: NodeSpec) -> Iterator[Found]:
    if spec.memory is not None and spec.memory.regime == "driver" and not spec.hardware.hbm_numa_nodes:
        sentence = (
            "is about GPU memory that the CPUs share (Grace); say in hardware.hbm_numa_nodes which memory nodes it is in regime "
            "numa, as `numactl -H` lists them without CPUs"
        )
        yield Found(("memory", "regime"), sentence)


RULES = (hbm_has_its_role, memory_can_ask_the_kernel, driver_regime_has_something_to_hide)
