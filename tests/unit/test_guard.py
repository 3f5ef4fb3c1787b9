"""The guard's script, run for real in a mount namespace and killed before and after every program it calls; systemd is a
stand-in here (tests/lab/test_guard.py has the real one)."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyinfra.api import StringCommand
from pyinfra.connectors.util import CommandOutput, OutputLine

from gpuwright import guard
from gpuwright.guard import Undo
from gpuwright.render import REPOSITORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a private /var/lib")

SCRIPT = REPOSITORY / "files/base/usr/local/lib/gpuwright/guard"
PROGRAMS = [
    "mkdir",
    "flock",
    "rm",
    "mktemp",
    "base64",
    "find",
    "cp",
    "sync",
    "mv",
    "date",
    "cut",
    "sed",
    "timeout",
    "tr",
]
SHIM = """#!/bin/sh
n=$(/usr/bin/flock "$COUNTER.lock" /bin/sh -c 'n=$(($(/bin/cat "$COUNTER") - 1)); echo $n >"$COUNTER"; echo $n')
if [ "$n" -eq 0 ] && [ "$WHEN" = before ]; then kill -9 0; fi
/usr/bin/{name} "$@"
status=$?
if [ "$n" -eq 0 ]; then kill -9 0; fi
exit $status
"""
# Says yes to everything, and notes what it was asked.
SYSTEMD = """#!/bin/sh
echo "${{0##*/}} $*" >>{calls}
[ "$1" != is-system-running ] || cat {state}
"""
OLD, NEW = "old\n", "new\n"


class Sandbox:
    """A private /var/lib/gpuwright and one directory with the files that are guarded."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        for name in ("state", "etc", "shims", "systemd"):
            (directory / name).mkdir()
        for name in PROGRAMS:
            self._program(f"shims/{name}", SHIM.format(name=name))
        (directory / "running").write_text("running\n")
        for name in ("systemctl", "systemd-run"):
            self._program(f"systemd/{name}", SYSTEMD.format(calls=directory / "calls", state=directory / "running"))
        self.undo = Undo(
            paths=("/var/lib/target/there", "/var/lib/target/absent"),
            after="touch /var/lib/target/told",
            keep="echo kept >state",
        )

    def _program(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def blank(self) -> None:
        """The old state, and a guard that never was."""
        subprocess.run(["rm", "-rf", f"{self.root}/state/guard"], check=True)
        for path in (self.root / "etc").iterdir():
            path.unlink()
        (self.root / "etc/there").write_text(OLD)
        (self.root / "etc/there").chmod(0o640)

    def change(self) -> None:
        (self.root / "etc/there").write_text(NEW)
        (self.root / "etc/absent").write_text(NEW)

    def guard(self, *arguments: str, kill: int | None = None, when: str = "before", stdin: str = ""):
        environment = dict(os.environ)
        path = f"{self.root}/systemd:{environment['PATH']}"
        if kill is not None:
            (self.root / "counter").write_text(str(kill))
            path = f"{self.root}/shims:{path}"
            environment |= {"COUNTER": str(self.root / "counter"), "WHEN": when}
        mounts = (
            f"mount -t tmpfs none /var/lib && mkdir /var/lib/gpuwright && mount --bind {self.root}/state /var/lib/gpuwright"
            f" && mkdir -p /var/lib/target && mount --bind {self.root}/etc /var/lib/target"
        )
        return subprocess.run(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'{mounts} && export PATH="$WANTED" && exec sh "$@"',
                "sh",
                str(SCRIPT),
                *arguments,
            ],
            input=stdin,
            env=environment | {"WANTED": path},
            start_new_session=True,
            capture_output=True,
            text=True,
            check=False,
        )

    def arm(self, **options):
        return self.guard("arm", "one", "60", "trial", "somebody@somewhere", stdin=self.undo.lines(), **options)

    def late(self) -> None:
        """The guard's time is up."""
        about = self.root / "state/guard/armed/about"
        if about.exists():
            text = about.read_text()
            about.write_text(re.sub(r"uptime=(\d+)", lambda found: f"uptime={int(found[1]) - 61}", text))

    def reboot(self, uptime: str = "99999999") -> None:
        """The machine was started anew since the guard was armed, then `uptime` seconds old."""
        about = self.root / "state/guard/armed/about"
        text = re.sub(r"boot=.*", "boot=00000000-0000-0000-0000-000000000000", about.read_text())
        about.write_text(re.sub(r"uptime=.*", f"uptime={uptime}", text))

    def deadline(self, **options):
        """What the timer runs, when the guard's time is up."""
        self.late()
        return self.guard("restore", "deadline", **options)

    @property
    def armed(self) -> bool:
        return (self.root / "state/guard/armed").is_dir()

    @property
    def is_old(self) -> bool:
        there = self.root / "etc/there"
        return (
            there.read_text() == OLD
            and there.stat().st_mode & 0o777 == 0o640
            and not (self.root / "etc/absent").exists()
        )

    @property
    def is_new(self) -> bool:
        return (self.root / "etc/there").read_text() == (self.root / "etc/absent").read_text() == NEW

    @property
    def copies(self) -> list[str]:
        return [path.name for path in (self.root / "etc").iterdir() if path.name.startswith(".")]


