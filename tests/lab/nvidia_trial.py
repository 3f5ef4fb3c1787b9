"""A lab host with stand-in cards under the repository's own deploy.py: role nvidia installs STAND-IN packages from the lab's
repository (lab/repository), for cards that do not exist (lab/gpus). apt, dpkg, kmod, systemd, Docker and SSH are real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trial
from trial import Run, Trial

import lab
from gpuwright import snapshot
from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import Result, judge_all
from gpuwright.spec.fleet import collect
from lab import gpus, repository
from lab.gpus import Gpu
from lab.hosts import Host
from roles.nvidia import equality
from roles.nvidia.facts import NVIDIA, Nvidia

OLD, NEW = "580.95.05", "595.58.03"
OFFERED = (f"driver-{OLD}", f"driver-{NEW}", "toolkit-1.18.2", "kernel-running")
KEY = "/etc/apt/keyrings/gpuwright-lab.asc"
GREEN = (Outcome.PASS, Outcome.NOT_APPLICABLE)


def driver(version: str = OLD, **settings: Any) -> dict[str, Any]:
    """A node file's part `nvidia`, for the lab's repository."""
    return {
        "source": "nvidia",
        "version": version,
        "repository": "http://repository.lab/compute/cuda/repos",
        "repository_key": str(repository.key_file()),
        "repository_fingerprint": repository.fingerprint(),
        **settings,
    }


def node_file(count: int, **parts: Any) -> dict[str, Any]:
    """A node with so many cards and no engine."""
    found: dict[str, Any] = {
        "hardware": {"gpus": {"count": count, "power_range_watts": [300, 600]}},
        "base": {"unattended_upgrades": False},
        "kernel": {"reboot": "when-needed"},
        "nvidia": driver(),
    }
    return {**found, **parts}


def with_kernel(host: Host) -> None:
    """The kernel that runs, as packages of the lab's: a lab host has none of its own. Its headers are left to the role."""
    host.run(f"mkdir -p {KEY.rpartition('/')[0]}; cat >{KEY}", stdin=repository.key_file().read_text())
    host.run("cat >/etc/apt/sources.list.d/lab-security.sources", stdin=repository.source("security", KEY))
    host.run(
        "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && apt-get -y -qq install "
        'linux-image-"$(uname -r | tr A-Z_ a-z-)" >/dev/null',
        timeout=300,
    )


class Node:
    """The host, what runs of it, and what is seen on it."""

    def __init__(self, host: Host, directory: Path, node: dict[str, Any], cards: Sequence[Gpu]) -> None:
        self.host = host
        self.cards = list(cards)
        self.trial = Trial(host, directory, node)
        gpus.plug(host, self.cards)

    @property
    def node(self) -> dict[str, Any]:
        """The node file, to be changed."""
        return self.trial.node

    def deploy(self, timeout: float = 900) -> Run:
        """A run that must succeed."""
        run = self.trial.run("-y", timeout=timeout)
        assert run.status == 0, run.said[-8000:]
        return run

    def fails(self) -> Run:
        """A run that must not."""
        run = self.trial.run("-y", timeout=900)
        assert run.status != 0, run.said[-8000:]
        return run

    def dry(self) -> Run:
        """What a run would change."""
        run = self.trial.run("--dry")
        assert run.status == 0, run.said[-8000:]
        return run

    def sh(self, command: str, check: bool = True, timeout: float = 300) -> str:
        """What a command prints on the host."""
        return self.host.run(command, check=check, timeout=timeout).stdout.strip()

    def facts(self) -> Nvidia:
        """What role nvidia reads of it."""
        return snapshot.parse(self.host.run(snapshot.script([NVIDIA])).stdout).read(NVIDIA)

    def findings(self) -> list[str]:
        """The kinds of what does not fit together."""
        return [finding.kind for finding in equality.findings(self.facts())]

    def installed(self, package: str) -> str:
        """A package's version, "" for none."""
        return self.sh(f"dpkg-query -W -f '${{Version}}' {package} 2>/dev/null", check=False)

    def module(self) -> str:
        """The version that is loaded, "" for none."""
        return self.sh(r"sed -n '1s/.*  \([0-9.]*\)  .*/\1/p' /proc/driver/nvidia/version 2>/dev/null", check=False)

    def judged(self, role: str = "NVID") -> dict[str, Result]:
        """The role's controls by id."""
        collected = collect(self.trial.directory / "inventory.py")
        assert not collected.faults, collected.faults
        name = self.host.name
        spec = collected.specs[name]
        chosen = tuple(control for control in controls.of_node(spec) if control.id.startswith(f"GPW-{role}-"))
        connected = connection.connect(name, collected.hosts[name])
        results = judge_all(chosen, connection.read(connected, chosen), spec)
        return {result.control.id: result for result in results}

    def red(self, role: str = "NVID") -> dict[str, str]:
        """What is not green, with what was seen."""
        found = self.judged(role)
        return {key: result.verdict.actual for key, result in found.items() if result.outcome not in GREEN}


def blank(name: str, count: int, directory: Path, model: str = "rtx-pro-6000", **parts: Any) -> Node:
    """A blank host with so many cards, and nothing deployed on it yet."""
    repository.withdraw()
    repository.publish(*OFFERED)
    directory.mkdir(exist_ok=True)
    site = trial.blank(name, "trixie", directory, {})
    with_kernel(site.host)
    cards = gpus.cards(name, count, model)
    return Node(site.host, directory, node_file(count, **parts), cards)


__all__ = ["NEW", "OFFERED", "OLD", "Node", "blank", "driver", "lab", "node_file"]
