"""Settings of role `containers`: the Docker engine and its daemon.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gpuwright.spec.base import ControllerPath, NodePath, Size, Strict


class Registry(Strict):
    """A registry with its own certificate authority (air-gapped and corporate sites)."""

    host: str = Field(description="host[:port] as images name it")
    ca: ControllerPath = Field(
        description="path on the controller of the PEM bundle that signs it; public, not a secret"
    )


class ContainersSpec(Strict):
    """Docker: where it comes from and what daemon.json must say."""

    source: Literal["distribution", "docker"] = Field(
        default="distribution", description="the distribution's docker.io, or Docker's own repository"
    )
    repository: str = Field(
        default="https://download.docker.com/linux", description="base URL of Docker's repository or a mirror of it"
    )
    repository_key: ControllerPath | None = Field(
        default=None, description="path on the controller of the repository key (ASCII armour)"
    )
    data_root: NodePath = "/var/lib/docker"
    log_max_size: Size = Field(default=64 * 1024**2, description="json-file log of one container before it is rotated")
    log_max_files: int = Field(default=5, ge=1, le=100)
    registries: tuple[Registry, ...] = ()
    daemon: dict[str, Any] = Field(default_factory=dict, description="further daemon.json keys, merged three ways")
