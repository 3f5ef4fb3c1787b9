"""The lab's package repository and its stand-in GPUs: what is simulated is the hardware, apt, dpkg, systemd, kmod and Docker are real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trial

from gpuwright import snapshot
from lab import gpus, hosts, repository
from lab.command import LabError
from lab.hosts import Host
from lab.paths import state
from roles.nvidia import equality
from roles.nvidia.facts import NVIDIA, Nvidia

pytestmark = pytest.mark.lab

KEY = "/etc/apt/keyrings/gpuwright-lab.asc"
DRIVER = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
PIN = "nvidia-driver-pinning-580.95.05"
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
OFFERED = ("driver-580.95.05", "driver-595.58.03", "toolkit-1.18.0", "kernel-running", "harmless-1.0-1")
CARDS = gpus.cards("repository-1", 4)


class Node:
    """A lab host with four cards, whose apt knows the lab's repository."""

    def __init__(self, host: Host) -> None:
        self.host = host
        gpus.plug(host, gpus.cards(host.name, 4))
        host.run(f"mkdir -p /etc/apt/keyrings; cat >{KEY}", stdin=repository.key_file().read_text())
        for name in repository.ARCHIVES:
            host.run(f"cat >/etc/apt/sources.list.d/lab-{name}.sources", stdin=repository.source(name, KEY))

    def sh(self, command: str, *, check: bool = True) -> str:
        return self.host.run(
            f"export DEBIAN_FRONTEND=noninteractive\n{command}", check=check, timeout=300
        ).stdout.strip()

    def status(self, command: str) -> int:
        return self.host.run(command, check=False).returncode

    def apt(self, arguments: str, *, check: bool = True) -> str:
        self.sh("apt-get -qq update")
        return self.sh(f"apt-get -y -q --no-install-recommends {arguments} 2>&1", check=check)

    def candidate(self, package: str) -> str:
        return self.sh(f"apt-cache policy {package} | sed -n 's/ *Candidate: //p'")

    def installed(self, package: str) -> str:
        return self.sh(f"dpkg-query -W -f '${{Version}}' {package}", check=False)

    def module(self) -> str:
        """The version that is loaded, "" for none."""
        return self.sh(r"sed -n '1s/.*  \([0-9.]*\)  .*/\1/p' /proc/driver/nvidia/version 2>/dev/null", check=False)

    def facts(self) -> Nvidia:
        """What role nvidia reads of it."""
        return snapshot.parse(self.host.run(snapshot.script([NVIDIA])).stdout).read(NVIDIA)

    def findings(self) -> list[str]:
        """The kinds of what does not fit together."""
        return [finding.kind for finding in equality.findings(self.facts())]

    def specification(self) -> str:
        """The CDI specification, once the refresh that is under way has ended."""
        self.sh("systemctl start nvidia-cdi-refresh.service || true")
        return self.sh("cat /var/run/cdi/nvidia.yaml")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    [host] = hosts.up(["repository-1"], blank=True)
    repository.withdraw()
    repository.publish(*OFFERED)
    yield Node(host)
    host.destroy()
    repository.withdraw()


@pytest.fixture(scope="module")
def installed(node: Node) -> Node:
    """The same with driver 580.95.05 and the container toolkit."""
    node.apt(f"install linux-image-$(uname -r) linux-headers-$(uname -r) {PIN}")
    node.apt(f"install {' '.join((*DRIVER, *TOOLKIT))}")
    node.sh("systemctl restart nvidia-persistenced")
    return node


@pytest.fixture
def driven(installed: Node) -> Iterator[Node]:
    """That node; whatever a test does to its driver and cards is undone."""
    yield installed
    gpus.plug(installed.host, CARDS)
    others = r"dpkg-query -W -f '${Package} ${Version}\n' | sed -n '/^nvidia-driver-pinning/d; /580\.95\.05/d; s/ [56][0-9][0-9]\..*//p'"
    named = " ".join(f"{name}=580.95.05-1" for name in installed.sh(others).split())
    if named or not installed.installed(PIN):
        installed.apt(f"install --allow-downgrades {named} {PIN}")
    if installed.module() != "580.95.05":
        installed.host.reboot()
    assert (installed.module(), installed.sh("dpkg --audit")) == ("580.95.05", "")