@pytest.fixture
def sandbox(tmp_path):
    sandbox = Sandbox(tmp_path)
    sandbox.blank()
    return sandbox


def test_armed_changed_and_restored(sandbox):
    done = sandbox.arm()
    assert (done.returncode, done.stderr) == (0, "")
    assert sandbox.armed and len(sandbox.copies) == 1
    sandbox.change()
    done = sandbox.deadline()
    assert done.returncode == 0, done.stderr
    assert sandbox.is_old and not sandbox.armed and sandbox.copies == []
    assert (sandbox.root / "etc/told").exists(), "what follows the files was done"
    assert (sandbox.root / "state/guard/fired.deadline/state").read_text() == "kept\n"
    [said] = guard.GUARDS.parse(sandbox.guard("status").stdout)
    assert (said.state, said.role, said.who, said.seconds) == ("fired.deadline", "trial", "somebody@somewhere", 60)


def test_disarmed_the_new_state_stays_and_nothing_is_left(sandbox):
    sandbox.arm()
    sandbox.change()
    assert sandbox.guard("disarm", "one").returncode == 0
    assert sandbox.is_new and not sandbox.armed and sandbox.copies == []
    assert sandbox.deadline().returncode == 0
    assert sandbox.is_new, "a timer that comes too late does nothing"


def test_a_timer_that_fires_too_early_does_nothing(sandbox):
    """Its second trigger counts from the service's last end, which may be that of another change."""
    sandbox.arm()
    sandbox.change()
    assert sandbox.guard("restore", "deadline").returncode == 0
    assert sandbox.armed and sandbox.is_new


def test_while_the_machine_boots_only_files_are_put_back(sandbox):
    sandbox.arm()
    sandbox.change()
    (sandbox.root / "running").write_text("initializing\n")
    sandbox.reboot()
    assert sandbox.guard("restore", "deadline").returncode == 0
    assert sandbox.is_old
    assert not (sandbox.root / "etc/told").exists(), "telling sshd would wait for sshd, which waits for us"
    assert (sandbox.root / "state/guard/fired.restart").is_dir()


def test_nobody_else_s_id_does_anything(sandbox):
    sandbox.arm()
    sandbox.change()
    for verb in (("disarm", "other"), ("withdraw", "other"), ("run", "other", "true"), ("restore", "asked", "other")):
        assert sandbox.guard(*verb).returncode == 77, verb
    assert sandbox.armed and sandbox.is_new


def test_a_second_run_is_told_who_the_first_is(sandbox):
    sandbox.arm()
    done = sandbox.guard("arm", "two", "60", "other", "else@where", stdin=sandbox.undo.lines())
    assert done.returncode == 75
    assert "another run is changing who may reach this machine: somebody@somewhere for role trial" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert sandbox.guard("run", "one", "true").returncode == 0, "the first one's is still armed"


