"""What pyinfra gets from an inventory, and what it gets instead when something is wrong."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import textwrap

import pytest
from pyinfra.connectors.ssh import connector_data_meta

from gpuwright.render import REPOSITORY
from gpuwright.spec import fleet
from gpuwright.spec.fault import Refused
from gpuwright.spec.fleet import node

PINS = {
    "images": {"registry.lab:5000/sim:lab": "sha256:" + "a" * 64},
    "models": {"lab/tiny@main": "b" * 40},
    "caddy": {"2.11.7/amd64": {"url": "https://caddy.lab/caddy", "sha256": "c" * 64}},
}


class Host:
    def __init__(self, name, data):
        self.name, self.data = name, data


@pytest.fixture
def inventory(tmp_path):
    """Writes an inventory with the shipped node files beside it, and runs it as pyinfra does."""

    def run(nodes, rest=""):
        (tmp_path / "nodes").unlink(missing_ok=True)
        (tmp_path / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
        file = tmp_path / "site.py"
        file.write_text(
            textwrap.dedent(f"""\
            from gpuwright.spec.fleet import fleet as _fleet
            gpu_nodes = _fleet({nodes}, __file__, pins={PINS})
            {rest}
            """)
        )
        return runpy.run_path(str(file))["gpu_nodes"]

    return run


def test_host_data_is_plain_and_node_rebuilds_the_description(inventory):
    [(name, data)] = inventory(
        '{"gpu-01": {"node": "lab", "ssh_user": "root", "set": {"engine.evidence_max": "1 MiB"}}}'
    )
    assert name == "gpu-01"
    assert json.loads(json.dumps(data)) == data
    assert data["ssh_strict_host_key_checking"] == "yes"
    assert data["ssh_known_hosts_file"].endswith("/known_hosts")
    spec = node(Host(name, data))
    assert spec.engine.evidence_max == 1024**2
    assert spec.engine.engines["main"].image.reference == "registry.lab:5000/sim@sha256:" + "a" * 64
    assert spec.models.items["tiny"].commit == "b" * 40
    assert spec.gateway.caddy.sha256 == "c" * 64
    assert node(Host(name, data)) is spec


def test_faults_of_all_hosts_of_all_groups_come_in_one_report(inventory, capsys):
    with pytest.raises(SystemExit) as stopped:
        inventory(
            '{"a": {"node": "lab", "ssh_usr": "root"}}',
            'more = _fleet({"b": {"node": "lap"}, "A": {"node": "lab"}}, __file__)',
        )
    assert stopped.value.code == 1
    report = capsys.readouterr().err
    assert "a.ssh_usr  is not a setting of a host; did you mean 'ssh_user'?" in report
    assert "b.node  'lap'  names no node file; did you mean 'lab'?" in report
    assert "A  has the same address as a: a port 22" in report


def test_pyinfra_shows_the_hosts_and_their_data(inventory, tmp_path):
    """`debug-inventory` crashes on anything in host data that is not JSON (pyinfra.md 6)."""
    inventory('{"gpu-01": {"node": "lab", "ssh_user": "root"}}')
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", str(tmp_path / "site.py"), "debug-inventory"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0
    assert "Groups: gpu_nodes, site" in shown
    assert '"served_name": "lab"' in shown


def test_ssh_settings_are_those_of_pyinfra():
    theirs = set(connector_data_meta)
    ours = set(fleet.SSH_SETTINGS)
    assert ours < theirs
    # passwords belong into an agent; the other one takes arguments that could switch host key checking off
    assert theirs - ours == {
        "ssh_password",
        "ssh_key_password",
        "ssh_paramiko_connect_kwargs",
        "ssh_connect_retry_min_delay",
        "ssh_connect_retry_max_delay",
    }


def test_a_secret_stays_a_reference(inventory, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "SEKRET")
    [(_, data)] = inventory('{"gpu-01": {"node": "lab", "set": {"models.token": {"env": "HUB_TOKEN"}}}}')
    assert data["gpuwright"]["spec"]["models"]["token"] == {"env": "HUB_TOKEN"}
    assert "SEKRET" not in json.dumps(data)


def test_relative_files_on_the_controller_start_at_the_inventory(inventory, tmp_path):
    (tmp_path / "site-ca.pem").write_text("")
    [(_, data)] = inventory('{"gpu-01": {"node": "lab", "set": {"models.hub_ca": "site-ca.pem"}}}')
    assert data["gpuwright"]["spec"]["models"]["hub_ca"] == str(tmp_path / "site-ca.pem")


def test_a_host_without_a_description_says_so():
    with pytest.raises(Refused, match="is described by no node file; name it in an inventory"):
        node(Host("gpu-09", {}))


def test_a_file_that_is_run_again_starts_anew(inventory, tmp_path):
    """An audit and a deploy in one process read the same inventory twice; no host is "described twice" by that."""
    first = inventory('{"gpu-01": {"node": "lab"}}')
    again = runpy.run_path(str(tmp_path / "site.py"))["gpu_nodes"]
    assert again == first
