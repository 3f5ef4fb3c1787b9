"""Cross-checks on the container engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found

DAEMON_SETTINGS = {
    # daemon.json keys that role containers writes: the setting that says it, or why there is none
    "data-root": "say it with containers.data_root",
    "log-driver": "it is json-file; evidence is read from it",
    "log-opts": "say it with containers.log_max_size and containers.log_max_files",
    "live-restore": "it is always on: engines outlive a restart of Docker",
    "ip": "it is always 127.0.0.1: engines are published on loopback only",
    "features": "CDI is switched on where the node has GPUs",
}

DAEMON_REFUSED = {
    # keys that open the node
    "hosts": "Docker's socket stays local; whoever reaches it is root",
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


def daemon_settings_of_ours(spec: NodeSpec) -> Iterator[Found]:
    for key in spec.containers.daemon if spec.containers else ():
        path = ("containers", "daemon", key)
        if key in DAEMON_SETTINGS:
            yield Found(path, f"belongs to role containers: {DAEMON_SETTINGS[key]}", show=False)
        elif key in DAEMON_REFUSED:
            yield Found(path, f"is refused: {DAEMON_REFUSED[key]}", show=False)


def registries_are_hosts(spec: NodeSpec) -> Iterator[Found]:
    seen: set[str] = set()
    for index, registry in enumerate(spec.containers.registries if spec.containers else ()):
        path = ("containers", "registries", index, "host")
        if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d{1,5})?", registry.host):
            yield Found(path, "must be host or host:port, as images name it, without https://")
        elif registry.host in seen:
            yield Found(path, "is named twice")
        seen.add(registry.host)


RULES = (docker_can_give_gpus, daemon_settings_of_ours, registries_are_hosts)
