"""Profiles server-cis1 and strict on a machine that has its own kernel: audit rules, AppArmor, sysctls, words, one reboot.

These are the tests of test_hardening_machine.py (Debian 13) and of test_hardening_debian_12.py. A machine goes from one profile to the
next, in order, and Lynis looks at it first and in strict. The firewall's rules let the lab's own forwarded port in. An account with
sudo deploys; root stays, with a reason, because the lab has no other way to an emulated machine's console.
"""

from __future__ import annotations

from typing import Any

import judges
import pytest
from hardening_sabotage import LOCKED, UNLOCKED
from judges import Lynis
from test_kernel import judged_by
from trial import Trial

import lab
from gpuwright.audit.control import Outcome

pytestmark = pytest.mark.machine

NODE = {
    "hardening": "server-cis1",
    "base": {"unattended_upgrades": False},
    "firewall": {"ssh": ["0.0.0.0/0", "::/0"]},
    "containers": {"source": "distribution"},
    "kernel": {"reboot": "when-needed", "reboot_timeout": "15 min"},
}
STRICT = {"hardening": "strict", "console": True}
ROLES = ("base", "access", "kernel")
# A blank machine of the lab has no GPU and no clock server that it reaches.
NOT_HERE = {"GPW-BASE-003"}


@pytest.fixture(scope="module")
def trial(release, tmp_path_factory):
    """A machine of its own: the tests' other one may be running, and is Debian 13."""
    [machine] = lab.up_machines([f"hardened-{release}"], release=release, blank=True)
    yield Trial(machine, tmp_path_factory.mktemp("trial"), node(machine), {"ssh_port": machine.port})
    machine.destroy()


@pytest.fixture(scope="module")
def lynis(trial) -> dict[str, Lynis]:
    """What Lynis said of this machine, by stage."""
    return {}


def node(machine: Any) -> dict[str, Any]:
    """The node file: whom the lab and the deploy log in as, with the lab's key."""
    key = f"{machine.ssh_key}.pub"
    access = {
        "users": {"deploy": {"keys": [key], "sudo": "all"}, "root": {"keys": [key]}},
        "deviations": {
            "PermitRootLogin": {"value": "prohibit-password", "reason": "the lab's own console is an ssh of root"}
        },
        "banner": "For authorised use only.",
    }
    return {"os": judges.RELEASES[machine.release].lower().replace(" ", "-"), **NODE, "access": access}


def look(trial: Trial) -> Lynis:
    """What a lab host cannot show: an emulated processor takes a quarter of an hour for all of Lynis."""
    return judges.lynis(lambda command: trial.host.run(command, timeout=1200).stdout, judges.MACHINE)


def failed(trial: Trial) -> set[str]:
    found = judged_by(trial, ROLES)
    assert Outcome.ERROR not in found.values(), found
    return {key for key, outcome in found.items() if outcome is Outcome.FAIL} - NOT_HERE


def test_what_lynis_says_of_it_blank(trial, lynis):
    trial.host.run(judges.INSTALL + "lynis >/dev/null 2>&1", timeout=600)
    judges.add_group(trial.sh)
    lynis["blank"] = look(trial)
    (trial.directory / "lynis-blank.dat").write_text(lynis["blank"].text)


def test_server_cis1_comes_without_a_reboot(trial):
    before = trial.host.boot_id()
    dry = trial.run("--dry")
    assert dry.status == 0, dry.said
    first = trial.deploy()
    assert set(first.changed) <= set(dry.changed)
    trial.connect |= {"ssh_user": "deploy", "_sudo": True}
    assert trial.deploy().changed == []
    assert failed(trial) == set()
    assert trial.host.boot_id() == before
    assert trial.sh("auditctl -s | sed -n 's/^enabled //p'") == "1"


def test_a_journald_that_starts_leaves_the_kernel_s_audit_on(trial):
    """Debian 12's turns it off, unless it is told not to."""
    trial.sh("systemctl restart systemd-journald.service; sleep 5")
    assert trial.sh("auditctl -s | sed -n 's/^enabled //p'") == "1"


def test_an_audit_that_somebody_turned_off_is_red_and_turned_on_again(trial):
    trial.host.run("auditctl -e 0")
    assert failed(trial) == {"GPW-BASE-024"}
    assert trial.deploy().changed == ["Audit | Load the rules of the kernel's audit"]
    assert failed(trial) == set()


def test_what_changes_who_may_do_what_is_recorded(trial):
    trial.sh("useradd -m audited; userdel -r audited; sync; sleep 1")
    assert "gpuwright-accounts" in trial.sh("ausearch --input-logs -k gpuwright-accounts --raw | head -c 4000")


