"""The units that we ship, on booted hosts: as little exposed as docs/hardening.md says, and each still does its job.

`gpuwright-acs.service` and `gpuwright-p2p.service` need a bus and cards: here systemd judges the files of them alone.
"""

from __future__ import annotations

import re
import time

import exposure
import fleet
import pytest

from roles.gateway.engine_guard import TABLE

pytestmark = pytest.mark.lab

_LOADED = {
    "gpuwright-guard.service": "gpuwright-guard.service",
    "gpuwright-gpu-faults.service": "gpuwright-gpu-faults.service",
    "gpuwright-firewall.service": "gpuwright-firewall.service",
    "gpuwright-neighbour-guard.service": "gpuwright-neighbour-guard.service",
    "gpuwright-model-NAME.service": "gpuwright-model-tiny.service",
    "gpuwright-model-verify@.service": "gpuwright-model-verify@tiny.service",
    "gpuwright-image-NAME.service": "gpuwright-image-main.service",
    "gpuwright-engine-guard.service": "gpuwright-engine-guard.service",
    "gpuwright-gateway.service": "gpuwright-gateway.service",
}
ENGINE = "gpuwright-engine-main.service"
_REASON = "looks at the engines' metrics"


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def site(request, tmp_path_factory):
    """Debian 13 with the firewall; Debian 12, whose Docker is before 28, with the neighbour guard instead."""
    name = {"trixie": "box-13", "bookworm": "box-12"}[request.param]
    site = fleet.boot([name], tmp_path_factory.mktemp("box"), request.param)
    if request.param == "trixie":
        segment = str(site.hosts[0].segment.network)
        site.set(name, firewall__ssh=[segment], firewall__gateway=["0.0.0.0/0", "::/0"])
    site.set(name, gateway__local_clients={"backup": _REASON})
    site.dry()
    site.deploy()
    yield site
    for host in site.hosts:
        host.destroy()


def exposed(host, command: str) -> float:
    said = host.run(f"systemd-analyze --no-pager security {command}").stdout
    [level] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    return float(level)


def measured(host) -> tuple[dict[str, float], set[str]]:
    """Every unit of the page as this host's systemd judges it, and which of them it has; the others by their files."""
    found, live = {}, set()
    for name, confined in exposure.ROWS:
        unit = _LOADED.get(name)
        if unit and host.run(f"systemctl cat {unit} 2>/dev/null", check=False).returncode == 0:
            found[name] = exposed(host, unit)
            live.add(name)
        else:
            text = f"[Service]\nExecStart=/bin/true\n{confined.lines()}\n"
            host.run(f"mkdir -p /run/offline; cat >/run/offline/{name}", stdin=text)
            found[name] = exposed(host, f"--offline=true /run/offline/{name}")
    return found, live


def test_no_unit_is_more_exposed_than_the_page_says(site):
    [host] = site.hosts
    found, live = measured(host)
    absent = "gpuwright-neighbour-guard.service" if host.release == "trixie" else "gpuwright-firewall.service"
    assert live == set(_LOADED) - {absent}, "judged as this host runs them, and not by their files"
    page = exposure.PAGE.read_text()
    known = exposure.recorded(page)
    new = {name: known.get(name, {}) | {host.release: found[name]} for name, _ in exposure.ROWS}
    worse = {name: level for name, level in found.items() if level > known.get(name, {}).get(host.release, 0.0)}
    assert worse == {}, f"put this into docs/hardening.md, if it is meant:\n{exposure.table(new)}"
    assert found["gpuwright-gateway.service"] <= 2.0
    # An engine without cards has less than the one of the page.
    assert exposed(host, ENGINE) <= found["gpuwright-engine-NAME.service"]


def answer(site, host) -> int:
    question = {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 8}
    with site.client(host) as client:
        return client.post("/v1/chat/completions", json=question).status_code


