"""`pytest tests/audit` itself, run on hosts that are played: what ends up in JUnit, JSON and the exit status."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

NODE = "gpuwright: 1\nsummary: a played host\nos: debian-13\n"

INVENTORY = """
from gpuwright.spec.fleet import fleet as _fleet
nodes = _fleet({"n-1": {"node": "n"}, "n-2": {"node": "n"}}, __file__)
"""

# Four controls, one of each kind of end, and a host that is played by a list of answers.
PLAYED = """
import pytest
from gpuwright.audit import connection, controls
from gpuwright.audit.control import Control, judged, not_applicable
from gpuwright.audit.references import JOURNAL
from gpuwright.snapshot import CouldNotLook, Section, Snapshot

TEXT = Section("text", "true", str)
BROKEN = Section("broken", "false", str)

def control(number, title, predicate, observed=(TEXT,)):
    return Control(f"GPW-TEST-{number:03d}", title, "why", "high", observed, predicate, "do", "none", JOURNAL)

PLAYED = (
    control(1, "Right.", lambda s, n: judged(s.read(TEXT) == "a", "a", s.read(TEXT))),
    control(2, "Wrong.", lambda s, n: judged(False, "b", s.read(TEXT))),
    control(3, "Elsewhere.", lambda s, n: not_applicable("this host has no GPU")),
    control(4, "Dark.", lambda s, n: judged(bool(s.read(BROKEN)), "", ""), (BROKEN,)),
)

exchanges = []

def read(host, wanted):
    name = host.backend.host.name
    exchanges.append(name)
    assert exchanges.count(name) == 1, "a second exchange"
    if name == "n-2":
        raise CouldNotLook("no connection to n-2: refused")
    return Snapshot({"text": (0, "a"), "broken": (1, "")})

controls.of_node = lambda spec: PLAYED
connection.read = read
"""


@dataclass
class Run:
    """One run over both hosts."""

    status: int
    words: str
    cases: dict  # name to how it ended, and its properties
    audit: dict


def pytest_in(directory, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=REPOSITORY,
        env={"PYTHONPATH": f"{directory}:{REPOSITORY}", "PATH": "/usr/bin:/bin", "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("audit")
    (directory / "nodes").mkdir()
    (directory / "nodes" / "n.yaml").write_text(NODE)
    (directory / "inventory.py").write_text(INVENTORY)
    (directory / "played.py").write_text(PLAYED)
    return directory


@pytest.fixture(scope="module")
def ran(directory):
    junit, audit = directory / "junit.xml", directory / "audit.json"
    run = pytest_in(
        directory,
        "-p",
        "played",
        "-rs",
        "tests/audit/test_controls.py",
        f"--inventory={directory}/inventory.py",
        f"--junitxml={junit}",
        f"--audit-json={audit}",
    )
    cases = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        cases[case.get("name")] = (ends, {e.get("name"): e.get("value") for e in case.iter("property")})
    return Run(run.returncode, run.stdout, cases, json.loads(audit.read_text()))


NAMES = ["GPW-TEST-001 Right", "GPW-TEST-002 Wrong", "GPW-TEST-003 Elsewhere", "GPW-TEST-004 Dark"]


def test_junit_keeps_pass_fail_not_applicable_and_error_apart(ran):
    assert ran.status == 1
    assert "warning" not in ran.words
    assert list(ran.cases) == [f"test_control[{host}::{name}]" for host in ("n-1", "n-2") for name in NAMES]
    ends = [ran.cases[f"test_control[n-1::{name}]"][0] for name in NAMES]
    assert ends == [[], ["failure"], ["skipped"], ["error"]]
    properties = ran.cases[f"test_control[n-1::{NAMES[3]}]"][1]
    assert (properties["outcome"], properties["severity"]) == ("error", "high")
    assert properties["nist-800-171-r3"] == "03.03.03, 03.03.08 (inferred)"
    assert "not applicable: this host has no GPU" in ran.words
    assert ran.audit["hosts"][0]["outcomes"] == {"pass": 1, "fail": 1, "not applicable": 1, "error": 1}


def test_a_failure_says_seen_expected_why_and_what_to_do(ran):
    for line in (
        "n-1: GPW-TEST-002 Wrong.",
        "seen:     a",
        "expected: b",
        "why:      why",
        "do:       do",
        "risk:     none",
    ):
        assert line in ran.words
    assert "Traceback" not in ran.words


def test_a_host_that_is_not_reached_is_an_error_for_every_control(ran):
    assert [ran.cases[f"test_control[n-2::{name}]"][0] for name in NAMES] == [["error"]] * 4
    assert "could not look: no connection to n-2: refused" in ran.words
    host = ran.audit["hosts"][1]
    assert host["snapshot_sha256"] is None
    # "not applicable" is a fact of a host that was seen, too.
    assert host["outcomes"] == {"error": 4}


def _conftest():
    specification = importlib.util.spec_from_file_location("audit_conftest", REPOSITORY / "tests/audit/conftest.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["audit_conftest"] = module
    specification.loader.exec_module(module)
    return module


class Options:
    def __init__(self, **given):
        self.given = given

    def getoption(self, name, default=None):
        return self.given.get(name.strip("-"), default)


def test_what_cannot_be_audited_is_said_in_one_sentence(directory):
    nodes = _conftest()._nodes
    with pytest.raises(pytest.UsageError, match=r"^there is no inventory inventory/none.py; the ones here are"):
        nodes(Options(inventory="inventory/none.py"))
    with pytest.raises(pytest.UsageError, match=r"^--limit names n-3; the hosts of .* are: n-1, n-2$"):
        nodes(Options(inventory=str(directory / "inventory.py"), limit="n-3"))
    (directory / "empty.py").write_text(INVENTORY.replace('"n"', '"x"'))
    with pytest.raises(pytest.UsageError, match="names no node file"):
        nodes(Options(inventory=str(directory / "empty.py")))


def test_hosts_of_testinfra_are_the_way_to_the_inventorys(directory):
    (node,) = _conftest()._nodes(
        Options(inventory=str(directory / "inventory.py"), limit="n-1", hosts="ssh://admin@n-1:2222", sudo=True)
    )
    assert node.host.backend.NAME == "ssh"
    assert node.host.backend.sudo is True


def test_without_an_inventory_the_audit_says_what_it_needs(tmp_path):
    run = pytest_in(tmp_path, "tests/audit")
    assert run.returncode == 4
    assert "pytest tests/audit --inventory inventory/prod.py" in run.stdout + run.stderr
