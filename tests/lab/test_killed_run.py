"""A run killed anywhere, also between a change and its restart, is healed by the next one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright.render import REPOSITORY

pytestmark = pytest.mark.lab


def killed_after(site, operation: int) -> bool:
    """Start a run and kill it, without a goodbye, as soon as it begins its `operation`-th one. False: it ended before."""
    site.write()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("pyinfra"), "-y", str(site.inventory), "deploy.py"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen = 0
    for line in process.stderr:
        seen += bool(re.search(r"Starting (serial )?operation", line))
        if seen == operation:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.stderr.close()
    process.wait()
    return process.returncode == -signal.SIGKILL


def change(site, turn: int) -> None:
    """Settings that make `containers`, `engine` and `gateway` all change and restart something."""
    site.set(
        "site-1",
        containers__log_max_files=3 + turn % 2,
        engine__engines__main__settings__max_num_seqs=16 + turn % 2,
        gateway__aliases=[{"prefix": "/other"}] if turn % 2 else [],
    )


def drill(site, operations: list[int]) -> None:
    change(site, 0)
    site.deploy()
    for turn, operation in enumerate(operations, 1):
        change(site, turn)
        if not killed_after(site, operation):
            break
        site.deploy()
        [host] = site.hosts
        arguments = " ".join(json.loads(host.run("docker inspect gpuwright-main").stdout)[0]["Args"])
        assert re.search(rf"--max-num-seqs[= ]{16 + turn % 2}\b", arguments), (
            f"killed at operation {operation}: {arguments}"
        )
        with site.client(host) as client:
            assert client.get("/other/v1/models").status_code == (200 if turn % 2 else 404), f"killed at {operation}"
        daemon = json.loads(host.run("cat /etc/docker/daemon.json").stdout)
        assert daemon["log-opts"]["max-file"] == str(3 + turn % 2)
        assert site.deploy().all_changed == [], f"killed at operation {operation}"


def test_killed_where_a_restart_would_be_lost(site):
    """Two points of the drill below: after the engine's, and after the gateway's change."""
    names = [name for name in order(site)]
    after = [
        n + 2
        for n, name in enumerate(names)
        if "Merge /etc/docker/daemon.json" in name or "gateway's configuration" in name
    ]
    assert len(after) == 2
    drill(site, after)


@pytest.mark.proof
def test_killed_at_every_operation(site):
    drill(site, list(range(1, len(order(site)) + 1)))


def order(site) -> list[str]:
    """Names of all operations, in order."""
    site.write()
    done = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "--json", "--dry", str(site.inventory), "deploy.py"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [operation["name"] for operation in json.loads(done.stdout)["plan"]]
