"""A lab host with a node file of its own, and what a run of pyinfra on it came to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from outcome import NoDocument, operations

from gpuwright.render import REPOSITORY
from lab import hosts
from lab.hosts import Host


@dataclass
class Run:
    """One run: exit status, everything it said, and the operations by what became (or would become) of them."""

    status: int
    said: str
    changed: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """`node` is the node file; change it and run again."""

    host: Host
    directory: Path
    node: dict[str, Any]
    connect: dict[str, Any] = field(default_factory=dict)
    """Settings of the host in the inventory, over root and the lab's key."""

    def run(self, *options: str, timeout: float = 600) -> Run:
        """``pyinfra inventory deploy.py`` as a user types it; the node file is written first."""
        process = self.start(*options)
        try:
            said, errors = process.communicate(timeout=timeout)
        finally:
            process.kill()
        run = Run(process.returncode, errors)
        with contextlib.suppress(NoDocument):
            run.changed = operations(said)[0].get(self.host.name, [])
        return run

    def start(self, *options: str) -> subprocess.Popen[str]:
        """The same, still running, in a process group of its own."""
        document = {"gpuwright": 1, "summary": "a lab host", **self.node}
        (self.directory / "nodes").mkdir(exist_ok=True)
        (self.directory / "nodes/trial.yaml").write_text(yaml.safe_dump(document))
        settings = {
            "node": "trial",
            "ssh_hostname": self.host.address,
            "ssh_user": "root",
            "ssh_key": str(self.host.ssh_key),
            "ssh_known_hosts_file": str(self.host.known_hosts),
            **self.connect,
        }
        (self.directory / "inventory.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({ {self.host.name: settings}!r}, __file__)\n"
        )
        return subprocess.Popen(
            [Path(sys.executable).with_name("pyinfra"), "--json", "inventory.py", REPOSITORY / "deploy.py", *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def deploy(self) -> Run:
        """A real run that must succeed."""
        run = self.run("-y")
        assert run.status == 0, run.said
        return run

    def sh(self, command: str, check: bool = True) -> str:
        """What a command prints on the host."""
        return self.host.run(command, check=check).stdout.strip()


def blank(name: str, release: str, directory: Path, node: dict[str, Any]) -> Trial:
    """A blank host, booted, and nothing deployed on it yet."""
    (host,) = hosts.up([name], release, blank=True)
    return Trial(host, directory, node)
