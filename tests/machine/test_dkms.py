"""A real DKMS module on a machine that boots its own kernel: built for the kernel that boots next, signed, loaded, and failing for real.

The module is a STAND-IN of NVIDIA's that drives nothing (lab/repository/module.py); dkms, headers, GRUB, modprobe and the kernel are
real. One machine goes through the tests in order; compiling under emulation takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuwright import snapshot
from gpuwright.boot import BOOT
from lab import repository
from lab.machines import Machine
from roles.nvidia import equality
from roles.nvidia.facts import NVIDIA, Nvidia

pytestmark = pytest.mark.machine

KEY = "/etc/apt/keyrings/gpuwright-lab.asc"
APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends"
# A package made anew has the version and the size of the one before, and apt asks no more of what it has kept.
FRESH = "apt-get clean; apt-get -q update >/dev/null"
VERSION, NEWER = "580.95.05", "595.58.03"
LOADED = "/proc/driver/nvidia/version"


@pytest.fixture(scope="module")
def node(machine: Machine) -> Iterator[Machine]:
    """The machine with the headers of its kernel, dkms, and an apt that knows the module."""
    machine.reset()
    repository.withdraw()
    repository.publish(f"module-{VERSION}")
    machine.run(f"mkdir -p /etc/apt/keyrings; cat >{KEY}", stdin=repository.key_file().read_text())
    machine.run("cat >/etc/apt/sources.list.d/lab-module.sources", stdin=repository.source("module", KEY))
    machine.run(f"{APT} update && {APT} install dkms openssl mokutil linux-headers-$(uname -r)", timeout=3600)
    yield machine
    machine.reset()
    repository.withdraw()


def sh(node: Machine, command: str, timeout: int = 300) -> str:
    return node.run(command, timeout=timeout).stdout.strip()


def facts(node: Machine) -> Nvidia:
    """What role nvidia reads of it."""
    return snapshot.parse(node.run(snapshot.script([NVIDIA]), timeout=300).stdout).read(NVIDIA)


def findings(node: Machine) -> dict[str, str]:
    """What does not fit together: kind to what it is about."""
    return {finding.kind: finding.subject for finding in equality.findings(facts(node))}


def boots_next(node: Machine) -> str:
    """The release that the boot loader takes by default."""
    seen = snapshot.parse(node.run(snapshot.script([BOOT]), timeout=300).stdout).read(BOOT)
    return str(seen.default)


def test_it_is_built_signed_and_loaded(node: Machine) -> None:
    kernel = sh(node, "uname -r")
    sh(node, f"{APT} install nvidia-kernel-open-dkms", timeout=3600)
    assert f"nvidia/{VERSION}, {kernel}, x86_64: installed" in sh(node, "dkms status")
    sh(node, "modprobe nvidia NVreg_RegistryDwords=ForceP2P=0x11")
    seen = facts(node)
    assert seen.module is not None
    assert (seen.module.version, seen.module.open) == (VERSION, True)
    assert seen.module.params["RegistryDwords"] == "ForceP2P=0x11", "read back from the module, not from a file"
    [here] = [one for one in seen.kernels if one.release == kernel]
    subject = sh(node, "openssl x509 -inform DER -in /var/lib/dkms/mok.pub -noout -subject -nameopt multiline")
    assert here.signer and here.signer in subject
    # The lab's firmware has no Secure Boot: off, or nothing that says so; never "on".
    assert seen.secure_boot is not True
    assert findings(node) == {}


def test_the_kernel_that_boots_next_has_no_headers_and_is_found(node: Machine) -> None:
    """dkms passes it over in silence; the finding is about the kernel that GRUB takes next, before it boots."""
    running = sh(node, "uname -r")
    # Another flavour of the same source: real, small, and with headers that nobody asked for.
    sh(node, f"{APT} install linux-image-cloud-amd64", timeout=3600)
    other = sh(node, "basename /lib/modules/*-cloud-amd64")
    assert findings(node) == {"module-missing": other}
    sh(node, f"printf 'GRUB_DEFAULT=\"gnulinux-advanced-%s>gnulinux-{other}-advanced-%s\"\\n' $(findmnt -no UUID /) $(findmnt -no UUID /) "
             ">/etc/default/grub.d/zz-lab.cfg; update-grub 2>&1")  # fmt: skip
    assert other in boots_next(node)
    sh(node, f"{APT} install linux-headers-cloud-amd64", timeout=3600)
    assert findings(node) == {}
    node.reboot()
    assert sh(node, "uname -r") == other != running
    sh(node, "modprobe nvidia")
    assert VERSION in sh(node, f"cat {LOADED}")
    sh(node, "rm /etc/default/grub.d/zz-lab.cfg; update-grub 2>&1")


def test_a_newer_module_is_installed_and_the_old_one_stays_loaded_until_a_reboot(node: Machine) -> None:
    repository.publish(f"module-{NEWER}")
    sh(node, f"{APT} update >/dev/null; {APT} install nvidia-kernel-open-dkms", timeout=3600)
    assert VERSION in sh(node, f"cat {LOADED}")
    assert "reboot" in findings(node)
    node.reboot()
    sh(node, "modprobe nvidia")
    assert NEWER in sh(node, f"cat {LOADED}")
    assert findings(node) == {}


def test_a_module_that_does_not_compile_is_found_before_a_reboot(node: Machine) -> None:
    repository.withdraw(f"module-{NEWER}")
    repository.publish(f"module-{VERSION}/build")
    said = node.run(
        f"{FRESH}; {APT} install --allow-downgrades nvidia-kernel-open-dkms={VERSION}-1 2>&1",
        check=False,
        timeout=3600,
    )
    assert said.returncode != 0
    assert "this package was made not to build" in sh(node, f"cat /var/lib/dkms/nvidia/{VERSION}/build/make.log")
    assert {"half-installed", "module-missing"} <= findings(node).keys()


def test_a_module_that_finds_no_card_is_built_and_does_not_load(node: Machine) -> None:
    repository.withdraw(f"module-{VERSION}")
    repository.publish(f"module-{VERSION}/probe")
    # rmmod: modprobe -r looks for a file, and the one that did not build left none; loaded, it would make the next modprobe a success.
    # The package is half installed, and offered nowhere any more.
    sh(node, "rmmod nvidia; dpkg --purge nvidia-kernel-open-dkms", timeout=600)
    sh(node, f"{FRESH}; {APT} install nvidia-kernel-open-dkms={VERSION}-1", timeout=3600)
    assert "installed" in sh(node, "dkms status")
    said = node.run("modprobe nvidia 2>&1", check=False)
    assert said.returncode != 0 and "No such device" in said.stdout
    assert "NVRM: No NVIDIA devices probed" in sh(node, "dmesg")
    assert facts(node).module is None
