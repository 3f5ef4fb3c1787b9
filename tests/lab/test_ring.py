"""The ring, for all five roles at once: blank host, dry run, converge, second run with zero changes, audit green, break it
by hand, audit says so, converge repairs it, reboot, audit green. On Debian 13 whole; on Debian 12 without the breaking."""

from __future__ import annotations

import time

import fleet
import pytest

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = fleet.boot(["ring-13"], tmp_path_factory.mktemp("ring"))
    yield site
    for host in site.hosts:
        host.destroy()


def answers(site: fleet.Fleet, host) -> tuple[int, int]:
    """Status without a key and with one."""
    question = {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 8}
    with site.client(host, key=None) as client:
        without = client.post("/v1/chat/completions", json=question).status_code
    with site.client(host) as client:
        return without, client.post("/v1/chat/completions", json=question).status_code


def blank(host) -> None:
    missing = host.run("for p in docker caddy python3 curl jq; do command -v $p; done; true").stdout.split()
    assert missing == [], "blank means blank"


def test_the_ring_on_debian_13(site):
    [host] = site.hosts
    blank(host)

    predicted = site.dry()
    blank(host)
    first = site.deploy()
    unpredicted = set(first.changed[host.name]) - set(predicted.changed[host.name])
    assert not unpredicted, "every change of the real run was predicted or listed as conditional"
    assert answers(site, host) == (401, 200)

    assert site.deploy().all_changed == []
    assert site.dry().all_changed == []
    assert site.audit() == []

    host.run("systemctl stop gpuwright-engine-main.service gpuwright-gateway.service")
    host.run("chmod 0644 /etc/gpuwright/gateway/keys.caddy")
    host.run(
        'sed -i \'s/"live-restore": true/"live-restore": false/\' /etc/docker/daemon.json && systemctl reload docker'
    )
    red = site.audit()
    for role in ("ENGN", "GATE", "CONT"):
        assert any(f"GPW-{role}-" in name for name in red), f"nothing about {role} in {red}"

    repaired = site.deploy()
    assert repaired.all_changed
    assert answers(site, host) == (401, 200)
    assert site.audit() == []

    host.reboot()
    deadline = time.monotonic() + 180
    while answers_or_nothing(site, host) != (401, 200):
        assert time.monotonic() < deadline, "the node did not come back by itself"
        time.sleep(2)
    assert site.audit() == []
    assert site.deploy().all_changed == []


def answers_or_nothing(site, host):
    try:
        return answers(site, host)
    except Exception:
        return None


@pytest.mark.proof
def test_debian_12_converges_and_comes_back(tmp_path_factory):
    site = fleet.boot(["ring-12"], tmp_path_factory.mktemp("ring12"), release="bookworm")
    [host] = site.hosts
    try:
        site.deploy()
        assert answers(site, host) == (401, 200)
        assert site.deploy().all_changed == []
        host.reboot()
        deadline = time.monotonic() + 180
        while answers_or_nothing(site, host) != (401, 200):
            assert time.monotonic() < deadline, "the node did not come back by itself"
            time.sleep(2)
        assert site.audit() == []
    finally:
        host.destroy()
