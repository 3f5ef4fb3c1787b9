"""The writing script, run for real in a mount namespace of its own, and killed before and after every command it runs."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from pyinfra.api import OperationError

from gpuwright import atomic
from gpuwright.atomic import File, Validate
from gpuwright.ownership import Owned
from gpuwright.spec.secret import Secret

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a private /var/lib and /etc")

SECRET = b"SEKRET-4f1c9d"
PROGRAMS = [
    "mkdir",
    "flock",
    "rm",
    "mktemp",
    "base64",
    "tar",
    "sort",
    "cmp",
    "cp",
    "sync",
    "mv",
    "chown",
    "chmod",
    "touch",
    "cat",
    "grep",
    "xargs",
]

# Kills the whole script at the N-th program call, before or after that program did its work.
SHIM = """#!/bin/sh
# The two ends of a pipe run at the same time; the lock keeps their counts apart.
n=$(/usr/bin/flock "$COUNTER.lock" /bin/sh -c 'n=$(($(/bin/cat "$COUNTER") - 1)); echo $n >"$COUNTER"; echo $n')
if [ "$n" -eq 0 ] && [ "$WHEN" = before ]; then kill -9 0; fi
/usr/bin/{name} "$@"
status=$?
if [ "$n" -eq 0 ]; then kill -9 0; fi
exit $status
"""


class Sandbox:
    """A private /etc/systemd/system and /var/lib/gpuwright, kept between commands in one directory."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        for name in ("state", "units", "etc", "shims"):
            (directory / name).mkdir()
        for name in PROGRAMS:
            (directory / "shims" / name).write_text(SHIM.format(name=name))
            (directory / "shims" / name).chmod(0o755)

    def write(self, files, kill=None, when="before", **kwargs):
        command = atomic.write("gateway", files, **kwargs)
        environment = dict(os.environ)
        if kill is not None:
            (self.root / "counter").write_text(str(kill))
            environment |= {
                "PATH": f"{self.root}/shims:{environment['PATH']}",
                "COUNTER": str(self.root / "counter"),
                "WHEN": when,
            }
        mounts = (
            f"mount -t tmpfs none /var/lib && mkdir /var/lib/gpuwright && mount --bind {self.root}/state /var/lib/gpuwright"
            f" && mkdir -p /var/lib/target && mount --bind {self.root}/etc /var/lib/target"
            f" && mount --bind {self.root}/units /etc/systemd/system"
        )
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{mounts} && {command.get_raw_value()}"],
            input=command.connector_arguments["_stdin"],
            env=environment,
            start_new_session=True,  # the shim kills the whole process group
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def everything(sandbox):
    return [path for path in sandbox.root.rglob("*") if path.is_file() and "shims" not in path.parts]


OLD = [
    File("/var/lib/target/a.conf", b"old a\n"),
    File("/var/lib/target/key", Secret("key", b"old " + SECRET), "0600"),
]
NEW = [
    File("/var/lib/target/a.conf", b"new a\n"),
    File("/var/lib/target/key", Secret("key", b"new " + SECRET), "0640"),
]


def test_writes_content_mode_and_record(sandbox):
    done = sandbox.write(NEW, claims=[Owned("network", "gpuwright-x")])
    assert done.returncode == 0, done.stderr
    assert (sandbox.root / "etc/a.conf").read_bytes() == b"new a\n"
    assert (sandbox.root / "etc/key").read_bytes() == b"new " + SECRET
    assert (sandbox.root / "etc/key").stat().st_mode & 0o777 == 0o640
    assert (sandbox.root / "state/owned/gateway").read_text().splitlines() == [
        "file\t/var/lib/target/a.conf",
        "file\t/var/lib/target/key",
        "network\tgpuwright-x",
    ]
    assert list((sandbox.root / "state/stage").iterdir()) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_point_a_file_is_old_or_new(sandbox, when):
    """Every program call of the script is one point; the last round runs to the end, which proves that all were covered."""
    kills = 0
    for point in range(1, 200):
        assert sandbox.write(OLD).returncode == 0
        done = sandbox.write(NEW, kill=point, when=when)
        content = (sandbox.root / "etc/a.conf").read_bytes()
        key = sandbox.root / "etc/key"
        assert content in (b"old a\n", b"new a\n"), point
        assert key.read_bytes() in (b"old " + SECRET, b"new " + SECRET), point
        expected = 0o640 if key.read_bytes().startswith(b"new") else 0o600
        assert key.stat().st_mode & 0o777 == expected, point
        for path in everything(sandbox):
            if SECRET in path.read_bytes() and path != key:
                assert path.stat().st_mode & 0o077 == 0 or path.parent.parent.stat().st_mode & 0o077 == 0, path
        if done.returncode == 0:
            break
        kills += 1
    else:
        pytest.fail("the script never reached its end")
    assert kills > 20
    assert [path.name for path in (sandbox.root / "etc").iterdir() if path.name.startswith(".")] == []


