"""``gpuwright driver``: a machine of any kind is described without a crash, and logs are explained."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from test_driver_facts import OPEN, ROWS, SPECIFICATION, Root

from gpuwright.cli import main
from gpuwright.snapshot import Snapshot
from roles.nvidia import cli

MISMATCH = """\
$ cat /proc/driver/nvidia/version
NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.01  Mon Jan  5 10:00:00 UTC 2026
$ dpkg-query -W nvidia-driver-570
nvidia-driver-570:amd64 570.3.02-0ubuntu0.24.04.1
$ nvidia-smi
Failed to initialize NVML: Driver/library version mismatch
"""
HISTORY = """\
Start-Date: 2026-03-01  06:12:01
Commandline: /usr/bin/unattended-upgrade
Upgrade: libnvidia-common-570:amd64 (570.1.01-0ubuntu0.24.04.1, 570.3.02-0ubuntu0.24.04.1)
End-Date: 2026-03-01  06:12:09
"""
JOURNAL = """\
nv-fabricmanager[11]: fabric manager NVIDIA GPU driver interface version 580.1.02 don't match with driver version 580.3.04. Please update
nv-fabricmanager[12]: request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]
systemd[1]: Started something else.
"""


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(main, ["driver", *arguments], input=stdin, catch_exceptions=False)


def test_this_machine_is_described_whatever_it_is():
    done = run()
    assert done.exit_code in (0, 1)
    assert "module" in done.output and "GPW-NVID-001" in done.output
    document = json.loads(run("--json").output)
    assert len(document["controls"]) == len(cli.CONTROLS)


@pytest.mark.parametrize("version", ["595.1.1", "latest", ""])
def test_a_release_that_is_none_is_refused_in_one_sentence(version):
    done = run("--version", version)
    assert done.exit_code == 2
    assert f"seen: {version!r}; expected: a release of the driver as nvidia-smi prints it, as in 580.95.05" in " ".join(
        done.output.split()
    )


def node(tmp_path, monkeypatch, *missing: str, smi: str | None = None):
    root = Root(tmp_path)
    root.write("proc/driver/nvidia/version", OPEN)
    root.write("proc/driver/nvidia/params", "EnableMSI: 1\n")
    root.write("etc/cdi/nvidia.yaml", SPECIFICATION)
    for number in (1, 2):
        root.device(f"0000:0{number}:00.0", "0x10de", "0x030200", "nvidia")
    answer = f"cat <<'X'\n{ROWS}\nX" if smi is None else smi
    root.program("nvidia-smi", f'case $* in --version) echo "NVML version : 580.95" ;; *) {answer}\n ;; esac')
    text = root.answer()
    answers = {"nvidia": (0, text), "audit-nvidia-logs": (0, "no journal\nhistory\n"), "system": (1, "")}
    kept = {name: answer for name, answer in answers.items() if name not in missing}
    monkeypatch.setattr(cli, "look", lambda: Snapshot(kept))


def test_a_machine_without_systemd_is_told_what_cannot_be_told(tmp_path, monkeypatch):
    node(tmp_path, monkeypatch)
    done = run("--version", "580.95.05", "--json")
    outcomes = {control["id"]: control["outcome"] for control in json.loads(done.output)["controls"]}
    assert outcomes["GPW-NVID-001"] == "pass"
    assert outcomes["GPW-NVID-006"] == "pass"
    assert outcomes["GPW-NVID-014"] == "error", "neither a journal nor a line of the kernel's log"
    table = run().output
    assert "cannot tell" in table
    assert "does not run: what units do cannot be told" in table
    assert "580.95.05, open modules" in table


def test_another_release_than_expected_is_a_fault(tmp_path, monkeypatch):
    node(tmp_path, monkeypatch)
    assert run("--version", "595.58.03").exit_code == 1


def test_a_mismatch_is_named(tmp_path, monkeypatch):
    sentence = "Failed to initialize NVML: Driver/library version mismatch"
    node(tmp_path, monkeypatch, smi=f"echo '{sentence}'; echo 'NVML library version: 595.58'; exit 18")
    done = run()
    assert done.exit_code == 1
    assert sentence in done.output


@pytest.mark.parametrize("missing", [("nvidia",), ("audit-nvidia-logs",), ("nvidia", "audit-nvidia-logs", "system")])
def test_what_gave_no_answer_is_no_crash(tmp_path, monkeypatch, missing):
    node(tmp_path, monkeypatch, *missing)
    done = run()
    assert "cannot tell" in done.output
    if "nvidia" in missing:
        assert "the driver cannot be looked at: nvidia: the node gave no answer" in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MISMATCH, ["version-mismatch", "make all of one release, drain the node and reboot it"]),
        (HISTORY, ["libnvidia-common-570", "by itself (unattended-upgrades)", "hold the driver's packages"]),
        (
            JOURNAL,
            [
                "fabric-manager-version",
                "install nvidia-fabricmanager 580.3.04",
                "fabric-manager-unwanted",
                "do: remove",
            ],
        ),
        ("nothing at all\n", ["nothing in it is known"]),
    ],
)
def test_a_log_is_explained_by_kind(tmp_path, text, said):
    log = tmp_path / "log"
    log.write_text(text)
    for done in (run("--diagnose", str(log)), run("--diagnose", "-", stdin=text)):
        assert done.exit_code == 0
        assert [part for part in said if part not in done.output] == []
    assert "Started something else" not in done.output
    document = json.loads(run("--diagnose", str(log), "--json").output)
    assert bool(document["lines"] or document["moves"]) == ("nothing in it is known" not in said)