def test_every_unit_does_its_job(site):
    """Each started anew under its confinement; what it is for is seen, not its exit status alone."""
    [host] = site.hosts
    assert answer(site, host) == 200
    host.run("systemctl reset-failed 'gpuwright-*'")
    # The jobs: from nothing, and every byte again.
    host.run(
        "systemctl restart gpuwright-model-tiny.service gpuwright-model-verify@tiny.service gpuwright-image-main.service"
    )
    assert "every byte" in host.run("journalctl -q -o cat -u gpuwright-model-verify@tiny.service").stdout
    # Stopped, evidence kept, started, ready.
    before = host.run("ls /var/lib/gpuwright/evidence/main 2>/dev/null | wc -l", check=False).stdout.strip()
    host.run(f"systemctl restart {ENGINE}", timeout=200)
    assert int(host.run("ls /var/lib/gpuwright/evidence/main | wc -l").stdout) > int(before)
    assert host.run("stat -c '%a %U' /run/gpuwright /run/gpuwright/ready/main").stdout.split() == [
        "755",
        "root",
        "644",
        "root",
    ]
    deadline = time.monotonic() + 60
    while answer(site, host) != 200:
        assert time.monotonic() < deadline
        time.sleep(1)
    host.run("systemctl reload-or-restart gpuwright-gateway.service")
    assert answer(site, host) == 200
    filters = {
        "gpuwright-firewall.service": "inet gpuwright",
        "gpuwright-neighbour-guard.service": "inet gpuwright_containers",
        "gpuwright-engine-guard.service": TABLE,
    }
    for unit, table in filters.items():
        if host.run(f"systemctl is-enabled -q {unit}", check=False).returncode == 0:
            host.run(f"nft delete table {table}; systemctl restart {unit}")
            assert host.run(f"nft list table {table}").stdout
    # Killed by the filter, refused by it, or never started for want of a namespace: nothing of that.
    said = host.run(
        "journalctl -q -b -o cat -u 'gpuwright-*' | grep -E 'status=2[0-9][0-9]/|SIGSYS|Operation not permitted|Read-only file system'"
        " | head -n 5",
        check=False,
    ).stdout
    assert said == ""
    assert host.run("systemctl list-units --failed --plain --no-legend 'gpuwright-*'").stdout == ""


def test_local_accounts_reach_engines_by_the_gateway_alone(site):
    """By the published port and by the container's own address; root and the gateway go on, whatever flushes the rules."""
    [host] = site.hosts
    networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    own = host.run(f"docker inspect --format '{networks}' gpuwright-main").stdout.strip()
    ways = ("127.0.0.1:18001", f"{own}:8000")

    def codes(account: str) -> list[str]:
        asked = "curl -s -m 5 -o /dev/null -w '%{http_code}' http://"
        return [host.run(f"runuser -u {account} -- {asked}{way}/v1/models", check=False).stdout for way in ways]

    def shut() -> bool:
        reached = {account: codes(account) for account in ("root", "backup", "daemon")}
        let_in, refused = ["200", "200"], ["000", "000"]
        return reached == {"root": let_in, "backup": let_in, "daemon": refused} and answer(site, host) == 200

    assert shut()
    # A container of the site's own stays everybody's, by its published port and by its address.
    image = host.run("docker inspect --format '{{.Image}}' gpuwright-main").stdout.strip()
    host.run(
        "docker network create of-the-site >/dev/null; docker run --detach --name of-the-site --network of-the-site "
        f"--publish 127.0.0.1:18900:8000 --entrypoint python3 {image} -m http.server 8000"
    )
    address = host.run(f"docker inspect --format '{networks}' of-the-site").stdout.strip()
    try:
        for way in ("127.0.0.1:18900", f"{address}:8000"):
            deadline = time.monotonic() + 30
            while host.run(f"runuser -u daemon -- curl -s -m 5 -f -o /dev/null http://{way}/", check=False).returncode:
                assert time.monotonic() < deadline, f"the site's own container is not reached by {way}"
                time.sleep(0.5)
    finally:
        host.run("docker rm --force of-the-site; docker network rm of-the-site")

    # Without role firewall a start of nftables.service flushes every rule, Docker's too.
    host.run(
        "systemctl restart nftables.service && systemctl stop nftables.service && systemctl restart docker.service"
    )
    deadline = time.monotonic() + 120
    while codes("root") != ["200", "200"] or answer(site, host) != 200:
        assert time.monotonic() < deadline
        time.sleep(1)
    own = host.run(f"docker inspect --format '{networks}' gpuwright-main").stdout.strip()
    ways = ("127.0.0.1:18001", f"{own}:8000")
    assert shut()

    host.run("nft flush chain inet gpuwright_engines output")
    assert codes("daemon") == ["200", "200"]
    assert [name for name in site.audit() if "GPW-GATE-024" in name] == site.audit() != []
    assert site.deploy().all_changed == [f"Gateway | Keep local accounts away from engines (table {TABLE})"]
    assert shut()

    site.set(host.name, gateway__local_clients={"nobody-has-this": _REASON})
    failed = site.pyinfra("-y")
    assert failed.status != 0
    assert "gateway.local_clients: this node has no account nobody-has-this" in failed.said
    assert shut(), "as it was"

    # An account that goes later must not open the engines at the next boot.
    host.run("useradd --system agent")
    site.set(host.name, gateway__local_clients={"agent": _REASON, "backup": _REASON})
    site.deploy()
    assert codes("agent") == ["200", "200"]
    host.run("userdel agent; nft delete table inet gpuwright_engines; systemctl restart gpuwright-engine-guard.service")
    assert shut()

    site.set(host.name, gateway__local_clients={"*": _REASON})
    site.deploy()
    assert codes("daemon") == ["200", "200"], "nothing of it is left"
    assert host.run("nft list table inet gpuwright_engines", check=False).returncode
    site.set(host.name, gateway__local_clients={"backup": _REASON})
    site.deploy()
    assert shut()
    assert site.deploy().all_changed == []
    assert site.audit() == []