@pytest.fixture
def offered() -> Iterator[None]:
    """What a test publishes or withdraws is as before afterwards."""
    before = repository.published()
    yield
    repository.withdraw()
    repository.publish(*before)


# --- the source ------------------------------------------------------------------------------------------------------


def test_apt_trusts_the_lists_for_their_signature_only(node: Node):
    node.sh(f"mv {KEY} {KEY}.away")
    refused = node.sh("apt-get update 2>&1", check=False)
    node.sh(f"mv {KEY}.away {KEY}")
    assert "The repository 'http://repository.lab/compute/cuda" in refused and "is not signed" in refused
    assert "is not signed" not in node.sh("apt-get update 2>&1")


def test_a_list_that_somebody_changed_is_refused(node: Node):
    archive = repository.ARCHIVES["toolkit"].path
    listed = state() / "repository/www" / archive / "Packages"
    before = listed.read_bytes()
    listed.write_bytes(before.replace(b"1.18.0-1", b"6.66.6-6"))
    try:
        node.sh("rm -rf /var/lib/apt/lists/*")
        assert "Hash Sum mismatch" in node.sh("apt-get update 2>&1", check=False)
    finally:
        listed.write_bytes(before)
    node.sh("apt-get -qq update")


def test_the_same_packages_are_made_of_the_same_recipe():
    one, other = (repository.driver.packages("580.95.05")[0] for _ in range(2))
    assert one.recipe() == other.recipe()
    before = one.build().read_bytes()
    one.build().unlink()
    assert one.build().read_bytes() == before


@pytest.mark.parametrize("name", ["driver-1.2.3", "toolkit-1.18.0/build", "driver-595.58.03/smoke"])
def test_a_release_nobody_made_is_refused(name):
    before = repository.published()
    with pytest.raises(LabError, match="has no release"):
        repository.publish(name)
    assert repository.published() == before


# --- what role nvidia reads ------------------------------------------------------------------------------------------


def test_the_facts_of_a_node_with_a_driver(driven: Node):
    gpus.plug(driven.host, gpus.cards("repository-1", 4), nvswitches=2)
    driven.specification()
    seen = driven.facts()
    assert seen.module is not None
    assert (seen.module.version, seen.module.open, seen.module.hmm_disabled) == ("580.95.05", True, False)
    assert [card.uuid for card in seen.cards] == [card.uuid for card in CARDS]
    assert {(card.power, card.power_min, card.power_max, card.persistence) for card in seen.cards} == {
        (600.0, 300.0, 600.0, True)
    }
    assert (seen.library, seen.toolkit, seen.nvswitches, seen.smi_failed) == ("580.95", "1.18.0", 2, None)
    assert {seen.packages[name].driver for name in DRIVER} == {"580.95.05"}
    [specification] = seen.specifications
    assert (specification.path, specification.driver) == ("/run/cdi/nvidia.yaml", "580.95.05")
    assert specification.uuids == tuple(card.uuid for card in CARDS)
    [kernel] = [kernel for kernel in seen.kernels if kernel.release == seen.running_kernel]
    assert (kernel.headers, kernel.module) == (True, "580.95.05")
    assert seen.units is not None
    assert seen.units["nvidia-persistenced"].active == "active"
    assert (seen.units["nvidia-cdi-refresh.path"].active, seen.units["nvidia-fabricmanager"].loaded) == (
        "active",
        False,
    )
    gpus.plug(driven.host, CARDS)


# --- pins, holds, upgrades -------------------------------------------------------------------------------------------


