"""Each control of the role on a machine's answers: green as they are, and red when one thing in them is changed."""

from __future__ import annotations

import json

import pytest
from answers import BOOT, IMAGE, boot_answer, container_answer, menu, snapshot, system

from gpuwright import boot, wishes
from gpuwright.audit import controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.boot import state
from gpuwright.render import static
from gpuwright.spec.load import typed
from roles.kernel.files import modprobe_file
from roles.kernel.operations import modprobe_sum

AUDIT = "audit=1 audit_backlog_limit=8192"  # role base's, in strict
WORDS = f"{AUDIT} iommu=pt 'pci=disable_acs_redir=a;b'"
NODE = {
    "gpuwright": 1,
    "summary": "a machine",
    "hardening": "strict",
    "console": True,
    "hardware": {"gpus": {"count": 1}},
    "kernel": {
        "words": [
            {"word": "iommu=pt", "reason": "P2P"},
            {"word": "pci=disable_acs_redir=a;b", "reason": "P2P"},
        ],
        "sysctls": [{"name": "vm.swappiness", "value": 10, "reason": "models stay in memory"}],
        "module_options": [
            {"module": "nvidia", "option": "NVreg_EnableS0ixPowerManagement", "value": 0, "reason": "x"}
        ],
    },
}
SPEC = typed(json.loads(json.dumps(NODE)))
WANTED = wishes.gathered(SPEC)
LINE = BOOT["line"].replace("\n", f" {AUDIT} iommu=pt pci=disable_acs_redir=a;b\n")
SUM = modprobe_sum(modprobe_file(boot.Boot(), WANTED))
RIGHT = {
    "line": LINE,
    "menu": menu(WORDS),
    "initramfs": f"{IMAGE}:100.200.300 {SUM}\n",
    "nvidia": "EnableS0ixPowerManagement: 0\n",
    "recorded": "audit=1\naudit_backlog_limit=8192\niommu=pt\npci=disable_acs_redir=a;b\n",
}
SYSCTL = "".join(
    f"{one.key.replace('*', interface)} = {one.value}\n"
    for one in WANTED.sysctls
    for interface in (("lo", "eth0", "veth1a") if "*" in one.key else ("",))
)
MODPROBE = "".join(f"install {one.module} /bin/false\nblacklist {one.module}\n" for one in WANTED.blocked)


def judged(said=None, sysctl=SYSCTL, modprobe=MODPROBE, spec=SPEC, virtualization="none", answer=None):
    seen = snapshot(
        {
            "system": system(virtualization),
            "boot": boot_answer(**(RIGHT | (said or {}))) if answer is None else answer,
            "audit-kernel-sysctl": sysctl,
            "audit-kernel-modprobe": modprobe,
        }
    )
    return {result.control.id: result for result in judge_all(controls.of_role("kernel"), seen, spec)}


def without(key: str) -> str:
    return SYSCTL.replace(f"{key} = ", f"{key} = 7")


# control: what is changed, and which others turn red with it
DOCTORED = {
    "GPW-KERN-001": ({"said": {"line": LINE.replace("iommu=pt", "iommu=off")}}, {"GPW-KERN-006"}),
    "GPW-KERN-002": ({"said": {"said": "Command line: x\nPCI: Unknown option `disable_acs_redir=a;b'\n"}}, set()),
    "GPW-KERN-003": ({"said": {"line": LINE.replace("quiet", "mitigations=off")}}, set()),
    "GPW-KERN-004": ({"said": {"menu": menu(f"{AUDIT} iommu=pt")}}, set()),
    "GPW-KERN-005": (
        {"said": {"menu": menu(WORDS, "gnulinux-advanced-1>gnulinux-6.12.48+deb13-amd64-advanced-1")}},
        set(),
    ),
    "GPW-KERN-006": (
        {"said": {"modules": BOOT["modules"] + "nouveau 0\n"}},
        {"GPW-KERN-011"},
    ),
    "GPW-KERN-007": ({"sysctl": without("kernel.yama.ptrace_scope")}, set()),
    "GPW-KERN-008": ({"sysctl": without("kernel.kptr_restrict")}, set()),
    "GPW-KERN-009": ({"sysctl": without("net.ipv4.conf.all.accept_redirects")}, set()),
    "GPW-KERN-010": ({"sysctl": without("vm.swappiness")}, set()),
    "GPW-KERN-011": ({"modprobe": MODPROBE.replace("install nova_core /bin/false\n", "")}, set()),
    "GPW-KERN-012": ({"said": {"modules": BOOT["modules"] + "udf 0\n"}}, set()),
    "GPW-KERN-013": ({"said": {"nvidia": "EnableS0ixPowerManagement: 1\n"}}, {"GPW-KERN-006"}),
    "GPW-KERN-014": ({"said": {"initrds": f"{IMAGE} 100.201.300\n"}}, set()),
    "GPW-KERN-015": ({"sysctl": without("kernel.core_pattern")}, set()),
    "GPW-KERN-016": ({"sysctl": without("dev.tty.ldisc_autoload")}, set()),
}


