"""Role containers on booted hosts: the ring, daemon.json with other owners, streams over restarts, neighbours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest
import trial
from trial import Trial

from lab import repository

pytestmark = pytest.mark.lab

DAEMON_JSON = "/etc/docker/daemon.json"
MERGE = "Containers | Merge /etc/docker/daemon.json"
RUN = "Containers | Run docker.service with its daemon.json"
GUARD = "Containers | Keep neighbours away from containers (Docker before 28)"

# A web server of the host's own busybox, with a page that takes 12 seconds to send.
IMAGE = r"""
set -e
apt-get install -y -q busybox-static >/dev/null
root=$(mktemp -d)
mkdir -p "$root/bin" "$root/www/cgi-bin"
cp /bin/busybox "$root/bin/"
cat >"$root/bin/serve" <<'SH'
#!/bin/sh
# The first process of a container has no default for SIGTERM: without this a shutdown of the host waits for it.
trap 'exit 0' TERM
httpd -f -p 80 -h /www &
wait
SH
chmod +x "$root/bin/serve"
for name in sh httpd sleep; do ln -s busybox "$root/bin/$name"; done
echo hello >"$root/www/index.html"
cat >"$root/www/cgi-bin/stream" <<'CGI'
#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
i=0
while [ $i -lt 60 ]; do echo "tick $i"; i=$((i + 1)); sleep 0.2; done
CGI
chmod +x "$root/www/cgi-bin/stream"
tar -C "$root" -c . | docker import - probe:1 >/dev/null
docker run -d --name web -p 127.0.0.1:8080:80 probe:1 /bin/serve >/dev/null
docker run -d --name unpublished probe:1 /bin/serve >/dev/null
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    blank = trial.blank("containers", "trixie", tmp_path_factory.mktemp("containers"), {"containers": {}})
    yield blank
    blank.host.destroy()


def pid(node: Trial) -> str:
    return node.sh("systemctl show docker.service --property=MainPID --value")


def daemon(node: Trial) -> dict:
    return json.loads(node.sh(f"cat {DAEMON_JSON}"))


def edit(node: Trial, change: Callable[[dict], object]) -> None:
    """Somebody else edits daemon.json."""
    config = daemon(node)
    change(config)
    node.host.run(f"cat >{DAEMON_JSON}", stdin=json.dumps(config))


# --- the ring --------------------------------------------------------------------------------------------------------


def test_a_blank_host_is_predicted_converged_and_then_left_alone(node):
    assert not node.sh("command -v dockerd", check=False)
    dry = node.run("--dry")
    assert dry.status == 0, dry.said
    assert not node.sh("ls /etc/docker /var/lib/gpuwright 2>/dev/null", check=False)

    first = node.deploy()
    assert set(first.changed) <= set(dry.changed)
    assert {MERGE, RUN, GUARD} <= set(first.changed)

    before = pid(node)
    second = node.deploy()
    assert second.changed == []
    assert pid(node) == before
    assert node.run("--dry").changed == []


def test_docker_runs_as_the_node_file_says(node):
    info = json.loads(node.sh("docker info --format '{{json .}}'"))
    assert info["LiveRestoreEnabled"] is True
    assert (info["LoggingDriver"], info["DockerRootDir"]) == ("json-file", "/var/lib/docker")
    assert set(node.sh("apt-mark showhold").splitlines()) == {"docker.io", "docker-cli", "containerd"}
    assert node.sh("systemctl is-enabled docker.service gpuwright-neighbour-guard.service").split() == ["enabled"] * 2
    node.host.run(IMAGE, timeout=300)
    options = json.loads(node.sh("docker inspect --format '{{json .HostConfig.LogConfig}}' web"))
    assert options == {"Type": "json-file", "Config": {"max-file": "5", "max-size": "67108864"}}


@pytest.mark.parametrize("network_options", ["", "--network own"])
def test_a_port_published_without_an_address_is_for_this_machine_only(node, network_options):
    node.sh("docker network inspect own >/dev/null 2>&1 || docker network create own")
    node.sh(f"docker run -d --rm --name open {network_options} -p 8081:80 probe:1 /bin/serve")
    bindings = json.loads(node.sh("docker inspect --format '{{json .NetworkSettings.Ports}}' open"))
    node.sh("docker rm -f open")
    assert bindings == {"80/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8081"}]}


# --- daemon.json with other owners -----------------------------------------------------------------------------------


