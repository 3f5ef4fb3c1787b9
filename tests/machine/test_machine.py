"""Lab machines: what kernel, PCIe and memory are proven on must be what it says it is."""

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
from lab import machines

pytestmark = pytest.mark.machine


def _cli(*arguments):
    command = [sys.executable, "-m", "gpuwright", "lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_it_boots_through_firmware_and_grub(machine):
    assert machine.run("systemctl is-system-running").stdout == "running\n"
    assert machine.run("test -d /sys/firmware/efi && findmnt -no FSTYPE /boot/efi").stdout == "vfat\n"
    assert "BOOT_IMAGE=/boot/vmlinuz-" in machine.run("cat /proc/cmdline").stdout
    assert machine.run("hostname").stdout == f"{machine.name}\n"
    assert machine.run("passwd -S root").stdout.split()[1] == "L"
    # a kernel of its own, not this machine's
    assert machine.run("uname -r").stdout != os.uname().release + "\n"
    assert "Linux version" in machine.console()


def test_numa_nodes_of_which_one_has_no_processors(machine):
    nodes = "cd /sys/devices/system/node; cat has_memory; cat has_cpu; cat node2/cpulist"
    assert machine.run(nodes).stdout == "0-2\n0-1\n\n"


def test_iommu_groups_and_ports_with_acs(machine):
    assert set(machine.run("cat /sys/kernel/iommu_groups/*/type").stdout.split()) <= {"DMA", "DMA-FQ"}
    # Root ports (1b36:000c): three lead to accelerators, two to disk and network, which nobody may touch.
    ports = "for port in $(lspci -Dd 1b36:000c | cut -d' ' -f1); do echo $port $(setpci -s $port ECAP_ACS+6.w); done"
    found = dict(line.split() for line in machine.run(ports).stdout.splitlines())
    assert set(found.values()) == {"001d"}
    assert [address[5:7] for address in sorted(found)] == ["00", "00", "40", "40", "40"]
    # Stand-ins for accelerators: vendor 1af4, class 00ff, each on node 0, two of them below a switch.
    seen = machine.run(
        "cd /sys/bus/pci/devices; for at in $(lspci -Dd 1af4::00ff | cut -d' ' -f1); do readlink $at; done"
    ).stdout
    assert [path.count("/0000:") for path in seen.split()] == [2, 2, 4, 4]
    assert set(machine.run("cat /sys/bus/pci/drivers/virtio-pci/0000:4*/numa_node").stdout.split()) == {"0"}


def test_a_word_for_grub_reaches_the_next_kernel(machine):
    before = machine.boot_id()
    machine.run("echo 'GRUB_CMDLINE_LINUX=\"$GRUB_CMDLINE_LINUX lab.word=1\"' > /etc/default/grub.d/zz-test.cfg")
    assert "improperly nested" not in machine.run("update-grub 2>&1", timeout=300).stdout
    assert "lab.word=1" not in machine.run("cat /proc/cmdline").stdout
    machine.reboot()
    assert machine.boot_id() not in ("", before)
    assert "lab.word=1" in machine.run("cat /proc/cmdline").stdout.split()
    machine.run("rm /etc/default/grub.d/zz-test.cfg; update-grub", timeout=300)


def test_packages_registry_and_hub_are_there_and_nothing_else(machine):
    assert machine.run("ip route show default").stdout == ""
    assert machine.run("apt-get update -qq 2>&1", timeout=300).stdout == ""
    ask = f"curl -sko /dev/null -w '%{{http_code}}' https://{lab.registry.host()}/v2/"
    assert machine.run(ask).stdout == "200"


def test_networks_that_docker_makes_are_docker_s(machine):
    """The machine's own network settings are its card's: given to a container's, they took it off its bridge."""
    machine.run(
        "ip link add lab0 type bridge; ip link add lab1 type veth peer name lab2; ip link set lab1 master lab0 up"
    )
    machine.run("ip link set lab0 up; ip link set lab2 up; sleep 5")
    assert "master lab0" in machine.run("ip link show lab1").stdout
    assert "10.0.2.15" not in machine.run("ip address show lab1; ip address show lab2; ip address show lab0").stdout
    machine.run("ip link del lab1; ip link del lab0")


def test_the_page_cache_of_a_download_spills_onto_the_node_without_processors(machine):
    """What the memory role is for: 2.4 GB written on a machine with 2 GiB on node 0."""
    write = "dd if=/dev/zero of=/root/big bs=1M count=2400 status=none; sync"
    pages = "sed -n 's/^Node 2 FilePages: *\\([0-9]*\\) kB/\\1/p' /sys/devices/system/node/node2/meminfo"
    clean = "rm -f /root/big; sync; echo 1 > /proc/sys/vm/drop_caches"
    machine.run(clean)
    machine.run(write, timeout=600)
    assert int(machine.run(pages).stdout) > 200_000
    machine.run(clean)
    machine.run(f"systemd-run --quiet --wait -p NUMAPolicy=bind -p NUMAMask=0-1 sh -c '{write}'", timeout=600)
    assert int(machine.run(pages).stdout) < 20_000
    machine.run(clean)


def test_a_power_cut_forgets_memory_and_keeps_the_disk(machine):
    before = machine.boot_id()
    machine.run("echo kept > /root/kept; sync; echo lost > /dev/shm/lost; echo lost > /root/lost")
    machine.power_cycle()
    assert machine.boot_id() not in ("", before)
    assert machine.run("cat /root/kept; cat /dev/shm/lost", check=False).stdout == "kept\n"


def test_a_cut_at_a_moment_of_the_tests_choosing(machine):
    before = machine.boot_id()
    machine.power_off()
    assert not machine.running
    assert machine.boot_id() == ""
    with pytest.raises(
        lab.LabError, match=f"{machine.name} is off; switch it on with: gpuwright lab up --machine {machine.name}"
    ):
        machine.reboot()
    machine.switch_on()
    machine.wait()
    assert machine.boot_id() not in ("", before)


def test_a_reboot_from_outside_needs_no_network(machine):
    before = machine.boot_id()
    machine.run("(sleep 1; ip link set dev $(ls /sys/class/net | grep ^en) down) >/dev/null 2>&1 &")
    time.sleep(5)
    machine.reboot()
    assert machine.boot_id() not in ("", before)


def test_reset_is_blank_again_and_keeps_name_port_and_host_key(machine):
    key = machine.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout
    machine.run(
        "touch /root/kept; useradd somebody; systemctl mask ssh.socket; echo broken > /boot/grub/grub.cfg; sync"
    )
    machine.reset()
    assert (
        machine.run("ls /root/kept; id somebody; systemctl is-enabled ssh.socket", check=False).stdout == "disabled\n"
    )
    assert machine.run("cat /etc/ssh/ssh_host_ed25519_key.pub").stdout == key
    now = int(machine.run("date +%s").stdout)
    assert abs(now - time.time()) < 30


def test_a_machine_that_does_not_boot_shows_the_end_of_its_console(machine, monkeypatch):
    machine.run("mv /boot/grub/grub.cfg /boot/grub/gone.cfg; sync")
    machine.power_off()
    monkeypatch.setattr(machines.Machine, "boot_limit", 60.0)
    machine.switch_on()
    with pytest.raises(lab.LabError, match=r"did not boot within \d+ s: .*grub"):
        machine.wait()
    monkeypatch.undo()
    machine.reset()


def test_a_killed_run_leaves_nothing_behind(machine):
    half = machine.directory.with_name("half")
    half.mkdir()
    stray = subprocess.Popen(["qemu-system-x86_64", "-machine", "none", "-nodefaults", "-display", "none"], cwd=half)
    assert lab.up_machines([machine.name]) == [machine]
    assert stray.wait(timeout=10) == -signal.SIGKILL
    assert not half.exists()


def test_the_command_line_works_on_machines_as_on_hosts(machine):
    assert _cli("exec", machine.name, "--", "sh", "-c", "exit 7").returncode == 7
    [entry] = [entry for entry in json.loads(_cli("list", "--json").stdout) if entry["name"] == machine.name]
    assert entry["running"]
    assert entry["kind"] == "machine"
    assert entry["hardware"] == "hbm"
    assert f"{machine.name}\t{machine.address}:{machine.port}\ttrixie\trunning\n" in _cli("list").stdout


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--machine", "Bad_Name"), "'Bad_Name' is no machine name for the lab"),
        (
            ("--machine", "node-1", "--release", "bookworm"),
            "node-1 is a machine of kind hbm with the provisioned image of trixie",
        ),
        (("--kind", "pairs"), "--kind and --image are of machines; name one with --machine NAME"),
        (("--machine", "x", "--names", "y"), "--names is of hosts and --machine of machines; give one of them"),
        (
            ("--machine", "node-1", "--kind", "pairs"),
            "node-1 is a machine of kind hbm with the provisioned image of trixie",
        ),
        (("--names", "node-1"), "node-1 is a machine of this lab; choose another name"),
    ],
)
def test_the_command_line_says_what_is_wrong_in_one_sentence(machine, arguments, sentence):
    result = _cli("up", *arguments)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_host_cannot_have_the_name_of_a_machine_and_a_port_that_is_taken_is_named(machine):
    machine.power_off()
    listener = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, time\n"
            f"taken = socket.create_server(('{machine.address}', {machine.port}))\n"
            "print('taken', flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert listener.stdout is not None and listener.stdout.readline() == "taken\n"
        with pytest.raises(lab.LabError, match=f"port {machine.port} on {machine.address} is taken by another program"):
            machine.switch_on()
    finally:
        listener.kill()
        listener.wait()
    machine.switch_on()
    machine.wait()


def test_pairs_have_processors_and_accelerators_on_every_node(machine):
    machine.power_off()  # one at a time: memory and cores of the machine that runs the tests are shared
    [pairs] = lab.up_machines(["pairs-1"], "pairs", blank=True)
    try:
        assert (
            pairs.run("cd /sys/devices/system/node; cat has_memory has_cpu node0/cpulist node1/cpulist").stdout
            == "0-1\n0-1\n0-1\n2-3\n"
        )
        nodes = pairs.run("cat /sys/bus/pci/drivers/virtio-pci/0000:[48]*/numa_node").stdout.split()
        assert nodes == ["0", "0", "1", "1"]
    finally:
        pairs.destroy()
        machine.switch_on()
        machine.wait()


def test_the_lab_is_labelled_as_one(machine):
    assert machine.run("cat /etc/gpuwright-lab-machine").stdout == "hbm provisioned\n"
    assert Path("/var/cache/gpuwright-lab/machines").is_dir()
