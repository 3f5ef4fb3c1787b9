"""Role kernel on a machine that boots its own kernel through firmware, GRUB and an initramfs.

One machine goes through the ring, in order: plan, one reboot, second run, broken by hand, audited, repaired, rebooted. Under emulation
a run takes a minute and a boot several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from kernel_sabotage import SABOTAGES
from trial import Trial

from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.spec.fleet import collect

pytestmark = pytest.mark.machine

# Each one GRUB, sh or the kernel would change, were it not quoted.
HARD = {
    "gpuwright.list": "a;b;c",
    "gpuwright.dollar": "64G$16G",
    "gpuwright.equals": "a=b=c{d}|e&f",
    "gpuwright.blanks": "file x.c +p",
}

NODE = {
    "os": "debian-13",
    "hardware": {"gpus": {"count": 1, "model": "a stand-in"}},
    "base": {"unattended_upgrades": False},
    "kernel": {
        "words": [
            {"word": "iommu=pt", "reason": "peer to peer"},
            *(
                {"word": f'{key}="{value}"' if " " in value else f"{key}={value}", "reason": "hard to quote"}
                for key, value in HARD.items()
            ),
        ],
        "sysctls": [
            {"name": "vm.swappiness", "value": 10, "reason": "models stay in memory"},
            {"name": "net.ipv4.tcp_rmem", "value": "4096 131072 6291456", "reason": "several numbers"},
            {"name": "kernel.no_such_key", "value": 1, "reason": "this kernel does not have it"},
        ],
        "module_options": [
            {"module": "efi_pstore", "option": "pstore_disable", "value": 1, "reason": "an option of a loaded module"}
        ],
        "reboot": "when-needed",
        "reboot_timeout": "15 min",
    },
}

# What a person, an image and a package left there before us.
GRUB = """\
# edit, then run update-grub
GRUB_DEFAULT=0
GRUB_TIMEOUT=1
#GRUB_CMDLINE_LINUX_DEFAULT="old=1"
GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"
GRUB_CMDLINE_LINUX_DEFAULT='ipv6.disable_policy=0 panic=30 amd_iommu=off'
GRUB_CMDLINE_LINUX="rd.auto=1 iommu=off gpuwright_unknown=1 \\"lab.quoted=x y\\""
GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX crashkernel=2G-4G:0M,4G-:0M"
"""
THEIRS = [
    "panic=30",
    "rd.auto=1",
    "gpuwright_unknown=1",
    "crashkernel=2G-4G:0M,4G-:0M",
    "ipv6.disable_policy=0",
    "lab.quoted=x y",
]


DROP_IN = "etc/modprobe.d/gpuwright.conf"
IMAGE = "/boot/initrd.img-$(uname -r)"
# A new image is a new file.
BUILT = f"stat -c %i {IMAGE}"


@pytest.fixture(scope="module")
def trial(machine, tmp_path_factory):
    machine.reset()
    machine.run(f"cat >/etc/default/grub <<'END'\n{GRUB}END\n")
    yield Trial(machine, tmp_path_factory.mktemp("trial"), NODE, {"ssh_port": machine.port})
    machine.reset()


def judged(trial: Trial) -> dict[str, Outcome]:
    """The audit of role kernel, as `gpuwright audit` does it."""
    return judged_by(trial, ("kernel",))


def judged_by(trial: Trial, roles: Sequence[str]) -> dict[str, Outcome]:
    """The audit of some roles."""
    collected = collect(trial.directory / "inventory.py")
    [(name, spec)] = collected.specs.items()
    chosen = tuple(control for role in roles for control in controls.of_role(role))
    seen = connection.read(connection.connect(name, collected.hosts[name]), chosen)
    return {result.control.id: result.outcome for result in judge_all(chosen, seen, spec)}


def failed(trial: Trial) -> set[str]:
    found = judged(trial)
    assert Outcome.ERROR not in found.values(), found
    return {key for key, outcome in found.items() if outcome is Outcome.FAIL}


def test_a_plan_on_a_blank_machine_says_that_and_why_it_reboots(trial):
    before = trial.host.boot_id()
    said = trial.run("--dry").said
    assert "reboot needed, because the kernel runs without iommu=pt (kernel: peer to peer)" in said or (
        "reboot needed, because the kernel runs with iommu=off instead of iommu=pt (kernel: peer to peer)" in said
    )
    assert "this run drains the engines and reboots it, once" in said
    assert "iommu=off of the boot loader's own settings gives way to iommu=pt" in said
    assert trial.host.boot_id() == before
    assert trial.sh("ls /etc/default/grub.d /etc/sysctl.d | grep gpuwright || true") == ""


def test_never_writes_everything_and_leaves_the_reboot_to_somebody(trial):
    before = trial.host.boot_id()
    trial.node = {**NODE, "kernel": {**NODE["kernel"], "reboot": "never"}}
    said = trial.deploy().said
    assert "this run does not reboot it (kernel.reboot: never)" in said
    assert trial.host.boot_id() == before
    assert trial.sh("cat /proc/sys/vm/swappiness") == "10"
    assert "sysctl kernel.no_such_key: this kernel does not have it" in said
    assert trial.deploy().changed == []
    assert failed(trial) >= {"GPW-KERN-001", "GPW-KERN-006"}
    trial.node = NODE


def test_one_run_reboots_once_and_the_machine_is_what_was_asked(trial):
    before = trial.host.boot_id()
    run = trial.deploy()
    assert trial.host.boot_id() not in ("", before)
    assert re.search(r"back after \d+ s", run.said)
    assert re.search(
        r"this kernel does not know [^;]*\bgpuwright_unknown=1\b.* of the boot loader's own settings", run.said
    )
    line = trial.sh("cat /proc/cmdline")
    for key, value in HARD.items():
        assert (f'"{key}={value}"' if " " in value else f"{key}={value}") in line, line
    for word in THEIRS:
        assert (f'"{word}"' if " " in word else word) in line, line
    assert line.split().count("iommu=pt") == 1
    assert "iommu=off" not in line.split() and "amd_iommu=off" not in line.split()
    assert trial.sh("cat /etc/default/grub") == GRUB.strip()
    assert trial.sh("modprobe --show-depends udf 2>&1 || true").splitlines()[-1] == "install /bin/false"
    assert trial.sh("cat /sys/module/efi_pstore/parameters/pstore_disable") == "Y"


def test_the_image_that_was_booted_holds_the_module_settings(trial):
    """Looked into by the distribution's own program: what the role recorded of it is the role's word."""
    inside = trial.host.run(
        f"mkdir /var/tmp/image && unmkinitramfs {IMAGE} /var/tmp/image && "
        f"find /var/tmp/image -path '*/{DROP_IN}' -exec cat {{}} +; rm -r /var/tmp/image",
        timeout=600,
    ).stdout
    assert "options efi_pstore pstore_disable=1" in inside.splitlines()
    assert inside.strip() == trial.sh(f"cat /{DROP_IN}")


def test_a_second_run_changes_nothing_and_the_audit_is_green(trial):
    built = trial.sh(BUILT)
    assert trial.deploy().changed == []
    found = judged(trial)
    fine = (Outcome.PASS, Outcome.NOT_APPLICABLE)  # a profile above baseline asks for more
    wrong = {key: outcome for key, outcome in found.items() if outcome not in fine}
    # kernel.no_such_key is asked for, and this kernel does not have it
    assert wrong == {"GPW-KERN-010": Outcome.FAIL}
    trial.node = {**NODE, "kernel": {**NODE["kernel"], "sysctls": NODE["kernel"]["sysctls"][:2]}}
    trial.deploy()
    assert trial.deploy().changed == []
    assert failed(trial) == set()
    assert trial.sh(BUILT) == built, "other sysctls are no reason for another initramfs"


@pytest.mark.parametrize("control", SABOTAGES)
def test_every_control_turns_red_when_it_is_broken(trial, control):
    sabotage = SABOTAGES[control]
    built = trial.sh(BUILT)
    trial.host.run(sabotage.do)
    try:
        assert failed(trial) == {control, *sabotage.also}
        if sabotage.heals:
            trial.deploy()
            assert failed(trial) == set()
    finally:
        if not sabotage.heals:
            trial.host.run(sabotage.undo)
    assert failed(trial) == set()
    # Also where the record of the image was no longer true (GPW-KERN-014): it was looked into, and was right.
    assert trial.sh(BUILT) == built, "no initramfs is made anew that holds what it should"


def test_a_menu_made_without_our_words_is_made_anew(trial):
    """As a package does that resets the boot loader, and as a run does that dies between drop-in and menu."""
    trial.host.run("sed -i 's/ iommu=pt//' /boot/grub/grub.cfg")
    changed = trial.deploy().changed
    assert len(changed) == 1 and "Put on the kernel's command line" in changed[0], changed
    assert failed(trial) == set()


def test_a_later_drop_in_that_takes_our_words_out_is_named(trial):
    trial.host.run(
        "echo 'GRUB_CMDLINE_LINUX_DEFAULT=quiet' >/etc/default/grub.d/zzz-site.cfg; sed -i 's/ iommu=pt//' /boot/grub/grub.cfg"
    )
    before = trial.sh("sha256sum /boot/grub/grub.cfg")
    run = trial.run("-y")
    assert run.status == 1
    assert (
        "is missing on this line; a file of /etc/default/grub.d that is read after zz-gpuwright.cfg takes it out"
        in run.said
    )
    assert trial.sh("sha256sum /boot/grub/grub.cfg") == before
    trial.host.run("rm /etc/default/grub.d/zzz-site.cfg")
    trial.deploy()
    assert failed(trial) == set()


def test_a_role_s_word_goes_alone_and_the_machine_boots_without_it(trial):
    words = [word for word in NODE["kernel"]["words"] if not word["word"].startswith("gpuwright.dollar")]
    trial.node = {**trial.node, "kernel": {**trial.node["kernel"], "words": words}}
    said = trial.deploy().said
    assert "the kernel runs with gpuwright.dollar=64G$16G, which nothing asks for any more" in said
    line = trial.sh("cat /proc/cmdline")
    assert "gpuwright.dollar" not in line
    for word in [*THEIRS, "gpuwright.list=a;b;c", "iommu=pt"]:
        assert word in line
    assert trial.deploy().changed == []
    assert failed(trial) == set()


def test_after_a_power_cut_it_is_still_right(trial):
    trial.host.power_cycle()
    assert trial.deploy().changed == []
    assert failed(trial) == set()


def test_a_role_taken_away_leaves_the_site_s_own_line(trial):
    trial.node = {key: value for key, value in trial.node.items() if key != "kernel"}
    trial.deploy()
    assert trial.sh("grep -c 'gpuwright[.]' /boot/grub/grub.cfg || true") == "0"
    assert "iommu=off" in trial.sh("grep -m1 vmlinuz /boot/grub/grub.cfg")
    assert trial.sh("ls /etc/default/grub.d /etc/sysctl.d /etc/modprobe.d | grep gpuwright || true") == ""
    assert trial.sh("ls /var/lib/gpuwright/kernel 2>/dev/null || true") == ""
    listed = {name.removeprefix("./") for name in trial.host.run(f"lsinitramfs {IMAGE}", timeout=600).stdout.split()}
    assert "init" in listed
    assert not {name for name in listed if name.endswith(DROP_IN)}
    assert trial.deploy().changed == []