def test_a_key_of_the_site_is_kept_and_taken_over_without_a_restart(node):
    before = pid(node)
    edit(node, lambda config: config.update({"registry-mirrors": ["https://mirror.example"], "shutdown-timeout": 20}))
    run = node.deploy()
    assert run.changed == [RUN]
    assert "docker.service: reload (registry-mirrors, shutdown-timeout)" in run.said
    assert daemon(node)["registry-mirrors"] == ["https://mirror.example"]
    assert pid(node) == before
    assert "https://mirror.example" in node.sh("docker info")
    assert node.deploy().changed == []


def test_a_key_of_ours_is_put_back_and_docker_restarted_because_it_ran_with_it(node):
    before = pid(node)
    edit(node, lambda config: config.update({"ip": "0.0.0.0"}))
    node.sh("systemctl restart docker.service")
    run = node.deploy()
    assert run.changed == [MERGE, RUN]
    assert 'daemon.json: ip: "0.0.0.0" -> "127.0.0.1" (changed on the host since the last run; put back)' in run.said
    assert "docker.service: restart (ip)" in run.said
    assert daemon(node)["ip"] == "127.0.0.1"
    assert daemon(node)["shutdown-timeout"] == 20
    assert pid(node) != before


def test_a_key_we_no_longer_want_goes_and_one_of_the_site_stays(node):
    node.node["containers"] = {"daemon": {"debug": True, "max-concurrent-downloads": 5}}
    assert node.deploy().changed == [MERGE, RUN]
    edit(node, lambda config: config.update({"max-concurrent-downloads": 7}))
    node.node["containers"] = {}
    run = node.deploy()
    assert "debug" not in daemon(node)
    assert daemon(node)["max-concurrent-downloads"] == 7
    assert "max-concurrent-downloads was set by gpuwright once and changed on the host since" in run.said
    assert node.deploy().changed == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"debug": true,}', "is not JSON: a comma before the closing '}' (line 1, column 16); remove it"),
        pytest.param('{\n  // ours\n  "debug": true\n}\n', "is not JSON: a comment in line 2, and JSON has none; remove it", marks=pytest.mark.proof),
        pytest.param("\ufeff{}", "starts with a byte order mark", marks=pytest.mark.proof),
        pytest.param('["debug"]', "holds an array, and an object ({...}) is needed", marks=pytest.mark.proof),
        pytest.param('{"log-opts": "max-size=1m"}', "log-opts in /etc/docker/daemon.json is a string, and an object is wanted", marks=pytest.mark.proof),
        ('{"hosts": ["fd://"]}', "hosts would be in /etc/docker/daemon.json and docker.service already starts dockerd with -H"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_merged_stops_the_run_with_one_sentence(node, text, sentence):
    before = node.sh(f"cat {DAEMON_JSON}"), pid(node)
    try:
        node.host.run(f"cat >{DAEMON_JSON}", stdin=text)
        for option in ("--dry", "-y"):
            run = node.run(option)
            assert run.status == 1
            assert sentence in run.said
            assert "Traceback" not in run.said
        assert node.host.run(f"cat {DAEMON_JSON}").stdout == text
    finally:
        node.host.run(f"cat >{DAEMON_JSON}", stdin=before[0] + "\n")
    assert pid(node) == before[1]
    assert node.deploy().changed == []


def test_a_value_that_was_there_before_us_stops_the_run(node):
    """A site's own data-root: taking it over would make all its containers vanish."""
    record = "/var/lib/gpuwright/containers/daemon.applied.json"
    node.sh(f"mv {record} {record}.away")
    edit(node, lambda config: config.update({"data-root": "/data/docker"}))
    try:
        run = node.run("-y")
        assert run.status == 1
        assert '/etc/docker/daemon.json already says data-root = "/data/docker", which gpuwright never set' in run.said
        assert "put the host's value into the node file (containers.data_root)" in run.said
        assert daemon(node)["data-root"] == "/data/docker"
    finally:
        node.sh(f"mv {record}.away {record}")
        edit(node, lambda config: config.update({"data-root": "/var/lib/docker"}))


def test_a_new_data_root_is_refused_while_the_old_one_is_in_use(node):
    node.node["containers"] = {"data_root": "/data/docker"}
    run = node.run("--dry")
    node.node["containers"] = {}
    assert run.status == 1
    assert "Docker keeps 2 containers and 1 images in /var/lib/docker, and the node file wants" in run.said


def test_dockerd_has_the_last_word_and_nothing_is_written(node):
    before = node.sh(f"cat {DAEMON_JSON}"), pid(node)
    node.node["containers"] = {"daemon": {"log-levle": "info"}}
    run = node.run("-y")
    node.node["containers"] = {}
    assert run.status == 1
    assert "refused by: dockerd --validate --config-file ./etc/docker/daemon.json; nothing was written:" in run.said
    assert "the following directives don't match any configuration option: log-levle" in run.said
    assert (node.sh(f"cat {DAEMON_JSON}"), pid(node)) == before


def test_a_run_killed_between_the_change_and_the_restart_is_healed(node):
    """Killed the moment the operation that restarts Docker begins: the file is new, the daemon old."""
    before = pid(node)
    node.node["containers"] = {"log_max_files": 6}
    node.sh("systemctl mask --runtime docker.service")  # this is what makes the restart not happen
    assert node.run("-y").status == 1
    node.sh("systemctl unmask --runtime docker.service; systemctl reset-failed docker.service")
    assert daemon(node)["log-opts"]["max-file"] == "6"
    assert pid(node) == before
    run = node.deploy()
    assert run.changed == [RUN]
    assert "docker.service: restart (log-opts)" in run.said
    assert pid(node) != before
    assert node.deploy().changed == []


# --- restarts of the daemon ------------------------------------------------------------------------------------------


def test_containers_and_their_streams_outlive_a_restart_of_docker(node):
    running = node.sh("docker inspect --format '{{.State.Pid}}' web")
    stream = subprocess.Popen(
        [*node.host.ssh_argv(), "curl -sSN http://127.0.0.1:8080/cgi-bin/stream"], stdout=subprocess.PIPE, text=True
    )
    assert stream.stdout is not None
    assert stream.stdout.readline() == "tick 0\n"
    before = pid(node)
    node.node["containers"] = {"log_max_files": 7}
    run = node.deploy()
    assert "docker.service: restart (log-opts); running containers go on" in run.said
    assert pid(node) != before
    lines = stream.stdout.read().splitlines()
    assert stream.wait() == 0
    assert lines == [f"tick {number}" for number in range(1, 60)]
    assert node.sh("docker inspect --format '{{.State.Pid}}' web") == running


def test_a_registry_authority_is_written_without_touching_docker(node):
    before = pid(node)
    pem = node.directory / "ca.pem"
    pem.write_text("-----BEGIN CERTIFICATE-----\nnot read by Docker before a pull\n-----END CERTIFICATE-----\n")
    node.node["containers"] = {"log_max_files": 7, "registries": [{"host": "registry.example:5000", "ca": "ca.pem"}]}
    assert node.deploy().changed == ["Containers | Write Docker's drop-in and registry certificates"]
    assert node.sh("cat /etc/docker/certs.d/registry.example:5000/ca.crt") == pem.read_text().strip()
    node.node["containers"] = {"log_max_files": 7}
    removed = node.run("--dry").changed
    assert len(removed) == 1 and "file /etc/docker/certs.d/registry.example:5000/ca.crt" in removed[0]
    node.deploy()
    assert not node.sh("ls /etc/docker/certs.d/registry.example:5000/ca.crt 2>/dev/null", check=False)
    assert pid(node) == before


# --- neighbours ------------------------------------------------------------------------------------------------------


class Attacker:
    """A neighbour on the segment that sends what a router would not: loopback and container addresses."""

    def __init__(self, node: Trial) -> None:
        segment = node.host.segment
        self.namespace = f"gpwattacker{node.host.octet}"
        self.link = f"gpwatt{node.host.octet}"
        steps = f"""
            netns add {self.namespace}
            link add {self.link} type veth peer name eth0 netns {self.namespace}
            link set {self.link} master {segment.bridge} up
            -n {self.namespace} addr add {segment.address(251)}/24 dev eth0
            -n {self.namespace} link set eth0 up
            -n {self.namespace} route add 127.0.0.1/32 via {node.host.address}
            -n {self.namespace} route add 172.16.0.0/12 via {node.host.address}
        """
        self.close()  # what a killed run left
        for step in steps.strip().splitlines():
            subprocess.run(["ip", *step.split()], check=True)
        # Answers come from 127.0.0.1; without this its own kernel drops them.
        self.run("sysctl", "-qw", "net.ipv4.conf.eth0.route_localnet=1")

    def run(self, *argv: str) -> str:
        return subprocess.run(["ip", "netns", "exec", self.namespace, *argv], capture_output=True, text=True).stdout

    def reaches(self, *urls: str) -> list[bool]:
        return [self.run("curl", "-s", "-m", "2", url) == "hello\n" for url in urls]

    def close(self) -> None:
        for command in (["link", "del", self.link], ["netns", "del", self.namespace]):
            subprocess.run(["ip", *command], stderr=subprocess.DEVNULL)


@pytest.fixture
def attacker(node: Trial) -> Iterator[Attacker]:
    there = Attacker(node)
    yield there
    there.close()


def targets(node: Trial) -> list[str]:
    """The published port on the loopback address; the container's own address; a container that publishes nothing."""
    address = "docker inspect --format '{{.NetworkSettings.IPAddress}}' "
    return [
        "http://127.0.0.1:8080/",
        f"http://{node.sh(address + 'web')}/",
        f"http://{node.sh(address + 'unpublished')}/",
    ]


def answers(node: Trial, url: str) -> None:
    """Wait until the host itself gets an answer."""
    node.sh(f"timeout 30 sh -c 'until [ \"$(curl -s -m 2 {url})\" = hello ]; do sleep 0.2; done'")


def kept_away(node: Trial, attacker: Attacker) -> None:
    """Whoever is on the host reaches its containers, the neighbour reaches none."""
    for url in targets(node):
        answers(node, url)
    assert attacker.reaches(*targets(node)) == [False, False, False]


def test_the_guard_is_what_keeps_a_neighbour_away(node, attacker):
    policy = node.sh("iptables -S FORWARD | head -n 1")
    # Where something else switched forwarding on before Docker started, Docker leaves this policy alone.
    node.sh("iptables -P FORWARD ACCEPT; nft delete table inet gpuwright_containers")
    assert attacker.reaches(*targets(node)) == [True, True, True]

    run = node.deploy()
    assert run.changed == [GUARD]
    kept_away(node, attacker)
    node.sh(f"iptables {policy}")
    assert node.deploy().changed == []


def test_a_port_published_on_purpose_stays_reachable(node, attacker):
    node.sh("docker run -d --rm --name open -p 0.0.0.0:8082:80 probe:1 /bin/serve")
    answers(node, "http://127.0.0.1:8082/")
    reached = attacker.reaches(f"http://{node.host.address}:8082/")
    node.sh("docker rm -f open")
    assert reached == [True]


def test_the_guard_outlives_restarts_of_docker_and_of_nftables(node, attacker):
    rules = node.sh("nft -s list table inet gpuwright_containers")
    node.sh("systemctl restart docker.service")
    kept_away(node, attacker)
    for action in ("start", "restart", "reload", "stop"):  # Debian's unit flushes every rule in all four
        node.sh(f"systemctl {action} nftables.service")
        assert node.sh("nft -s list table inet gpuwright_containers") == rules, action
    node.sh("systemctl restart docker.service")  # its own rules went with the flush
    kept_away(node, attacker)
    assert node.deploy().changed == []


def test_a_rule_taken_out_of_the_table_is_seen(node, attacker):
    node.sh("nft flush chain inet gpuwright_containers loopback")
    assert attacker.reaches(targets(node)[0]) == [True]
    assert node.deploy().changed == [GUARD]
    kept_away(node, attacker)


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_everything_is_there_after_a_reboot(node, attacker):
    node.sh("docker update --restart=always web unpublished")  # a test's own; engines have no restart policy
    node.host.reboot()
    order = "systemctl show --property=ActiveEnterTimestampMonotonic --value "
    guard, docker = (int(node.sh(f"{order}{unit}")) for unit in ("gpuwright-neighbour-guard.service", "docker.service"))
    assert 0 < guard < docker
    assert node.deploy().changed == []
    kept_away(node, attacker)


def test_a_removed_role_takes_its_rules_and_holds_along_and_leaves_docker(node):
    before = pid(node)
    containers = node.node.pop("containers")
    predicted = node.run("--dry").changed
    assert len(predicted) == 1
    assert "table inet gpuwright_containers" in predicted[0] and "hold docker.io" in predicted[0]
    node.deploy()
    assert not node.sh("nft list table inet gpuwright_containers 2>/dev/null", check=False)
    assert node.sh("apt-mark showhold") == ""
    assert not node.sh("ls /etc/systemd/system/docker.service.d/gpuwright.conf 2>/dev/null", check=False)
    assert pid(node) == before
    assert daemon(node)["live-restore"] is True
    node.node["containers"] = containers


def test_a_docker_that_was_there_before_us_is_taken_over_with_its_containers(node):
    """It ran without live-restore; a restart alone would end what runs in it."""
    node.host.run(f"cat >{DAEMON_JSON}", stdin='{"registry-mirrors": ["https://mirror.example"]}')
    node.sh("systemctl reset-failed docker.service; systemctl restart docker.service")
    node.sh("docker start web unpublished")
    assert node.sh("docker info --format '{{.LiveRestoreEnabled}}'") == "false"
    running = node.sh("docker inspect --format '{{.State.Pid}}' web")
    run = node.deploy()
    assert {MERGE, RUN, GUARD} <= set(run.changed)
    assert node.sh("docker inspect --format '{{.State.Pid}}' web") == running
    assert node.sh("docker info --format '{{.LiveRestoreEnabled}}'") == "true"
    assert daemon(node)["registry-mirrors"] == ["https://mirror.example"]
    assert node.deploy().changed == []


def test_the_guard_is_retired_when_docker_does_it_itself(node):
    """Stand-ins for Docker 28, which no distribution here has: only what it says of its version is replaced."""
    node.sh(
        r"""
        cat >/usr/local/sbin/dockerd <<'SH'
#!/bin/sh
[ "$1" != --version ] || { echo "Docker version 28.0.0, build stand-in"; exit 0; }
exec /usr/sbin/dockerd "$@"
SH
        cat >/usr/local/bin/docker <<'SH'
#!/bin/sh
[ "$1" = info ] || exec /usr/bin/docker "$@"
/usr/bin/docker "$@" | sed 's/"ServerVersion":"[^"]*"/"ServerVersion":"28.0.0"/'
SH
        chmod +x /usr/local/sbin/dockerd /usr/local/bin/docker
        """
    )
    changed = node.deploy().changed
    assert len(changed) == 1 and "table inet gpuwright_containers" in changed[0]
    assert not node.sh("nft list table inet gpuwright_containers 2>/dev/null", check=False)
    assert node.deploy().changed == []
    node.sh("rm /usr/local/sbin/dockerd /usr/local/bin/docker")
    assert node.deploy().changed == [GUARD]


# --- Debian 12 -------------------------------------------------------------------------------------------------------


def test_debian_12(tmp_path):
    """Docker 20.10: no --validate, no default-network-opts, one package for daemon and client."""
    node = trial.blank("containers-12", "bookworm", tmp_path, {"os": "debian-12", "containers": {}})
    try:
        dry = node.run("--dry")
        assert dry.status == 0, dry.said
        first = node.deploy()
        assert set(first.changed) <= set(dry.changed)
        assert node.deploy().changed == []
        assert node.sh("docker version --format '{{.Server.Version}}'").startswith("20.10.")
        assert "default-network-opts" not in daemon(node)
        assert node.sh("docker info --format '{{.LiveRestoreEnabled}}'") == "true"
        node.host.run(IMAGE, timeout=300)
        attacker = Attacker(node)
        try:
            kept_away(node, attacker)
            node.host.reboot()
            assert node.deploy().changed == []
            node.sh("docker start web unpublished")
            kept_away(node, attacker)
        finally:
            attacker.close()
    finally:
        node.host.destroy()


# --- Docker's own repository -----------------------------------------------------------------------------------------


@pytest.mark.proof
def test_dockers_own_repository(tmp_path):
    """The lab's stand-in of it: Docker's layout, package names and versions, and the distribution's Docker in the packages."""
    offered = repository.published()
    node = trial.blank("containers-ce", "trixie", tmp_path, {})
    try:
        repository.publish("docker-28.5.1")
        (tmp_path / "docker.asc").write_text(repository.key_file().read_text())
        node.node["containers"] = {
            "source": "docker",
            "repository": f"http://{repository.NAME}/linux",
            "repository_key": "docker.asc",
        }
        dry = node.run("--dry")
        assert dry.status == 0, dry.said
        first = node.deploy()
        assert set(first.changed) <= set(dry.changed)
        assert node.deploy().changed == []
        assert set(node.sh("apt-mark showhold").splitlines()) == {"docker-ce", "docker-ce-cli", "containerd.io"}
        assert node.sh("docker info --format '{{.LiveRestoreEnabled}}'") == "true"

        node.node["containers"] = {}
        refused = node.run("-y")
        assert refused.status == 1
        sentence = (
            "docker-ce 5:28.5.1-1~debian.13~trixie is installed and the node file wants docker.io from the distribution"
        )
        assert sentence in refused.said
    finally:
        node.host.destroy()
        repository.withdraw()
        repository.publish(*offered)
