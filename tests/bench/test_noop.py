"""A converged host that needs nothing: how long until a run knows that, against ansible-core with pipelining doing the same
work on the same host, taken in turns in one run. Ratios are recorded; nothing here asserts a time."""

from __future__ import annotations

import datetime
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuwright import snapshot
from gpuwright.render import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests" / "lab"))
import fleet
from playbook import playbook

pytestmark = [pytest.mark.lab, pytest.mark.proof]

ROUNDS = 5
MARK = "<!-- everything below is written by ./run proof -->\n"
# Asked for by the roles; all are there on a converged node.
PACKAGES = ["ca-certificates", "curl", "jq", "docker.io", "nftables"]


def timed(command: list[str], **options) -> tuple[float, subprocess.CompletedProcess[str]]:
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    seconds = time.monotonic() - started
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return seconds, done


@pytest.fixture
def site(tmp_path_factory):
    site = fleet.boot(["bench-1"], tmp_path_factory.mktemp("bench"))
    site.deploy()
    yield site
    for host in site.hosts:
        host.destroy()


def prepare_ansible(site: fleet.Fleet, directory: Path) -> tuple[list[str], int]:
    """The playbook, its inventory, and Python on the host: Ansible cannot work without it."""
    [host] = site.hosts
    host.run("apt-get -qq update && apt-get -qq -y install python3 python3-apt >/dev/null", timeout=300)
    seen = snapshot.parse(host.run(snapshot.script()).stdout)
    contents = directory / "contents"
    contents.mkdir()
    paths = " ".join(
        f"/etc/systemd/system/{f.name}" if f.kind == "unit" else f.name for f in seen.read(snapshot.OWNED) if f.sha256
    )
    archive = host.run(f"tar -c --absolute-names {paths} | base64").stdout
    subprocess.run(
        f"base64 -d | tar -x -C {contents}", shell=True, input=archive, text=True, check=True, capture_output=True
    )
    tasks = playbook(seen, PACKAGES, contents, directory / "noop.json")
    ssh = f"-o UserKnownHostsFile={host.known_hosts} -o ControlMaster=auto -o ControlPersist=60s"
    (directory / "hosts.ini").write_text(
        f"{host.name} ansible_host={host.address} ansible_user=root ansible_ssh_private_key_file={host.ssh_key} "
        f"ansible_ssh_common_args='{ssh}' ansible_python_interpreter=/usr/bin/python3\n"
    )
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(directory / "hosts.ini")]
    return [*command, str(directory / "noop.json")], tasks


def test_a_converged_host_that_needs_nothing(site, tmp_path):
    site.write()
    pyinfra = [str(Path(sys.executable).with_name("pyinfra")), str(site.inventory), "deploy.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ansible, tasks = prepare_ansible(site, tmp_path)
    piped = os.environ | {"ANSIBLE_PIPELINING": "True", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOST_KEY_CHECKING": "True"}
    seconds: dict[str, list[float]] = {"pyinfra -y": [], "pyinfra --dry": [], "ansible-playbook, pipelining": []}
    for _ in range(ROUNDS):
        for name, options in (("pyinfra -y", ["-y"]), ("pyinfra --dry", ["--dry"])):
            took, done = timed([*pyinfra, *options], cwd=REPOSITORY, env=environment)
            seconds[name].append(took)
            if options == ["-y"]:
                total = re.search(r"Grand total\s+(\d+)\s+(\S+)\s+(\S+)\s+(\S+)", done.stderr + done.stdout)
                assert total and total[2] == "-" and total[3] == "-", "a converged host reports a change"
        took, done = timed(ansible, env=piped)
        seconds["ansible-playbook, pipelining"].append(took)
        assert "changed=0" in done.stdout, done.stdout[-2000:]
    talk = timed([*pyinfra, "-y", "-vvv"], cwd=REPOSITORY, env=environment)[1]
    operations = int(total[1])
    commands = len(re.findall(r">>> ", talk.stderr + talk.stdout))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = median["ansible-playbook, pipelining"] / median["pyinfra -y"]
    lines = [
        f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"- {operations} operations, {commands} remote commands; {tasks} Ansible tasks asking the same",
        "- command: `pytest tests/bench -m ''`",
        "",
        "| run | median of 5 | fastest | slowest |",
        "| --- | --- | --- | --- |",
        *(f"| {name} | {median[name]:.2f} s | {min(v):.2f} s | {max(v):.2f} s |" for name, v in seconds.items()),
        "",
        f"`pyinfra -y` is {ratio:.1f} times as fast as ansible-core with pipelining, in this run, on this host.",
    ]
    print("\n".join(lines))
    if os.environ.get("GPUWRIGHT_RECORD"):
        page = REPOSITORY / "docs" / "benchmarks.md"
        page.write_text(page.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines) + "\n")