def test_a_driver_is_installed_pinned_and_held(driven: Node, offered: None):
    """Everything that has a version says the same; a newer driver that comes out changes nothing."""
    assert driven.candidate("nvidia-driver-cuda") == "580.95.05-1"
    assert {driven.installed(name) for name in DRIVER} == {"580.95.05-1"}
    assert driven.module() == driven.sh("modinfo -F version nvidia") == "580.95.05"
    assert driven.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader").splitlines() == ["580.95.05"] * 4
    assert driven.sh("dkms status") == f"nvidia/580.95.05, {driven.sh('uname -r')}, {driven.sh('uname -m')}: installed"
    assert "libcuda.so.580.95.05" in driven.specification()

    driven.sh(
        "apt-mark hold nvidia-driver-cuda nvidia-kernel-open-dkms; apt-get -y -qq remove nvidia-driver-pinning-580.95.05"
    )
    repository.publish("driver-580.126.09")
    assert driven.candidate("nvidia-driver-cuda") == "595.58.03-1"
    said = driven.apt("dist-upgrade")
    assert "The following packages have been kept back" in said
    assert (driven.installed("nvidia-driver-cuda"), driven.installed("libnvidia-ml1")) == ("580.95.05-1", "580.95.05-1")
    driven.sh("apt-mark unhold nvidia-driver-cuda nvidia-kernel-open-dkms")
    driven.apt("install nvidia-driver-pinning-580.95.05 --allow-downgrades")


def test_a_branch_package_does_not_stop_at_its_branch(node: Node):
    """NVIDIA's only asks for "this or later" (forums.developer.nvidia.com 353805): a pin is what keeps a branch."""
    simulated = node.apt("install -s -o Dir::Etc::PreferencesParts=/none nvidia-open-580", check=False)
    assert (
        "Inst nvidia-driver-cuda [580.95.05-1] (595.58.03-1" in simulated
        or "Inst nvidia-driver-cuda (595.58.03-1" in simulated
    )


def test_an_older_toolkit_must_be_named_in_all_its_parts(driven: Node, offered: None):
    repository.publish("toolkit-1.18.2")
    alone = driven.apt("install -s nvidia-container-toolkit=1.18.0-1 --reinstall --allow-downgrades", check=False)
    assert driven.installed("nvidia-container-toolkit") == "1.18.0-1", alone
    driven.apt(f"install {' '.join(TOOLKIT)}")
    assert driven.installed("nvidia-container-toolkit-base") == "1.18.2-1"
    assert "1.18.2" in driven.sh("nvidia-ctk --version")
    older = driven.apt("install nvidia-container-toolkit=1.18.0-1 --allow-downgrades", check=False)
    assert "unmet dependencies" in older
    driven.apt(f"install --allow-downgrades {' '.join(f'{name}=1.18.0-1' for name in TOOLKIT)}")


def test_an_upgrade_runs_with_the_old_module_until_a_reboot_and_goes_back(driven: Node):
    driven.sh(f"apt-get -y -qq remove {PIN}")
    driven.apt(f"install {' '.join(DRIVER)}")
    assert driven.installed("nvidia-driver-cuda") == "595.58.03-1"
    assert driven.module() == "580.95.05"
    assert driven.sh("modinfo -F version nvidia") == "595.58.03"
    assert driven.sh("nvidia-smi -L", check=False) == (
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.58"
    )
    assert driven.status("nvidia-smi") == 18
    assert "libcuda.so.580.95.05" in driven.sh("cat /var/run/cdi/nvidia.yaml"), "stale: nothing could refresh it"
    assert driven.findings() == ["reboot"]

    driven.host.reboot()
    assert driven.module() == "595.58.03"
    assert "libcuda.so.595.58.03" in driven.specification()
    assert driven.findings() == []

    named = " ".join(f"{name}=580.95.05-1" for name in (*DRIVER, "nvidia-kernel-support", "firmware-nvidia-gsp", "libcuda1",
        "libnvidia-ml1", "libnvidia-cfg1", "libnvidia-nvvm4", "libnvidia-ptxjitcompiler1", "nvidia-modprobe"))  # fmt: skip
    driven.apt(f"install --allow-downgrades {named} nvidia-driver-pinning-580.95.05")
    assert driven.module() == "595.58.03"
    driven.host.reboot()
    assert driven.module() == "580.95.05"
    assert driven.sh("nvidia-smi -L").count("GPU-") == 4
    by_hand = "mkdir -p /etc/cdi; cp /var/run/cdi/nvidia.yaml /etc/cdi/"
    driven.specification()
    driven.sh(by_hand)
    assert driven.findings() == ["specification-twice"]
    driven.sh("rm -r /etc/cdi")


