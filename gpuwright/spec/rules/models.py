"""Cross-checks on the weights."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def io_stays_off_hbm(spec: NodeSpec) -> Iterator[Found]:
    """Seed 2: file pages of a download that land on an HBM node break the next start of the engine."""
    if spec.models is None or not spec.hardware.hbm_numa_nodes:
        return
    cpu_nodes = set(spec.hardware.cpu_numa_nodes)
    wanted = ",".join(map(str, sorted(cpu_nodes)))
    path = ("models", "numa_nodes")
    if spec.models.numa_nodes is None:
        yield Found(path, f"must keep downloads off the HBM nodes: add numa_nodes: '{wanted}' (the nodes with CPUs)")
    elif outside := nodes(spec.models.numa_nodes) - cpu_nodes:
        listed = ", ".join(map(str, sorted(outside)))
        yield Found(path, f"names node {listed}, which has no CPUs; allowed: '{wanted}'")


def hub_is_an_address(spec: NodeSpec) -> Iterator[Found]:
    if spec.models is not None and not spec.models.hub.startswith(("https://", "http://")):
        yield Found(("models", "hub"), "must be an address that starts with https://")
    if spec.models is not None and spec.models.hub.startswith("http://") and spec.models.token is not None:
        yield Found(("models", "hub"), "would send the hub token in the clear; use https:// or drop the token")


def items_are_named(spec: NodeSpec) -> Iterator[Found]:
    if spec.models is not None and not spec.models.items:
        yield Found(("models", "items"), "names no model; add one or leave out 'models:'")


def nodes(text: str) -> set[int]:
    """``0-1,3`` as {0, 1, 3}."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


RULES = (io_stays_off_hbm, hub_is_an_address, items_are_named)
