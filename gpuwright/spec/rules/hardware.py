"""Cross-checks on what the machine is, and on which roles need one another."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def roles_need_one_another(spec: NodeSpec) -> Iterator[Found]:
    if spec.engine is not None:
        for role in ("containers", "models"):
            if getattr(spec, role) is None:
                yield Found(("engine",), f"needs the role {role}; add '{role}:' to the node file")
        if not spec.engine.engines:
            yield Found(("engine", "engines"), "names no engine; add one or leave out 'engine:'")
    if spec.gateway is not None and spec.engine is None:
        yield Found(("gateway",), "has no engine behind it; add 'engine:' to the node file")


def power_limit_in_the_cards_range(spec: NodeSpec) -> Iterator[Found]:
    gpus = spec.hardware.gpus
    if gpus.power_range_watts is None:
        return
    low, high = gpus.power_range_watts
    if not 0 < low <= high:
        yield Found(("hardware", "gpus", "power_range_watts"), "must be [lowest, highest] in watts")
    elif gpus.power_limit_watts is not None and not low <= gpus.power_limit_watts <= high:
        path = ("hardware", "gpus", "power_limit_watts")
        yield Found(path, f"is outside the card's range of {low} to {high} W")


def numa_nodes_are_told_apart(spec: NodeSpec) -> Iterator[Found]:
    """HBM nodes are those with memory and no CPUs, wherever they are numbered (gpu-node.md 3.1)."""
    both = set(spec.hardware.cpu_numa_nodes) & set(spec.hardware.hbm_numa_nodes)
    if both:
        listed = ", ".join(map(str, sorted(both)))
        path = ("hardware", "hbm_numa_nodes")
        yield Found(path, f"names node {listed}, which cpu_numa_nodes names too; an HBM node has no CPUs")
    if not spec.hardware.cpu_numa_nodes:
        yield Found(("hardware", "cpu_numa_nodes"), "must name at least one node")


RULES = (roles_need_one_another, power_limit_in_the_cards_range, numa_nodes_are_told_apart)
