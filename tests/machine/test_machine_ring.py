"""The ring on a machine that boots its own kernel, for all roles at once: blank, dry run, one run with one reboot, second run
without a change, audit, damage by hand, repair, reboot. Accelerators and engine are STAND-INS; kernel, IOMMU, bridges and memory are real."""

from __future__ import annotations

import json
import time

import fleet
import httpx
import pytest

pytestmark = pytest.mark.machine

ENGINE = "gpuwright-engine-main.service"
REDIRECT = 0x2C
QUESTION = {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def site(machine, tmp_path_factory):
    yield fleet.prepare([machine], tmp_path_factory.mktemp("ring"))
    machine.reset()


def sh(site, command: str) -> str:
    return site.hosts[0].run(command, timeout=300).stdout.strip()


def boots(site) -> int:
    return len(sh(site, "journalctl --list-boots --quiet").splitlines())


def ports(site) -> dict[str, int]:
    """ACS control words of the root ports, by address; those on buses from 40 lead to accelerators."""
    listed = sh(
        site, "for port in $(lspci -Dd 1b36:000c | cut -d' ' -f1); do echo $port $(setpci -s $port ECAP_ACS+6.w); done"
    )
    return {address: int(word, 16) for address, word in (line.split() for line in listed.splitlines())}


def above_accelerators(address: str) -> bool:
    return int(address.split(":")[1], 16) >= 0x40


def answers(site) -> tuple[int, ...]:
    """Status without a key and with one, asked from outside; 0 where nobody answers."""
    found = []
    for key in (None, ""):
        with site.client(site.hosts[0], key) as client:
            try:
                found.append(client.post("/v1/chat/completions", json=QUESTION).status_code)
            except httpx.TransportError:
                found.append(0)
    return tuple(found)


def until_it_serves(site) -> None:
    """After a reboot, without a run."""
    deadline = time.monotonic() + 600
    while answers(site) != (401, 200):
        assert time.monotonic() < deadline, "the node did not come back by itself"
        time.sleep(5)


def test_the_ring_of_a_machine(site):
    [machine] = site.hosts
    assert set(ports(site).values()) == {0x1D}
    before = machine.boot_id()

    planned = site.dry()
    assert "reboot needed, because" in planned.said
    assert "iommu=pt" in planned.said
    assert machine.boot_id() == before, "a dry run reboots nothing"
    assert sh(site, "ls /etc/default/grub.d | grep -c gpuwright || true") == "0"

    first = site.deploy(timeout=1800)
    unpredicted = set(first.changed[machine.name]) - set(planned.changed[machine.name])
    assert not unpredicted, "every change of the real run was predicted or listed as conditional"
    assert boots(site) == 2, "one reboot, and no second one"

    assert {"iommu=pt", "intel_iommu=on"} <= set(sh(site, "cat /proc/cmdline").split())
    assert set(sh(site, "cat /sys/bus/pci/devices/0000:4*/iommu_group/type").split()) == {"identity"}
    assert {a: w for a, w in ports(site).items() if above_accelerators(a)}.values() and all(
        word == (0x11 if above_accelerators(address) else 0x1D) for address, word in ports(site).items()
    )
    assert sh(site, "cat /proc/sys/vm/zone_reclaim_mode") == "1"
    assert sh(site, "modprobe --showconfig | grep -c '^install cramfs '") == "1"
    assert answers(site) == (401, 200)
    pid = sh(site, "docker inspect -f '{{.State.Pid}}' gpuwright-main")
    assert set(sh(site, f"awk '{{print $2}}' /proc/{pid}/numa_maps | sort -u").split()) == {"default"}

    assert site.deploy().all_changed == []
    assert site.dry().all_changed == []
    assert site.audit() == []

    port = next(address for address in ports(site) if above_accelerators(address))
    sh(site, f"setpci -s {port} ECAP_ACS+6.w=2c:2c")
    sh(site, "sysctl -qw vm.zone_reclaim_mode=0")
    red = site.audit()
    assert any("GPW-PCIE-002" in name for name in red), red
    assert any("GPW-KERN-" in name or "GPW-MEMO-" in name for name in red), red

    repaired = site.deploy()
    assert len(repaired.all_changed) == 2, repaired.all_changed
    assert ports(site)[port] & REDIRECT == 0
    assert site.audit() == []
    assert boots(site) == 2, "nothing of that needs a reboot"

    # Setting the time by hand tells the kernel that nobody keeps it right any more.
    sh(site, "systemctl stop systemd-timesyncd && date --set=@$(date +%s)")
    assert any("GPW-BASE-003" in name for name in site.audit())
    assert site.deploy().all_changed
    deadline = time.monotonic() + 120
    while sh(site, "timedatectl show --property=NTPSynchronized --value") != "yes":
        assert time.monotonic() < deadline
        time.sleep(2)
    assert site.audit() == []

    machine.reboot()
    until_it_serves(site)
    assert site.audit() == []
    assert site.deploy().all_changed == []


def test_a_word_that_is_no_longer_asked_for_goes_and_nothing_else(site):
    """And with ``reboot: never`` the run says what waits, and starts nothing."""
    machine = site.hosts[0]
    site.set(machine.name, kernel__words=[{"word": "lab.mine=1", "reason": "a test"}])
    site.deploy()
    assert "lab.mine=1" in sh(site, "cat /proc/cmdline").split()
    before = set(sh(site, "cat /proc/cmdline").split())

    site.set(machine.name, kernel__words=[], kernel__reboot="never")
    boot = machine.boot_id()
    sh(site, f"systemctl stop {ENGINE}")
    said = site.deploy().said
    assert machine.boot_id() == boot
    assert "engine main waits for a reboot, because" in said
    assert "the kernel runs with lab.mine=1, which nothing asks for any more" in said
    assert sh(site, f"systemctl show -p ActiveState --value {ENGINE}") == "inactive"
    assert sh(site, "docker ps --quiet --filter name=gpuwright-main") == ""
    assert "lab.mine=1" not in sh(site, "grep -h '^[[:space:]]*linux' /boot/grub/grub.cfg")
    machine.reboot()
    assert set(sh(site, "cat /proc/cmdline").split()) == before - {"lab.mine=1"}
    until_it_serves(site)
    assert site.deploy().all_changed == []


def test_the_record_of_what_is_ours_names_the_boot_loaders_drop_in(site):
    owned = sh(site, "cat /var/lib/gpuwright/owned/kernel")
    assert "/etc/default/grub.d/" in owned
    assert json.loads(sh(site, "docker inspect gpuwright-main"))[0]["HostConfig"]["CpusetMems"] == ""
