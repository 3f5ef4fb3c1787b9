"""A lab host with roles base and models only, the hub stand-in, and what a run of pyinfra on it came to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from outcome import NoDocument, operations

import lab
from gpuwright.render import REPOSITORY
from lab import hub
from lab.hosts import Host
from lab.hub import weights
from lab.paths import state

REPO = "lab/weights"
"""A model of this test's own: its faults hurt nobody else who uses the lab's hub."""

# Only these roles: what other roles need of a host is theirs to test.
DEPLOY = """
from pyinfra.context import ctx_host, ctx_state

from gpuwright import connect, ownership
from gpuwright.spec.fleet import node
from roles.base import base
from roles.models import models_start, models_verified

host = ctx_host.get()
connect.keep_tuned(ctx_state.get(), host)
spec = node(host)
ownership.retire_roles(present=spec.roles)
base(spec.base, profile=spec.hardening)
if spec.models:
    models_start(spec.models, hardware=spec.hardware)
    models_verified(spec.models, hardware=spec.hardware)
"""


@dataclass
class Run:
    """One run: exit status, everything it said, and the operations that changed (or would change) something."""

    status: int
    said: str
    changed: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """`models` is that part of the node file; change it and run again."""

    host: Host
    directory: Path
    commit: str
    models: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.models = {
            "store": "/srv/models",
            "hub": "https://hub.lab",
            "hub_ca": str(lab.ca_file()),
            "reserve": "64 MiB",
            "stall_timeout": "4 s",
            "items": {"llm": {"repo": REPO, "revision": self.commit}},
        }

    @property
    def weights(self) -> str:
        """Where the model lies on the host."""
        return f"/srv/models/{REPO}/{self.commit}"

    def prepare(self) -> list[str]:
        """Write inventory, node file and deploy; returns the command."""
        node: dict[str, Any] = {
            "gpuwright": 1,
            "summary": "a lab host",
            "os": {"trixie": "debian-13", "bookworm": "debian-12"}[self.host.release],
            "base": {"unattended_upgrades": False},
        }
        if self.models:
            node["models"] = self.models
        (self.directory / "nodes").mkdir(exist_ok=True)
        (self.directory / "nodes/trial.yaml").write_text(yaml.safe_dump(node))
        settings = {
            "node": "trial",
            "ssh_hostname": self.host.address,
            "ssh_user": "root",
            "ssh_key": str(self.host.ssh_key),
            "ssh_known_hosts_file": str(self.host.known_hosts),
        }
        (self.directory / "inventory.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({ {self.host.name: settings}!r}, __file__)\n"
        )
        (self.directory / "deploy.py").write_text(DEPLOY)
        return [str(Path(sys.executable).with_name("pyinfra")), "--json", "inventory.py", "deploy.py"]

    def start(self, *options: str) -> subprocess.Popen[str]:
        """A run that goes on in the background."""
        return subprocess.Popen(
            [*self.prepare(), *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str, timeout: float = 300) -> Run:
        """A run to its end."""
        process = self.start(*options)
        try:
            output, said = process.communicate(timeout=timeout)
        finally:
            process.kill()
        run = Run(process.returncode, said)
        try:
            run.changed = operations(output)[0].get(self.host.name, [])
        except NoDocument:
            run.said += output
        return run

    def deploy(self, *options: str) -> Run:
        """A real run that must succeed."""
        run = self.run("-y", *options)
        assert run.status == 0, run.said
        return run

    def sh(self, command: str, check: bool = True) -> str:
        """What a command prints on the host."""
        return self.host.run(command, check=check).stdout.strip()

    def journal(self, unit: str = "gpuwright-model-llm") -> str:
        """Everything the job said."""
        return self.sh(f"journalctl --no-pager -o cat -u {unit}")

    def served(self) -> int:
        """Bytes of file contents the hub sent for this model."""
        requests = hub.control("requests", method="GET")
        return sum(r["bytes"] for r in requests if REPO in r["path"] and "/api/" not in r["path"])

    def fault(self, **fault: Any) -> None:
        """Ask the hub stand-in for trouble with this model's shards."""
        hub.control("faults", [{"path": "model-0*-of-0*.safetensors", **fault}])

    def forget_weights(self) -> None:
        """As if the model had never been fetched."""
        self.sh("systemctl stop gpuwright-model-llm; rm -rf /srv/models/lab /run/gpuwright/models/*")
        hub.control("faults", method="DELETE")
        hub.control("requests", method="DELETE")


def blank(name: str, release: str, directory: Path) -> Trial:
    """A blank host, booted, nothing deployed; the hub has a model of 24 MiB for it."""
    weights.make(state() / "models", REPO)
    [host] = lab.up([name], release, blank=True)
    hub.serve()
    commit = hub.publish(REPO)
    hub.control("access", {})  # a run that was killed left its own
    hub.control("faults", method="DELETE")
    hub.control("requests", method="DELETE")
    return Trial(host, directory, commit)