def test_what_a_compiler_does_is_not(trial):
    """Programs started, files made, changed, moved and removed, without a login: as in an engine."""
    trial.sh("systemctl stop auditd 2>/dev/null; systemctl start auditd; sleep 1", check=False)
    count = "cat /var/log/audit/audit.log* | grep -c 'key=\"gpuwright-' || true"
    before = trial.sh(count)
    storm = "for n in $(seq 300); do sh -c true; touch /tmp/$n; chmod 755 /tmp/$n; mv /tmp/$n /tmp/x; rm /tmp/x; done"
    trial.sh(f"systemd-run -q --wait sh -c '{storm}'; sleep 2")
    # systemd-run itself writes no file that is watched.
    assert trial.sh(count) == before
    assert trial.sh("auditctl -s | sed -n 's/^lost //p'") == "0"


@pytest.mark.parametrize("control", UNLOCKED)
def test_every_control_turns_red_when_it_is_broken(trial, control):
    sabotage = UNLOCKED[control]
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


def test_a_gpu_fault_of_the_kernel_s_own_log_is_kept_over_a_power_cut(trial):
    line = "NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, GPU has fallen off the bus."
    trial.sh(f"echo '<3>{line}' >/dev/kmsg")
    # An emulated machine's journalctl and jq take their time; what the record shows is on the disk a moment later.
    kept = f"grep -sqF '{line}' /var/lib/gpuwright/gpu-faults/record"
    assert trial.sh(f"for n in $(seq 60); do {kept} && sleep 2 && echo kept && break; sleep 1; done") == "kept"
    trial.host.power_cycle()
    assert line in trial.sh("cat /var/lib/gpuwright/gpu-faults/record")
    assert failed(trial) == set()


def test_a_core_dump_is_left_nowhere(trial):
    assert trial.sh("cd /tmp; ulimit -Hc; sh -c 'kill -SEGV $$' || true; ls core* 2>/dev/null || true").split() == ["0"]
    assert trial.sh("cat /proc/sys/kernel/core_pattern") == "|/bin/false"


def test_strict_reboots_once_and_locks_the_rules(trial):
    before = trial.host.boot_id()
    trial.node |= STRICT
    assert "reboot needed, because the kernel runs without audit=1" in trial.run("--dry").said
    trial.deploy()
    assert trial.host.boot_id() != before
    assert trial.deploy().changed == []
    assert {"audit=1", "audit_backlog_limit=8192"} <= set(trial.sh("cat /proc/cmdline").split())
    assert trial.sh("auditctl -s | sed -n 's/^enabled //p'") == "2"
    assert trial.sh("auditctl -D 2>&1 || true").startswith("Error")
    assert failed(trial) == set()


@pytest.mark.parametrize("control", LOCKED)
def test_every_control_of_strict_turns_red_when_it_is_broken(trial, control):
    sabotage = LOCKED[control]
    trial.host.run(sabotage.do)
    assert failed(trial) == {control, *sabotage.also}
    trial.deploy()
    assert failed(trial) == set()


def test_lynis_finds_the_machine_harder_than_blank_and_as_hard_as_the_page_says(trial, lynis):
    lynis["strict"] = look(trial)
    (trial.directory / "lynis-strict.dat").write_text(lynis["strict"].text)
    found = {stage: one.index for stage, one in lynis.items()}
    assert found["blank"] < found["strict"]
    row = f"{judges.RELEASES[trial.host.release]}, a machine"
    recorded = judges.figures("lynis figures").get(row, {})
    assert found["strict"] >= recorded.get("strict", 101), (
        f"put this into docs/hardening.md, if it is meant: | {row} | "
        + " | ".join(lynis[stage].figure if stage in lynis else "-" for stage in judges.STAGES)
        + " |"
    )


def test_whatever_lynis_still_says_of_the_machine_has_a_written_reason(lynis):
    written = {(row[0].strip("`"), row[1]) for row in judges.rows("lynis findings")}
    missing = sorted(lynis["strict"].findings - written)
    assert missing == [], "\n".join(f"| `{key}` | {sentence} | … |" for key, sentence in missing)


def test_back_to_baseline_the_rules_wait_for_a_reboot_and_that_is_said(trial):
    trial.node["hardening"] = "baseline"
    run = trial.deploy()
    assert "rules of the kernel's audit are locked" in run.said
    assert trial.sh("ls /etc/audit/rules.d | grep gpuwright || true") == ""
    assert trial.sh("auditctl -l | grep -c gpuwright- || true") == "0", (
        "the reboot that takes the words away takes the rules, too"
    )
    assert trial.deploy().changed == []
    assert failed(trial) == set()
