"""What the node file allows beyond the profile is a waiver with its reason, never a pass; what it does not, fails."""

from __future__ import annotations

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge
from gpuwright.snapshot import Snapshot
from gpuwright.spec.node import NodeSpec
from roles.access import checks, keys

REASON = "until the tokens arrive in March"
KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}B alice"
CONTROLS = {control.id: control for control in checks.CONTROLS}


def judged(control: str, answer: str, hardening: str = "server-cis1", **access):
    spec = NodeSpec.model_validate(
        {
            "gpuwright": 1,
            "summary": "a node",
            "hardening": hardening,
            "access": {"users": {"alice": {"keys": [KEY], "sudo": "all"}}, **access},
        }
    )
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
