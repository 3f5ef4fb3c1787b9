"""The ring of role `nvidia` with 0, 1, 4 and 8 cards, its controls with a sabotage each, and damage done by hand.

The cards do not exist and the driver's packages are STAND-INS (lab/gpus, lab/repository); apt, dpkg, kmod and systemd are real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cdi_trial
import nvidia_trial
import pytest
from nvidia_sabotage import NO_SECURE_BOOT, SABOTAGES, secure_boot
from nvidia_trial import NEW, OLD, Node

from gpuwright.audit.control import Outcome
from lab import gpus, hosts
from lab.repository.driver import SIGNER

pytestmark = pytest.mark.lab

DRIVER = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")


def wait_green(node: Node) -> None:
    """What a unit does after a boot or a restart gets some seconds."""
    deadline = time.monotonic() + 60
    while red := node.red():
        assert time.monotonic() < deadline, red
        time.sleep(2)


def settled(node: Node) -> None:
    """The release is installed and loaded, a further run has nothing to do, and the audit is green."""
    assert {node.installed(name) for name in DRIVER} == {f"{OLD}-1"}
    assert node.module() == OLD
    assert node.deploy().changed == []
    assert node.red() == {}


# --- one host for sabotage and damage ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Four cards behind two switches, and a module option that role kernel writes on a machine: put there by hand."""
    settings = nvidia_trial.driver(power_limit_watts=450, uvm_hmm="off")
    node = nvidia_trial.blank("damage-1", 4, tmp_path_factory.mktemp("damage"), nvidia=settings)
    gpus.plug(node.host, node.cards, nvswitches=2)
    node.host.run("cat >/etc/modprobe.d/lab.conf", stdin="options nvidia_uvm uvm_disable_hmm=1\n")
    node.deploy()
    yield node
    node.host.destroy()


@pytest.fixture
def node(converged: Node) -> Iterator[Node]:
    """The same, right before and after."""
    yield converged
    gpus.plug(converged.host, converged.cards, nvswitches=2)
    converged.deploy()
    wait_green(converged)


def test_it_is_green(converged: Node) -> None:
    outcomes = {key: result.outcome for key, result in converged.judged().items()}
    assert {key for key, outcome in outcomes.items() if outcome is not Outcome.PASS} == {"GPW-NVID-012"}, outcomes
    assert outcomes["GPW-NVID-012"] is Outcome.NOT_APPLICABLE
    assert converged.installed("nvidia-fabricmanager") == f"{OLD}-1"
    assert converged.deploy().changed == []


@pytest.mark.parametrize("control", SABOTAGES)
def test_a_sabotage_turns_its_control_red(converged: Node, control: str) -> None:
    entry = SABOTAGES[control]
    before = {key: result.outcome for key, result in converged.judged().items()}
    assert before[control] is Outcome.PASS
    try:
        converged.sh(entry.do)
        found = converged.judged()
    finally:
        converged.sh(entry.undo)
    turned = {key: result.verdict.actual for key, result in found.items() if result.outcome is not before[key]}
    assert set(turned) == {control, *entry.also}, turned
    assert found[control].outcome is Outcome.FAIL
    wait_green(converged)


def test_a_signer_that_the_kernel_does_not_trust_turns_its_control_red(converged: Node) -> None:
    """GPW-NVID-012: a lab host has no firmware, so mokutil and keyctl are STAND-INS here, and so is the module's signature."""
    try:
        converged.sh(secure_boot(SIGNER))
        trusted = converged.judged()["GPW-NVID-012"]
        assert trusted.outcome is Outcome.PASS, trusted.verdict.actual
        converged.sh(secure_boot("another key"))
        red = converged.red()
        assert set(red) == {"GPW-NVID-012"}
        assert f"the kernel does not trust the key of its signer, {SIGNER}" in red["GPW-NVID-012"]
    finally:
        converged.sh(NO_SECURE_BOOT)
    assert converged.red() == {}


def test_a_deploy_heals_what_drifted(node: Node) -> None:
    healed = [key for key, entry in SABOTAGES.items() if entry.heals]
    for key in healed:
        node.sh(SABOTAGES[key].do)
    assert set(node.red()) == set(healed)
    node.deploy()
    wait_green(node)


# --- damage by hand: found, named, repaired or refused as its kind demands ------------------------------------------------