def test_a_driver_whose_module_does_not_compile_stays_half_configured(driven: Node, offered: None):
    repository.withdraw("driver-595.58.03")
    repository.publish("driver-595.71.05/build")
    driven.sh(f"apt-get -y -qq remove {PIN}")
    said = driven.apt(f"install {' '.join(DRIVER)}", check=False)
    assert "Bad return status for module build" in said and "returned an error code (1)" in said
    assert "nvidia-kernel-open-dkms" in driven.sh("dpkg --audit")
    assert driven.sh("dkms status") == "nvidia/595.71.05: added"
    assert {"half-installed", "module-missing"} <= set(driven.findings())


def test_a_driver_that_finds_no_card_fails_after_the_reboot_only(driven: Node, offered: None):
    repository.withdraw("driver-595.58.03")
    repository.publish("driver-595.45.04/probe")
    driven.sh(f"apt-get -y -qq remove {PIN}")
    driven.apt(f"install {' '.join(DRIVER)}")
    assert driven.sh("dkms status").endswith(": installed")
    driven.host.reboot()
    assert driven.module() == ""
    assert driven.status("nvidia-smi") == 9


def test_headers_that_are_missing_are_passed_over_in_silence(driven: Node, offered: None):
    """A kernel without its headers installs well, and has no driver when it boots."""
    repository.publish("kernel-newer")
    driven.apt("install linux-image-$(dpkg --print-architecture)")
    assert "9.99.9+deb13" not in driven.sh("dkms status")
    assert driven.findings() == ["module-missing"]
    driven.apt("install linux-headers-$(dpkg --print-architecture)")
    assert "9.99.9+deb13" in driven.sh("dkms status")
    assert driven.findings() == []
    driven.sh("apt-get -y -qq purge 'linux-image-*' 'linux-headers-*'")
    driven.apt("install linux-image-$(uname -r) linux-headers-$(uname -r)")
    driven.sh("dkms install -m nvidia -v 580.95.05")


# --- what does not fit together --------------------------------------------------------------------------------------


def test_one_library_alone(driven: Node):
    """By hand: nvidia-smi goes on with one that it does not use, and not with the one it talks through."""
    swap = "cd /tmp && apt-get -q download {0}=595.58.03-1 && dpkg --force-depends -i {0}_595*.deb"
    driven.sh(swap.format("libnvidia-cfg1"))
    assert driven.status("nvidia-smi") == 0
    assert driven.findings() == ["package"]
    driven.sh(swap.format("libnvidia-ml1"))
    assert driven.status("nvidia-smi") == 18
    assert sorted(driven.findings()) == ["library", "package", "package"]


def test_an_old_module_that_stayed_loaded(driven: Node):
    gpus.plug(driven.host, CARDS, module="550.90.07")
    assert driven.module() == "550.90.07"
    assert driven.status("nvidia-smi") == 18
    assert driven.findings() == ["reboot", "specification-stale"]


def test_a_hidden_card_changes_the_numbers_of_those_after_it(driven: Node):
    hidden = [replace(card, hidden=number == 1) for number, card in enumerate(CARDS)]
    gpus.plug(driven.host, hidden)
    seen = driven.sh("nvidia-smi --query-gpu=index,uuid --format=csv,noheader").splitlines()
    assert seen == [f"{index}, {card.uuid}" for index, card in enumerate(CARDS[:1] + CARDS[2:])]
    assert driven.sh("ls /dev/nvidia[0-9]*").split() == ["/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia3"]
    assert driven.findings() == ["specification-stale"]
    assert CARDS[1].uuid not in driven.specification()
    assert driven.findings() == []
    gpus.plug(driven.host, CARDS)
    assert CARDS[1].uuid in driven.specification()