def test_a_machine_as_it_should_be_keeps_every_promise():
    assert {key: result.verdict.actual for key, result in judged().items() if result.outcome is not Outcome.PASS} == {}


def test_every_control_is_doctored():
    assert DOCTORED.keys() == {control.id for control in controls.of_role("kernel")}


@pytest.mark.parametrize("control", DOCTORED)
def test_one_thing_wrong_is_red(control):
    changes, also = DOCTORED[control]
    found = judged(**changes)
    assert {key for key, result in found.items() if result.outcome is Outcome.FAIL} == {control, *also}
    assert found[control].verdict.actual != judged()[control].verdict.actual


def test_a_container_has_its_machine_s_kernel():
    found = judged(virtualization="systemd-nspawn", answer=container_answer())
    assert {result.outcome for result in found.values()} == {Outcome.NOT_APPLICABLE}


@pytest.mark.parametrize("section", ["system", "boot", "audit-kernel-sysctl", "audit-kernel-modprobe"])
def test_a_section_that_failed_is_an_error_of_every_control_that_reads_it(section):
    answers = {
        "system": system(),
        "boot": boot_answer(**RIGHT),
        "audit-kernel-sysctl": SYSCTL,
        "audit-kernel-modprobe": MODPROBE,
    }
    seen = snapshot(answers)
    seen.answers[section] = (1, "")
    results = judge_all(controls.of_role("kernel"), seen, SPEC)
    touched = {result.outcome for result in results if section in {one.name for one in result.control.observed}}
    assert touched == {Outcome.ERROR}


@pytest.mark.parametrize(("kind", "outcome"), [("hidden", Outcome.MANUAL), ("unknown", Outcome.FAIL)])
def test_an_option_whose_value_the_kernel_does_not_show(kind, outcome):
    said = {"nvidia": "", "options": f"{kind} nvidia NVreg_EnableS0ixPowerManagement\n"}
    found = judged(said=said)
    assert found["GPW-KERN-013"].outcome is outcome
    assert "NVreg_EnableS0ixPowerManagement" in found["GPW-KERN-013"].verdict.actual
    assert found["GPW-KERN-006"].outcome is Outcome.PASS


def test_gone_messages_are_for_a_person():
    assert judged(said={"said": ""})["GPW-KERN-002"].outcome is Outcome.MANUAL


@pytest.mark.parametrize("key", ["pcie_acs_override", "pcie-acs-override"])
def test_isolation_that_is_only_pretended_is_red_whatever_comes_after_it(key):
    line = LINE.replace("quiet", f"{key}=downstream {key}=id:1:2")
    found = judged(said={"line": line})["GPW-KERN-003"]
    assert found.outcome is Outcome.FAIL
    assert "pretends isolation that is not there" in found.verdict.actual


def test_words_of_the_site_that_the_kernel_does_not_know_are_named_and_no_fault():
    said = 'Command line: x\nUnknown kernel command line parameters "splash", will be passed to user space.\n'
    found = judged(said={"said": said})["GPW-KERN-002"]
    assert found.outcome is Outcome.PASS
    assert found.verdict.actual.endswith("of the site's own it names splash")


def test_a_protection_asked_for_again_at_the_end_of_the_line_is_on():
    line = LINE.replace("quiet", "mitigations=off").replace("\n", " mitigations=auto,nosmt\n")
    assert judged(said={"line": line})["GPW-KERN-003"].outcome is Outcome.PASS


def test_a_driver_loaded_by_hand_is_seen():
    found = judged(said={"modules": BOOT["modules"] + "nouveau 2\n"})
    assert found["GPW-KERN-011"].verdict.actual == "nouveau is loaded, with 2 users"
    assert found["GPW-KERN-006"].outcome is Outcome.FAIL


def test_the_file_system_of_a_stick_in_fstab_is_named():
    found = judged(said={"filesystems": "ext4\nudf\n", "initramfs": f"{IMAGE}:100.200.300 {SUM}\n"})
    assert found["GPW-KERN-012"].verdict.actual == "udf stands in fstab"


@pytest.mark.parametrize("key", ["net.ipv6.conf.eth0.accept_redirects", "net.ipv4.conf.veth1a.send_redirects"])
def test_what_one_interface_says_is_judged_where_the_kernel_goes_by_it(key):
    found = judged(sysctl=without(key))["GPW-KERN-009"]
    assert found.outcome is Outcome.FAIL and f"{key} is 70 instead of 0" in found.verdict.actual