BEFORE, SINCE = "99999999", "0"
"""Uptime when it was armed: seen from this boot it is never over, or long ago."""


@pytest.mark.parametrize("uptime", [BEFORE, "now", SINCE])
def test_what_was_armed_before_a_reboot_is_overdue_whatever_uptime_says(sandbox, uptime):
    """A restore that failed while the node booted is tried again when it runs, at any second of its new uptime."""
    sandbox.arm()
    sandbox.change()
    sandbox.reboot(Path("/proc/uptime").read_text().partition(".")[0] if uptime == "now" else uptime)
    assert sandbox.guard("run", "one", "touch", "/var/lib/target/step").returncode == 77
    assert sandbox.guard("restore", "deadline").returncode == 0
    assert sandbox.is_old and not sandbox.armed
    assert (sandbox.root / "etc/told").exists(), "the node runs: what reads the files is told"
    assert (sandbox.root / "state/guard/fired.restart").is_dir()


@pytest.mark.parametrize("how", ["late", "reboot"])
def test_a_run_that_finds_an_overdue_guard_puts_the_old_state_back_and_ends(sandbox, how):
    sandbox.arm()
    sandbox.change()
    getattr(sandbox, how)()
    done = sandbox.guard("arm", "two", "60", "other", "else@where", stdin=sandbox.undo.lines())
    assert done.returncode == 75
    assert "was overdue: somebody@somewhere for role trial. Its old state has been put back only now" in done.stderr
    assert " s ago" not in done.stderr
    assert sandbox.is_old and not sandbox.armed and sandbox.copies == []
    [said] = guard.GUARDS.parse(sandbox.guard("status").stdout)
    assert said.state == {"late": "fired.deadline", "reboot": "fired.restart"}[how]
    assert sandbox.guard("arm", "two", "60", "other", "else@where", stdin=sandbox.undo.lines()).returncode == 0


def test_what_cannot_be_put_back_is_named_and_tried_again(sandbox):
    sandbox.arm()
    sandbox.change()
    there = sandbox.root / "etc/there"
    there.unlink()
    there.mkdir()
    sandbox.reboot()
    done = sandbox.guard("restore", "deadline")
    assert done.returncode != 0, "systemd starts the service again when it fails"
    assert "not everything could be put back; trying again in 10 s" in done.stderr
    (sandbox.root / "calls").unlink()
    done = sandbox.guard("arm", "two", "60", "other", "else@where", stdin=sandbox.undo.lines())
    assert done.returncode == 75
    assert "overdue and cannot be put back: somebody@somewhere for role trial" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert "systemctl start --no-block gpuwright-guard.service" in (sandbox.root / "calls").read_text().splitlines()
    there.rmdir()
    assert sandbox.guard("restore", "deadline").returncode == 0
    assert sandbox.is_old and not sandbox.armed and sandbox.copies == []


def test_its_service_tries_again_for_as_long_as_it_fails():
    """After a reboot there is no timer any more."""
    [unit] = [file.data.decode() for file in guard.files() if file.path.endswith(".service")]
    general, service = unit.split("[Service]\n")
    assert {"Restart=on-failure", "RestartSec=10"} <= set(service.splitlines())
    assert "StartLimitIntervalSec=0" in general.splitlines()
    assert "RestartMode" not in unit, "a start that failed has to end, or sshd would wait for it at boot"


