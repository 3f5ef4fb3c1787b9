"""The script driver-change with programs that are stand-ins: what it says of the kernel that boots next, and of Secure Boot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuwright.render import REPOSITORY

SCRIPT = REPOSITORY / "files/nvidia/usr/local/lib/gpuwright/driver-change"
SETTER = REPOSITORY / "files/nvidia/usr/local/lib/gpuwright/gpu-settings"
CONF = "version=580.95.05\npackages=(nvidia-driver-cuda)\nbuilt=yes\nfabric=auto\nfabric_manager=nvidia-fabricmanager\ncards=2\n"


class Node:
    """Folders and programs of a node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("etc/gpuwright/nvidia/driver.conf", CONF)
        self.program("modinfo", 'case "$*" in *version*) echo 580.95.05 ;; *signer*) echo "DKMS key of gpu-1" ;; esac')
        self.program("mokutil", "echo SecureBoot disabled")
        self.program("keyctl", "exit 1")

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def program(self, name: str, script: str) -> None:
        self.write(f"bin/{name}", f"#!/bin/sh\n{script}\n").chmod(0o755)

    def run(self, *arguments: str, script: Path = SCRIPT) -> tuple[int, str]:
        environment = {**os.environ, "PATH": f"{self.path}/bin:{os.environ['PATH']}", "GPUWRIGHT_ROOT": str(self.path)}
        done = subprocess.run(
            ["bash", script, *arguments], capture_output=True, text=True, env=environment, check=False
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_kernel_with_its_module_may_boot(node: Node) -> None:
    assert node.run("check", "6.12") == (0, "")


def test_a_kernel_without_a_module_may_not(node: Node) -> None:
    node.program("modinfo", "exit 1")
    assert node.run("check", "6.13") == (
        1,
        "not rebooted: kernel 6.13 boots next and has no NVIDIA module (its headers are missing: dkms status)\n",
    )
    node.write("lib/modules/6.13/build/Makefile", "")
    assert "(dkms status)" in node.run("check", "6.13")[1]


def test_secure_boot_asks_for_a_signature_that_the_kernel_trusts(node: Node) -> None:
    node.program("mokutil", "echo SecureBoot enabled")
    node.program("keyctl", 'case "$*" in *.machine) echo "7: ---lswrv 0 0 asymmetric: DKMS key of gpu-1: 01" ;; esac')
    assert node.run("check", "6.12") == (0, "")
    # Enrolled in the firmware, and in no ring that modules are judged by.
    node.program(
        "keyctl", 'case "$*" in *.secondary*) echo "7: ---lswrv 0 0 asymmetric: Debian Secure Boot CA: 02" ;; esac'
    )
    status, said = node.run("check", "6.12")
    assert status == 1
    assert "the kernel does not trust the key that signed its module (DKMS key of gpu-1)" in said
    node.program("modinfo", 'case "$*" in *version*) echo 580.95.05 ;; esac')
    assert "the module of kernel 6.12 is not signed" in node.run("check", "6.12")[1]


def test_nothing_is_installed_that_secure_boot_would_refuse(node: Node) -> None:
    node.program("mokutil", "echo SecureBoot enabled")
    node.program("keyctl", "true")
    node.program("apt-get", "echo touched; exit 1")
    for verb in ("install", "download"):
        status, said = node.run(verb)
        assert status == 1
        assert "trusts no key that DKMS would sign the driver with" in said
        assert "touched" not in said


def test_apt_that_would_take_others_away_is_not_asked_to(node: Node) -> None:
    node.program("dpkg", "true")
    node.program("dpkg-query", "true")
    node.program(
        "apt-get",
        'case "$*" in *-s*) echo "Remv docker-ce [1]"; echo "Remv libcuda1 [580]" ;; *update*) ;; *) echo TOUCHED >&2; exit 1 ;; esac',
    )
    status, said = node.run("install")
    assert (status, "TOUCHED" in said) == (1, False)
    assert "apt would remove docker-ce with it; nothing was changed" in said


def test_what_became_of_a_change_is_said(node: Node) -> None:
    assert node.run("outcome") == (0, "good nothing was changed\n")
    node.write("var/lib/gpuwright/nvidia/outcome", "failed because\n")
    assert node.run("outcome") == (0, "failed because\n")
    node.write("var/lib/gpuwright/nvidia/change/to", "595.58.03\n")
    assert node.run("outcome")[1].startswith("pending driver 595.58.03")


def test_before_the_reboot_nothing_is_settled(node: Node) -> None:
    node.write("var/lib/gpuwright/nvidia/change/to", "595.58.03\n")
    node.write("var/lib/gpuwright/nvidia/change/from", "580.95.05\n")
    node.write("var/lib/gpuwright/nvidia/change/boot", Path("/proc/sys/kernel/random/boot_id").read_text())
    assert node.run("settle") == (0, "")
    assert (node.path / "var/lib/gpuwright/nvidia/change/to").exists()


# --- the cards --------------------------------------------------------------------------------------------------------

SMI = """
state={state}
case "$*" in
  *query-gpu=uuid,power.limit*) echo "GPU-a, $(cat $state/power)"; echo "GPU-b, 450.00" ;;
  *query-gpu=uuid,mig*) echo "GPU-a, $(cat $state/mig), Disabled"; echo "GPU-b, [N/A], [N/A]" ;;
  *"-i GPU-a -pl 450"*) {power} ;;
  *"-i GPU-a -mig 0"*) {mig} ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


def cards(
    node: Node, power: str = "echo 450.00 >$state/power", mig: str = "echo Disabled >$state/mig"
) -> tuple[int, str]:
    node.write("etc/gpuwright/nvidia/cards.conf", "power_limit=450\nmig=off\n")
    node.write("power", "600.00\n")
    node.write("mig", "Enabled\n")
    node.program("nvidia-smi", SMI.format(state=node.path, power=power, mig=mig))
    return node.run(script=SETTER)


def test_cards_are_set_and_read_back(node: Node) -> None:
    assert cards(node) == (0, "GPU-a: 450 W\nGPU-b: 450 W\n")


def test_a_card_that_does_not_take_it_is_named(node: Node) -> None:
    status, said = cards(node, power="echo 'Provided power limit 450.00 W is not a valid power limit'; exit 2")
    assert status == 1
    assert "GPU-a does not take 450 W: Provided power limit" in said
    assert "GPU-a is limited to 600.00 W instead of 450 W" in said


def test_a_card_that_only_says_yes_is_found_out(node: Node) -> None:
    status, said = cards(node, power="true", mig="true")
    assert status == 1
    assert "GPU-a is limited to 600.00 W" in said
    assert "GPU-a is still in MIG mode" in said


def test_what_nobody_asks_for_is_left_alone(node: Node) -> None:
    node.write("etc/gpuwright/nvidia/cards.conf", "power_limit=\nmig=kept\n")
    node.program("nvidia-smi", "echo touched; exit 1")
    assert node.run(script=SETTER) == (0, "")
