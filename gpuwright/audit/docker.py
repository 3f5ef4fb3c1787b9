"""What Docker says of its containers and images: looked at by more than one role's controls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpuwright.snapshot import Section

# sh has no pipefail: what a command says is kept first, so that its failure is a failure of the section.
#
# jq takes out what controls judge. The values of environment variables never leave the node (security.md 4.2, 9): of
# each only its name, and whether its value has the shape of a key. Settings that are public anyway come with value.
_CONTAINERS = r"""
set -f
ids=$(docker container ls --all --quiet --no-trunc) || exit 1
[ -n "$ids" ] || { echo '[]'; exit 0; }
found=$(docker container inspect $ids) || exit 1
printf '%s' "$found" | jq -c '
  def name: split("=")[0];
  [.[] | {
    name: (.Name | ltrimstr("/")),
    image: .Image,
    image_name: .Config.Image,
    running: .State.Running,
    pid: .State.Pid,
    labels: (.Config.Labels // {} | with_entries(select(.key | startswith("gpuwright.")))),
    privileged: .HostConfig.Privileged,
    read_only: .HostConfig.ReadonlyRootfs,
    restart: .HostConfig.RestartPolicy.Name,
    network: .HostConfig.NetworkMode,
    networks: (.NetworkSettings.Networks // {} | keys),
    pid_mode: .HostConfig.PidMode,
    ipc_mode: .HostConfig.IpcMode,
    uts_mode: .HostConfig.UTSMode,
    userns_mode: .HostConfig.UsernsMode,
    cgroupns_mode: .HostConfig.CgroupnsMode,
    security: (.HostConfig.SecurityOpt // []),
    cap_add: (.HostConfig.CapAdd // []),
    log: .HostConfig.LogConfig,
    pids_limit: (.HostConfig.PidsLimit // 0),
    memory: .HostConfig.Memory,
    shm_size: .HostConfig.ShmSize,
    devices: [.HostConfig.Devices // [] | .[] | .PathOnHost],
    device_requests: [.HostConfig.DeviceRequests // [] | .[] | {driver: .Driver, ids: (.DeviceIDs // [])}],
    mounts: [.Mounts[] | {source: .Source, target: .Destination, write: .RW}],
    published: [(.NetworkSettings.Ports // {}) | to_entries[] | .key as $port | (.value // [])[]
                | {port: $port, address: .HostIp, host_port: .HostPort}],
    wanted_ports: [(.HostConfig.PortBindings // {}) | to_entries[] | .key as $port | (.value // [])[]
                   | {port: $port, address: .HostIp, host_port: .HostPort}],
    environment: [.Config.Env // [] | .[] | name],
    key_shaped: [.Config.Env // [] | .[] | select(test("=(hf_|sk-|ghp_|xox)[A-Za-z0-9_-]{16,}")) | name],
    arguments: [(.Config.Cmd // [])[] | select(startswith("--")) | name]
  }]'
"""


def _parse_containers(text: str) -> list[Container]:
    return [Container(**entry) for entry in json.loads(text)]


@dataclass(frozen=True)
class Container:
    """One container as ``docker container inspect`` has it."""

    name: str
    image: str  # id
    image_name: str  # as it was asked for
    running: bool
    pid: int
    labels: dict[str, str]
    privileged: bool
    read_only: bool
    restart: str
    network: str
    networks: list[str]
    pid_mode: str
    ipc_mode: str
    uts_mode: str
    userns_mode: str
    cgroupns_mode: str
    security: list[str]
    cap_add: list[str]
    log: dict[str, Any]
    pids_limit: int
    memory: int
    shm_size: int
    devices: list[str]
    device_requests: list[dict[str, Any]]
    mounts: list[dict[str, Any]]
    published: list[dict[str, str]]
    wanted_ports: list[dict[str, str]]
    environment: list[str]  # names
    key_shaped: list[str]  # names of variables whose value looks like a key
    arguments: list[str]  # names of the command's flags


CONTAINERS = Section("audit-containers", _CONTAINERS, _parse_containers)

# image id to its digests
IMAGES = Section(
    "audit-images",
    r"""
set -f
ids=$(docker image ls --quiet --no-trunc) || exit 1
[ -n "$ids" ] || { echo '{}'; exit 0; }
found=$(docker image inspect $ids) || exit 1
printf '%s' "$found" | jq -c 'map({key: .Id, value: (.RepoDigests // [])}) | from_entries'
""",
    json.loads,
)
