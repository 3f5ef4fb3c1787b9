"""Cross-checks on the weights."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright import numa
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def io_stays_off_hbm(spec: NodeSpec) -> Iterator[Found]:
    """Seed 2: file pages of a download that land on an HBM node break the next start of the engine."""
    if spec.models is None or spec.models.numa_nodes is None:
        return
    path = ("models", "numa_nodes")
    try:
        bound = numa.indices(spec.models.numa_nodes)
    except ValueError:
        yield Found(path, "must be memory nodes in ascending order, as in '0' or '0-1,4'")
        return
    cpu_nodes = set(spec.hardware.cpu_numa_nodes)
    if spec.hardware.hbm_numa_nodes and (outside := bound - cpu_nodes):
        sentence = (
            f"names node {', '.join(map(str, sorted(outside)))}, which has no CPUs; allowed: '{numa.listed(cpu_nodes)}'"
        )
        yield Found(path, f"{sentence}, which is also what it is when left out")


def hub_is_an_address(spec: NodeSpec) -> Iterator[Found]:
    if spec.models is not None and not spec.models.hub.startswith(("https://", "http://")):
        yield Found(("models", "hub"), "must be an address that starts with https://")
    if spec.models is not None and spec.models.hub.startswith("http://") and spec.models.token is not None:
        yield Found(("models", "hub"), "would send the hub token in the clear; use https:// or drop the token")


def items_are_named(spec: NodeSpec) -> Iterator[Found]:
    if spec.models is not None and not spec.models.items:
        yield Found(("models", "items"), "names no model; add one or leave out 'models:'")


RULES = (io_stays_off_hbm, hub_is_an_address, items_are_named)
