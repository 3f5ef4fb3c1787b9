"""A change of the driver on a host with two engines: drained, exchanged, rebooted, verified and back in service; or taken back.

The engines are SIMULATED, the cards do not exist, the driver's packages and the hub are STAND-INS (lab/gpus, lab/repository). apt, dpkg, systemd, Docker with CDI, SSH, pyinfra and the reboots are real.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cdi_trial
import engine_trial
import nvidia_trial
import pytest
import yaml
from nvidia_trial import NEW, OLD
from outcome import NoDocument, operations

import lab
from gpuwright.render import REPOSITORY
from lab import gpus, hosts, repository

pytestmark = pytest.mark.lab

ENGINES = {"one": 18001, "two": 18002}
BOOT = "cat /proc/sys/kernel/random/boot_id"
STATE = "/var/lib/gpuwright/nvidia"
EVIDENCE = "/var/lib/gpuwright/evidence/driver"


class Site:
    """The host, its node file, and runs of pyinfra on it."""

    def __init__(self, directory: Path, name: str) -> None:
        [self.host] = hosts.up([name], "trixie", blank=True)
        self.directory = directory
        self.cards = gpus.cards(name, 2)
        gpus.plug(self.host, self.cards)
        nvidia_trial.with_kernel(self.host)
        self.node: dict[str, Any] = {
            **nvidia_trial.node_file(2, nvidia=nvidia_trial.driver(OLD)),
            "containers": {
                "registries": [{"host": lab.registry.host(), "ca": str(lab.ca_file())}],
                "toolkit": cdi_trial.toolkit(),
            },
            "models": {
                "hub": "https://hub.lab",
                "hub_ca": str(lab.ca_file()),
                "reserve": "256 MiB",
                "items": {"tiny": {"repo": "lab/tiny", "revision": "main"}},
            },
            "engine": {
                "evidence_max": "16 MiB",
                "engines": {
                    name: engine_trial.engine(port=port, gpus=[index])
                    for index, (name, port) in enumerate(ENGINES.items())
                },
            },
        }

    def begin(self, *options: str) -> subprocess.Popen[str]:
        """A run, as a user types it."""
        (self.directory / "nodes").mkdir(exist_ok=True)
        document = {"gpuwright": 1, "summary": "a lab host with two simulated engines", **self.node}
        (self.directory / "nodes/node.yaml").write_text(yaml.safe_dump(document))
        settings = {
            "node": "node",
            "ssh_hostname": self.host.address,
            "ssh_user": "root",
            "ssh_key": str(self.host.ssh_key),
            "ssh_known_hosts_file": str(self.host.known_hosts),
        }
        (self.directory / "inventory.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({ {self.host.name: settings}!r}, __file__, pins={lab.pins.read()!r})\n"
        )
        return subprocess.Popen(
            [
                str(Path(sys.executable).with_name("pyinfra")),
                "--json",
                "inventory.py",
                REPOSITORY / "deploy.py",
                *options,
            ],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str) -> engine_trial.Run:
        """A run to its end."""
        process = self.begin(*options)
        try:
            said, errors = process.communicate(timeout=1200)
        finally:
            process.kill()
        run = engine_trial.Run(process.returncode, errors)
        try:
            run.changed, run.failed = operations(said)
        except NoDocument:
            run.said += said
        return run

    def deploy(self) -> engine_trial.Run:
        """A run that must succeed."""
        run = self.run("-y")
        assert run.status == 0, run.said[-8000:]
        return run

    def sh(self, command: str, check: bool = True) -> str:
        return self.host.run(command, check=check, timeout=300).stdout.strip()

    def module(self) -> str:
        return self.sh(r"sed -n '1s/.*  \([0-9.]*\)  .*/\1/p' /proc/driver/nvidia/version 2>/dev/null", check=False)

    def serving(self) -> bool:
        """Both engines are published and answer, each with its own card and the libraries of the loaded driver."""
        ready = set(self.sh("ls /run/gpuwright/ready 2>/dev/null", check=False).split())
        if ready != set(ENGINES):
            return False
        for index, (name, port) in enumerate(ENGINES.items()):
            self.sh(f"curl -fsS -m 5 http://127.0.0.1:{port}/health")
            listed = self.sh(
                f"docker exec gpuwright-{name} nvidia-smi --query-gpu=uuid,driver_version --format=csv,noheader"
            )
            assert listed == f"{self.cards[index].uuid}, {self.module()}"
        return True


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two engines that serve with driver 580.95.05."""
    from lab import hub, images

    images.build("sim")
    hub.serve()
    repository.withdraw()
    repository.publish(*nvidia_trial.OFFERED)
    site = Site(tmp_path_factory.mktemp("change"), "change-1")
    site.deploy()
    assert site.serving()
    yield site
    site.host.destroy()
    repository.withdraw()


def test_without_leave_to_reboot_nothing_is_exchanged(site: Site) -> None:
    site.node["kernel"]["reboot"] = "never"
    site.node["nvidia"]["version"] = NEW
    try:
        boot = site.sh(BOOT)
        run = site.deploy()
        assert f"driver {OLD} is loaded and {NEW} is wanted" in run.said
        assert f"the packages of {NEW} lie ready" in run.said
        assert (site.module(), site.sh(BOOT)) == (OLD, boot)
        assert site.sh("dpkg-query -W -f '${Version}' libcuda1") == f"{OLD}-1"
        assert site.serving()
        assert site.deploy().changed == {}, "what lies ready is not fetched again"
    finally:
        site.node["kernel"]["reboot"] = "when-needed"
        site.node["nvidia"]["version"] = OLD
        site.deploy()