def test_no_card_no_module(driven: Node):
    gpus.plug(driven.host, [])
    driven.host.reboot()
    assert driven.module() == ""
    assert driven.status("nvidia-smi") == 9
    assert driven.sh("systemctl is-active nvidia-persistenced", check=False) == "failed"


@pytest.mark.parametrize("switches", [0, 4])
def test_the_fabric_manager_wants_switches_and_its_own_version(driven: Node, switches: int):
    gpus.plug(driven.host, gpus.cards("repository-1", 4, "h200"), nvswitches=switches)
    driven.apt("install nvidia-fabricmanager")
    # By time, not by the unit's invocation: journald cannot tell that of a process that has ended already.
    journal = f"journalctl -u nvidia-fabricmanager -o cat --since @{driven.sh('date +%s')}"
    driven.sh("systemctl restart nvidia-fabricmanager; sleep 2", check=False)
    state = driven.sh("systemctl is-active nvidia-fabricmanager", check=False)
    assert state == ("active" if switches else "failed")
    said = driven.sh(journal)
    assert ("NV_WARN_NOTHING_TO_DO" in said) == (not switches)
    assert driven.findings() == ([] if switches else ["fabric-manager-unwanted"])
    if switches:
        driven.sh(f"apt-get -y -qq remove {PIN}")
        driven.apt("install nvidia-fabricmanager")
        assert (driven.installed("nvidia-fabricmanager"), driven.installed("libcuda1")) == (
            "595.58.03-1",
            "580.95.05-1",
        )
        driven.sh("systemctl restart nvidia-fabricmanager; sleep 2", check=False)
        said = driven.sh(journal)
        assert "interface version 595.58.03 don't match with driver version 580.95.05" in said
        assert driven.findings() == ["fabric-manager"]
    driven.sh("apt-get -y -qq purge nvidia-fabricmanager")


def test_a_power_limit_is_checked_and_lost_at_a_reboot(driven: Node):
    ask = "nvidia-smi -i 1 --query-gpu=power.limit --format=csv,noheader,nounits"
    refused = driven.sh("nvidia-smi -i 1 -pl 250", check=False)
    assert "250.00 W is not a valid power limit which should be between 300.00 W and 600.00 W" in refused
    assert driven.sh(ask) == "600.00"
    driven.sh("nvidia-smi -i 1 -pl 450")
    assert driven.sh(ask) == "450.00"
    driven.host.reboot()
    assert driven.sh(ask) == "600.00"
    assert driven.sh("nvidia-smi --query-gpu=persistence_mode --format=csv,noheader").split() == ["Enabled"] * 4


def test_module_options_are_those_it_was_loaded_with(driven: Node):
    options = 'options nvidia NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1" NVreg_EnableMSI=0\noptions nvidia_uvm uvm_disable_hmm=1\n'
    driven.host.run("cat >/etc/modprobe.d/lab.conf", stdin=options)
    assert 'RegistryDwords: ""' in driven.sh("cat /proc/driver/nvidia/params")
    driven.host.reboot()
    params = driven.sh("cat /proc/driver/nvidia/params").splitlines()
    assert 'RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1"' in params and "EnableMSI: 0" in params
    assert driven.sh("cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm") == "Y"
    driven.sh("rm /etc/modprobe.d/lab.conf")
    driven.host.reboot()


def test_everything_says_that_it_is_a_stand_in(driven: Node):
    for name in (*DRIVER, *TOOLKIT, "libcuda1", "dkms"):
        assert "STAND-IN" in driven.sh(f"dpkg-query -W -f '${{Description}}' {name}")
    for command in ("nvidia-smi --version", "nvidia-ctk --version", "dkms --version", "nvidia-modprobe --version"):
        assert "stand-in" in driven.sh(command).lower(), command
    assert "stand-in" in driven.sh("cat /proc/driver/nvidia/version")


# --- Docker ----------------------------------------------------------------------------------------------------------


IMAGE = r"""
set -e
apt-get install -y -q busybox-static >/dev/null
root=$(mktemp -d)
mkdir -p "$root/bin" "$root/usr/bin"
cp /bin/busybox "$root/bin/"
for name in $(busybox --list); do [ "$name" = busybox ] || ln -sf busybox "$root/bin/$name"; done
ln -sf ../../bin/env "$root/usr/bin/env"
tar -C "$root" -c . | docker import - probe:1 >/dev/null
"""


