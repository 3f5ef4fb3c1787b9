"""Lab hosts with stand-in GPUs and a driver that was put there by hand, for role containers; with a SIMULATED engine on the GPUs.

The cards, nvidia-smi and the driver's packages are STAND-INS; apt, dpkg, systemd, Docker and what Docker makes of a CDI
specification are real. Role nvidia, which brings the driver, has a ring of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_trial import Trial, engine

from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import Result, judge_all
from gpuwright.spec.fleet import collect
from lab import gpus, hosts, repository

DRIVER = "580.95.05"
TOOLKIT = "1.18.2"
OFFERED = (f"driver-{DRIVER}", "toolkit-1.18.0", f"toolkit-{TOOLKIT}", "toolkit-1.20.0", "kernel-running")
_KEY = "/etc/apt/keyrings/lab-driver.asc"
_APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends"


def toolkit(version: str = TOOLKIT) -> dict[str, Any]:
    """Role containers' settings for the toolkit of the lab's repository."""
    return {
        "source": "nvidia",
        "version": version,
        "repository": f"http://{repository.NAME}/{repository.ARCHIVES['toolkit'].path}",
        "repository_key": str(repository.key_file()),
        "repository_fingerprint": repository.fingerprint(),
    }


def blank(name: str, count: int, directory: Path) -> Trial:
    """A blank host with `count` cards, their driver loaded, and one engine that shall have all of them. Nothing is deployed yet."""
    from lab import images

    images.build("sim")
    [host] = hosts.up([name], blank=True)
    if not set(OFFERED) <= set(repository.published()):
        repository.publish(*OFFERED)
    driven(host, count)
    made = Trial([host], directory)
    made.hardware = {"gpus": {"count": count, "memory": "1 GiB"}} if count else {}
    made.containers = {"toolkit": toolkit()}
    made.engines[host.name] = {"main": on_gpus(range(count))}
    return made


def driven(host: hosts.Host, count: int) -> None:
    """Give a host cards and, by hand, their driver; kernel and driver come from sources that stay on the host."""
    if not count:
        return
    gpus.plug(host, gpus.cards(host.name, count))
    host.run(f"mkdir -p /etc/apt/keyrings; cat >{_KEY}", stdin=repository.key_file().read_text())
    for archive in ("nvidia", "security"):
        source = repository.source(archive, _KEY)
        host.run(f"cat >/etc/apt/sources.list.d/lab-{archive}.sources", stdin=source)
    kernel = "linux-image-$(uname -r) linux-headers-$(uname -r)"
    host.run(f"{_APT} update && {_APT} install nvidia-driver-pinning-{DRIVER} {kernel}", timeout=300)
    host.run(f"{_APT} install nvidia-driver-cuda nvidia-kernel-open-dkms nvidia-persistenced", timeout=300)
    host.run("systemctl restart nvidia-persistenced")


def on_gpus(numbers: range | list[int], **changes: Any) -> dict[str, Any]:
    """An engine that shares its weights over these cards."""
    split = {"tensor_parallel_size": len(numbers)} if numbers else {}
    return engine(gpus=list(numbers), settings=split, **changes)


def audit(trial: Trial, prefix: str = "GPW-CONT-") -> dict[str, Result]:
    """What the controls say, by id."""
    trial.write()
    collected = collect(trial.directory / "inventory.py")
    assert not collected.faults, collected.faults
    name = trial.host.name
    spec = collected.specs[name]
    chosen = tuple(control for control in controls.of_node(spec) if control.id.startswith(prefix))
    host = connection.connect(name, collected.hosts[name])
    return {result.control.id: result for result in judge_all(chosen, connection.read(host, chosen), spec)}


def red(trial: Trial) -> dict[str, str]:
    """The controls that are not green, with what they saw."""
    green = (Outcome.PASS, Outcome.NOT_APPLICABLE)
    return {key: one.verdict.actual for key, one in audit(trial).items() if one.outcome not in green}


def cards(trial: Trial) -> list[str]:
    """The UUIDs of the host's cards, as the driver lists them."""
    return trial.sh("nvidia-smi --query-gpu=uuid --format=csv,noheader").split()


def inside(trial: Trial, container: str = "gpuwright-main") -> list[str]:
    """The UUIDs that the running container sees."""
    return trial.sh(f"docker exec {container} nvidia-smi --query-gpu=uuid --format=csv,noheader").split()
