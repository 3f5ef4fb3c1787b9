"""What the node file no longer names is gone after the next run, a dry run said so, and evidence and weights stay."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.lab

SECOND = {
    "image": "registry.lab:5000/sim:lab",
    "model": "tiny",
    "served_name": "lab",
    "port": 18002,
    "settings": {"kind": "vllm", "max_model_len": 4096},
    "shm_size": "64 MiB",
    "tmp_size": "64 MiB",
    "stop_timeout": "20 s",
    "readiness": {"deadline": "120 s", "conditions_limit": "30 s"},
    "restart": {"delay": "5 s", "burst": 3, "interval": "20 min"},
}


def status(site, path: str) -> int:
    with site.client(site.hosts[0]) as client:
        return client.get(path).status_code


def test_an_engine_and_an_alias_go_and_leave_evidence_and_weights(site):
    [host] = site.hosts
    site.set("site-1", engine__engines__second=SECOND, gateway__aliases=[{"prefix": "/old-name"}])
    site.deploy()
    assert status(site, "/old-name/v1/models") == 200
    assert host.run("systemctl is-active gpuwright-engine-second.service").stdout.strip() == "active"

    del site.settings["site-1"]["set"]["engine.engines.second"]
    del site.settings["site-1"]["set"]["gateway.aliases"]
    predicted = site.dry().changed["site-1"]
    [removal] = [name for name in predicted if "no longer names (engine)" in name]
    for gone in ("unit gpuwright-engine-second.service", "container gpuwright-second", "network gpuwright-second"):
        assert gone in removal
    done = site.deploy().changed["site-1"]
    assert removal in done

    assert status(site, "/old-name/v1/models") == 404
    assert host.run("docker ps -a --format '{{.Names}}'").stdout.split() == ["gpuwright-main"]
    assert "gpuwright-second" not in host.run("docker network ls --format '{{.Name}}'").stdout.split()
    assert host.run("systemctl cat gpuwright-engine-second.service", check=False).returncode != 0
    assert host.run("ls /var/lib/gpuwright/evidence/second").stdout.strip(), "evidence is never removed"
    assert "second" not in host.run("cat /var/lib/gpuwright/owned/*").stdout
    assert site.deploy().all_changed == []


def test_a_role_goes_and_comes_back(site):
    [host] = site.hosts
    site.set("site-1", gateway=None)
    predicted = site.dry().changed["site-1"]
    assert any("gateway" in name and "unit gpuwright-gateway.service" in name for name in predicted)
    site.deploy()
    assert host.run("systemctl cat gpuwright-gateway.service", check=False).returncode != 0
    assert host.run("ss -Hltn 'sport = :443'").stdout == ""
    assert host.run("ls /etc/gpuwright/gateway", check=False).returncode != 0, "an empty directory is a leftover too"
    assert host.run("systemctl is-active gpuwright-engine-main.service").stdout.strip() == "active"
    del site.settings["site-1"]["set"]["gateway"]
    site.deploy()
    assert status(site, "/v1/models") == 200
