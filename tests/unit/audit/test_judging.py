"""What a predicate can do wrong ends as an error of its control; the six outcomes are never merged."""

import json

import pytest

from gpuwright.audit.control import Control, Outcome, Verdict, judged, manual, not_applicable, without
from gpuwright.audit.judge import judge
from gpuwright.audit.references import JOURNAL, NONE
from gpuwright.audit.report import HostReport, document, write
from gpuwright.snapshot import CouldNotLook, Section, Snapshot

TEXT = Section("text", "cat /etc/hostname", str)
OTHER = Section("other", "true", str)


def control(predicate, observed=(TEXT,), references=NONE):
    return Control("GPW-TEST-001", "A title.", "why", "low", observed, predicate, "do this", "none", references)


def seen(status=0, answer="a"):
    return Snapshot({"text": (status, answer), "other": (0, "b")})


@pytest.mark.parametrize(
    ("predicate", "outcome"),
    [
        (lambda seen, spec: judged(True, "a", "a"), Outcome.PASS),
        (lambda seen, spec: judged(False, "a", "b"), Outcome.FAIL),
        (lambda seen, spec: without([], "none", "looked"), Outcome.PASS),
        (lambda seen, spec: without(["x"], "none", "looked"), Outcome.FAIL),
        (lambda seen, spec: not_applicable("no GPU"), Outcome.NOT_APPLICABLE),
        (lambda seen, spec: manual("look at the card"), Outcome.MANUAL),
    ],
)
def test_a_predicates_word_is_kept(predicate, outcome):
    assert judge(control(predicate), seen(), None).outcome is outcome


def test_could_not_look_is_an_error_whatever_the_predicate_wanted():
    result = judge(control(lambda seen, spec: judged(seen.read(TEXT) != "off", "", "")), seen(status=3), None)
    assert result.outcome is Outcome.ERROR
    assert result.verdict.actual == "could not look: text: exit status 3"


def test_a_section_that_never_answered_is_an_error_too():
    result = judge(control(lambda seen, spec: judged(bool(seen.read(TEXT)), "", "")), Snapshot({}), None)
    assert "the node gave no answer" in result.verdict.actual


def test_a_predicate_that_breaks_is_an_error_with_its_controls_id():
    result = judge(control(lambda seen, spec: judged(1 / 0 == 1, "", "")), seen(), None)
    assert result.outcome is Outcome.ERROR
    assert result.verdict.actual == "GPW-TEST-001 failed in judging: ZeroDivisionError: division by zero"


def test_a_predicate_may_not_read_what_its_control_does_not_name():
    result = judge(control(lambda seen, spec: judged(seen.read(OTHER) == "b", "", "")), seen(), None)
    assert result.outcome is Outcome.ERROR
    assert "reads section 'other'" in result.verdict.actual


def test_a_predicate_may_raise_could_not_look_itself():
    def predicate(seen, spec):
        raise CouldNotLook("the gateway does not run")

    assert judge(control(predicate), seen(), None).verdict.actual == "could not look: the gateway does not run"


def test_evidence_has_a_length():
    verdict = without([f"fault {number}" for number in range(1000)], "none", "")
    assert len(verdict.actual) < 1600
    assert verdict.actual.endswith("characters)")


def test_the_report_keeps_outcomes_apart_and_says_how_it_was_looked(tmp_path):
    import datetime

    snapshot = seen()
    results = [
        judge(control(lambda seen, spec: Verdict(Outcome.FAIL, "x", "y"), references=JOURNAL), snapshot, None),
        judge(control(lambda seen, spec: seen.read(OTHER)), snapshot, None),
    ]
    at = datetime.datetime(2026, 11, 29, 12, 0, tzinfo=datetime.UTC)
    report = HostReport("gpu-01", at, snapshot, results)
    found = document([report])
    assert found["schema"] == 1
    assert found["sections"] == {"text": "cat /etc/hostname"}
    host = found["hosts"][0]
    assert (host["host"], host["time"]) == ("gpu-01", "2026-11-29T12:00:00+00:00")
    assert host["outcomes"] == {"fail": 1, "error": 1}
    assert len(host["snapshot_sha256"]) == 64
    first = host["results"][0]
    assert (first["id"], first["expected"], first["actual"]) == ("GPW-TEST-001", "x", "y")
    assert first["references"]["inferred"] is True
    assert first["references"]["ids"]["bsi-it-grundschutz"] == ["SYS.1.1.A10", "SYS.1.6.A7", "OPS.1.1.5.A3"]
    assert host["results"][1]["references"] is None
    write(tmp_path / "audit.json", [report])
    assert json.loads((tmp_path / "audit.json").read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["audit.json"]


def test_a_host_that_was_not_reached_has_no_snapshot():
    import datetime

    found = document([HostReport("gpu-01", datetime.datetime.now(datetime.UTC), None)])
    assert found["hosts"][0]["snapshot_sha256"] is None
