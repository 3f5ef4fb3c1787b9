"""Role firewall on booted hosts: the ring, what is reached from outside, Docker, the site's own rules, lock-out drills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import fleet
import httpx
import pytest
import trial
from test_containers import IMAGE, Attacker
from trial import Trial

import lab
from gpuwright.render import REPOSITORY
from lab import tools

pytestmark = pytest.mark.lab

LOAD = "Firewall | Load the packet filter (table inet gpuwright)"
TABLE = "nft -s list table inet gpuwright"
GUARD = "/var/lib/gpuwright/guard"
# The shortest time the guard takes; half of it is for trying.
SECONDS = 20

SCAN = """
import json, sys
from gpuwright.audit.outside import open_ports
first, last = map(int, sys.argv[1].split("-"))
print(json.dumps([open_ports(address, range(first, last + 1), wait=1.0) for address in sys.argv[2:]]))
"""

# Started by hand: without an address (Docker is told to take loopback), on every address, and over IPv6; and a program
# on the node itself.
STRANGERS = """
set -e
docker network inspect six >/dev/null 2>&1 || docker network create --ipv6 --subnet fd00:6::/64 six >/dev/null
docker network inspect own >/dev/null 2>&1 || docker network create own >/dev/null
docker run -d --restart=always --name plain -p 8000:80 probe:1 /bin/serve >/dev/null
docker run -d --restart=always --name open -p 0.0.0.0:8001:80 probe:1 /bin/serve >/dev/null
docker run -d --restart=always --name six --network six -p '[::]:8002:80' probe:1 /bin/serve >/dev/null
docker run -d --restart=always --name bridged --network own -p 0.0.0.0:8004:80 probe:1 /bin/serve >/dev/null
docker update --restart=always web unpublished >/dev/null
cat >/etc/systemd/system/stranger.service <<'UNIT'
[Service]
ExecStart=/bin/busybox httpd -f -p 8003 -h /srv
[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable -q --now stranger.service
"""

DOCKER = {"daemon": {"experimental": True, "ip6tables": True}}  # IPv6 rules are an experiment before Docker 27


def networks(node: Trial) -> list[str]:
    """Where the controller, and on the lab's segment everybody else, comes from."""
    return [str(node.host.segment.network), "fd67:7077::/32"]


def scan(node: Trial, ports: str = "1-65535") -> list[list[int]]:
    """What the neighbour finds open: over IPv4, over IPv6."""
    neighbour = lab.neighbour()
    command = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-c", SCAN, ports]
    done = neighbour.run(*command, node.host.address, node.host.address6, check=True, timeout=240)
    return json.loads(done.stdout)


def reached(node: Trial) -> list[list[int]]:
    """The ports in question only; all of them are asked where it matters."""
    return scan(node, "8000-8010")


def up(node: Trial) -> None:
    """Whoever is on the node reaches everything, so what is not reached from outside is not simply down."""
    for port in (8000, 8001, 8004):
        node.sh(
            f"timeout 60 sh -c 'until [ \"$(curl -s -m 2 http://127.0.0.1:{port}/)\" = hello ]; do sleep 0.2; done'"
        )
    node.sh("timeout 60 sh -c 'until curl -s -o /dev/null -m 2 http://127.0.0.1:8003/; do sleep 0.2; done'")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A host with Docker and containers that somebody started by hand, and no firewall yet."""
    there = trial.blank("firewall", "trixie", tmp_path_factory.mktemp("firewall"), {"containers": DOCKER})
    there.deploy()
    there.host.run(IMAGE, timeout=300)
    there.host.run(STRANGERS)
    yield there
    there.host.destroy()


@pytest.fixture
def attacker(node: Trial) -> Iterator[Attacker]:
    there = Attacker(node)
    yield there
    there.close()


@contextlib.contextmanager
def knocking(attacker: Attacker, *targets: tuple[str, int]) -> Iterator[list[str]]:
    """A hundred connections a second to each target, as long as it takes; the list has what got through."""
    code = """
import errno, select, socket, sys, time
targets = [(a, int(p)) for a, p in (t.rsplit(":", 1) for t in sys.argv[1:])]
print("begun", flush=True)
while True:
    asked = []
    for target in targets:
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(target)
        asked.append((s, target))
    time.sleep(0.01)
    for s, target in asked:
        if select.select([], [s], [], 0)[1] and s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            print("through to", *target, flush=True)
        s.close()
"""
    listed = [f"{address}:{port}" for address, port in targets]
    process = subprocess.Popen(
        ["ip", "netns", "exec", attacker.namespace, sys.executable, "-c", code, *listed],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    through: list[str] = []
    try:
        yield through
    finally:
        process.kill()
        through += process.communicate()[0].splitlines()


def inside(node: Trial, attacker: Attacker) -> list[tuple[str, int]]:
    """What only the neighbour rule keeps away: a loopback port, and a container's own address."""
    address = node.sh("docker inspect --format '{{.NetworkSettings.IPAddress}}' unpublished")
    return [("127.0.0.1", 8080), (address, 80)]


# --- the ring --------------------------------------------------------------------------------------------------------


def test_without_a_firewall_all_of_it_is_open(node):
    """What the next test finds shut."""
    up(node)
    assert scan(node) == [[22, 8001, 8003, 8004], [22, 8002, 8003]]


def test_it_takes_the_neighbour_rule_over_without_a_moment_between(node, attacker):
    # Where something else switched forwarding on before Docker started, Docker leaves this policy alone.
    node.sh("iptables -P FORWARD ACCEPT")
    node.node["firewall"] = {"ssh": networks(node)}
    dry = node.run("--dry")
    assert dry.status == 0, dry.said
    assert "table inet gpuwright_containers" in " ".join(dry.changed)
    with knocking(attacker, *inside(node, attacker)) as through:
        first = node.deploy()
    assert through == []
    assert set(first.changed) == set(dry.changed)
    assert LOAD in first.changed
    assert "the lock-out guard is armed" in first.said
    assert not node.sh("nft list table inet gpuwright_containers 2>/dev/null", check=False)
    assert not node.sh("ls /etc/gpuwright/containers /etc/systemd/system/gpuwright-neighbour-guard.service 2>/dev/null", check=False)  # fmt: skip
    assert node.deploy().changed == []
    assert node.run("--dry").changed == []


def test_nothing_but_ssh_is_reached(node):
    up(node)
    assert scan(node) == [[22], [22]]


def test_the_neighbours_other_ways_in_are_shut_too(node, attacker):
    targets = inside(node, attacker)
    assert attacker.reaches(*(f"http://{address}:{port}/" for address, port in targets)) == [False, False]
    six = node.sh("docker inspect --format '{{.NetworkSettings.Networks.six.GlobalIPv6Address}}' six")
    subprocess.run(["ip", "-n", attacker.namespace, "addr", "add", f"{node.host.segment.address6(251)}/64", "dev", "eth0", "nodad"], check=True)  # fmt: skip
    subprocess.run(["ip", "-n", attacker.namespace, "route", "add", "fd00:6::/64", "via", node.host.address6], check=True)  # fmt: skip
    assert attacker.reaches(f"http://[{six}]/") == [False]
    node.sh("nft delete table inet gpuwright")
    assert attacker.reaches(f"http://[{six}]/") == [True], "the way there is right, and only the firewall was in it"
    node.deploy()


def test_it_outlives_restarts_of_docker_and_of_nftables(node):
    rules = node.sh(TABLE)
    node.sh("systemctl restart docker.service")
    up(node)
    assert reached(node) == [[], []]
    for action in ("start", "restart", "reload", "stop"):
        node.sh(f"systemctl {action} nftables.service")
        assert node.sh(TABLE) == rules, action
        assert node.sh("curl -s -m 2 http://127.0.0.1:8001/") == "hello", f"Docker's rules are gone after {action}"
    for action in ("restart", "reload", "stop"):
        node.sh(f"systemctl {action} gpuwright-firewall.service")
        assert node.sh(TABLE) == rules, action
    assert scan(node) == [[22], [22]]
    node.deploy()
    assert node.deploy().changed == []


def test_docker_with_the_old_iptables(node):
    """The other place where Docker 26 can put its rules."""
    node.sh("update-alternatives --set iptables /usr/sbin/iptables-legacy; update-alternatives --set ip6tables /usr/sbin/ip6tables-legacy")  # fmt: skip
    try:
        node.sh("nft delete table ip nat; nft delete table ip filter; nft delete table ip6 nat; nft delete table ip6 filter; systemctl reset-failed docker.service; systemctl restart docker.service", check=False)  # fmt: skip
        up(node)
        assert "DOCKER" in node.sh("iptables-legacy -t nat -S")
        assert reached(node) == [[], []]
        node.sh("nft delete table inet gpuwright")
        assert reached(node) == [[8001, 8003, 8004], [8002, 8003]]
        node.sh("systemctl reload gpuwright-firewall.service")
        assert reached(node) == [[], []]
    finally:
        node.sh("for old in iptables-legacy ip6tables-legacy; do $old -t nat -F; $old -F; $old -P FORWARD ACCEPT; done", check=False)  # fmt: skip
        node.sh("update-alternatives --auto iptables; update-alternatives --auto ip6tables; systemctl reset-failed docker.service; systemctl restart docker.service")  # fmt: skip
    up(node)
    assert reached(node) == [[], []]


def test_containers_open_no_connection(node):
    web = "$(docker inspect --format '{{.NetworkSettings.IPAddress}}' web)"
    tries = {
        "out": f"{node.host.segment.gateway} 3143",
        "the node": f"{node.host.address} 22",
        "the node by the bridge": "$(docker network inspect bridge --format '{{(index .IPAM.Config 0).Gateway}}') 22",
        "a container": f"{web} 80",
    }

    def opened() -> dict[str, bool]:
        # busybox' nc is told by its status whether somebody was there
        return {
            what: node.sh(f"docker exec open /bin/busybox timeout 3 /bin/busybox nc -w 2 {where} </dev/null >/dev/null 2>&1 && echo yes", check=False) == "yes"
            for what, where in tries.items()
        }  # fmt: skip

    assert opened() == {"out": False, "the node": False, "the node by the bridge": False, "a container": True}
    node.node["firewall"]["container_egress"] = "any"
    assert node.deploy().changed == [LOAD]
    assert opened()["out"] is True
    assert reached(node) == [[], []]
    del node.node["firewall"]["container_egress"]
    assert node.deploy().changed == [LOAD]


def test_a_further_port_is_opened_for_those_it_is_meant_for(node):
    here, elsewhere = networks(node), ["192.0.2.0/24", "2001:db8::/32"]
    node.node["firewall"]["ports"] = [
        {"port": 8001, "networks": here, "reason": "a container, on purpose"},
        {"port": 8002, "networks": here, "reason": "the same over IPv6"},
        {"port": 8003, "networks": here, "reason": "a program"},
        {"port": 8004, "networks": elsewhere, "reason": "for others"},
    ]
    try:
        node.deploy()
        assert reached(node) == [[8001, 8003], [8002, 8003]]
    finally:
        del node.node["firewall"]["ports"]
    assert node.deploy().changed == [LOAD]
    assert reached(node) == [[], []]


@pytest.mark.parametrize(
    "by_hand",
    [
        "nft delete table inet gpuwright",
        "nft flush ruleset; systemctl reset-failed docker.service; systemctl restart docker.service",
        "nft insert rule inet gpuwright input tcp dport 8003 accept",
        "nft 'chain inet gpuwright forward { policy accept; }'",
        "nft flush chain inet gpuwright refused",
        "systemctl disable gpuwright-firewall.service",
        "rm /etc/gpuwright/firewall/table.nft",
    ],
)
def test_what_was_changed_by_hand_is_put_right(node, by_hand):
    rules = node.sh(TABLE)
    node.sh(by_hand)
    assert node.run("--dry").changed == [LOAD]
    assert node.deploy().changed == [LOAD]
    assert node.sh(TABLE) == rules
    assert node.deploy().changed == []


# --- neighbours of another kind --------------------------------------------------------------------------------------


def test_the_sites_own_rules_are_kept_and_its_flush_is_not(node):
    """Debian's file, its flush written in two ways, with a table of the site's own behind it, and one in a file that flushes too."""
    ours, dockers = node.sh(TABLE), node.sh("nft -s list table ip nat")
    node.sh("mkdir -p /etc/nftables.d; cp /etc/nftables.conf /root/nftables.conf.kept")
    node.host.run(
        "cat >/etc/nftables.conf",
        stdin="#!/usr/sbin/nft -f\n\nflush ruleset # all of it\n\ndefine door = 8003\n\nflush ruleset; table inet site {\n\tchain input {\n"
        '\t\ttype filter hook input priority 5; policy accept;\n\t\ttcp dport $door counter drop\n\t}\n}\ninclude "/etc/nftables.d/*.nft"\n',
    )
    node.host.run("cat >/etc/nftables.d/more.nft", stdin="flush ruleset\ntable ip more {\n\tchain nothing {\n\t}\n}\n")
    try:
        for action in ("start", "reload", "reload", "restart"):
            node.sh(f"systemctl {action} nftables.service")
            assert node.sh(TABLE) == ours, action
            assert node.sh("nft -s list table ip nat") == dockers, action
            site = node.sh("nft -s list table inet site")
            assert site.count("dport 8003 counter drop") == 1, "loaded once, whatever was there before"
            assert node.sh("nft list table ip more")
        node.sh("sed -i 's/8003/8013/' /etc/nftables.conf; systemctl reload nftables.service")
        site = node.sh("nft -s list table inet site")
        assert "8013" in site
        assert "8003" not in site
        node.sh("systemctl stop nftables.service")
        assert not node.sh("nft list table inet site 2>/dev/null", check=False)
        assert node.sh(TABLE) == ours
        node.sh("printf 'table inet site {\\n chain broken' >>/etc/nftables.conf")
        assert node.sh("systemctl start nftables.service && echo started", check=False) == ""
        assert node.sh(TABLE) == ours
        node.sh("systemctl reset-failed nftables.service")
        assert node.deploy().changed == []
    finally:
        node.sh("mv /root/nftables.conf.kept /etc/nftables.conf; rm -r /etc/nftables.d")


def test_the_sites_rules_in_a_table_of_dockers_are_refused_and_both_stay(node):
    """Emptied for a reload, it would take Docker's rules along; filled beside them, every reload would add the site's once more."""
    ours, dockers = node.sh(TABLE), node.sh("nft -s list table ip nat")
    node.sh("cp /etc/nftables.conf /root/nftables.conf.kept; echo 'table ip nat { }' >/etc/more.nft")
    node.sh("printf '\\ntable inet site { }\\ninclude \"/etc/more.nft\"\\n' >>/etc/nftables.conf")
    sentence = "ip nat is a table of iptables or Docker, whose rules would go with it"
    try:
        assert node.sh("systemctl start nftables.service && echo started", check=False) == ""
        assert sentence in node.sh("journalctl --sync; journalctl -q -o cat -b -u nftables.service")
        assert node.sh(TABLE) == ours
        assert node.sh("nft -s list table ip nat") == dockers
        assert not node.sh("nft list table inet site 2>/dev/null", check=False)
        run = node.run("--dry")
        assert run.status == 1
        assert (
            f"would not load the site's rules in /etc/nftables.conf beside Docker's and these: {sentence}" in run.said
        )
    finally:
        node.sh("mv /root/nftables.conf.kept /etc/nftables.conf; rm /etc/more.nft; systemctl reset-failed nftables.service")  # fmt: skip
    assert node.deploy().changed == []


def test_an_interface_that_would_pass_for_a_bridge_of_containers_is_refused(node):
    before = node.sh(TABLE)
    node.sh("ip link add br-storage type veth peer name storage")
    try:
        run = node.run("-y")
        assert run.status == 1
        assert (
            "br-storage is no bridge, and firewall.container_interfaces takes br-* for a bridge of containers"
            in run.said
        )
        assert run.changed == []
        assert node.sh(TABLE) == before
        node.node["firewall"]["container_interfaces"] = ["docker0"]
        dry = node.run("--dry")
        assert dry.status == 0, dry.said
        assert dry.changed == [LOAD]
    finally:
        node.node["firewall"].pop("container_interfaces", None)
        node.sh("ip link del br-storage")
    assert node.run("--dry").changed == []


@pytest.mark.parametrize(("package", "on", "off"), [("ufw", "ufw allow ssh; ufw --force enable", "ufw disable"), ("firewalld", "systemctl start firewalld.service", "systemctl disable --now firewalld.service")])  # fmt: skip
def test_another_firewall_is_refused_before_anything_changes(node, package, on, off):
    node.sh(f"DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends {package} >/dev/null 2>&1", check=False)  # fmt: skip
    node.sh(on)
    before = node.sh("nft -s list ruleset; sha256sum /etc/gpuwright/firewall/*")
    node.node["firewall"]["ports"] = [{"port": 8001, "networks": networks(node), "reason": "anything"}]
    try:
        for option in ("--dry", "-y"):
            run = node.run(option)
            assert run.status == 1
            assert f"{package} is active and owns the packet filter of this host" in run.said
            assert "Traceback" not in run.said
        assert node.sh("nft -s list ruleset; sha256sum /etc/gpuwright/firewall/*") == before
    finally:
        del node.node["firewall"]["ports"]
        node.sh(off)
        node.sh(f"apt-get -qq -y purge {package} >/dev/null 2>&1; systemctl reset-failed docker.service; systemctl restart docker.service", check=False)  # fmt: skip
    node.deploy()


def test_a_read_only_etc_is_refused_before_anything_changes(node):
    before = node.sh(TABLE)
    node.node["base"] = {"journal_max_use": "1 GiB"}
    node.node["firewall"]["ports"] = [{"port": 8001, "networks": networks(node), "reason": "anything"}]
    node.sh("mount --bind /etc /etc; mount -o remount,bind,ro /etc")
    try:
        run = node.run("-y")
        assert run.status == 1
        assert "/etc is read-only, so rules would be gone with the next boot" in run.said
        assert run.changed == []
        assert node.sh(TABLE) == before
    finally:
        node.sh("umount /etc")
        del node.node["firewall"]["ports"], node.node["base"]
    assert node.deploy().changed == []


def test_a_node_file_that_shuts_the_deploy_out_is_refused(node):
    before = node.sh(TABLE)
    node.node["firewall"]["ssh"] = ["192.0.2.0/24"]
    run = node.run("-y")
    node.node["firewall"]["ssh"] = networks(node)
    assert run.status == 1
    assert f"this run comes from {node.host.segment.gateway}, and firewall.ssh lets in 192.0.2.0/24 only" in run.said
    assert node.sh(TABLE) == before


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_everything_is_there_after_a_reboot(node):
    node.host.reboot()
    moment = "systemctl show --property=ActiveEnterTimestampMonotonic --value "
    units = ("gpuwright-firewall.service", "network-pre.target", "systemd-networkd.service", "docker.service")
    moments = [int(node.sh(f"{moment}{unit}")) for unit in units]
    assert moments[0] > 0
    assert all(moments[0] < later for later in moments[2:])
    up(node)
    assert scan(node) == [[22], [22]]
    assert node.deploy().changed == []


def test_the_role_goes_and_the_neighbour_rule_is_there_before(node, attacker):
    node.sh("iptables -P FORWARD ACCEPT")
    firewall = node.node.pop("firewall")
    dry = node.run("--dry")
    with knocking(attacker, *inside(node, attacker)) as through:
        run = node.deploy()
    assert set(run.changed) == set(dry.changed)
    assert through == []
    assert not node.sh("nft list table inet gpuwright 2>/dev/null", check=False)
    assert not node.sh("ls -d /etc/gpuwright/firewall /etc/systemd/system/gpuwright-firewall.service /etc/systemd/system/nftables.service.d/gpuwright-firewall.conf 2>/dev/null", check=False)  # fmt: skip
    assert reached(node) == [[8001, 8003, 8004], [8002, 8003]]
    assert node.deploy().changed == []
    node.node["firewall"] = firewall


# --- with an engine and a gateway ------------------------------------------------------------------------------------


# Started by hand beside an engine, as their users type it; and two programs that send back what comes by UDP.
BESIDE = r"""
set -e
docker network create --ipv6 --subnet fd00:6::/64 six >/dev/null
serve='trap "exit 0" TERM; httpd -f -p 8000 -h /www & wait'
docker run -d --restart=always --name plain -p 8000:8000 probe:1 /bin/sh -c "$serve" >/dev/null
docker run -d --restart=always --name open -p 0.0.0.0:8001:8000 probe:1 /bin/sh -c "$serve" >/dev/null
docker run -d --restart=always --name six --network six -p '[::]:8002:8000' probe:1 /bin/sh -c "$serve" >/dev/null
cat >/etc/systemd/system/echo@.service <<'UNIT'
[Service]
ExecStart=/usr/bin/perl /root/echo.pl %i
[Install]
WantedBy=multi-user.target
UNIT
cat >/root/echo.pl <<'PERL'
use Socket qw(:all);
socket(my $s, AF_INET6, SOCK_DGRAM, 0) or die $!;
setsockopt($s, IPPROTO_IPV6, IPV6_V6ONLY, pack("i", 0)) or die $!;
bind($s, pack_sockaddr_in6($ARGV[0], IN6ADDR_ANY)) or die $!;
while (my $from = recv($s, my $said, 1500, 0)) { send($s, $said, 0, $from) }
PERL
systemctl daemon-reload
systemctl enable -q --now echo@8005.service echo@8006.service
"""

ASK_UDP = """
import json, socket, sys

def answers(address, port):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.connect((address, port))
        for _ in range(3):
            try:
                s.send(b"hello")
                if s.recv(99) == b"hello":
                    return True
            except OSError:
                pass
    return False

ports = [int(port) for port in sys.argv[1].split(",")]
print(json.dumps([[port for port in ports if answers(address, port)] for address in sys.argv[2:]]))
"""


def answered_by_udp(node: Trial) -> list[list[int]]:
    """Which of the two programs answers the neighbour: over IPv4, over IPv6."""
    command = [sys.executable, "-c", ASK_UDP, "8005,8006"]
    done = lab.neighbour().run(*command, node.host.address, node.host.address6, check=True, timeout=60)
    return json.loads(done.stdout)


def beside_is_up(node: Trial) -> None:
    """Whoever is on the node reaches them, so what is not reached from outside is not simply down."""
    asked = ("curl -s -m 2 http://127.0.0.1:8000/", "curl -s -m 2 http://127.0.0.1:8001/", "docker exec six /bin/busybox wget -q -O - http://127.0.0.1:8000/")  # fmt: skip
    for command in asked:
        node.sh(f"timeout 60 sh -c 'until [ \"$({command})\" = hello ]; do sleep 0.2; done'")
    node.sh("systemctl is-active -q echo@8005.service echo@8006.service")


def test_engine_and_gateway_serve_before_during_and_after(tmp_path):
    """A firewall on a node that serves, with containers started by hand: no answer is lost, and from outside there is ssh, the
    gateway, the one UDP port that the node file opens, and nothing else.
    """
    site = fleet.boot(["fw-site"], tmp_path)
    [host] = site.hosts
    listen = [{"address": "0.0.0.0", "port": 443}, {"address": "::", "port": 443}]
    site.set(host.name, gateway__listen=listen, containers__daemon=DOCKER["daemon"])
    node = Trial(host, tmp_path, {})
    echo = {"port": 8005, "protocol": "udp", "networks": networks(node), "reason": "a program that answers by UDP"}
    question = {"model": "lab", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answers: list[object] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                # A connection each time: an old one says nothing about the rules.
                with site.client(host, timeout=30) as client:
                    answers.append(client.post("/v1/chat/completions", json=question).status_code)
            except httpx.HTTPError as error:
                answers.append(repr(error))
            time.sleep(0.1)

    try:
        site.deploy()
        host.run(IMAGE, timeout=300)
        host.run(BESIDE)
        beside_is_up(node)
        # What the firewall is to shut.
        assert reached(node) == [[8001], [8002]]
        assert answered_by_udp(node) == [[8005, 8006], [8005, 8006]]
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            site.set(
                host.name, firewall__ssh=networks(node), firewall__gateway=["0.0.0.0/0", "::/0"], firewall__ports=[echo]
            )
            first = site.deploy()
            assert LOAD in first.all_changed
            for then in ("true", "systemctl restart docker.service"):
                node.sh(then)
                beside_is_up(node)
                assert scan(node) == [[22, 443], [22, 443]], then
                assert answered_by_udp(node) == [[8005], [8005]], then
            assert site.deploy().all_changed == []
        finally:
            over.set()
            asking.join()
        assert len(answers) > 20
        assert set(answers) == {200}
        host.reboot()
        beside_is_up(node)
        assert scan(node) == [[22, 443], [22, 443]]
        deadline = time.monotonic() + 120
        with site.client(host) as client:
            while client.post("/v1/chat/completions", json=question).status_code != 200:
                assert time.monotonic() < deadline, "the engine does not come back"
                time.sleep(1)
        # The next deploy takes everything else away from it again.
        site.set(host.name, firewall__gateway=["192.0.2.0/24"])
        site.deploy()
        assert scan(node) == [[22], [22]]
    finally:
        host.destroy()


# --- lock-out drills -------------------------------------------------------------------------------------------------


# Debian 12 has nft 1.0.6: what it prints of a table is what it must be able to read again.
_13 = pytest.mark.parametrize("detour", ["trixie"], indirect=True)
_13_and_12 = pytest.mark.parametrize("detour", ["trixie", "bookworm"], indirect=True)


@pytest.fixture(scope="module")
def detour(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    """A host that the controller reaches by a forwarder on it: what sshd sees of the controller is a loopback address.

    So a node file that opens ssh to somebody else looks right to every check that can be made beforehand, and shuts the
    controller out.
    """
    release = request.param
    system = {"trixie": "debian-13", "bookworm": "debian-12"}[release]
    node = trial.blank(f"detour-{system[-2:]}", release, tmp_path_factory.mktemp("detour"), {"os": system})
    node.host.run(
        r"""
cat >/etc/systemd/system/detour.socket <<'UNIT'
[Socket]
ListenStream=2222
[Install]
WantedBy=sockets.target
UNIT
cat >/etc/systemd/system/detour.service <<'UNIT'
[Service]
ExecStart=/usr/lib/systemd/systemd-socket-proxyd 127.0.0.1:22
UNIT
systemctl daemon-reload; systemctl enable -q --now detour.socket
"""
    )
    known = node.directory / "known_hosts"
    known.write_text(node.host.known_hosts.read_text().replace(f"{node.host.address} ", f"[{node.host.address}]:2222 "))
    node.connect = {"ssh_port": 2222, "ssh_known_hosts_file": str(known)}
    node.node["base"] = {"guard": f"{SECONDS} s"}
    node.node["firewall"] = {"ssh": ["192.0.2.0/24"]}
    yield node
    node.host.destroy()


def state(node: Trial) -> str:
    """Everything the role has on a node."""
    return node.sh(
        "nft -s list ruleset; find /etc/gpuwright/firewall /etc/systemd/system/gpuwright-firewall.service "
        "/etc/systemd/system/sysinit.target.wants/gpuwright-firewall.service "
        "/etc/systemd/system/nftables.service.d /usr/local/lib/gpuwright/nftables-conf ! -type d 2>/dev/null | sort; "
        "systemctl is-active gpuwright-firewall.service; cat /var/lib/gpuwright/owned/firewall 2>/dev/null",
        check=False,
    )


def there(node: Trial, within: float) -> bool:
    """Whether a new connection gets in by the detour within some seconds."""
    deadline = time.monotonic() + within
    argv = node.host.ssh_argv("-o", "BatchMode=yes", "-p", "2222", "-o", f"UserKnownHostsFile={node.connect['ssh_known_hosts_file']}", "-o", "ConnectTimeout=2")  # fmt: skip
    while time.monotonic() < deadline:
        if subprocess.run([*argv, "true"], stderr=subprocess.DEVNULL).returncode == 0:
            return True
        time.sleep(0.2)
    return False


def wait_for(node: Trial, condition: str) -> None:
    """Until a shell condition holds on the node, looked at from inside: ssh may be shut."""
    deadline = time.monotonic() + 120
    while subprocess.run(["ip", "netns", "exec", node.host.namespace, "true"]).returncode or not _inside(
        node, condition
    ):
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)


def _inside(node: Trial, condition: str) -> bool:
    pid = node.host._init()
    return pid > 0 and subprocess.run(["nsenter", "-a", "-t", str(pid), "sh", "-c", condition], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0  # fmt: skip


LOADED = f"[ -d {GUARD}/armed ] && nft list chain inet gpuwright input | grep -q 'policy drop'"


@_13
def test_rules_that_drop_the_controller_heal_themselves(detour):
    before = state(detour)
    run = detour.run("-y")
    assert run.status == 1
    assert "no new connection after the change of role firewall" in run.said
    assert there(detour, SECONDS + 5)
    assert state(detour) == before
    assert not detour.sh(f"ls -d {GUARD}/armed 2>/dev/null", check=False)


@_13
def test_the_controller_is_killed_when_the_rules_have_shut_it_out(detour):
    before = state(detour)
    process = detour.start("-y")
    wait_for(detour, LOADED)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not there(detour, 3), "these rules let nobody in"
    assert there(detour, SECONDS + 5)
    wait_for(detour, f"! [ -d {GUARD}/armed ]")
    assert state(detour) == before


@_13_and_12
def test_the_node_reboots_while_the_guard_is_armed(detour):
    before = state(detour)
    process = detour.start("-y")
    wait_for(detour, LOADED)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    detour.host.power_cycle()
    assert there(detour, 10)
    assert state(detour) == before
    assert "the node went down before a new connection was confirmed" in detour.run("--dry").said


_TALKS = """
import socket, sys, time
with socket.create_server((sys.argv[1], 39999)) as server:
    print("listening", flush=True)
    there, _ = server.accept()
    for number in range(900):
        there.sendall(f"tick {number}\\n".encode())
        time.sleep(0.1)
"""


@contextlib.contextmanager
def download(node: Trial) -> Iterator[Callable[[], bool]]:
    """A connection that the node opened and whose data only comes in; the result says whether it still does."""
    sender = subprocess.Popen(
        [sys.executable, "-c", _TALKS, node.host.segment.gateway], stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None
    assert sender.stdout.readline() == "listening\n"
    node.sh(f"systemd-run --quiet --collect --unit=download -p StandardInput=null sh -c 'exec bash -c \"exec 3<>/dev/tcp/{node.host.segment.gateway}/39999; cat <&3 >/run/download\"'")  # fmt: skip

    def grows() -> bool:
        wait_for(node, "[ -s /run/download ]")
        before = node.sh("stat -c %s /run/download")
        time.sleep(4)
        return node.sh("stat -c %s /run/download") != before

    try:
        yield grows
    finally:
        sender.kill()
        sender.wait()
        node.sh("systemctl stop download.service; rm -f /run/download", check=False)


@_13
def test_a_download_that_only_comes_in_outlives_the_first_load(detour):
    """Without rules that ask for it the kernel follows no connection, and its packets would look new."""
    bad, detour.node["firewall"] = detour.node["firewall"], {"ssh": networks(detour), "ssh_ports": [22, 2222]}
    assert detour.sh("nft list ruleset") == ""
    with download(detour) as grows:
        assert grows()
        detour.deploy()
        assert grows()
    detour.sh("nft delete table inet gpuwright")
    with download(detour) as grows:
        assert grows()
        detour.sh("nft -f /etc/gpuwright/firewall/table.nft")
        assert not grows(), "loaded at once, it is cut"
    del detour.node["firewall"]
    detour.deploy()
    detour.node["firewall"] = bad


@_13_and_12
def test_the_old_rules_come_back_as_they_were_loaded(detour):
    """Not those of a file: also what somebody added by hand an hour ago."""
    good = {"ssh": networks(detour), "ssh_ports": [22, 2222]}
    bad, detour.node["firewall"] = detour.node["firewall"], good
    detour.deploy()
    assert detour.deploy().changed == []
    detour.sh("nft insert rule inet gpuwright input tcp dport 9999 counter accept")
    before = state(detour)
    assert "9999" in before
    detour.node["firewall"] = bad
    assert detour.run("-y").status == 1
    assert there(detour, SECONDS + 5)
    assert state(detour) == before
    detour.node["firewall"] = good
    assert LOAD in detour.deploy().changed
    assert "9999" not in state(detour)
    detour.node["firewall"] = bad


# --- the other release, and the other backend ------------------------------------------------------------------------


def test_the_ring_on_debian_12(tmp_path):
    """Docker 20.10 and nftables 1.0.6."""
    node = trial.blank("firewall-12", "bookworm", tmp_path, {})
    node.node = {"os": "debian-12", "containers": {}, "firewall": {"ssh": networks(node)}}
    try:
        dry = node.run("--dry")
        assert dry.status == 0, dry.said
        first = node.deploy()
        assert set(first.changed) <= set(dry.changed)
        assert not [name for name in first.changed if "neighbours" in name]
        assert node.deploy().changed == []
        node.host.run(IMAGE, timeout=300)
        node.sh("docker run -d --restart=always --name open -p 0.0.0.0:8001:80 probe:1 /bin/serve")
        assert scan(node) == [[22], [22]]
        node.sh("systemctl restart docker.service; systemctl restart nftables.service")
        assert reached(node) == [[], []]
        node.sh("nft delete table inet gpuwright")
        assert reached(node)[0] == [8001]
        assert node.deploy().changed == [LOAD]
        node.host.reboot()
        assert scan(node) == [[22], [22]]
        assert node.deploy().changed == []
    finally:
        node.host.destroy()


# A stand-in for Docker 29's rules with "firewall-backend": "nftables": what they do, in tables of the documented names
# (docs.docker.com, Docker with nftables). No distribution that boots here has that Docker.
DOCKER_NFTABLES = """
table {family} docker-bridges {{
	chain nat-prerouting {{
		type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local tcp dport 8001 dnat to {target}
	}}
	chain filter-forward {{
		type filter hook forward priority filter; policy accept;
		oifname "docker0" accept
	}}
}}
"""


def test_docker_with_rules_of_its_own_in_nftables(tmp_path):
    """Three network namespaces: a client, the node, and a "container" behind a bridge called docker0."""
    from roles.firewall import table
    from roles.firewall.spec import FirewallSpec, OpenPort

    shut = FirewallSpec(ssh=("10.9.0.0/24",))
    on_purpose = OpenPort(port=8001, networks=("10.9.0.0/24", "fd09::/64"), reason="on purpose")
    ports = table.Ingress(ssh=(22,), gateway=())
    tools.need({"nft": "nftables"})
    with _three_namespaces() as (client, host, container):
        for name, spec in (("shut", shut), ("open", shut.model_copy(update={"ports": (on_purpose,)}))):
            (tmp_path / name).write_bytes(table.rules(spec, ports))
        (tmp_path / "docker").write_text(
            DOCKER_NFTABLES.format(family="ip", target="10.19.0.2:80")
            + DOCKER_NFTABLES.format(family="ip6", target="[fd19::2]:80")
        )
        host("nft", "-f", str(tmp_path / "docker"))
        server = "import socket\ns = socket.create_server(('::', 80), family=socket.AF_INET6, dualstack_ipv6=True)\nwhile True: s.accept()[0].close()"  # fmt: skip
        with subprocess.Popen(["ip", "netns", "exec", container, sys.executable, "-c", server]) as serving:
            try:
                direct = {"10.9.0.1": 8001, "fd09::1": 8001, "10.19.0.2": 80, "fd19::2": 80}

                def got_through() -> list[bool]:
                    return [client(address, port) for address, port in direct.items()]

                deadline = time.monotonic() + 20
                while got_through() != [True] * 4:  # links of either family need a moment to come up
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
                host("nft", "-f", str(tmp_path / "shut"))
                assert got_through() == [False] * 4
                host("nft", "-f", str(tmp_path / "open"))
                assert got_through() == [True, True, False, False]
                # Docker starts again and loads its rules anew, ours being there.
                host("nft", "delete", "table", "ip", "docker-bridges")
                host("nft", "delete", "table", "ip6", "docker-bridges")
                host("nft", "-f", str(tmp_path / "docker"))
                host("nft", "-f", str(tmp_path / "shut"))
                assert got_through() == [False] * 4
            finally:
                serving.kill()


@contextlib.contextmanager
def _three_namespaces():
    names = [f"gpwfw{os.getpid()}{part}" for part in "chx"]
    client, host, container = names
    steps = f"""
        netns add {client}
        netns add {host}
        netns add {container}
        link add eth0 netns {client} type veth peer name eth0 netns {host}
        -n {host} link add docker0 type bridge
        -n {host} link add leg type veth peer name eth0 netns {container}
        -n {host} link set leg master docker0 up
        -n {client} addr add 10.9.0.2/24 dev eth0
        -n {client} addr add fd09::2/64 dev eth0 nodad
        -n {host} addr add 10.9.0.1/24 dev eth0
        -n {host} addr add fd09::1/64 dev eth0 nodad
        -n {host} addr add 10.19.0.1/24 dev docker0
        -n {host} addr add fd19::1/64 dev docker0 nodad
        -n {container} addr add 10.19.0.2/24 dev eth0
        -n {container} addr add fd19::2/64 dev eth0 nodad
        -n {client} link set eth0 up
        -n {host} link set eth0 up
        -n {host} link set docker0 up
        -n {container} link set eth0 up
        -n {client} route add 10.19.0.0/24 via 10.9.0.1
        -n {client} route add fd19::/64 via fd09::1
        -n {container} route add default via 10.19.0.1
        -n {container} route add default via fd19::1
    """

    def inside_host(*argv: str) -> None:
        subprocess.run(["ip", "netns", "exec", host, *argv], check=True)

    def asks(address: str, port: int) -> bool:
        code = f"import socket; socket.create_connection(({address!r}, {port}), 1)"
        return subprocess.run(["ip", "netns", "exec", client, sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0  # fmt: skip

    try:
        for step in steps.strip().splitlines():
            subprocess.run(["ip", *step.split()], check=True)
        inside_host("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        yield asks, inside_host, container
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