def test_one_library_upgraded_alone_is_put_back_while_the_node_serves(node: Node) -> None:
    boot = node.sh("cat /proc/sys/kernel/random/boot_id")
    node.sh(
        f"cd /tmp; apt-get -qq download libnvidia-ml1={NEW}-1; dpkg --force-depends -i libnvidia-ml1_{NEW}*.deb >/dev/null 2>&1"
    )
    assert sorted(node.findings()) == ["library", "package"]
    assert "libnvidia-ml1 is 595.58.03" in node.red()["GPW-NVID-002"]
    run = node.deploy()
    assert f"libnvidia-ml1 is {NEW} instead of {OLD}" in run.said
    assert node.installed("libnvidia-ml1") == f"{OLD}-1"
    assert node.sh("cat /proc/sys/kernel/random/boot_id") == boot


@pytest.mark.parametrize("package", ["nvidia-modprobe", "nvidia-kernel-open-dkms"])
def test_a_package_that_dpkg_was_stopped_in_is_laid_down_again(node: Node, package: str) -> None:
    """What dpkg notes before it unpacks a file, and takes back after: here is where the power went in between."""
    node.sh(
        f"sed -i '/^Package: {package}$/,/^$/s/^Status: .*/Status: install reinstreq half-installed/' /var/lib/dpkg/status"
    )
    assert package in node.sh("dpkg --audit")
    assert f"{package} {OLD}-1 is half-installed" in node.red()["GPW-NVID-002"]
    node.deploy()
    assert node.sh("dpkg --audit") == ""
    assert package in node.sh("apt-mark showhold")


def test_an_old_module_that_stayed_loaded_wants_a_reboot(node: Node) -> None:
    gpus.plug(node.host, node.cards, module="550.90.07", nvswitches=2)
    assert "reboot" in node.findings()
    node.node["kernel"]["reboot"] = "never"
    run = node.trial.run("-y")
    assert f"driver 550.90.07 is loaded and {OLD} is installed (nvidia: nvidia.version)" in run.said
    assert "kernel.reboot: never" in run.said
    assert node.module() == "550.90.07", "nothing reboots by surprise"
    # At its next boot the machine loads what is installed.
    fixture = gpus.fixture(node.cards, nvswitches=2)
    node.host.run(f"cat >{gpus.FIXTURE}", stdin=fixture)
    node.node["kernel"]["reboot"] = "when-needed"
    run = node.deploy()
    assert "back after" in run.said
    assert node.module() == OLD


def test_a_hidden_card_is_named_and_refused(node: Node) -> None:
    hidden = [replace(card, hidden=number == 1) for number, card in enumerate(node.cards)]
    gpus.plug(node.host, hidden, nvswitches=2)
    gone = node.cards[1]
    sentence = f"card 1 ({gone.uuid} at {gone.bus}) does not answer any more; indices after it have moved"
    assert sentence in node.red()["GPW-NVID-006"]
    run = node.fails()
    assert sentence in run.said


def test_a_fabric_manager_of_another_release_is_put_right(node: Node) -> None:
    node.sh(
        f"cd /tmp; apt-get -qq download nvidia-fabricmanager={NEW}-1; dpkg -i nvidia-fabricmanager_{NEW}*.deb >/dev/null 2>&1; "
        "systemctl restart nvidia-fabricmanager; sleep 2; true"
    )
    assert node.findings() == ["fabric-manager"]
    red = node.red()
    assert f"fabric manager {NEW}, driver {OLD}" in red["GPW-NVID-007"]
    assert "fabric-manager-version" in red["GPW-NVID-014"]
    node.deploy()
    assert node.installed("nvidia-fabricmanager") == f"{OLD}-1"
    assert node.sh("systemctl is-active nvidia-fabricmanager") == "active"


def test_a_fabric_manager_without_a_switch_goes(node: Node) -> None:
    gpus.plug(node.host, node.cards)
    assert node.findings() == ["fabric-manager-unwanted"]
    node.deploy()
    assert node.installed("nvidia-fabricmanager") == ""
    assert node.red() == {}


def test_a_frozen_driver_is_left_alone(node: Node) -> None:
    node.node["nvidia"] |= {"hold": True, "version": NEW}
    try:
        node.sh("apt-mark unhold -q libcuda1")
        run = node.trial.run("-y")
        assert "the driver is frozen" in run.said
        assert (node.module(), node.installed("libcuda1")) == (OLD, f"{OLD}-1")
        assert node.sh("apt-mark showhold | grep -c libcuda1; true") == "0"
        assert "the driver is frozen (nvidia.hold) at 580.95.05" in node.red()["GPW-NVID-001"]
    finally:
        node.node["nvidia"] |= {"hold": False, "version": OLD}


def test_a_vendors_driver_is_checked_and_never_touched(node: Node, tmp_path: Path) -> None:
    before = dict(node.node)
    node.node["nvidia"] = {"source": "vendor", "version": OLD}
    try:
        node.deploy()
        assert node.installed("nvidia-driver-cuda") == f"{OLD}-1"
        assert node.sh("ls /etc/apt/sources.list.d /etc/apt/preferences.d | grep gpuwright; true") == ""
        assert node.sh("apt-mark showhold") == ""
        assert node.deploy().changed == []
        assert node.red() == {}
    finally:
        node.node.clear()
        node.node.update(before)


