"""Settings of role `containers`: the Docker engine and its daemon.json."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gpuwright.spec.base import ControllerPath, NodePath, RepositoryUrl, Size, Strict
from roles.containers.gpus.spec import ToolkitSpec

# Keys of daemon.json that other parts of a node rely on, and where their value belongs instead.
RESERVED = {
    "data-root": "write containers.data_root",
    "hosts": "docker.service starts dockerd with -H, and it refuses to start with both (moby issue 22339)",
    "iptables": "published ports need Docker's own rules",
    "ip": "ports published without an address stay on 127.0.0.1; publish on another address where it is wanted",
    "live-restore": "it is always on: without it a restart of Docker ends every engine",
    "log-driver": "it is json-file: the evidence of an engine is read from it",
}


def _daemon_keys(daemon: dict[str, Any]) -> dict[str, Any]:
    faults = [f"{key}: {RESERVED[key]}" for key in daemon if key in RESERVED]
    options = daemon.get("log-opts", {})
    if not isinstance(options, dict):
        faults.append("log-opts: an object is needed, as in {compress: 'true'}")
    else:
        own = {"max-size": "write containers.log_max_size", "max-file": "write containers.log_max_files"}
        faults += [f"log-opts.{key}: {own[key]}" for key in options if key in own]
        faults += [
            f"log-opts.{key}: Docker takes only strings here; write it in quotes"
            for key, value in options.items()
            if key not in own and not isinstance(value, str)
        ]
    if faults:
        raise ValueError("; ".join(faults))
    return daemon


def _registry_host(value: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:\d{1,5})?", value):
        raise ValueError("a registry is host or host:port as images name it, without https:// and path")
    return value


RegistryHost = Annotated[str, AfterValidator(_registry_host)]


class Registry(Strict):
    """A registry with its own certificate authority (air-gapped and corporate sites)."""

    host: RegistryHost = Field(description="host[:port] as images name it")
    ca: ControllerPath = Field(
        description="path on the controller of the PEM bundle that signs it; public, not a secret"
    )


class ContainersSpec(Strict):
    """Docker: where it comes from and what daemon.json must say."""

    source: Literal["distribution", "docker"] = Field(
        default="distribution", description="the distribution's docker.io, or Docker's own repository"
    )
    repository: RepositoryUrl = Field(
        default="https://download.docker.com/linux",
        description="base URL of Docker's repository or a mirror of it",
    )
    repository_key: ControllerPath | None = Field(
        default=None, description="path on the controller of the repository key (ASCII armour)"
    )
    data_root: NodePath = Field(
        default="/var/lib/docker", description="where Docker keeps images; put it on the disk that has room"
    )
    log_max_size: Size = Field(default=64 * 1024**2, description="json-file log of one container before it is rotated")
    log_max_files: int = Field(default=5, ge=1, le=100, description="rotated logs kept of one container")
    registries: tuple[Registry, ...] = ()
    toolkit: ToolkitSpec = ToolkitSpec()
    daemon: Annotated[dict[str, Any], AfterValidator(_daemon_keys)] = Field(
        default_factory=dict, description="further daemon.json keys, merged three ways"
    )

    @model_validator(mode="after")
    def _key_of_the_repository(self) -> ContainersSpec:
        if self.source == "docker" and self.repository_key is None:
            raise ValueError(
                "source docker needs repository_key: the path of the key that signs the repository "
                "(Docker publishes it as <repository>/<distribution>/gpg)"
            )
        return self
