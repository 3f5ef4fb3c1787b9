"""``gpuwright deploy``: exit status and closing table, on a booted host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gpuwright.render import REPOSITORY

pytestmark = pytest.mark.lab


def test_nothing_left_to_do_is_0_and_changes_pending_are_2(site):
    done = site.gpuwright("deploy", "--dry", "--json", str(site.inventory))
    [row] = json.loads(done.stdout)
    expected = {"host": "site-1", "changed": 0, "failed": 0, "reboot_needed": False, "reboot_because": []}
    assert row == expected | {"seconds": row["seconds"]}

    site.set("site-1", gateway__log_keep_days=7)
    site.write()
    done = site.gpuwright("deploy", "--dry", str(site.inventory), check=False)
    assert done.returncode == 2, done.stderr
    assert "would change" in done.stdout and "reboot needed" in done.stdout and "site-1" in done.stdout
    done = site.gpuwright("deploy", str(site.inventory))
    assert "site-1" in done.stdout
    assert site.gpuwright("deploy", "--dry", str(site.inventory), check=False).returncode == 0


def test_a_reboot_that_waits_is_said(site):
    [host] = site.hosts
    host.run("touch /run/reboot-required")
    try:
        done = site.gpuwright("deploy", "--dry", "--json", str(site.inventory))
    finally:
        host.run("rm /run/reboot-required")
    [row] = json.loads(done.stdout)
    assert row["reboot_needed"] is True
    assert row["reboot_because"] == ["the distribution asks for it (/run/reboot-required)"]
    assert "a reboot would be good, because the distribution asks for it" in done.stderr


def test_a_host_that_is_not_reached_is_1_and_the_others_go_on(site, tmp_path):
    text = site.inventory.read_text().replace("    __file__,", "    __file__,\n", 1)
    extra = tmp_path / "inventory.py"
    (tmp_path / "nodes").symlink_to(REPOSITORY / "inventory" / "nodes")
    settings = json.loads((site.directory / "settings.json").read_text())
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    # 192.0.2.0/24 is for documentation (RFC 5737); port 9 of the host itself answers nobody.
    extra.write_text(
        text + f"\ngone = [('gone', {{**gpu_nodes[0][1], 'ssh_port': 9, 'ssh_hostname': {site.hosts[0].address!r}}})]\n"
    )
    done = site.gpuwright("deploy", "--json", str(extra), check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    rows = {row["host"]: row for row in json.loads(done.stdout)}
    assert rows["site-1"]["failed"] == 0


def test_an_inventory_that_is_not_there_is_one_sentence(site):
    done = site.gpuwright("deploy", "inventory/nowhere.py", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "inventory/nowhere.py" in done.stderr and "Traceback" not in done.stderr


def test_interrupted_is_130(site):
    site.write()
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuwright", "deploy", str(site.inventory)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background has told them to ignore the signal; a person's terminal has not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if "Connected" in line:
            break
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