# --- power ------------------------------------------------------------------------------------------------------------


def test_a_host_that_lost_power_in_the_middle_of_dpkg_converges(tmp_path: Path) -> None:
    node = nvidia_trial.blank("power-1", 2, tmp_path)
    try:
        # Twice, at two points: the first libraries, and what builds the module.
        for unpacked in ("libcuda1", "nvidia-kernel-open-dkms"):
            run = node.trial.start("-y")
            deadline = time.monotonic() + 300
            while not node.sh(f"dpkg-query -W -f '${{db:Status-Status}}' {unpacked} 2>/dev/null", check=False):
                assert time.monotonic() < deadline and run.poll() is None
                time.sleep(0.2)
            node.host.power_cycle()
            run.kill()
            run.wait()
        node.deploy()
        assert node.sh("dpkg --audit") == ""
        settled(node)
    finally:
        node.host.destroy()


# --- the ring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, 0, 8, 1])
def test_the_ring(count: int, tmp_path: Path) -> None:
    """Blank, dry, converge, again without a change, green, damaged and red, repaired, rebooted and still right."""
    power = {"power_limit_watts": 450} if count else {}
    with_docker = {"containers": {"toolkit": cdi_trial.toolkit()}} if count in (1, 4) else {}
    node = nvidia_trial.blank(f"ring-{count}", count, tmp_path, nvidia=nvidia_trial.driver(**power), **with_docker)
    try:
        predicted = node.dry()
        assert (node.installed("nvidia-driver-cuda"), node.sh("ls /etc/apt/sources.list.d")) == (
            "",
            "lab-security.sources",
        )
        first = node.deploy()
        assert set(first.changed) <= set(predicted.changed), "a change of the real run was not predicted"
        assert {node.installed(name) for name in DRIVER} == {f"{OLD}-1"}
        assert node.module() == (OLD if count else "")
        assert node.deploy().changed == []
        assert node.dry().changed == []
        assert node.red() == node.red("CONT") == {}

        node.sh("apt-mark unhold -q nvidia-driver-cuda libnvidia-ml1")
        expected = {"GPW-NVID-005"}
        if count:
            node.sh("nvidia-smi -i 0 -pl 600; systemctl disable --now -q nvidia-persistenced")
            expected |= {"GPW-NVID-008", "GPW-NVID-009"}
        assert set(node.red()) == expected
        assert node.deploy().changed
        assert node.red() == {}

        node.host.reboot()
        wait_green(node)
        assert node.deploy().changed == []
        if count:
            assert (
                node.sh("nvidia-smi --query-gpu=power.limit --format=csv,noheader").splitlines() == ["450.00 W"] * count
            )
    finally:
        node.host.destroy()


def test_a_flat_repository_of_the_sites_own(tmp_path: Path) -> None:
    """Source `local`: the whole address, and a fingerprint that the site names itself."""
    folder = "http://repository.lab/compute/cuda/repos/debian13/x86_64"
    settings = nvidia_trial.driver(source="local", repository=folder)
    node = nvidia_trial.blank("local-1", 1, tmp_path, nvidia=settings)
    try:
        node.deploy()
        assert f"URIs: {folder}" in node.sh("cat /etc/apt/sources.list.d/gpuwright-nvidia.sources")
        settled(node)
    finally:
        node.host.destroy()


def test_the_distributions_own_packages(tmp_path: Path) -> None:
    """Source `distribution` with Debian's REAL packages, on a host without a card and without a kernel to build for."""
    [host] = hosts.up(["debian-1"], blank=True)
    node = Node(host, tmp_path, nvidia_trial.node_file(0), [])
    try:
        node.sh("sed -i 's/ main$/ main contrib non-free non-free-firmware/' /etc/apt/sources.list; apt-get -qq update")
        offered = node.sh("apt-cache policy nvidia-smi | sed -n 's/ *Candidate: //p'")
        node.node["nvidia"] = {"source": "distribution", "version": offered.partition("-")[0]}
        node.deploy()
        assert node.installed("nvidia-smi") == node.installed("nvidia-open-kernel-dkms") == offered
        held = set(node.sh("apt-mark showhold").split())
        assert {"nvidia-smi", "libcuda1", "libnvidia-ml1", "nvidia-open-kernel-dkms", "nvidia-modprobe"} <= held
        assert node.deploy().changed == []
        assert node.red() == {}
    finally:
        node.host.destroy()