def test_a_killed_run_leaves_temporary_names_that_match_no_drop_in_glob_and_are_swept(sandbox):
    seen = set()
    for point in range(1, 60):
        if sandbox.write(NEW, kill=point).returncode == 0:
            break
        seen |= {path.name for path in (sandbox.root / "etc").iterdir()} - {"a.conf", "key"}
    assert seen, "no point left a temporary file: the test looks in the wrong place"
    assert all(name.startswith(".") and not name.endswith((".conf", ".service", ".list")) for name in seen)
    assert sandbox.write(NEW).returncode == 0
    assert {path.name for path in (sandbox.root / "etc").iterdir()} == {"a.conf", "key"}


def test_a_refusal_writes_nothing(sandbox):
    assert sandbox.write(OLD).returncode == 0
    done = sandbox.write(NEW, validate=[Validate("grep -q 'something else' ./var/lib/target/a.conf")])
    assert done.returncode == 65
    assert "nothing was written" in done.stderr
    assert (sandbox.root / "etc/a.conf").read_bytes() == b"old a\n"


def test_what_a_validator_notes_is_passed_on_where_it_agrees(sandbox):
    done = sandbox.write(NEW, validate=[Validate("echo 'note: half of it was looked at'; echo and so on")])
    assert (done.returncode, done.stderr) == (0, "note: half of it was looked at\n")


def test_validators_see_the_whole_set_under_full_names(sandbox):
    done = sandbox.write(NEW, change=NEW[:1], validate=[Validate("grep -q new ./var/lib/target/key")])
    assert done.returncode == 0, done.stderr
    assert not (sandbox.root / "etc/key").exists()


def test_a_unit_that_systemd_refuses_is_not_written(sandbox):
    broken = File("/etc/systemd/system/gpuwright-x.service", b"[Service]\nExecStart=relative/path\n")
    done = sandbox.write([broken])
    assert done.returncode == 65
    assert "systemd-analyze verify" in done.stderr
    assert not (sandbox.root / "units/gpuwright-x.service").exists()


def test_a_unit_whose_program_comes_in_the_same_set_is_fine(sandbox):
    unit = File("/etc/systemd/system/gpuwright-x.service", b"[Service]\nExecStart=/var/lib/target/program\n")
    program = File("/var/lib/target/program", b"#!/bin/sh\n", "0755")
    done = sandbox.write([unit, program])
    assert done.returncode == 0, done.stderr
    assert (sandbox.root / "state/owned/gateway").read_text().count("unit\tgpuwright-x.service") == 1


def test_our_lint_refuses_a_key_in_the_wrong_section_before_any_connection():
    unit = File("/etc/systemd/system/gpuwright-x.service", b"[Service]\nExecStart=/bin/true\nStartLimitBurst=3\n")
    with pytest.raises(OperationError, match=r"line 3: StartLimitBurst= belongs in \[Unit\]"):
        atomic.write("engine", [unit])


def test_no_content_in_arguments_or_printed_forms():
    command = atomic.write("gateway", NEW)
    printed = f"{command} {command!r} {NEW[1]} {NEW[1]!r} {shlex.quote(command.get_raw_value())}"
    for form in (SECRET, base64.b64encode(SECRET)):
        assert form.decode() not in printed
