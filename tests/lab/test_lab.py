"""The lab itself: what everything else is proven on must be what it says it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lab
from lab import images
from lab.paths import locked

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", autouse=True)
def own_lab():
    """A lab of this module's own, next to whatever lab runs on this machine; always the same one, so that what a
    killed test run leaves is cleared by the next."""
    directory = Path("/var/lib/gpuwright-lab-selftest")
    with pytest.MonkeyPatch.context() as patch, locked(directory.with_suffix(".lock")):
        patch.setenv("GPUWRIGHT_LAB_DIR", str(directory))
        lab.down()
        yield directory
        lab.down()


@pytest.fixture(scope="module")
def host(own_lab):
    [host] = lab.up(["probe"])
    return host


def _cli(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gpuwright", "lab", *arguments], capture_output=True, text=True, timeout=120
    )


def _supervisor(host):
    return int((host._cgroup() / "watch/cgroup.procs").read_text().split()[0])


@pytest.mark.parametrize("release, version", [("trixie", "13"), ("bookworm", "12")])
def test_a_blank_host_is_blank(release, version):
    [host] = lab.up([f"blank-{version}"], release)
    assert host.run("systemctl is-system-running").stdout == "running\n"
    assert host.run(". /etc/os-release; echo $VERSION_ID").stdout == f"{version}\n"
    assert host.run("hostname").stdout == f"{host.name}\n"
    tools = "docker dockerd containerd caddy python3 python curl wget jq nft iptables sudo"
    assert host.run(f"command -v {tools}", check=False).stdout == ""
    assert host.run("passwd -S root").stdout.split()[1] == "L"
    host.destroy()
    assert host.name not in [other.name for other in lab.known()]
    assert host.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()


def test_two_hosts_boot_side_by_side_and_differ(host):
    other, same = lab.up(["other", "probe"])
    assert same == host
    for command in (
        "cat /etc/machine-id",
        "cat /etc/ssh/ssh_host_ed25519_key.pub",
        "cat /proc/sys/kernel/random/boot_id",
    ):
        assert host.run(command).stdout != other.run(command).stdout
    host.run("rm -f /root/only-here; touch /root/only-here")
    assert other.run("ls /root/only-here", check=False).returncode != 0
    other.destroy()


def test_the_host_key_is_checked(host, tmp_path):
    other_key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other_key)], check=True)
    wrong = tmp_path / "known_hosts"
    wrong.write_text(f"{host.address} {other_key.with_suffix('.pub').read_text()}")
    argv = [argument.replace(str(host.known_hosts), str(wrong)) for argument in host.ssh_argv("-o", "BatchMode=yes")]
    assert "verification failed" in subprocess.run([*argv, "true"], capture_output=True, text=True).stderr


def test_a_host_reaches_packages_and_nothing_else(host):
    assert host.run("ip route show default").stdout == ""
    # -qq says nothing but warnings; there are none about the blank host's own sources
    assert host.run("apt-get update -qq 2>&1").stdout == ""
    host.run("apt-get install -qqy --no-install-recommends jq")
    assert host.run("jq -n 1").stdout == "1\n"


def test_a_reboot_from_inside_comes_back_with_its_disk_and_forgets_its_network(host):
    before = host.boot_id()
    host.run("touch /root/kept /run/gone; ip link add left-over type bridge")
    host.run("systemctl reboot", check=False)
    deadline = time.monotonic() + 30
    while host.boot_id() in ("", before):
        assert time.monotonic() < deadline, "it did not come back"
    host.wait()
    assert host.run("ls /root/kept /run/gone", check=False).stdout == "/root/kept\n"
    assert host.run("ip link show left-over", check=False).returncode != 0


@pytest.mark.parametrize("way", ["reboot", "power_cycle"])
def test_a_reboot_from_outside_needs_no_network(host, way):
    before = host.boot_id()
    # What a broken firewall looks like from here.
    host.run("touch /root/kept; (sleep 0.2; ip link set host0 down) >/dev/null 2>&1 &")
    time.sleep(0.5)
    assert host.boot_id() == ""
    getattr(host, way)()
    assert host.boot_id() not in ("", before)
    assert host.run("ls /root/kept").stdout == "/root/kept\n"


def test_reset_is_blank_again_and_keeps_name_address_and_host_key(host):
    key = host.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout
    host.run("touch /root/kept; useradd somebody; systemctl mask ssh.socket; chmod 000 /srv")
    host.reset()
    assert host.run("ls /root/kept; id somebody; systemctl is-enabled ssh.socket", check=False).stdout == "disabled\n"
    assert host.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout == key


def test_a_killed_supervisor_leaves_nothing_behind(host):
    boot = host.boot_id()
    host.run("touch /root/kept")
    os.kill(_supervisor(host), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while host.running and time.monotonic() < deadline:
        time.sleep(0.05)
    # It still answers, but nobody would boot it again: that is not a running host.
    assert host.boot_id() == boot
    assert "off" in _cli("list").stdout
    [again] = lab.up([host.name])
    assert again.boot_id() not in ("", boot)
    assert again.run("ls /root/kept").stdout == "/root/kept\n"
    mine = [line for line in _processes() if f"--machine={host.name} " in line and str(host.directory) in line]
    assert len(mine) == 1, mine


def test_down_after_a_killed_supervisor_ends_its_host():
    [host] = lab.up(["orphan"])
    os.kill(_supervisor(host), signal.SIGKILL)
    host.destroy()
    assert not [line for line in _processes() if str(host.directory) in line]
    assert host.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()


def test_a_half_made_host_is_swept(own_lab, host):
    half = own_lab / "hosts" / "half"
    (half / "upper/etc").mkdir(parents=True)
    subprocess.run(["ip", "netns", "add", host.segment.namespace("half")], check=True)
    lab.up([host.name])
    assert not half.exists()
    assert (
        host.segment.namespace("half")
        not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    )


def test_a_neighbour_sees_the_host_from_the_same_segment(host):
    neighbour = lab.neighbour()
    ask = f"exec 3<>/dev/tcp/{host.address}/22; head -c 4 <&3"
    assert neighbour.run("bash", "-c", ask).stdout == "SSH-"
    assert neighbour.address in host.run("ip neighbour show").stdout


def test_containers_run_and_the_image_comes_from_the_registry_by_digest(host):
    image = images.build("sim")
    assert images.build("sim") == image
    host.run(
        "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends docker.io docker-cli",
        timeout=300,
    )
    folder = f"/etc/docker/certs.d/{lab.registry.host()}"
    host.run(f"mkdir -p {folder} && cat > {folder}/ca.crt", stdin=lab.ca_file().read_text())
    host.run(f"docker pull -q {image.reference}")
    flags = "--read-only --cap-drop ALL --user 10001 --security-opt no-new-privileges -p 127.0.0.1:8000:8000"
    host.run(f"docker run -d --name engine {flags} {image.reference} --model x --served-model-name hello")
    ask = "exec 3<>/dev/tcp/127.0.0.1/8000; printf 'GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n' >&3; timeout 5 cat <&3"
    assert '"hello"' in host.run(f'for i in 1 2 3 4 5 6 7 8 9; do bash -c "{ask}" && break; sleep 1; done').stdout
    assert host.run("docker info -f '{{.Driver}} {{.CgroupVersion}}'").stdout == "overlay2 2\n"


def test_a_lab_never_touches_another_that_took_its_number(own_lab, host, tmp_path):
    """A lab that is down has no number any more; the one that has it now keeps its hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUWRIGHT_LAB_DIR", str(tmp_path))
        (tmp_path / "lab.json").write_text((own_lab / "lab.json").read_text())
        assert lab.down() == []
    assert host.run("true").returncode == 0