def test_the_guard_puts_files_back_wherever_they_were(site):
    """The one unit whose job comes when all else has failed: armed as a deploy does it, and left alone."""
    [host] = site.hosts
    guard = "/usr/local/lib/gpuwright/guard"
    host.run("echo old >/etc/kept; echo old >/usr/local/lib/gpuwright/kept; chmod 600 /etc/kept")
    undo = "path\\t/etc/kept\\npath\\t/usr/local/lib/gpuwright/kept\\npath\\t/etc/absent\\n"
    after = "bmZ0IGxpc3QgdGFibGVzID4vcnVuL2FmdGVyLnNhaWQ7IHN5c3RlbWN0bCByZWxvYWQgc3NoLnNlcnZpY2U="  # nft list tables…; systemctl reload ssh
    host.run(f"printf '{undo}after\\t{after}\\n' | {guard} arm one 20 trial somebody@somewhere")
    host.run("echo new >/etc/kept; echo new >/usr/local/lib/gpuwright/kept; touch /etc/absent")
    deadline = time.monotonic() + 60
    while (
        host.run("cat /etc/kept").stdout != "old\n"
        or host.run("ls -d /var/lib/gpuwright/guard/armed", check=False).returncode == 0
    ):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert host.run("cat /usr/local/lib/gpuwright/kept; stat -c %a /etc/kept; ls /etc/absent 2>/dev/null; test -e /run/after.said && echo told", check=False).stdout.split() == ["old", "600", "told"]  # fmt: skip
    host.run("rm -rf /etc/kept /usr/local/lib/gpuwright/kept /run/after.said /var/lib/gpuwright/guard/fired.*")


def test_it_comes_back_after_a_reboot(site):
    """Early units have nothing but the root file system to be confined in."""
    [host] = site.hosts
    host.reboot()
    deadline = time.monotonic() + 180
    while True:
        try:
            if answer(site, host) == 200:
                break
        except Exception:
            pass
        assert time.monotonic() < deadline, "the node did not come back by itself"
        time.sleep(2)
    assert host.run("systemctl list-units --failed --plain --no-legend 'gpuwright-*'").stdout == ""
    assert site.audit() == []
