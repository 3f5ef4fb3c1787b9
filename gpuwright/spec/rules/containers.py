"""Cross-checks on the container engine."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found

DAEMON_REFUSED = {
    # keys that open the node; those that another setting says are refused by the settings of the role itself
    "default-runtime": "GPUs reach containers through CDI",
    "insecure-registries": "name the registry's certificate authority in containers.registries",
}


def docker_can_give_gpus(spec: NodeSpec) -> Iterator[Found]:
    """Debian 12's docker.io is 20.10, which has no CDI (security.md 2.5, DESIGN 2)."""
    if spec.containers is None or spec.os != "debian-12" or spec.hardware.gpus.count == 0:
        return
    if spec.containers.source == "distribution":
        sentence = "is Docker 20.10 on debian-12, which cannot give GPUs to a container (CDI); use 'source: docker'"
        yield Found(("containers", "source"), sentence)


def daemon_settings_that_open_the_node(spec: NodeSpec) -> Iterator[Found]:
    for key in spec.containers.daemon if spec.containers else ():
        if key in DAEMON_REFUSED:
            yield Found(("containers", "daemon", key), f"is refused: {DAEMON_REFUSED[key]}", show=False)


def registries_are_named_once(spec: NodeSpec) -> Iterator[Found]:
    seen: set[str] = set()
    for index, registry in enumerate(spec.containers.registries if spec.containers else ()):
        if registry.host in seen:
            yield Found(("containers", "registries", index, "host"), "is named twice")
        seen.add(registry.host)


RULES = (docker_can_give_gpus, daemon_settings_that_open_the_node, registries_are_named_once)