def test_steps_run_only_while_armed_and_in_time(sandbox):
    assert sandbox.guard("run", "one", "touch", "/var/lib/target/step").returncode == 77
    sandbox.arm()
    assert sandbox.guard("run", "one", "touch", "/var/lib/target/step").returncode == 0
    about = sandbox.root / "state/guard/armed/about"
    about.write_text(about.read_text().replace("seconds=60", "seconds=-1"))
    done = sandbox.guard("run", "one", "touch", "/var/lib/target/late")
    assert done.returncode == 77
    assert "the time of the guard is up" in done.stderr
    assert not (sandbox.root / "etc/late").exists()


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.proof)])
def test_killed_while_arming_nothing_is_armed_or_everything(sandbox, when):
    kills = 0
    for point in range(1, 200):
        sandbox.blank()
        done = sandbox.arm(kill=point, when=when)
        assert sandbox.is_old, point
        if sandbox.armed:
            sandbox.change()
            assert sandbox.deadline().returncode == 0
            assert sandbox.is_old and sandbox.copies == [], point
        else:
            # What a killed one left is swept by the next, and keeps nobody out.
            assert sandbox.arm().returncode == 0, point
            assert len(sandbox.copies) == 1, point
        if done.returncode == 0:
            break
        kills += 1
    assert kills > 10


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.proof)])
def test_killed_while_restoring_it_is_repeated_to_the_end(sandbox, when):
    """As the timer does it every ten seconds, and a boot."""
    kills = 0
    for point in range(1, 200):
        sandbox.blank()
        sandbox.arm()
        sandbox.change()
        done = sandbox.deadline(kill=point, when=when)
        assert sandbox.armed or sandbox.is_old, point
        assert sandbox.deadline().returncode == 0
        assert sandbox.is_old and not sandbox.armed and sandbox.copies == [], point
        if done.returncode == 0:
            break
        kills += 1
    assert kills > 8


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.proof)])
def test_killed_while_disarming_it_is_still_armed_or_the_new_state_stays(sandbox, when):
    kills = 0
    for point in range(1, 200):
        sandbox.blank()
        sandbox.arm()
        sandbox.change()
        done = sandbox.guard("disarm", "one", kill=point, when=when)
        was_armed = sandbox.armed
        assert sandbox.deadline().returncode == 0
        assert sandbox.is_old if was_armed else sandbox.is_new, point
        assert sandbox.arm().returncode == 0, point
        assert len(sandbox.copies) <= 2 and sandbox.guard("disarm", "one").returncode == 0
        assert sandbox.copies == [], point
        if done.returncode == 0:
            break
        kills += 1
    assert kills > 4


def test_what_a_step_notes_is_said(monkeypatch):
    noted: list[str] = []
    output = CommandOutput([OutputLine("stderr", "note: half of it was looked at"), OutputLine("stderr", "and so on")])
    host = SimpleNamespace(print_prefix="", connector_data={}, run_shell_command=lambda *_, **__: (True, output))
    attempt = guard._Attempt(guard.Guarded("trial", [StringCommand("true")], Undo()), None, host, {})
    monkeypatch.setattr(guard.logger, "info", noted.append)
    assert attempt._change()[0]
    assert noted == ["half of it was looked at"]


def test_links_are_kept_as_links(sandbox):
    there = sandbox.root / "etc/there"
    there.unlink()
    there.symlink_to("/nowhere")
    sandbox.arm()
    there.unlink()
    there.write_text(NEW)
    assert sandbox.deadline().returncode == 0
    assert there.is_symlink() and there.readlink() == Path("/nowhere")


def test_what_cannot_be_kept_stops_it_before_the_change(sandbox):
    for undo, sentence in (
        (Undo(paths=("/var/lib/target",)), "is a directory"),
        (Undo(paths=("/var/lib/target/there",), keep="exit 3"), "the present state cannot be kept"),
    ):
        done = sandbox.guard("arm", "one", "60", "trial", "x", stdin=undo.lines())
        assert done.returncode == 73
        assert sentence in done.stderr and "Nothing was changed" in done.stderr
        assert not sandbox.armed and sandbox.copies == []


def test_a_path_that_no_line_can_hold_is_refused_here():
    for path in ("relative", "/with\ttab", "/with\nline"):
        with pytest.raises(ValueError, match="no absolute path"):
            Undo(paths=(path,)).lines()
    script = "a\nb"
    lines = Undo(paths=("/a", "/a"), after=script).lines()
    assert lines.splitlines() == ["path\t/a", "after\t" + base64.b64encode(script.encode()).decode()]
