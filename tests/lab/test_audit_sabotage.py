"""Every control can fail: green on a converged host, red after its sabotage and nothing else with it, green again."""

import json
import os
import subprocess
import sys
import time

import fleet
import pytest
import sabotage

from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect

pytestmark = pytest.mark.lab

HOST = "aud-1"
# This host has no role access: its own test has a host that is deployed by an account with sudo. Nor has it GPUs.
HERE = [key for key in sabotage.SABOTAGES if not key.startswith("GPW-ACCS-") and key not in sabotage.WITH_GPUS]
GREEN = (Outcome.PASS, Outcome.NOT_APPLICABLE)


class Node:
    """The host, and what its controls say of it."""

    def __init__(self, site):
        self.site = site
        collected = collect(site.inventory)
        assert not collected.faults, collected.faults
        self.spec = collected.specs[HOST]
        self.controls = controls.of_node(self.spec)
        self.host = connection.connect(HOST, collected.hosts[HOST])

    def judge(self):
        """Control id to its result, of one exchange."""
        snapshot = connection.read(self.host, self.controls)
        return {result.control.id: result for result in judge_all(self.controls, snapshot, self.spec)}

    def run(self, script):
        done = self.host.run(f"set -e\n{script}")
        assert done.rc == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    site = fleet.boot([HOST], tmp_path_factory.mktemp("audit"))
    # Settings without which a promise would not arise on a lab host.
    site.set(HOST, base__unattended_upgrades=True, models__numa_nodes="0", memory__regime="numa")
    site.set(HOST, firewall__ssh=[str(site.hosts[0].segment.network)], firewall__gateway=["0.0.0.0/0", "::/0"])
    site.set(HOST, gateway__local_clients={})
    site.deploy()
    node = Node(site)
    # A lab host has none; many installations of Ubuntu do.
    node.run("DEBIAN_FRONTEND=noninteractive apt-get -qq -y install needrestart >/dev/null 2>&1")
    # The access log exists from the first request on.
    with site.client(site.hosts[0], key=None) as client:
        client.get("/v1/models")
    yield node
    for host in site.hosts:
        host.destroy()


@pytest.fixture(scope="module")
def green(node):
    """What a converged host is judged to be: nothing is red, and nothing could not be seen."""
    found = node.judge()
    wrong = {key: r.verdict.actual for key, r in found.items() if r.outcome not in GREEN}
    assert wrong == {}
    return {key: result.outcome for key, result in found.items()}


def turned(node, green):
    """Controls whose outcome is another one than on the green host."""
    return {key: r for key, r in node.judge().items() if r.outcome is not green[key]}


def settled(node, green):
    """Nothing is different any more; what a service does after its restart gets some seconds."""
    deadline = time.monotonic() + 30
    while different := turned(node, green):
        if time.monotonic() > deadline:
            return {key: r.verdict.actual for key, r in different.items()}
        time.sleep(0.5)
    return {}


def check(node, green, control):
    """Do it, see exactly what was meant turn red, take it back."""
    entry = sabotage.SABOTAGES[control]
    assert green[control] is Outcome.PASS, "a control that does not arise cannot be shown to fail"
    try:
        node.run(entry.do)
        red = turned(node, green)
        seen = {key: (r.outcome.value, r.verdict.actual) for key, r in red.items()}
        assert set(red) == {control, *entry.also}, seen
        assert all(r.outcome is Outcome.FAIL for r in red.values()), seen
    finally:
        node.run(entry.undo)
    assert settled(node, green) == {}


@pytest.mark.parametrize("control", sabotage.SAMPLE)
def test_a_sabotage_turns_exactly_its_control_red(node, green, control):
    check(node, green, control)


@pytest.mark.proof
@pytest.mark.parametrize("control", [key for key in HERE if key not in sabotage.SAMPLE])
def test_every_other_sabotage_turns_exactly_its_control_red(node, green, control):
    check(node, green, control)


def test_the_whole_audit_is_one_exchange_and_takes_a_second(node, green):
    """`pytest tests/audit` as users run it: everything green, every result in JUnit and JSON, judged in no time."""
    directory = node.site.directory
    report = directory / "audit.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/audit",
        f"--inventory={node.site.inventory}",
    ]
    run = subprocess.run(
        [*command, f"--limit={HOST}", f"--audit-json={report}", f"--junitxml={directory}/audit.xml"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={
            "PATH": "/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": "/root",
            "GPUWRIGHT_AUDIT_KEY": node.site.key,
            # Which lab the host is of.
            **{name: value for name, value in os.environ.items() if name.startswith("GPUWRIGHT_LAB")},
        },
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    [host] = json.loads(report.read_text())["hosts"]
    assert len(host["results"]) == len(node.controls) >= 40
    assert set(host["outcomes"]) <= {"pass", "not applicable"}
    assert node.site.key not in report.read_text() + (directory / "audit.xml").read_text() + run.stdout
    snapshot = connection.read(node.host, node.controls)
    began = time.monotonic()
    judge_all(node.controls, snapshot, node.spec)
    # It takes 0.05 s; a busy builder is not a fault of the audit.
    assert time.monotonic() - began < 1


@pytest.mark.proof
def test_a_deploy_heals_what_drifted(node, green):
    """Everything that the next deploy is said to put right, done at once."""
    drifted = [key for key in HERE if sabotage.SABOTAGES[key].heals]
    # The last: others reload systemd in passing.
    drifted.sort(key=lambda key: key == "GPW-BASE-014")
    for key in drifted:
        node.run(sabotage.SABOTAGES[key].do)
    assert set(drifted) <= set(turned(node, green))
    node.site.deploy()
    assert settled(node, green) == {}
