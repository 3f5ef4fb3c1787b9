"""Sections run for real in a shell; what could not be seen is never "off"."""

import subprocess
from types import SimpleNamespace

import pytest

from gpuwright import snapshot
from gpuwright.snapshot import CouldNotLook, Section, Snapshot

TEXT = Section("text", "printf 'a\\nb \\'; echo; echo c", str.splitlines)
FAILS = Section("fails", "echo half; exit 3", str)
NUMBER = Section("number", "echo none", int)
QUOTES = Section("quotes", """echo "it's" '$HOME' `echo x`""", str)


def take(*sections):
    run = subprocess.run(["sh", "-c", snapshot.script(list(sections))], capture_output=True, text=True, check=True)
    return snapshot.parse("a login banner\n" + run.stdout)


def test_answers_keep_every_byte():
    assert take(QUOTES).read(QUOTES) == "it's $HOME x"


def test_an_exit_status_a_missing_answer_and_a_parser_that_refuses_are_all_could_not_look():
    seen = take(FAILS, NUMBER)
    for section, reason in ((FAILS, "exit status 3"), (NUMBER, "unexpected answer"), (TEXT, "no answer")):
        with pytest.raises(CouldNotLook, match=reason):
            seen.read(section)


def test_a_section_that_hangs_does_not_hang_the_snapshot(monkeypatch):
    monkeypatch.setattr(snapshot, "SECTION_TIMEOUT_SECONDS", 1)
    with pytest.raises(CouldNotLook, match="took longer"):
        take(Section("slow", "sleep 60", str)).read(Section("slow", "", str))


def test_a_snapshot_can_be_stored_and_judged_later():
    seen = take(QUOTES, FAILS)
    again = Snapshot.from_json(seen.to_json())
    assert again.read(QUOTES) == seen.read(QUOTES)
    with pytest.raises(CouldNotLook):
        again.read(FAILS)


def test_the_librarys_own_sections_are_plain_posix_shell():
    for section in (snapshot.OWNED, snapshot.PACKAGES, snapshot.UNITS, snapshot.SYSTEM, snapshot.NUMA):
        assert subprocess.run(["dash", "-n", "-c", section.script], check=False).returncode == 0, section.name


def test_an_hbm_node_is_one_with_memory_and_no_cpus_wherever_it_is_numbered():
    nodes = snapshot.NUMA.parse(
        "online 0,2-3\nhas_memory 0,2\nhas_cpu 0\nnode 0|0-71|500000|1|0\nnode 2||188416000|0|0\nnode 3||0|0|0\nend"
    )
    assert [index for index, node in nodes.items() if node.is_hbm] == [2]


def test_owned_files_are_read_with_hash_mode_and_owner():
    found = snapshot.OWNED.parse(
        "R gateway\tfile\t/etc/gpuwright/x\nR gateway\tunit\tgpuwright-x.service\nR engine\tnetwork\tgpuwright-a\n"
        "S 640 root root /etc/gpuwright/x\nH abc  /etc/gpuwright/x"
    )
    assert [(f.role, f.kind, f.name, f.sha256, f.mode) for f in found] == [
        ("gateway", "file", "/etc/gpuwright/x", "abc", "0640"),
        ("gateway", "unit", "gpuwright-x.service", None, None),
        ("engine", "network", "gpuwright-a", None, None),
    ]


def test_what_the_first_operation_changed_is_not_read_from_before_it(monkeypatch):
    """With --yes the look from before the run is used once; an operation that changes first must take it away, too."""
    host = SimpleNamespace(name="gpu-1", current_op_hash=None, get_fact=lambda fact: "new")
    state = SimpleNamespace(
        is_executing=True, check_for_changes=False, callback_handlers=[], add_callback_handler=print
    )
    monkeypatch.setattr(snapshot, "_cache", {("gpu-1", False): "old"})
    monkeypatch.setattr(snapshot, "_changed", set())
    monkeypatch.setattr(snapshot, "ctx_state", SimpleNamespace(get=lambda: state, isset=lambda: True))
    assert snapshot.read(host) == "old"
    snapshot.forget(host)
    assert snapshot.read(host) != "old"


def test_since_a_change_a_node_is_asked_for_what_is_read_and_at_the_sixth_for_all(monkeypatch):
    sections = [Section(f"s{number}", f"echo {number}", int) for number in range(9)]
    asked = []

    def get_fact(fact, names=None):
        asked.append(names.split())
        return take(*(section for section in sections if section.name in names.split()))

    host = SimpleNamespace(name="gpu-1", current_op_hash=None, get_fact=get_fact)
    state = SimpleNamespace(
        is_executing=True, check_for_changes=False, callback_handlers=[], add_callback_handler=print
    )
    monkeypatch.setattr(snapshot, "_sections", {section.name: section for section in sections})
    monkeypatch.setattr(snapshot, "_cache", {})
    monkeypatch.setattr(snapshot, "_changed", set())
    monkeypatch.setattr(snapshot, "ctx_state", SimpleNamespace(get=lambda: state, isset=lambda: True))
    snapshot.forget(host)
    read = [snapshot.read(host).read(section) for section in (sections[3], sections[3], *sections)]
    assert read == [3, 3, *range(9)]
    assert asked == [["s3"], ["s0"], ["s1"], ["s2"], ["s4"], ["s5", "s6", "s7", "s8"]]
    snapshot.forget(host)
    assert snapshot.read(host).read(sections[0]) == 0
    assert asked[-1] == ["s0"], "what was asked before the change is not true any more"
    with pytest.raises(CouldNotLook):
        snapshot.read(host).read(Section("nobody-registered-it", "echo 1", int))
