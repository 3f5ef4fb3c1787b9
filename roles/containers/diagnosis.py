"""What a daemon.json that others have written means for GPUs, by kind, with what to do about each. Pure.

The same sentence of Docker's ("could not select device driver") has several causes, and a setting that is harmless for containers
with CDI devices loses the GPUs of others (gpu-node.md section 7, reports 8 and 13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from roles.containers.daemon import PATH, Version

Kind = Literal[
    "systemd-cgroups",  # --gpus containers lose their GPUs when systemd reads its units again
    "runtime-only",  # a runtime is registered, which gives no container a GPU by itself
    "default-runtime",  # every image can ask for every GPU
    "cdi-off",  # devices of CDI are refused
    "cdi-folders",  # the toolkit's specification is not read
]


@dataclass(frozen=True)
class Diagnosis:
    """One setting, what it means for GPUs, what to do, and where that was seen."""

    kind: Kind
    setting: str
    meaning: str
    remedy: str
    source: str
    ours: bool = True
    """Whether it concerns gpuwright's own containers, or only those that others start."""

    def __str__(self) -> str:
        return f"{self.setting}: {self.meaning}; {self.remedy}"


def diagnoses(config: dict[str, Any], version: Version | None = None) -> list[Diagnosis]:
    """What is known of these settings. `version` is the installed Docker's; CDI is on by default from 28.3."""
    return list(_known(config, version))


def _known(config: dict[str, Any], version: Version | None) -> Iterator[Diagnosis]:
    features = config.get("features")
    cdi = features.get("cdi") if isinstance(features, dict) else None
    options = config.get("exec-opts")
    if isinstance(options, list) and "native.cgroupdriver=systemd" in options:
        yield Diagnosis(
            "systemd-cgroups",
            "exec-opts native.cgroupdriver=systemd",
            "containers of --gpus lose their GPUs when systemd reads its units again; those with CDI devices keep them",
            "start others' containers with --device nvidia.com/gpu=UUID; the setting may stay",
            "nvidia-container-toolkit#48",
            ours=False,
        )
    runtimes = config.get("runtimes")
    named = isinstance(runtimes, dict) and "nvidia" in runtimes
    on = cdi is True or (cdi is None and version is not None and version >= (28, 3))
    if named and not on:
        yield Diagnosis(
            "runtime-only",
            "runtimes.nvidia",
            'a registered runtime gives no container a GPU by itself (Docker says "could not select device driver")',
            f"features.cdi in {PATH}, which a run writes, and Docker restarted since; a snap's Docker never reads it",
            "nvidia-container-toolkit#854, nvidia-docker#1642",
        )
    if config.get("default-runtime") == "nvidia":
        yield Diagnosis(
            "default-runtime",
            "default-runtime nvidia",
            "every image whose environment says NVIDIA_VISIBLE_DEVICES=all takes every GPU, past what it was given",
            f'remove "default-runtime" from {PATH}; GPUs come through CDI',
            "gpu-node.md 4.2",
        )
    if cdi is False:
        yield Diagnosis(
            "cdi-off",
            "features.cdi false",
            "Docker refuses every CDI device, and so every engine with GPUs",
            f"remove it from {PATH}; a run writes true",
            "docs.docker.com, CDI",
        )
    folders = config.get("cdi-spec-dirs")
    if isinstance(folders, list) and not {"/var/run/cdi", "/run/cdi"} & set(map(str, folders)):
        yield Diagnosis(
            "cdi-folders",
            f"cdi-spec-dirs {', '.join(map(str, folders)) or 'empty'}",
            "the specification that the toolkit renews, in /var/run/cdi, is not read",
            f'add "/var/run/cdi" to it in {PATH}, or remove it',
            "docs.docker.com, CDI",
        )
