"""Lab hosts with engines of their own: the roles base, containers and engine only; weights are put there by hand, a
STAND-IN for role models. The engines are SIMULATED; systemd, Docker, pyinfra and SSH are real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from outcome import NoDocument, operations

import lab
from gpuwright.render import REPOSITORY
from lab.hosts import Host

COMMIT = "c" * 40
WEIGHTS = f"/srv/models/lab/tiny/{COMMIT}"
UNIT = "gpuwright-engine-main.service"
PORT = 18001

DEPLOY = """
from pyinfra.context import ctx_host, ctx_state

from gpuwright import connect, ownership, wishes
from gpuwright.peers import peer_groups
from gpuwright.spec.fleet import node
from roles.base import base
from roles.containers import containers, containers_verified
from roles.engine import engine
from roles.pcie import pcie

host = ctx_host.get()
connect.keep_tuned(ctx_state.get(), host)
spec = node(host)
ownership.retire_roles(present=spec.roles)
base(spec.base, profile=spec.hardening)
peers = peer_groups(spec)
if spec.pcie:
    pcie(spec.pcie, hardware=spec.hardware, peers=peers)
containers(spec.containers, gpus=spec.hardware.gpus.count)
if spec.engine:
    judged = [group.engine for group in peers]
    engine(
        spec.engine, models=spec.models, hardware=spec.hardware, barrier=wishes.barrier(spec), judged=judged
    )
containers_verified(gpus=spec.hardware.gpus.count)
"""

PUT_WEIGHTS = f"""
set -e
mkdir -p {WEIGHTS}
head -c 4096 /dev/zero >{WEIGHTS}/model.safetensors
printf '{{"repo":"lab/tiny","revision":"{COMMIT}","files":[{{"path":"model.safetensors","size":4096,"sha256":"-"}}]}}' \\
  >{WEIGHTS}.manifest.json
"""


def engine(**changes: Any) -> dict[str, Any]:
    """A node file's engine "main", quick to start and to give up."""
    one: dict[str, Any] = {
        "image": "registry.lab:5000/sim:lab",
        "model": "tiny",
        "served_name": "lab",
        "port": PORT,
        "settings": {"kind": "vllm", "max_model_len": 4096},
        "environment": {"SIM_TOKENS_PER_SECOND": "20"},
        "shm_size": "64 MiB",
        "tmp_size": "64 MiB",
        "drain": "5 s",
        "stop_timeout": "5 s",
        "readiness": {"deadline": "60 s", "conditions_limit": "30 s"},
        "restart": {"delay": "2 s", "burst": 3, "interval": "1 h"},
    }
    for key, value in changes.items():
        one[key] = {**one[key], **value} if isinstance(one.get(key), dict) else value
    return one


@dataclass
class Run:
    """One run of pyinfra: exit status, everything it said, what changed and failed per host."""

    status: int
    said: str
    changed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Trial:
    """`engines` per host name; change it and deploy again."""

    hosts: list[Host]
    directory: Path
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    role: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Any] = field(default_factory=dict)
    containers: dict[str, Any] = field(default_factory=dict)
    """Settings of role containers besides the lab's registry."""

    def __post_init__(self) -> None:
        for host in self.hosts:
            self.engines.setdefault(host.name, {"main": engine()})
            host.run(PUT_WEIGHTS)

    @property
    def host(self) -> Host:
        return self.hosts[0]

    def set(self, host: Host | None = None, **changes: Any) -> None:
        """Give engine "main" of a host (of the first one) these settings instead of the usual ones."""
        self.engines[(host or self.host).name] = {"main": engine(**changes)}

    def write(self) -> list[str]:
        """Node files, inventory and deploy. Returns pyinfra's command line."""
        (self.directory / "nodes").mkdir(exist_ok=True)
        hosts = {}
        for host in self.hosts:
            engines = self.engines[host.name]
            document = {
                "gpuwright": 1,
                "summary": "a lab host with simulated engines",
                "hardware": self.hardware,
                "base": {"unattended_upgrades": False},
                "containers": {
                    "registries": [{"host": lab.registry.host(), "ca": str(lab.ca_file())}],
                    **self.containers,
                },
                **self.roles,
                "models": {"hub": "https://hub.lab", "items": {"tiny": {"repo": "lab/tiny", "revision": COMMIT}}},
            }
            if engines:
                document["engine"] = {"evidence_max": "16 MiB", **self.role, "engines": engines}
            (self.directory / f"nodes/{host.name}.yaml").write_text(yaml.safe_dump(document))
            hosts[host.name] = {
                "node": host.name,
                "ssh_hostname": host.address,
                "ssh_user": "root",
                "ssh_key": str(host.ssh_key),
                "ssh_known_hosts_file": str(host.known_hosts),
            }
        (self.directory / "inventory.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({hosts!r}, __file__, pins={lab.pins.read()!r})\n"
        )
        (self.directory / "deploy.py").write_text(DEPLOY)
        return [str(Path(sys.executable).with_name("pyinfra")), "inventory.py", "deploy.py"]

    def begin(self, *options: str) -> subprocess.Popen[str]:
        """A run in the background, as a user types it."""
        return subprocess.Popen(
            [*self.write(), *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *options: str, timeout: float = 600) -> Run:
        """``pyinfra inventory deploy`` to its end."""
        done = subprocess.run(
            [*self.write(), "--json", *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        run = Run(done.returncode, done.stderr)
        try:
            run.changed, run.failed = operations(done.stdout)
        except NoDocument:
            run.said += done.stdout
        return run

    def deploy(self, *options: str) -> Run:
        """A real run that must succeed."""
        run = self.run("-y", *options)
        assert run.status == 0, run.said[-6000:]
        return run

    def sh(self, command: str, host: Host | None = None, timeout: float = 120) -> str:
        """What a command on a host (the first one) prints; it must succeed."""
        return (host or self.host).run(command, timeout=timeout).stdout.strip()

    def shows(self, property_: str, host: Host | None = None, unit: str = UNIT) -> str:
        """One property of the engine's unit."""
        return self.sh(f"systemctl show --property={property_} --value {unit}", host)

    def journal(self, host: Host | None = None) -> str:
        """What the engine's unit said since the host booted."""
        return self.sh(f"journalctl --no-pager --output=cat --unit={UNIT}", host)

    def evidence(self, host: Host | None = None, engine: str = "main") -> list[str]:
        """The folders of kept attempts, oldest first."""
        folder = f"/var/lib/gpuwright/evidence/{engine}"
        return self.sh(f"find {folder} -mindepth 1 -maxdepth 1 -type d 2>/dev/null | sort; true", host).split()

    def container(self, host: Host | None = None) -> str:
        """The id of the engine's container."""
        return self.sh("docker inspect --format '{{.Id}}' gpuwright-main", host)

    def until(self, condition: Callable[[], bool], seconds: float = 90, what: str = "") -> None:
        """Wait for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what or condition}\n{self.journal()[-3000:]}"
            time.sleep(0.5)

    def is_ready(self, host: Host | None = None) -> bool:
        """Whether the engine is published."""
        return (host or self.host).run("test -e /run/gpuwright/ready/main", check=False).returncode == 0
