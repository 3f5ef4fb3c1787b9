"""What pyinfra gets from an inventory, and what it gets instead when something is wrong."""

from __future__ import annotations

import json
import runpy
import textwrap

import pytest

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
        from gpuwright.render import REPOSITORY

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
