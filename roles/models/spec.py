"""Settings of role `models`: weights, where they come from and where they lie."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from gpuwright.spec.base import Commit, ControllerPath, Name, NodePath, Seconds, SecretRef, Size, Strict


def _repo(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value):
        raise ValueError("a model is named organisation/name")
    return value


class Model(Strict):
    """One set of weights at one commit."""

    repo: Annotated[str, AfterValidator(_repo)] = Field(description="organisation/name on the hub")
    revision: str = Field(
        description="40-hex commit, or a branch or tag that `gpuwright pin` resolves into pins.lock.yaml"
    )
    commit: Commit | None = Field(default=None, description="filled from pins.lock.yaml")
    source: NodePath | None = Field(default=None, description="directory on the node to copy from instead of the hub")
    size: Size | None = Field(
        default=None, description="bytes on disk, for planning and the disk guard before the hub answers"
    )
    cache_per_token: Size | None = Field(
        default=None,
        description="key-value cache of one token on each GPU at 16 bit; every rank holds a latent cache whole (seed 3)",
    )
    licence: str | None = Field(default=None, description="for people; nothing reads it")

    @model_validator(mode="after")
    def _inline_commit(self) -> Model:
        if self.commit is None and re.fullmatch(r"[0-9a-f]{40}", self.revision):
            object.__setattr__(self, "commit", self.revision)
        return self


class ModelsSpec(Strict):
    """One systemd job per model: ``gpuwright-model-<name>.service``."""

    store: NodePath = Field(default="/srv/models", description="weights lie in <store>/<org>/<name>/<commit>")
    hub: str = Field(default="https://huggingface.co", description="base URL of the hub or of a mirror of its HTTP API")
    hub_ca: ControllerPath | None = Field(
        default=None, description="path on the controller of a PEM bundle for a private hub"
    )
    token: SecretRef | None = Field(default=None, description="hub token; reaches only the download jobs")
    workers: int = Field(
        default=4, ge=1, le=16, description="parallel HTTP connections; four held 80-110 MiB/s (seed 1)"
    )
    stall_timeout: Seconds = Field(
        default=60, description="no new byte for this long: kill and resume (gpu-node.md 4.3)"
    )
    attempts: int = Field(default=10, ge=1, description="stalls or cuts without progress before the job gives up")
    reserve: Size = Field(default=10 * 1024**3, description="space that must stay free on the store's file system")
    numa_nodes: str | None = Field(
        default=None,
        pattern=r"^\d+([,-]\d+)*$",
        description="NUMAPolicy=bind, NUMAMask= of every job: the nodes with CPUs on machines with HBM nodes (seed 2)",
    )
    wait: bool = Field(default=True, description="the run shows progress and waits; false: the node finishes alone")
    items: dict[Name, Model] = Field(description="models by the name engines use")
