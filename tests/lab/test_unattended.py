"""Unattended-upgrades really run on a host with the whole stack, against archives in which all of it has become newer.

Real: unattended-upgrades, apt, dpkg, systemd and Docker. STAND-INS: what the packages contain, and the cards (lab/repository,
lab/gpus). The driver was installed by hand: what role nvidia adds (its own pins and holds) is tested with that role.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import cdi_trial
import pytest
import trial
from trial import Trial

from lab import repository

pytestmark = pytest.mark.lab

OLD = ("driver-580.95.05", "toolkit-1.18.2", "docker-28.5.1", "kernel-running", "harmless-1.0-1")
NEW = ("driver-580.126.09", "driver-595.58.03", "toolkit-1.20.0", "docker-28.5.2", "docker-29.1.3", "kernel-newer", "harmless-1.0-1+deb13u1")  # fmt: skip
STACK = r"nvidia|cuda|docker|containerd|linux-(image|headers)|firmware-nvidia|dkms"
DOCKER_PID = "systemctl show docker.service --property=MainPID --value"
# A site that lets everything in: the worst case for what must stay.
EVERY_ORIGIN = 'Unattended-Upgrade::Origins-Pattern { "origin=*"; };\n'


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    site = trial.blank("unattended-1", "trixie", tmp_path_factory.mktemp("unattended"), {})
    repository.withdraw()
    repository.publish(*OLD)
    cdi_trial.driven(site.host, 2)
    site.node = {
        "hardware": {"gpus": {"count": 2}},
        "containers": {
            "source": "docker",
            "repository": f"http://{repository.NAME}/linux",
            "repository_key": str(repository.key_file()),
            "toolkit": cdi_trial.toolkit(),
        },
    }
    site.deploy()
    site.sh("DEBIAN_FRONTEND=noninteractive apt-get -y -q install gpuwright-lab-harmless nvidia-fabricmanager")
    site.host.run("cat >/etc/apt/apt.conf.d/60site", stdin=EVERY_ORIGIN)
    yield site
    site.host.destroy()
    repository.withdraw()


@pytest.fixture
def offered(node: Trial) -> Iterator[None]:
    """Everything has become newer; afterwards the harmless package is the old one again."""
    repository.publish(*NEW)
    node.sh("apt-get -qq update")
    yield
    repository.withdraw()
    repository.publish(*OLD)
    node.sh(
        "apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -y -q --allow-downgrades install gpuwright-lab-harmless=1.0-1"
    )


def versions(node: Trial) -> dict[str, str]:
    lines = node.sh("dpkg-query -W -f '${Package} ${Version}\\n'").splitlines()
    return dict(line.split(" ", 1) for line in lines if " " in line)


def moved(node: Trial) -> dict[str, tuple[str, str]]:
    """What a run of unattended-upgrades changed, by package: before, after."""
    before = versions(node)
    said = node.host.run("unattended-upgrade -v 2>&1", timeout=600).stdout
    after = versions(node)
    assert node.sh("dpkg --audit") == "", said
    return {name: (before.get(name, ""), after.get(name, "")) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}  # fmt: skip


def of_the_stack(changes: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: change for name, change in changes.items() if re.search(STACK, name)}


HARMLESS = ("1.0-1", "1.0-1+deb13u1")


def test_with_everything_newer_a_security_update_moves_and_the_stack_does_not(node, offered):
    """As deployed, on a site that lets every origin in."""
    pid, module = node.sh(DOCKER_PID), node.sh("cat /proc/driver/nvidia/version")
    changes = moved(node)
    assert of_the_stack(changes) == {}
    assert changes["gpuwright-lab-harmless"] == HARMLESS
    assert node.sh(DOCKER_PID) == pid
    assert node.sh("cat /proc/driver/nvidia/version") == module
    assert len(node.sh("nvidia-smi -L").splitlines()) == 2
    assert not node.sh("ls /run/reboot-required 2>/dev/null; true")


def test_the_block_list_alone_keeps_the_stack(node, offered):
    """No hold and no pin: what somebody took off by hand, or an apt that upgrades by source package (3, Debian 13) would go past."""
    held = node.sh("apt-mark showhold").split()
    node.sh(f"apt-mark unhold {' '.join(held)}; mkdir /root/pins; mv /etc/apt/preferences.d/* /root/pins/")
    try:
        upgradable = node.sh("apt list --upgradable 2>/dev/null")
        for name in ("docker-ce", "containerd.io", "libcuda1", "firmware-nvidia-gsp", "nvidia-container-toolkit", "linux-image-amd64"):  # fmt: skip
            assert f"{name}/" in upgradable or name == "linux-image-amd64", (
                "a newer one is offered, and nothing else keeps it"
            )
        changes = moved(node)
        assert of_the_stack(changes) == {}
        assert changes["gpuwright-lab-harmless"] == HARMLESS
    finally:
        node.sh(f"mv /root/pins/* /etc/apt/preferences.d/; rmdir /root/pins; apt-mark hold {' '.join(held)}")


def test_holds_and_pins_alone_keep_docker_and_the_toolkit(node, offered):
    """A block list that somebody emptied. Driver and kernel are not offered here: their holds are role nvidia's."""
    repository.withdraw("driver-580.126.09", "driver-595.58.03", "kernel-newer")
    node.sh("apt-get -qq update")
    node.host.run("cat >/etc/apt/apt.conf.d/99site", stdin="#clear Unattended-Upgrade::Package-Blacklist;\n")
    try:
        changes = moved(node)
        assert {name for name in of_the_stack(changes) if re.search("docker|containerd|container", name)} == set()
        assert changes["gpuwright-lab-harmless"] == HARMLESS
    finally:
        node.sh("rm /etc/apt/apt.conf.d/99site")


def test_a_hold_and_a_pin_taken_off_are_put_back_by_the_next_run(node):
    node.sh("apt-mark unhold docker-ce nvidia-container-toolkit; rm /etc/apt/preferences.d/gpuwright-toolkit")
    changed = node.deploy().changed
    assert changed == [
        "Containers | Hold Docker and containerd at their version",
        "Containers | Pin the container toolkit at 1.18.2-1",
        "Containers | Hold the container toolkit",
    ]
    assert {"docker-ce", "nvidia-container-toolkit"} <= set(node.sh("apt-mark showhold").split())
    assert node.deploy().changed == []


def test_without_the_holds_and_the_list_it_would_have_moved(node, offered):
    """The opposite, last: what these tests look for does happen when nothing keeps it."""
    held = node.sh("apt-mark showhold").split()
    node.sh(f"apt-mark unhold {' '.join(held)}; rm /etc/apt/preferences.d/gpuwright-toolkit")
    node.host.run("cat >/etc/apt/apt.conf.d/99site", stdin="#clear Unattended-Upgrade::Package-Blacklist;\n")
    changes = moved(node)
    assert {"docker-ce", "nvidia-container-toolkit"} <= of_the_stack(changes).keys()
