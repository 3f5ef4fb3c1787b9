"""What holds for every control, whatever it looks at."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright.audit import catalogue, controls, profiles, references

sys.path.insert(0, str(Path(__file__).parents[2] / "lab"))
import nvidia_sabotage
import sabotage

SABOTAGES = sabotage.SABOTAGES | nvidia_sabotage.SABOTAGES
EVERY = controls.every()
ROLE = {
    "BASE": "base",
    "ACCS": "access",
    "FIRE": "firewall",
    "KERN": "kernel",
    "PCIE": "pcie",
    "MEMO": "memory",
    "NVID": "nvidia",
    "CONT": "containers",
    "MODL": "models",
    "ENGN": "engine",
    "GATE": "gateway",
}


def test_ids_are_stable_unique_and_say_their_role():
    ids = [control.id for control in EVERY]
    assert len(ids) == len(set(ids)) >= 40
    for role in controls.ROLES:
        for number, control in enumerate(controls.of_role(role), 1):
            match = re.fullmatch(r"GPW-([A-Z]{4})-(\d{3})", control.id)
            assert match, control.id
            assert ROLE[match[1]] == role
            assert int(match[2]) == number + _moved_before(match[1], number), "ids are given in order and never again"
    assert not controls.MOVED.keys() & set(ids)
    assert set(controls.MOVED.values()) <= set(ids)


def _moved_before(prefix, number):
    """How many ids below this one belong to promises that another role keeps now."""
    below = 0
    for gone in sorted(controls.MOVED):
        if gone.startswith(f"GPW-{prefix}-") and int(gone[-3:]) <= number + below:
            below += 1
    return below


@pytest.mark.parametrize("control", EVERY, ids=lambda control: control.id)
def test_a_control_says_what_why_how_and_what_then(control):
    assert re.fullmatch(r"[A-Za-z].{10,110}\.", control.title), "one plain sentence"
    assert control.title.count(". ") == 0
    assert control.reason[-1] in ".:)" or control.reason.endswith(")."), control.reason
    assert control.severity in ("low", "medium", "high", "critical")
    assert control.observed
    assert control.how
    assert control.remedy
    assert control.risk


@pytest.mark.parametrize("section", controls.sections(EVERY), ids=lambda section: section.name)
def test_sections_are_plain_posix_shell_and_change_nothing(section):
    checked = subprocess.run(["dash", "-n", "-c", section.script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    # One section of the library keeps its list of paths in a file of its own in /run, for as long as it runs.
    changing = "mv|chmod|chown|tee|kill|mkdir|touch|truncate|mount|useradd|apt-get" + (
        "" if section.name == "owned" else "|rm"
    )
    # A loss of GPUs shows inside the container only; what is asked there is one program that reads.
    script = (
        section.script.replace('docker exec "$id" nvidia-smi -L', "")
        if section.name == "audit-gpus-inside"
        else section.script
    )
    found = re.findall(rf"(?m)(?:^|[|;&(]|\bdo|\bthen)\s*((?:{changing}) .*)", script)
    found += re.findall(r"systemctl (?:start|stop|restart|reload|enable|disable|mask|kill).*", script)
    found += re.findall(r"docker (?:\w+ )?(?:rm|stop|start|run|create|update|exec|kill|pull).*", script)
    assert found == []


def test_every_control_has_a_sabotage_or_a_reason_why_no_lab_host_can_be_made_so():
    ids = {control.id for control in EVERY}
    assert not SABOTAGES.keys() & sabotage.NOT_IN_THE_LAB.keys()
    assert SABOTAGES.keys() | sabotage.NOT_IN_THE_LAB.keys() == ids
    for entry in SABOTAGES.values():
        assert entry.also.keys() <= ids
        assert all(entry.also.values())
    assert set(sabotage.SAMPLE) <= sabotage.SABOTAGES.keys()


def test_sabotages_are_plain_posix_shell():
    for key, entry in SABOTAGES.items():
        for script in (entry.do, entry.undo):
            checked = subprocess.run(["dash", "-n", "-c", script], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, (key, checked.stderr)


def test_references_name_their_subject_and_keep_the_mark_of_our_own_judgement():
    for control in EVERY:
        if control.references is not references.NONE:
            assert control.references.subject
            assert control.references.ids
            assert isinstance(control.references.inferred, bool)


def in_force():
    """Catalogue to the ids that are in force."""
    found, ids = {}, []
    for line in (Path(__file__).parent / "in_force.txt").read_text().splitlines():
        if line.startswith("["):
            ids = found.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            ids += line.split()
    return {name: set(ids) for name, ids in found.items()}


SUBJECTS = {
    **{name: value for name, value in vars(references).items() if isinstance(value, references.References)},
    **{keyword.name: keyword.references for keyword in profiles.of_access()},
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_id_that_is_claimed_is_in_force(name):
    known = in_force()
    claimed = SUBJECTS[name].ids
    assert {
        catalogue: set(ids) - known[catalogue] for catalogue, ids in claimed.items() if set(ids) - known[catalogue]
    } == {}


def test_a_withdrawn_id_would_be_seen():
    assert "03.13.02" not in in_force()["nist-800-171-r3"]  # withdrawn, as the catalogue itself says
    assert {name: len(ids) for name, ids in in_force().items()} == {
        "cis-debian-12": 310,
        "cis-ubuntu-24.04": 312,
        "cis-docker": 117,
        "nist-800-171-r2": 110,
        "nist-800-171-r3": 97,
        "cmmc-l2": 110,
        "bsi-it-grundschutz": 1835,
    }


def test_the_documentation_lists_the_controls_as_they_are():
    documented = (Path(__file__).parents[3] / "docs" / "audit.md").read_text().partition("## Controls\n\n")[2]
    assert documented == catalogue.table(), "put the output of python -m gpuwright.audit.catalogue there"