def test_580_to_595_drained_verified_and_back_in_service(site: Site) -> None:
    before = site.sh(BOOT)
    containers = site.sh("docker ps --quiet --no-trunc | sort")
    site.node["nvidia"]["version"] = NEW
    plan = site.run("--dry")
    assert f"reboot needed, because driver {OLD} is loaded and {NEW} is wanted" in plan.said
    assert site.module() == OLD and site.serving()

    run = site.deploy()
    said = run.said
    # What the run before had laid by is taken.
    steps = (
        "draining before the reboot",
        f"exchanging {OLD} for {NEW}",
        f"driver {NEW} is loaded and verified",
    )
    assert [step for step in steps if step not in said] == []
    assert "lie ready" not in said
    assert sorted(steps, key=said.index) == list(steps)
    assert site.module() == NEW
    assert site.sh(BOOT) != before
    assert site.serving()
    assert site.sh("docker ps --quiet --no-trunc | sort") != containers
    assert site.sh(f"ls {STATE}") == "cards\nlog\noutcome"
    assert set(site.sh("dpkg-query -W -f '${Version}\\n' libcuda1 libnvidia-ml1 nvidia-driver-cuda").split()) == {
        f"{NEW}-1"
    }
    assert site.deploy().changed == {}


def test_a_driver_that_finds_no_card_is_taken_back_and_the_engines_serve_again(site: Site) -> None:
    bad = "595.71.05"
    repository.publish(f"driver-{bad}/probe")
    current = site.module()
    site.node["nvidia"]["version"] = bad
    run = site.run("-y")
    assert run.status != 0
    assert f"driver {bad} did not verify: no module is loaded" in run.said
    assert f"{current} was put back and is verified" in run.said
    assert site.module() == current
    until(site.serving)
    [folder] = site.sh(f"ls -d {EVIDENCE}/*-{bad}").split()
    assert "reason=no module is loaded" in site.sh(f"cat {folder}/reason")
    assert site.sh(f"stat -c %a {folder}") == "700"
    assert bad in site.sh(f"cat {folder}/packages")

    # It is not tried again, and says so, until somebody wants it to be.
    again = site.run("-y")
    assert again.status != 0
    assert f"driver {bad} is not tried again, because it failed on this node" in again.said
    assert site.serving()
    site.node["nvidia"]["version"] = current
    assert site.deploy().failed == {}
    assert site.deploy().changed == {}


def test_a_driver_that_does_not_build_never_reboots_the_node(site: Site) -> None:
    bad = "595.45.04"
    repository.publish(f"driver-{bad}/build")
    current, boot = site.module(), site.sh(BOOT)
    site.node["nvidia"]["version"] = bad
    run = site.run("-y")
    assert run.status != 0
    assert f"driver {bad} was not installed" in run.said and f"{current} was put back" in run.said
    assert "Bad return status for module build" in run.said
    assert (site.module(), site.sh(BOOT), site.sh("dpkg --audit")) == (current, boot, "")
    assert site.serving()
    assert "stand-in of the gpuwright lab: this package was made not to build" in site.sh(
        f"cat {EVIDENCE}/*-{bad}/make.log"
    )
    site.node["nvidia"]["version"] = current
    site.deploy()
    assert site.deploy().changed == {}


def test_a_controller_that_dies_after_the_reboot_is_not_missed(site: Site) -> None:
    """The node verifies by itself: its engines wait for no second run."""
    current = site.module()
    wanted = OLD if current == NEW else NEW
    site.node["nvidia"]["version"] = wanted
    before = site.sh(BOOT)
    process = site.begin("-y")
    until(
        lambda: site.sh(f"cat {STATE}/change/stage 2>/dev/null", check=False) == "applied" or process.poll() is not None
    )
    process.kill()
    process.wait()
    if site.sh(BOOT) == before:  # it died before it said so
        site.host.reboot()
    until(lambda: site.module() == wanted and site.serving())
    assert site.sh(f"cat {STATE}/outcome").startswith(f"good driver {wanted} is loaded and verified")
    site.deploy()
    assert site.deploy().changed == {}


def test_power_that_goes_while_packages_are_exchanged(site: Site) -> None:
    """The node itself goes back, serves, and the next run changes it."""
    current = site.module()
    wanted = OLD if current == NEW else NEW
    site.node["nvidia"]["version"] = wanted
    process = site.begin("-y")
    begun = f"dpkg-query -W -f '${{Version}}' libcuda1 | grep -q '^{wanted}' && cat {STATE}/change/stage"
    until(lambda: site.sh(begun, check=False) == "applying" or process.poll() is not None, pause=0.1)
    site.host.power_cycle()
    process.kill()
    process.wait()
    until(lambda: site.sh(f"cat {STATE}/outcome 2>/dev/null", check=False) != "")
    assert "the power went while the packages were exchanged" in site.sh(f"cat {STATE}/outcome")
    until(site.serving)
    assert (site.module(), site.sh("dpkg --audit")) == (current, "")
    site.deploy()
    assert site.module() == wanted
    assert site.serving()
    assert site.deploy().changed == {}


def until(condition: Any, seconds: float = 300, pause: float = 1.0) -> None:
    """Wait for a condition; a host that is between two boots answers later."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except Exception:  # the host is away
            pass
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)
