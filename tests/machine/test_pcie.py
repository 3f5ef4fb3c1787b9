"""Role pcie on a machine that boots its own kernel: a bus with root ports and a switch, an IOMMU, and STAND-IN accelerators.

The stand-ins are endpoints that compute nothing; what is shown is the kernel's topology, its IOMMU and its ACS bits, all real.
The tests go through one machine in order, as its life does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from outcome import operations

from gpuwright import snapshot
from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect
from gpuwright.spec.node import Accelerators
from lab.inventory import describe
from roles.pcie import CONSEQUENCES, facts, lspci

pytestmark = pytest.mark.machine

ACCELERATORS = {"vendor": "1af4", "classes": ["00ff"], "count": 4}
TOLD_BY = Accelerators(vendor="1af4", classes=("00ff",))
UNIT = "gpuwright-acs.service"
NODE = f"""
gpuwright: 1
summary: a lab machine with stand-in accelerators
os: debian-13
hardware:
  accelerators: {json.dumps(ACCELERATORS)}
base: {{unattended_upgrades: false}}
kernel: {{reboot: when-needed, deviations: {{sysctls: other tests have them, modules: other tests have them}}}}
pcie: {{}}
"""


class Site:
    """The machine, a node file for it, and what a run or an audit says."""

    def __init__(self, machine, directory: Path) -> None:
        self.machine, self.directory = machine, directory
        (directory / "nodes").mkdir()
        (directory / "nodes/node.yaml").write_text(NODE)
        self.name = machine.name
        self.write()

    def write(self, **settings) -> None:
        """The inventory, with dotted settings over the node file's."""
        entry = {**describe(self.machine, "node"), "set": settings}
        (self.directory / "inventory.py").write_text(
            f"from gpuwright.spec.fleet import fleet as _fleet\nnodes = _fleet({ {self.name: entry}!r}, __file__)\n"
        )

    def run(self, *options: str) -> tuple[int, list[str], str]:
        """Exit status of ``pyinfra inventory deploy.py``, the operations that changed (or would), and all that was said."""
        done = subprocess.run(
            [Path(sys.executable).with_name("pyinfra"), "--json", *options, "inventory.py", REPOSITORY / "deploy.py"],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        changed = operations(done.stdout)[0].get(self.name, []) if done.stdout.strip() else []
        return done.returncode, changed, done.stderr

    def deploy(self) -> list[str]:
        """A run that must succeed; what it changed."""
        status, changed, said = self.run("-y")
        assert status == 0, said
        return changed

    def sh(self, command: str) -> str:
        return self.machine.run(command, timeout=180).stdout.strip()

    def state_of(self, unit: str, name: str) -> str:
        """One property of a unit as systemd has it."""
        return self.sh(f"systemctl show -p {name} --value {unit}")

    @contextmanager
    def laid_over(self, path: str, text: str) -> Iterator[None]:
        """The kernel's own word in `path` is another until the block ends."""
        self.machine.run(f"cat >/run/laid-over; mount --bind /run/laid-over {path}", stdin=text)
        try:
            yield
        finally:
            self.sh(f"umount {path}")

    def topology(self) -> facts.Topology:
        found = snapshot.parse(self.machine.run("sh -s", stdin=snapshot.script([facts.TOPOLOGY])).stdout)
        return found.read(facts.TOPOLOGY)

    def words(self) -> dict[str, int | None]:
        return {address: acs.word for address, acs in self.topology().acs.items()}

    def outcomes(self) -> dict[str, Outcome]:
        """What each control of the role came to."""
        collected = collect(self.directory / "inventory.py")
        assert not collected.faults, collected.faults
        chosen = controls.of_role("pcie")
        seen = connection.read(connection.connect(self.name, collected.hosts[self.name]), chosen)
        return {r.control.id: r.outcome for r in judge_all(chosen, seen, collected.specs[self.name])}

    def red(self) -> set[str]:
        """Controls of the role that neither pass nor are left out or waived by the node file."""
        fine = (Outcome.PASS, Outcome.NOT_APPLICABLE, Outcome.WAIVED)
        return {control for control, outcome in self.outcomes().items() if outcome not in fine}


@pytest.fixture(scope="module")
def site(machine, tmp_path_factory):
    yield Site(machine, tmp_path_factory.mktemp("pcie"))
    machine.reset()


@pytest.fixture(scope="module")
def blank(site):
    """The bus before anything was deployed."""
    return site.topology()


@pytest.fixture(scope="module")
def converged(site, blank):
    """The node after its one reboot: what the run said. At that boot ssh answers long before ACS is cleared, as where udev is at
    work for long."""
    before = site.machine.boot_id()
    late = f"/etc/systemd/system/{UNIT}.d"
    site.machine.run(
        f"touch /run/before-the-reboot; mkdir {late}; cat >{late}/late.conf",
        stdin="[Service]\nExecStartPre=/bin/sh -c 'test -e /run/before-the-reboot || sleep 60'\n",
    )
    status, _, said = site.run("-y")
    assert status == 0, said
    assert site.machine.boot_id() not in ("", before)
    site.sh(f"rm -r {late}; systemctl daemon-reload")
    return said


def path_ports(topology):
    """Bridges above accelerators that have ACS at all."""
    above = topology.paths(topology.accelerators(TOLD_BY))
    return [address for address in above if topology.acs[address].word is not None]


def test_the_topology_is_what_the_machine_was_made_of(site, blank):
    accelerators = blank.accelerators(TOLD_BY)
    # Two on root ports of their own, two below one switch: root port, upstream port, downstream port.
    assert sorted(len(f.upstream) for f in accelerators) == [1, 1, 3, 3]
    assert {f.numa_node for f in accelerators} == {0}
    assert all(f.group is not None and f.max_width for f in accelerators)
    assert blank.iommu(accelerators).mode == "translated"
    assert len(path_ports(blank)) == 3
    assert {blank.acs[address].word for address in path_ports(blank)} == {0x1D}
    # lspci says the same of every bridge that has ACS; of the switch, which has none, it is not sure.
    listed = lspci.functions(f"{site.sh('lspci -D -vvv')}\n\n", blank.functions)
    assert {address: listed[address].acs for address in blank.acs} == site.words()


def test_who_is_not_root_is_not_told_that_there_is_no_acs(site, blank):
    """The same script as nobody: every bridge is "could not look", and so are the holders of VFIO devices."""
    script = facts.script()
    said = site.machine.run("setpriv --reuid=65534 --regid=65534 --clear-groups sh -s", stdin=script).stdout
    seen = facts.parse(said)
    assert seen.functions.keys() == blank.functions.keys()
    assert {acs.redirects for address, acs in seen.acs.items() if address in path_ports(blank)} == {None}
    assert seen.vfio_holders is None


def test_the_plan_says_what_it_costs_and_what_waits_for_the_reboot(site, blank):
    status, changed, said = site.run("--dry")
    assert status == 0, said
    assert f"pcie.iommu: translated now, pt wanted: {CONSEQUENCES['pt']}" in said
    assert any(UNIT in name for name in changed)


def test_one_run_and_one_reboot_make_it_so(site, blank, converged):
    seen = site.topology()
    assert seen.iommu(seen.accelerators(TOLD_BY)).mode == "pt"
    assert {"iommu=pt", "intel_iommu=on"} <= set(site.sh("cat /proc/cmdline").split())
    ports = path_ports(blank)
    assert {address: acs.word for address, acs in seen.acs.items()} == {
        address: 0x11 if address in ports else acs.word for address, acs in blank.acs.items()
    }
    log = site.sh(f"journalctl -b -u {UNIT} -o cat")
    assert all(f"{address}: 0x001d before, 0x0011 after" in log for address in ports)
    assert site.red() == set()


def test_what_the_boot_still_starts_is_waited_for_before_it_is_read_back(converged):
    assert re.search(rf"starting for \d+ of at most \d+ s: .*{UNIT}", converged), converged


def test_a_second_run_changes_nothing(site, converged):
    assert site.deploy() == []


def test_bits_set_by_hand_are_seen_and_cleared_by_the_next_run(site, blank, converged):
    port = path_ports(blank)[-1]
    site.sh(f"setpci -s {port} ECAP_ACS+6.w=2c:2c")
    assert site.words()[port] & facts.REDIRECT
    assert site.red() == {"GPW-PCIE-002"}
    assert site.deploy() == [f"PCIe | Run {UNIT}: no bridge above an accelerator redirects"]
    assert site.words()[port] == 0x11
    assert site.red() == set()


def test_a_rescan_that_brings_a_bridge_back_brings_it_back_cleared(site, blank, converged):
    port = path_ports(blank)[0]
    beside = {address: word for address, word in site.words().items() if address not in path_ports(blank)}
    site.sh(f"echo 1 >/sys/bus/pci/devices/{port}/remove")
    assert port not in site.topology().functions
    assert site.red() == {"GPW-PCIE-005"}
    # Until udev and what it starts are done; the kernel sets redirect on what it finds.
    site.sh(
        "echo 1 >/sys/bus/pci/rescan; udevadm settle; sleep 1; while systemctl list-jobs --no-legend | grep -q gpuwright-acs; do sleep 0.5; done"
    )
    assert site.words()[port] == 0x11
    assert {address: site.words()[address] for address in beside} == beside
    assert f"{port}: 0x001d before, 0x0011 after" in site.sh(f"journalctl -u {UNIT} -o cat -n 12")
    assert site.red() == set()


def test_a_unit_that_does_not_start_at_boot_is_seen_and_enabled_again(site, converged):
    site.sh(f"systemctl disable -q {UNIT}")
    assert site.red() == {"GPW-PCIE-004"}
    site.deploy()
    assert site.red() == set()


def test_a_link_that_came_up_with_fewer_lanes_is_seen(site, blank, converged):
    one = blank.accelerators(TOLD_BY)[0]
    assert site.outcomes()["GPW-PCIE-006"] is Outcome.PASS
    with site.laid_over(f"/sys/bus/pci/devices/{one.address}/max_link_width", f"{2 * one.max_width}\n"):
        assert site.red() == {"GPW-PCIE-006"}
    with site.laid_over(f"/sys/bus/pci/devices/{one.address}/current_link_width", "0\n"):
        assert site.red() == {"GPW-PCIE-006"}
    assert site.red() == set()


def test_a_region_smaller_than_a_card_s_memory_is_seen(site, blank, converged):
    """As firmware without Resizable BAR leaves it: the largest region of one accelerator ends early."""
    accelerators = blank.accelerators(TOLD_BY)
    one, memory = accelerators[0], min(f.aperture for f in accelerators)
    resource = f"/sys/bus/pci/devices/{one.address}/resource"
    lines = [line.split() for line in site.sh(f"cat {resource}").splitlines()]
    halved = [
        (start, hex(int(start, 16) + (int(end, 16) - int(start, 16) + 1) // 2 - 1) if int(end, 16) else end, flags)
        for start, end, flags in lines
    ]
    # What a card has is for rules about engines too; this node has none.
    site.write(**{"hardware.gpus.memory": f"{memory} B"})
    try:
        assert site.outcomes()["GPW-PCIE-007"] is Outcome.PASS
        with site.laid_over(resource, "".join(f"{' '.join(line)}\n" for line in halved)):
            assert site.red() == {"GPW-PCIE-007"}
        assert site.red() == set()
    finally:
        site.write()


def test_a_mode_changed_behind_the_words_is_seen(site, blank, converged):
    """One accelerator's group is translated again, as an administrator or a quirk can make it."""
    device = blank.accelerators(TOLD_BY)[0].address
    sys_device, group = f"/sys/bus/pci/devices/{device}", f"/sys/bus/pci/devices/{device}/iommu_group"
    site.sh(f"echo {device} >{sys_device}/driver/unbind; echo DMA >{group}/type")
    try:
        assert site.red() == {"GPW-PCIE-001"}
        status, _, said = site.run("-y")
        assert status == 1
        assert "expected: pt, as the kernel was told; do: look at" in said
    finally:
        site.sh(f"echo identity >{group}/type; echo {device} >/sys/bus/pci/drivers_probe")
    assert site.red() == set()


def test_a_host_with_guests_is_refused_and_left_as_it_is(site, blank, converged):
    device = blank.accelerators(TOLD_BY)[-1].address
    sys_device = f"/sys/bus/pci/devices/{device}"
    rebind = f"echo {device} >{sys_device}/driver/unbind; echo {device} >/sys/bus/pci/drivers_probe"
    site.sh(f"modprobe vfio-pci; echo vfio-pci >{sys_device}/driver_override; {rebind}")
    try:
        assert site.red() == {"GPW-PCIE-003", "GPW-PCIE-008"}
        for options in (["--dry"], ["-y"]):
            status, _, said = site.run(*options)
            assert status == 1
            assert f"{device} is bound to vfio-pci" in said
            assert "Nothing was changed." in said
        # The unit itself refuses too, as at a boot after which a guest has the device.
        assert site.machine.run(f"systemctl restart {UNIT}", check=False).returncode != 0
        site.sh(f"systemctl reset-failed {UNIT}")
        site.write(**{"pcie.vfio_guests_accepted": "a guest of ours that is trusted"})
        site.deploy()
        found = site.outcomes()
        assert found["GPW-PCIE-003"] is Outcome.WAIVED
        assert {control for control, outcome in found.items() if outcome is Outcome.FAIL} == {"GPW-PCIE-008"}
    finally:
        site.write()
        site.sh(f"echo >{sys_device}/driver_override; {rebind}")
    site.deploy()
    assert site.red() == set()


def test_after_a_reboot_it_is_still_right(site, blank, converged):
    has_docker = site.state_of("docker.service", "LoadState") == "loaded"
    if has_docker:
        site.sh("systemctl enable -q docker.service")
    site.machine.reboot()
    # Cleared before anybody could start a container, at a boot that nobody watched.
    assert "docker.service" in site.state_of(UNIT, "Before").split()
    cleared = int(site.state_of(UNIT, "ActiveEnterTimestampMonotonic"))
    assert cleared > 0
    if has_docker:
        assert cleared <= int(site.state_of("docker.service", "InactiveExitTimestampMonotonic"))
    seen = site.topology()
    assert {address: seen.acs[address].word for address in path_ports(blank)} == dict.fromkeys(path_ports(blank), 0x11)
    assert site.red() == set()
    assert site.deploy() == []


def test_where_redirect_is_kept_the_unit_goes_and_the_next_boot_has_it_again(site, blank, converged):
    site.write(**{"pcie.acs_redirect": "kept"})
    site.deploy()
    assert site.sh(f"systemctl show -p LoadState --value {UNIT}") == "not-found"
    assert site.sh("ls /etc/udev/rules.d | grep -c gpuwright || true") == "0"
    site.machine.reboot()
    assert {site.words()[address] for address in path_ports(blank)} == {0x1D}
    assert site.red() == set()