@pytest.mark.proof
def test_the_lab_works_where_systemd_is_pid_1_and_installs_its_tools():
    """A lab inside a lab host: a fresh Debian server, with this machine's proxy between it and the archive."""
    [server] = lab.up(["server"], blank=True)
    repository = Path(__file__).resolve().parents[2]
    packed = subprocess.run(["tar", "-c", "lab", "gpuwright"], cwd=repository, capture_output=True, check=True).stdout
    argv = [*server.ssh_argv(), "mkdir /opt/repository && tar -x -C /opt/repository"]
    subprocess.run(argv, input=packed, check=True)
    server.run(
        "apt-get update -qq && apt-get install -qqy --no-install-recommends python3-click python3-rich", timeout=300
    )

    def inner(arguments, check=True):
        # Its state where a plain file system is: an overlay cannot carry an overlay's upper layer.
        command = f"cd /opt/repository && GPUWRIGHT_LAB_DIR=/var/lib/docker/lab python3 -m gpuwright lab {arguments}"
        return server.run(command, check=check, timeout=600)

    assert "Installing apt-cacher-ng, docker-registry, mmdebstrap, systemd-container" in inner("up").stderr
    assert (
        server.run("systemctl is-enabled apt-cacher-ng docker-registry", check=False).stdout == "disabled\ndisabled\n"
    )
    unit = "gpuwright-lab-lab-1.service"
    assert server.run(f"systemctl is-active {unit}").stdout == "active\n"
    assert inner("exec lab-1 hostname").stdout == "lab-1\n"
    inner("reboot lab-1")
    server.run(f"kill -KILL $(cat /sys/fs/cgroup/system.slice/{unit}/watch/cgroup.procs)")
    assert inner("up").stdout.split() == ["lab-1", "10.83.0.11", "trixie", "running"]
    inner("down")
    assert server.run(f"systemctl is-active {unit}", check=False).stdout == "inactive\n"
    assert server.run("ip -o link | grep gpw; ps -e | grep -E 'apt-cacher|registry|nspawn'", check=False).stdout == ""
    assert server.run("systemctl is-system-running").stdout == "running\n"
    server.destroy()


def test_the_command_line_says_what_is_wrong_in_one_sentence(host):
    for arguments, sentence in [
        (("up", "--names", "Bad_Name"), "'Bad_Name' is no host name for the lab"),
        (("up", "--names", "a,a"), "a host is named twice"),
        (("up", "--names", host.name, "--release", "bookworm"), f"{host.name} is a trixie host"),
        (("reboot", "nobody"), f"no host or machine 'nobody'; it has: {host.name}"),
    ]:
        result = _cli(*arguments)
        assert result.returncode == 1
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr
    assert _cli("exec", host.name, "--", "sh", "-c", "exit 7").returncode == 7
    [entry] = json.loads(_cli("list", "--json").stdout)
    assert entry["running"]
    assert entry["address"] == host.address


def _processes():
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines
