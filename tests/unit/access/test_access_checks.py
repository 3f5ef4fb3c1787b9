"""What the node file allows beyond the profile is a waiver with its reason, never a pass; what it does not, fails."""

from __future__ import annotations

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge, judge_all
from gpuwright.hardening import PROFILES
from gpuwright.snapshot import Snapshot
from gpuwright.spec.node import NodeSpec
from roles.access import checks, keys, sshd

REASON = "until the tokens arrive in March"
KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}B alice"
CONTROLS = {control.id: control for control in checks.CONTROLS}


def described(hardening: str = "server-cis1", **access) -> NodeSpec:
    return NodeSpec.model_validate(
        {
            "gpuwright": 1,
            "summary": "a node",
            "hardening": hardening,
            "access": {"users": {"alice": {"keys": [KEY], "sudo": "all"}}, **access},
        }
    )


def judged(control: str, answer: str, hardening: str = "server-cis1", **access):
    spec = described(hardening, **access)
    [section] = CONTROLS[control].observed
    result = judge(CONTROLS[control], Snapshot({section.name: (0, answer)}), spec)
    return result.outcome, result.verdict.actual


def said(**values: str) -> str:
    """sshd's answers for one account."""
    return "\n".join(f"alice 127.0.0.1 {keyword} {value}" for keyword, value in values.items())


LIMITS = {"maxauthtries": "4", "logingracetime": "60", "maxstartups": "10:30:60", "maxsessions": "10"}


def test_the_profile_s_values_pass_and_others_fail():
    assert judged("GPW-ACCS-005", said(**LIMITS))[0] is Outcome.PASS
    outcome, actual = judged("GPW-ACCS-005", said(**{**LIMITS, "maxauthtries": "8"}))
    assert (outcome, actual) == (Outcome.FAIL, "MaxAuthTries is 8 for alice")


def test_a_deviation_is_waived_with_its_reason_and_only_at_its_own_value():
    deviations = {"MaxAuthTries": {"value": "8", "reason": REASON}}
    outcome, actual = judged("GPW-ACCS-005", said(**{**LIMITS, "maxauthtries": "8"}), deviations=deviations)
    assert outcome is Outcome.WAIVED
    assert actual == f"MaxAuthTries 8: {REASON}"
    assert judged("GPW-ACCS-005", said(**{**LIMITS, "maxauthtries": "9"}), deviations=deviations)[0] is Outcome.FAIL


def test_a_password_user_is_waived_and_nobody_else():
    no = {"kbdinteractiveauthentication": "no"}
    assert judged("GPW-ACCS-002", said(passwordauthentication="no", **no))[0] is Outcome.PASS
    assert judged("GPW-ACCS-002", said(passwordauthentication="yes", **no))[0] is Outcome.FAIL
    outcome, actual = judged("GPW-ACCS-002", said(passwordauthentication="yes", **no), password_users={"alice": REASON})
    assert (outcome, actual) == (Outcome.WAIVED, f"alice: {REASON}")
    assert (
        judged("GPW-ACCS-002", said(passwordauthentication="yes", **no), password_users={"bob": REASON})[0]
        is Outcome.FAIL
    )


def test_an_authority_is_a_key_that_opens_accounts_and_needs_a_reason():
    key = f"key alice {keys.parse(KEY).fingerprint} /etc/ssh/authorized_keys.d/alice\n"
    authority = f"{key}authority /etc/ssh/ca.pub\n"
    assert judged("GPW-ACCS-014", key, "baseline")[0] is Outcome.PASS
    outcome, actual = judged("GPW-ACCS-014", authority, "baseline")
    assert (outcome, actual) == (Outcome.FAIL, "whoever /etc/ssh/ca.pub certifies could be any of them")
    deviations = {"TrustedUserCAKeys": {"value": "/etc/ssh/ca.pub", "reason": REASON}}
    outcome, actual = judged("GPW-ACCS-014", authority, deviations=deviations)
    assert (outcome, actual) == (Outcome.WAIVED, f"TrustedUserCAKeys /etc/ssh/ca.pub: {REASON}")
    other = authority.replace("ca.pub", "another.pub")
    assert judged("GPW-ACCS-014", other, deviations=deviations)[0] is Outcome.FAIL


def test_what_a_profile_leaves_to_sshd_does_not_arise():
    outcome, actual = judged("GPW-ACCS-008", said(clientaliveinterval="0"), hardening="baseline")
    assert (outcome, actual) == (Outcome.NOT_APPLICABLE, "profile baseline leaves it to sshd")
    assert judged("GPW-ACCS-006", said(maxsessions="10"), hardening="baseline")[0] is Outcome.NOT_APPLICABLE


@pytest.mark.parametrize("control", CONTROLS)
def test_no_answer_is_no_pass(control):
    outcome, _ = judged(control, "", banner="For authorised use only.")
    assert outcome in (Outcome.FAIL, Outcome.ERROR, Outcome.NOT_APPLICABLE)


# --- every keyword of the table is looked at ---

OF_SSHD = tuple(control for control in checks.CONTROLS if control.observed == (checks.EFFECTIVE,))
EVERYBODY = ("root", "alice", "nobody-of-that-name")
BANNER = "For authorised use only."


def answers(hardening: str) -> dict[tuple[str, str], str]:
    """What sshd of a converged node says: by account and keyword."""
    spec = described(hardening, banner=BANNER)
    assert spec.access
    kinds = [sshd.HostKey("/k", kind, 4096) for kind in ("ED25519", "RSA")]
    lines = sshd.expected(spec.access, spec.hardening, sshd.allowed(spec.hardening), kinds)
    return {(user, keyword): value for who, keyword, value in lines for user in ([who] if who != "*" else EVERYBODY)}


def red(said: dict[tuple[str, str], str], hardening: str) -> dict[str, str]:
    """The controls that fail, and what they say."""
    text = "\n".join(f"{user} 192.0.2.1 {keyword} {value}" for (user, keyword), value in said.items())
    seen = Snapshot({checks.EFFECTIVE.name: (0, text)})
    results = judge_all(OF_SSHD, seen, described(hardening, banner=BANNER))
    assert {r.outcome for r in results} <= {Outcome.PASS, Outcome.FAIL, Outcome.NOT_APPLICABLE}
    return {r.control.id: r.verdict.actual for r in results if r.outcome is Outcome.FAIL}


SET = [
    (profile, keyword)
    for profile in PROFILES
    for keyword in sorted(
        {keyword for _, keyword in answers(profile)} - {"authorizedkeysfile"}
    )  # GPW-ACCS-014 reads the files
]


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_profile_sets_is_green(profile):
    assert red(answers(profile), profile) == {}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_keyword_that_a_profile_sets_is_tried(profile):
    names = {k.name.lower() for k in sshd.KEYWORDS if k.value(profile)} | {
        name.lower() for name in sshd.allowed(profile)
    }
    assert names <= {keyword for one, keyword in SET if one == profile}


@pytest.mark.parametrize("user", ["alice", "nobody-of-that-name"])
@pytest.mark.parametrize(("profile", "keyword"), SET)
def test_another_value_for_one_account_turns_one_control_red_and_is_named(profile, keyword, user):
    said = answers(profile)
    assert (user, keyword) in said
    said[user, keyword] = "another"
    found = red(said, profile)
    assert len(found) == 1, found
    [actual] = found.values()
    assert keyword in actual.lower() and "another" in actual and user in actual


@pytest.mark.parametrize("keyword", ["hostkeyalgorithms", "pubkeyacceptedalgorithms", "ciphers"])
def test_algorithms_that_are_not_seen_are_no_pass(keyword):
    said = answers("strict")
    del said["alice", keyword]
    assert "has nothing for alice" in red(said, "strict")["GPW-ACCS-004"]


def test_an_ecdsa_host_key_is_offered_no_further_than_the_profile_keeps_it():
    for profile, found in (("server-cis1", set()), ("strict", {"GPW-ACCS-004"})):
        said = answers(profile)
        said = {(u, k): f"{v},ecdsa-sha2-nistp256" if k == "hostkeyalgorithms" else v for (u, k), v in said.items()}
        assert red(said, profile).keys() == found


# --- accounts ---


def account(name: str, password: str = "none", groups: str = "") -> str:
    return f"login\t{name}\t{password}\t{groups}\n"


def test_a_password_is_waived_by_name_and_only_where_there_is_one():
    there = account("root", "usable") + account("alice")
    assert judged("GPW-ACCS-022", there) == (Outcome.FAIL, "root has a password")
    assert judged("GPW-ACCS-022", account("root") + account("alice"))[0] is Outcome.PASS
    emergency = {"root": "sealed in the safe"}
    assert judged("GPW-ACCS-022", there, console_passwords=emergency) == (Outcome.WAIVED, "root: sealed in the safe")
    assert judged("GPW-ACCS-022", account("root"), console_passwords=emergency)[0] is Outcome.PASS
    also = there + account("bob", "usable")
    assert judged("GPW-ACCS-022", also, console_passwords=emergency) == (Outcome.FAIL, "bob has a password")
    assert judged("GPW-ACCS-022", account("alice", "usable"), password_users={"alice": REASON})[0] is Outcome.WAIVED


def test_a_group_that_is_root_is_named():
    there = account("root", groups="disk") + account("alice", groups="docker,sudo")
    assert judged("GPW-ACCS-023", there) == (Outcome.FAIL, "alice is in group docker")
    assert judged("GPW-ACCS-023", account("root", groups="disk") + account("alice", groups="sudo"))[0] is Outcome.PASS