def test_one_interface_is_waived_with_its_reason_and_the_others_are_judged():
    key = "net.ipv6.conf.eth0.accept_redirects"
    spec = changed(sysctls=[{"name": key, "value": 1, "reason": "the router of the hall redirects"}])
    other = SYSCTL.replace(f"{key} = 0", f"{key} = 1")
    found = judged(sysctl=other, spec=spec)["GPW-KERN-009"]
    assert found.outcome is Outcome.WAIVED and "router of the hall" in found.verdict.actual
    other = other.replace("net.ipv6.conf.lo.accept_redirects = 0", "net.ipv6.conf.lo.accept_redirects = 1")
    assert judged(sysctl=other, spec=spec)["GPW-KERN-009"].outcome is Outcome.FAIL


def test_where_ipv6_is_off_it_has_nothing_to_refuse():
    off = "".join(line + "\n" for line in SYSCTL.splitlines() if not line.startswith("net.ipv6."))
    assert judged(sysctl=off)["GPW-KERN-009"].outcome is Outcome.PASS


def test_the_scripts_are_there():
    for name in ("boot-menu", "initramfs-modprobe", "node-drain"):
        assert static(f"kernel/usr/local/lib/gpuwright/{name}").startswith(b"#!/bin/")
    assert "systemd-detect-virt --container" in state._SCRIPT


def changed(**kernel):
    return typed(json.loads(json.dumps({**NODE, "kernel": {**NODE["kernel"], **kernel}})))


def test_another_value_than_the_profile_s_is_waived_with_its_reason_and_judged_all_the_same():
    extra = {"name": "kernel.core_pattern", "value": "/var/crash/%p", "reason": "a crash is looked for until March"}
    spec = changed(sysctls=[*NODE["kernel"]["sysctls"], extra])
    found = judged(sysctl=SYSCTL.replace("|/bin/false", "/var/crash/%p"), spec=spec)["GPW-KERN-015"]
    assert found.outcome is Outcome.WAIVED and "until March" in found.verdict.actual
    assert judged(spec=spec)["GPW-KERN-015"].outcome is Outcome.FAIL


def test_the_profile_s_own_value_in_the_node_file_waives_nothing():
    extra = {"name": "kernel.core_pattern", "value": "|/bin/false", "reason": "said once more"}
    assert judged(spec=changed(sysctls=[*NODE["kernel"]["sysctls"], extra]))["GPW-KERN-015"].outcome is Outcome.PASS


def test_a_kept_module_is_waived_with_its_reason():
    spec = changed(kept_modules={"usb_storage": "virtual media of the BMC"})
    kept = modprobe_sum(modprobe_file(boot.Boot(), wishes.gathered(spec)))
    said = {"initramfs": f"{IMAGE}:100.200.300 {kept}\n"}
    modprobe = "".join(f"{line}\n" for line in MODPROBE.splitlines() if "usb_storage" not in line)
    found = judged(said=said, modprobe=modprobe, spec=spec)["GPW-KERN-012"]
    assert found.outcome is Outcome.WAIVED and "virtual media of the BMC" in found.verdict.actual


def test_a_kernel_without_a_key_of_the_profile_has_nothing_to_close():
    less = "".join(f"{line}\n" for line in SYSCTL.splitlines() if not line.startswith("dev.tty."))
    assert judged(sysctl=less)["GPW-KERN-016"].outcome is Outcome.PASS
    less = "".join(f"{line}\n" for line in SYSCTL.splitlines() if not line.startswith("vm.swappiness"))
    assert judged(sysctl=less)["GPW-KERN-010"].outcome is Outcome.FAIL


OF_PROFILE = {"GPW-KERN-007", "GPW-KERN-008", "GPW-KERN-009", "GPW-KERN-015", "GPW-KERN-016"}


def test_a_profile_s_values_left_out_are_waived_never_passed():
    found = judged(spec=changed(deviations={"sysctls": "tuned by its maker"}))
    waived = {key for key, result in found.items() if result.outcome is Outcome.WAIVED}
    assert waived == OF_PROFILE
    assert all("tuned by its maker" in found[key].verdict.actual for key in waived)
    assert found["GPW-KERN-010"].outcome is Outcome.PASS  # vm.swappiness is the node file's own


def test_a_value_of_the_node_file_s_own_is_judged_where_the_profile_s_are_left_out():
    extra = {"name": "kernel.kptr_restrict", "value": 2, "reason": "more than the profile"}
    spec = changed(sysctls=[extra], deviations={"sysctls": "tuned by its maker"})
    assert judged(spec=spec)["GPW-KERN-008"].outcome is Outcome.FAIL


def test_a_profile_s_modules_left_out_are_waived():
    spec = changed(deviations={"modules": "the machine is a test's"})
    found = judged(modprobe="", spec=spec)["GPW-KERN-012"]
    assert found.outcome is Outcome.WAIVED and "a test's" in found.verdict.actual
    container = judged(virtualization="systemd-nspawn", answer=container_answer(), spec=spec)
    assert {result.outcome for result in container.values()} == {Outcome.NOT_APPLICABLE}
