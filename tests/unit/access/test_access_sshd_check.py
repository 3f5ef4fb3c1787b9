"""The check keeps its time by itself, run for real with a stand-in for sshd; tests/lab/test_access_sshd.py has the real one."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from gpuwright.render import REPOSITORY
from roles.access import facts, sshd

SCRIPT = REPOSITORY / "files/access/usr/local/lib/gpuwright/access-sshd-check"
SSHD = """#!/bin/sh
[ "$1" != -t ] || exit 0
for last; do :; done
user=${{last#user=}}
user=${{user%%,*}}
echo "$user" >>{asked}
sleep {pause}
[ "$user" != wrong ] || {{ echo "permitrootlogin yes"; exit 0; }}
echo "permitrootlogin no"
"""


@pytest.fixture
def check(tmp_path):
    """Runs it with these other login accounts, for so many seconds, with an sshd that takes `pause` for an answer."""
    (tmp_path / "ssh/sshd_config.d").mkdir(parents=True)
    (tmp_path / "ssh/sshd_config").write_text("UsePAM yes\n")
    expected = tmp_path / "stage/etc/gpuwright/access/sshd.expected"
    expected.parent.mkdir(parents=True)
    (tmp_path / "stage/etc/ssh/sshd_config.d").mkdir(parents=True)
    (tmp_path / "stage/etc/ssh/sshd_config.d/00-gpuwright.conf").write_text("")
    expected.write_text("* permitrootlogin no\nalice permitrootlogin no\n")

    def run(others: list[str], pause: float = 0, seconds: int = 15, directory: str = "exit 0"):
        rows = "".join(f"{name}:x:1000:1000::/home/{name}:/bin/bash\n" for name in ["daemon", *others])
        (tmp_path / "rows").write_text(rows)
        programs = {
            "sshd": SSHD.format(asked=tmp_path / "asked", pause=pause),
            "getent": f"#!/bin/sh\ncat {tmp_path}/rows\n{directory}\n",
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        text = (
            SCRIPT.read_text().replace("/usr/sbin/sshd", f"{tmp_path}/sshd").replace(" /etc/ssh/", f" {tmp_path}/ssh/")
        )
        text = text.replace("\t/etc/ssh/", f"\t{tmp_path}/ssh/")
        (tmp_path / "script").write_text(text)
        begun = time.monotonic()
        done = subprocess.run(
            ["sh", tmp_path / "script", tmp_path / "stage", str(seconds)],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        asked = list(dict.fromkeys((tmp_path / "asked").read_text().split()))
        return done.returncode, facts.parse_check(done.stdout), asked, time.monotonic() - begun

    return run


def test_every_account_is_asked_about_where_there_is_time(check):
    status, said, asked, _ = check(["bob", "eve"])
    assert (status, said) == (0, facts.Checked())
    assert asked == ["alice", "root", "nobody-of-that-name", "daemon", "bob", "eve"]


def test_a_fault_of_one_account_is_named(check):
    status, said, _, _ = check(["bob", "wrong"])
    assert status == 1
    assert said.faults == ("permitrootlogin is yes for wrong and must be no",)


def test_more_accounts_than_time_are_counted_and_those_that_matter_come_first(check):
    others = [f"user{number}" for number in range(300)]
    status, said, asked, took = check(others, pause=0.3, seconds=4)
    assert status == 0
    assert said.faults == ()
    [note] = said.notes
    assert (
        note.startswith("sshd was asked about ") and "of 304 accounts within 4 s, those of the node file first" in note
    )
    assert asked[:3] == ["alice", "root", "nobody-of-that-name"]
    assert took < 15


def test_an_sshd_that_hangs_is_a_fault_and_no_difference(check):
    status, said, _, took = check(["bob"], pause=60, seconds=2)
    assert status == 1
    [fault] = said.faults
    assert fault.startswith("sshd could not be asked about every account of the node file within 2 s (0 of 5 accounts)")
    assert took < 20


def test_where_nothing_is_promised_yet_nothing_is_amiss(tmp_path):
    """A run that was killed between its scripts and its change."""
    (tmp_path / "empty").mkdir()
    done = subprocess.run(["sh", SCRIPT, tmp_path / "empty"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_directory_that_does_not_answer_is_said(check):
    status, said, asked, _ = check([], directory="exit 2")
    assert status == 0
    assert "getent passwd has no answer" in said.notes[0]
    assert "alice" in asked


MATCHES = """
Match Address 10.9.0.0/16,!10.9.3.4
  PasswordAuthentication yes
match user bob address "192.168.*"
  X11Forwarding yes
Match all
  Banner none
"""


def test_sshd_is_asked_about_every_address_that_a_match_block_names(tmp_path):
    """The deploy's check and the audit alike: what one refuses the other must see."""
    (tmp_path / "sshd_config.d").mkdir()
    (tmp_path / "sshd_config").write_text("UsePAM yes\n")
    (tmp_path / "sshd_config.d/00-a.conf").write_text(MATCHES)
    (tmp_path / "sshd_config.d/60-b.conf").write_text("Match Address 2001:db8::/32\n PermitRootLogin yes\n")
    done = subprocess.run(
        ["sh", "-c", f"configuration={tmp_path}\n{sshd.ADDRESSES}"], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {
        "127.0.0.1",
        "192.0.2.1",
        "10.9.0.0",
        "10.9.3.4",
        "192.168.1.1",
        "2001:db8::",
    }
    assert sshd.ADDRESSES in SCRIPT.read_text()
