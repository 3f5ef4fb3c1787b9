"""Rules of the kernel's audit: what is written, and whether what a kernel lists is that. No host.

`LISTED` is what the kernel listed after it loaded the file of profile strict: auditctl 3.0.9 and 4.0.2 on Linux 6.18, the same
but for the folders that each machine had; together they are here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.hardening import PROFILES
from gpuwright.snapshot import Snapshot
from gpuwright.spec.node import NodeSpec
from roles.base import auditing, auditing_checks
from roles.base.spec import BaseSpec
from roles.base.wishes import wishes

LISTED = (Path(__file__).parent / "auditctl_l.txt").read_text().splitlines()
STATUS = "status enabled 1\nstatus failure 1\nstatus pid 612\nstatus lost 0\n"
# What at least one of the two machines had.
EVERYTHING = "".join(
    f"there {path}\n"
    for one in auditing.RULES
    for path in one.watched
    if any(f" {path.rstrip('/')} " in line for line in LISTED)
)


def seen(rules=LISTED, there=EVERYTHING, status=STATUS):
    return auditing._loaded(status + "".join(f"rule {rule}\n" for rule in rules) + there)


def text(profile):
    return auditing.own_files(BaseSpec(), profile)[1].data.decode()


def test_baseline_leaves_the_kernel_s_audit_alone():
    assert auditing.own_files(BaseSpec(), "baseline") == []
    assert auditing.own_files(BaseSpec(deviations={"audit": "another agent records here"}), "strict") == []


def test_what_a_kernel_lists_is_what_was_asked_for():
    assert auditing.missing(seen(), "strict") == []
    assert auditing.superfluous(seen(), "strict") == []
    assert [rule.split()[1] for rule in auditing.superfluous(seen(), "server-cis1")].count("key=gpuwright-logins") == 0
    assert len(auditing.superfluous(seen(), "server-cis1")) == 5
    assert len(auditing.superfluous(seen(), "baseline")) == len(LISTED)


@pytest.mark.parametrize("gone", range(len(LISTED)))
def test_every_rule_that_is_gone_is_missed(gone):
    [line] = auditing.missing(seen([*LISTED[:gone], *LISTED[gone + 1 :]]), "strict")
    assert auditing.canonical(line) == auditing.canonical(LISTED[gone])


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("-p wa", "-p w"),
        ("/etc/shadow", "/etc/shadow-"),
        ("-k gpuwright-accounts", "-k other"),
        ("-S mount", "-S umount2"),
    ],
)
def test_a_rule_that_says_something_else_is_missed(was, becomes):
    changed = [line.replace(was, becomes) for line in LISTED]
    assert auditing.missing(seen(changed), "strict")


def test_a_folder_that_this_machine_does_not_have_cannot_be_watched():
    rules = [line for line in LISTED if "/etc/docker" not in line]
    assert auditing.missing(seen(rules, EVERYTHING.replace("there /etc/docker/\n", "")), "strict") == []
    assert auditing.missing(seen(rules), "strict")


def test_without_an_answer_everything_is_missing():
    assert seen([], "", "").status == {}
    assert len(auditing.missing(seen(["No rules"]), "server-cis1")) > 30


@pytest.mark.parametrize("profile", ["server-cis1", "strict"])
def test_nothing_that_a_compiler_does_is_recorded(profile):
    """A JIT compiler starts programs, makes files, changes their modes, moves and removes them; in an engine without a login."""
    for line in text(profile).splitlines():
        calls = set(",".join(re.findall(r"-S (\S+)", line)).split(",")) - {""}
        assert not calls & {
            "chmod",
            "fchmod",
            "fchmodat",
            "unlink",
            "unlinkat",
            "rename",
            "renameat",
            "open",
            "openat",
            "mmap",
        }
        if calls & {"execve", "mount", "sethostname", "setdomainname"}:
            assert "-F auid!=unset" in line, "only who logged in"
        if line.startswith("-a") and not calls:
            assert "-F perm=wa" in line and re.search(r"-F (path|dir)=/(etc|usr|root|var/log)/", line), line


def test_no_program_waits_for_the_audit_daemon_and_a_lost_record_is_no_panic():
    for profile in ("server-cis1", "strict"):
        lines = text(profile).splitlines()
        assert "--backlog_wait_time 0" in lines and "-f 1" in lines and "-f 2" not in lines
        # Debian 13's auditd does not start where loading the rules fails.
        assert lines.index("-i") < min(number for number, line in enumerate(lines) if line.startswith("-a"))
    assert text("strict").splitlines()[-1] == "-e 2" and "-e 2" not in text("server-cis1").splitlines()


def test_only_strict_asks_for_words_of_the_command_line():
    found = {profile: [word.text for word in wishes(BaseSpec(), profile).words] for profile in PROFILES}
    assert found == {"baseline": [], "server-cis1": [], "strict": ["audit=1", "audit_backlog_limit=8192"]}
    assert wishes(BaseSpec(deviations={"audit": "another agent records here"}), "strict").words == ()


@pytest.mark.parametrize(
    ("enabled", "rules", "profile", "waits"),
    [
        ("2", LISTED, "strict", False),
        ("2", LISTED, "server-cis1", True),
        ("2", LISTED, "baseline", True),
        ("1", [], "strict", False),
    ],
)
def test_locked_rules_wait_for_a_reboot_and_that_is_said(enabled, rules, profile, waits):
    answer = (
        STATUS.replace("enabled 1", f"enabled {enabled}") + "".join(f"rule {rule}\n" for rule in rules) + EVERYTHING
    )
    said = auditing.waits(Snapshot({"kernel-audit": (0, answer)}), BaseSpec(), profile)
    assert bool(said) is waits


@pytest.mark.parametrize(("enabled", "profile", "red"), [("1", "strict", True), ("2", "strict", False), ("1", "server-cis1", False)])  # fmt: skip
def test_rules_that_strict_does_not_find_locked_are_red(enabled, profile, red):
    rules = [line for line in LISTED if profile == "strict" or not re.search("gpuwright-(mounts|logins)", line)]
    answer = (
        STATUS.replace("enabled 1", f"enabled {enabled}") + "".join(f"rule {rule}\n" for rule in rules) + EVERYTHING
    )
    described = NodeSpec.model_validate({"gpuwright": 1, "summary": "a node", "hardening": profile})
    verdict = auditing_checks._rules(Snapshot({"kernel-audit": (0, answer)}), described)
    assert (verdict.outcome is Outcome.FAIL) is red, verdict.actual
    assert ("the rules are not locked (enabled 1)" in verdict.actual) is red


@pytest.mark.parametrize(
    ("said", "profile", "virtualization", "on"),
    [
        (STATUS, "baseline", "none", True),
        (STATUS.replace("enabled 1", "enabled 2"), "baseline", "none", True),
        (STATUS.replace("enabled 1", "enabled 0"), "baseline", "none", False),
        ("", "baseline", "none", False),  # no auditctl
        (STATUS.replace("enabled 1", "enabled 0"), "server-cis1", "none", True),
        (STATUS, "strict", "systemd-nspawn", False),  # its machine's
    ],
)
def test_journald_is_told_to_leave_the_audit_on_where_it_is_or_shall_be(said, profile, virtualization, on):
    system = f"ID=debian\nARCHITECTURE=x86_64\nKERNEL=6.1.0\nVIRTUALIZATION={virtualization}\nREBOOT=no\n"
    answers = Snapshot({"kernel-audit": (0, said), "system": (0, system)})
    assert auditing.stays_on(answers, BaseSpec(), profile) is on