def test_docker_injects_the_card_that_was_asked_for(driven: Node, offered: None):
    repository.publish("docker-28.5.1")
    driven.apt("install docker-ce docker-ce-cli containerd.io iptables")
    driven.sh("""printf '{"features": {"cdi": true}}' >/etc/docker/daemon.json; systemctl restart docker""")
    driven.specification()
    driven.host.run(IMAGE, timeout=300)
    chosen = CARDS[2].uuid
    run = f"docker run --rm --read-only --network none --device nvidia.com/gpu={chosen} probe:1"
    assert driven.sh(f"{run} sh -c 'ls /dev/nvidia[0-9]*'") == "/dev/nvidia2"
    assert (
        driven.sh(f"{run} nvidia-smi --query-gpu=index,uuid,driver_version --format=csv,noheader")
        == f"0, {chosen}, 580.95.05"
    )
    missing = driven.sh("docker run --rm --device nvidia.com/gpu=GPU-none probe:1 true 2>&1", check=False)
    assert "unresolvable CDI devices nvidia.com/gpu=GPU-none" in missing
    assert len(json.loads(driven.sh("docker info --format '{{json .CDISpecDirs}}'"))) == 2

    # A newer Docker has come out: a running one is replaced by nothing but an upgrade.
    repository.publish("docker-29.1.3")
    driven.sh("apt-mark hold docker-ce docker-ce-cli containerd.io")
    driven.apt("dist-upgrade")
    assert driven.installed("docker-ce").startswith("5:28.5.1-1~")
    driven.sh("apt-mark unhold docker-ce docker-ce-cli containerd.io")
    driven.apt("install docker-ce docker-ce-cli containerd.io")
    assert driven.installed("docker-ce").startswith("5:29.1.3-1~")
    assert driven.sh("docker info --format '{{.ServerVersion}}'")


# --- unattended upgrades ---------------------------------------------------------------------------------------------


def test_unattended_upgrades_take_the_security_update_and_nothing_of_the_stack(tmp_path, offered: None):
    """With role base, and a site that lets NVIDIA's and Docker's origins in besides: the block list is what keeps them."""
    site = trial.blank("unattended", "trixie", tmp_path, {})
    try:
        site.deploy()
        repository.withdraw()
        repository.publish("driver-580.95.05", "toolkit-1.18.0", "docker-28.5.1", "kernel-running", "harmless-1.0-1")
        node = Node(site.host)
        kernel = "linux-image-$(dpkg --print-architecture) linux-headers-$(dpkg --print-architecture)"
        docker = "docker-ce docker-ce-cli containerd.io iptables"
        node.apt(
            f"install {kernel} {' '.join((*DRIVER, *TOOLKIT))} nvidia-fabricmanager {docker} gpuwright-lab-harmless"
        )
        origins = "".join(f'"origin={name}"; ' for name in ("NVIDIA", "NVIDIA CORPORATION", "Docker"))
        site.host.run("cat >/etc/apt/apt.conf.d/60site", stdin=f"Unattended-Upgrade::Origins-Pattern {{ {origins}}};\n")
        before = node.sh("dpkg-query -W").splitlines()
        repository.publish(
            "driver-580.126.09", "toolkit-1.18.2", "docker-28.5.2", "kernel-newer", "harmless-1.0-1+deb13u1"
        )
        node.sh("apt-get -qq update")
        said = node.sh("unattended-upgrade -v 2>&1")
        after = node.sh("dpkg-query -W").splitlines()
        ours = [line for line in set(after) ^ set(before) if not line.startswith("gpuwright-lab-harmless")]
        assert [
            line for line in ours if "580." in line or "1.18." in line or "28.5." in line or "9.99" in line
        ] == [], said
        assert "gpuwright-lab-harmless\t1.0-1+deb13u1" in after
        assert node.module() == "580.95.05"
    finally:
        site.host.destroy()
