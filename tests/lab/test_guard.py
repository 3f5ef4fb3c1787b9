"""The lock-out guard on booted hosts: a change that nobody can prove by a new connection does not last, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import lab
from gpuwright.render import REPOSITORY
from lab.hosts import Host

pytestmark = pytest.mark.lab

DROP_IN = "/etc/ssh/sshd_config.d/00-trial.conf"
KEPT = "LogLevel VERBOSE\n"
REFUSES = "AllowUsers nobody\n"
BROKEN = "NoSuchKeyword yes\n"
RELOAD = "systemctl reload ssh.service"
UNDO = "systemctl reset-failed ssh.service; systemctl reload-or-restart ssh.service"

# The guard as a role uses it, with one file.
DEPLOY = """
import json
import os

from pyinfra.context import ctx_host, ctx_state

from gpuwright import connect, guard
from gpuwright.atomic import File, Validate, files
from gpuwright.units import enabled

host = ctx_host.get()
connect.keep_tuned(ctx_state.get(), host)
guard.announce(host)
wanted = json.loads(os.environ["CHANGE"])
files(name="Install the guard", role="base", files=guard.files())
enabled(name="Enable the guard", units=[guard.UNIT])
guard.acknowledge()
guard.change(
    name="Change who may log in",
    role="trial",
    files=[File("/etc/ssh/sshd_config.d/00-trial.conf", wanted["content"].encode(), wanted["mode"])],
    undo=guard.Undo(after=wanted["after"]),
    validate=[Validate(command) for command in wanted["validate"]],
    apply=wanted["apply"],
    seconds=wanted["seconds"],
)
"""


@dataclass
class Change:
    """One run of that deploy file, in a process of its own."""

    process: subprocess.Popen[str]

    def end(self, timeout: float = 180) -> tuple[int, str]:
        """Exit status and everything it said."""
        said, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, said

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class Node:
    """A booted host, and the one file that decides who may log in on it."""

    def __init__(self, host: Host, directory: Path) -> None:
        self.host, self.directory = host, directory
        data = {"ssh_hostname": host.address, "ssh_user": "root", "ssh_key": str(host.ssh_key)}
        data |= {"ssh_known_hosts_file": str(host.known_hosts), "ssh_strict_host_key_checking": "yes"}
        (directory / "inventory.py").write_text(f"hosts = [({host.name!r}, {data!r})]\n")
        (directory / "deploy.py").write_text(DEPLOY)

    def start(
        self,
        content: str = KEPT,
        seconds: int = 10,
        apply: str = RELOAD,
        after: str = UNDO,
        validate: tuple[str, ...] = (),
        mode: str = "0600",
        options: tuple[str, ...] = ("-y",),
    ) -> Change:
        change = {
            "content": content,
            "seconds": seconds,
            "apply": apply,
            "after": after,
            "validate": validate,
            "mode": mode,
        }
        return Change(
            subprocess.Popen(
                [Path(sys.executable).with_name("pyinfra"), *options, "inventory.py", "deploy.py"],
                cwd=self.directory,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY), "CHANGE": json.dumps(change)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )

    def run(self, content: str = KEPT, **settings) -> tuple[int, str]:
        return self.start(content, **settings).end()

    def console(self, command: str) -> str:
        """What somebody at the machine's console would see: no network, no sshd."""
        argv = ["nsenter", "--all", "--target", str(self.host._init()), "sh", "-c", command]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()

    def wait_for(self, command: str, seconds: float = 30) -> None:
        """Until the console says something."""
        deadline = time.monotonic() + seconds
        while not self.console(command):
            assert time.monotonic() < deadline, f"nothing from: {command}"
            time.sleep(0.1)

    def content(self) -> str:
        return self.console(f"cat {DROP_IN} 2>/dev/null") + "\n"

    def may_log_in(self) -> bool:
        return self.host.run("true", check=False, timeout=20).returncode == 0

    def leftovers(self) -> str:
        """Of a guard that is over: nothing, whichever way it ended."""
        return self.console(
            "find /etc /var/lib/gpuwright -name '.gpuwright.*'; ls -d /var/lib/gpuwright/guard/a* /var/lib/gpuwright/guard/over*"
            " 2>/dev/null; systemctl is-active -q gpuwright-guard.timer && echo timer"
        )

    def is_old(self, within: float) -> None:
        """In its old state, reachable, and nothing left but the note."""
        deadline = time.monotonic() + within
        while self.content() != KEPT or self.leftovers() or not self.may_log_in():
            assert time.monotonic() < deadline, f"{self.content()!r} {self.leftovers()!r} {self.may_log_in()}"
            time.sleep(0.2)
        assert self.console(f"stat -c '%a %U' {DROP_IN}") == "600 root"
        assert self.console("sshd -T 2>/dev/null | grep -i '^loglevel'") == "loglevel VERBOSE"


@pytest.fixture(scope="module", params=["trixie", pytest.param("bookworm", marks=pytest.mark.proof)])
def booted(request, tmp_path_factory):
    name = {"trixie": "guard-13", "bookworm": "guard-12"}[request.param]
    [host] = lab.up([name], request.param, blank=True)
    yield Node(host, tmp_path_factory.mktemp("guard"))
    host.destroy()


@pytest.fixture
def node(booted):
    """The host with the file as it should be, and no memory of the test before."""
    status, said = booted.run()
    assert status == 0, said
    booted.console("rm -rf /var/lib/gpuwright/guard/fired.* /run/point")
    booted.is_old(within=5)
    return booted


def test_a_change_that_is_proven_stays_and_nothing_of_the_guard_is_left(node):
    status, said = node.run("LogLevel DEBUG\n")
    assert status == 0, said
    assert "without a new connection within 10 s" in said
    assert node.content() == "LogLevel DEBUG\n"
    assert not node.leftovers()
    time.sleep(11)
    assert node.content() == "LogLevel DEBUG\n"
    status, said = node.run("LogLevel DEBUG\n")
    assert status == 0 and "guard is armed" not in said


def test_a_guard_that_fired_a_moment_ago_does_not_fire_at_the_next_change(node):
    """Its timer also counts from the end of its service: a change that takes a while would be taken for overdue."""
    hangs = node.start(REFUSES, seconds=4, apply=f"{RELOAD}; sleep 60")
    # A run that still lives would withdraw the change at the same moment.
    node.wait_for("ls -d /var/lib/gpuwright/guard/armed 2>/dev/null", 30)
    hangs.kill()
    node.wait_for("ls -d /var/lib/gpuwright/guard/fired.deadline 2>/dev/null", 30)
    status, said = node.run("LogLevel DEBUG\n", seconds=60, apply=f"sleep 15; {RELOAD}")
    assert status == 0, said
    assert node.content() == "LogLevel DEBUG\n"
    assert not node.leftovers()


def test_a_dry_run_arms_nothing(node):
    status, said = node.run(REFUSES, options=("--dry",))
    assert status == 0, said
    assert "armed" not in said
    node.is_old(within=1)


def test_an_sshd_config_that_refuses_the_controller(node):
    started = time.monotonic()
    status, said = node.run(REFUSES, seconds=20)
    assert status != 0
    assert time.monotonic() - started < 40
    assert re.search("no new connection after the change of role trial: .*Authentication error", said), said
    assert "the old state is back; nothing of this change is left" in said
    node.is_old(within=1)
    status, said = node.run()
    assert status == 0, said
    assert "the lock-out guard put the old state of role trial back at" in said
    status, said = node.run()
    assert "put the old state" not in said, "it is said once"


def test_a_file_that_was_not_there_is_gone_again(node):
    node.console(f"rm {DROP_IN}; {RELOAD}")
    status, said = node.run(REFUSES)
    assert status != 0, said
    assert node.console(f"ls {DROP_IN} 2>/dev/null") == ""
    assert node.may_log_in()


def test_a_validator_that_was_fooled(node):
    """sshd does not start with this file at all, and nothing said so before."""
    status, said = node.run(BROKEN, validate=("true",), apply="kill -HUP $(cat /run/sshd.pid); sleep 1")
    assert status != 0
    assert "no new connection" in said
    node.is_old(within=15)


def test_a_change_that_cuts_every_connection_is_undone_by_the_node_alone(node):
    controller = node.host.segment.gateway
    apply = f"ip route add blackhole {controller}"
    started = time.monotonic()
    status, said = node.run(REFUSES, apply=apply, after=f"ip route del blackhole {controller}; {UNDO}", seconds=8)
    assert status != 0
    assert time.monotonic() - started < 60
    assert "the guard on the node puts the old state back by itself" in said
    assert "the guard put the old state back; the node is reachable again" in said
    node.is_old(within=1)
    assert "no new connection was confirmed within 8 s" in node.run()[1]


def test_a_refused_file_is_no_lock_out(node):
    status, said = node.run(REFUSES, validate=("echo refused-by-the-test; false",))
    assert status != 0
    assert "refused-by-the-test" in said and "nothing was written" in said
    node.is_old(within=1)
    assert "put the old state" not in node.run()[1]


SLOW = "touch /run/point; sleep 3"
POINTS = {
    "before the change": {"validate": (SLOW, "false")},
    "while the files are written": {"validate": (SLOW,)},
    "while they are made to count": {"apply": f"{SLOW}; {RELOAD}"},
    "between the change and its proof": {"apply": f"{RELOAD}; touch /run/point; sleep 1"},
    "while a new connection is tried": {"apply": f"{RELOAD}; (sleep 2; touch /run/point) >/dev/null 2>&1 &"},
}


@pytest.mark.parametrize("point", POINTS)
def test_the_controller_killed(node, point):
    change = node.start(REFUSES, seconds=8, **POINTS[point])
    node.wait_for("ls /run/point 2>/dev/null")
    change.kill()
    assert node.console("ls -d /var/lib/gpuwright/guard/armed")
    node.is_old(within=20)
    assert node.console("ls -d /var/lib/gpuwright/guard/fired.*").endswith("fired.deadline")
    status, said = node.run()
    assert status == 0, said
    assert "put the old state of role trial back" in said


def test_the_controller_killed_after_the_proof(node):
    change = node.start("LogLevel DEBUG\n", seconds=5)
    node.wait_for(f"grep -q DEBUG {DROP_IN} && [ ! -d /var/lib/gpuwright/guard/armed ] && echo proven")
    change.kill()
    time.sleep(6)
    assert node.content() == "LogLevel DEBUG\n"
    assert not node.leftovers()


@pytest.mark.parametrize("way", ["reboot", "power_cycle"])
def test_the_host_goes_down_while_the_guard_is_armed(node, way):
    change = node.start(REFUSES, seconds=300)
    node.wait_for(f"grep -q nobody {DROP_IN} && echo written")
    time.sleep(2)
    change.kill()
    assert not node.may_log_in()
    getattr(node.host, way)()
    node.is_old(within=5)
    status, said = node.run()
    assert status == 0, said
    assert "the node went down before a new connection was confirmed" in said


def test_what_could_not_be_put_back_at_boot_is_tried_again(node):
    """A reboot takes the timer along: what fails then is left to the service, which must not keep sshd waiting."""
    node.console(
        "echo old >/etc/kept; printf 'path\\t/etc/kept\\n' | /usr/local/lib/gpuwright/guard arm one 300 trial x@y"
    )
    assert node.console("ls -d /var/lib/gpuwright/guard/armed")
    node.console("rm /etc/kept; mkdir /etc/kept")
    node.host.reboot()
    assert node.may_log_in()
    status, said = node.run("LogLevel DEBUG\n")
    assert status != 0
    assert "is overdue and cannot be put back: x@y for role trial" in said and "Nothing was changed" in said
    assert node.content() == KEPT
    node.console("rmdir /etc/kept")
    node.wait_for("ls -d /var/lib/gpuwright/guard/fired.restart 2>/dev/null", 60)
    assert node.console("cat /etc/kept") == "old"
    node.is_old(within=5)
    assert "the node went down before a new connection was confirmed" in node.run()[1]
    node.console("rm /etc/kept")


def test_a_full_disk_stops_it_before_the_change(node):
    node.console(
        "mkdir -p /run/kept; cp -a /var/lib/gpuwright/. /run/kept/; mount -t tmpfs -o size=64k,mode=0700 none /var/lib/gpuwright;"
        "cp -a /run/kept/. /var/lib/gpuwright/; head -c 1M /dev/zero >/var/lib/gpuwright/full"
    )
    try:
        status, said = node.run(REFUSES)
        assert status != 0
        assert "the lock-out guard could not be armed" in said and "Nothing was changed" in said
        assert node.content() == KEPT
        assert not node.leftovers()
        assert node.may_log_in()
    finally:
        node.console("umount /var/lib/gpuwright; rm -r /run/kept")


def test_the_disk_fills_up_while_the_guard_is_armed(node):
    """The old files are kept where they belong, so that putting them back needs no space."""
    mounted = "/etc/ssh/sshd_config.d"
    node.console(
        f"mkdir -p /run/kept; cp -a {mounted}/. /run/kept/; mount -t tmpfs -o size=64k none {mounted}; cp -a /run/kept/. {mounted}/"
    )
    try:
        status, said = node.run(REFUSES, apply=f"{RELOAD}; head -c 1M /dev/zero >{mounted}/full; true")
        assert status != 0, said
        # What the new file took is free again; nothing else is.
        assert int(node.console(f"df --output=avail -k {mounted} | tail -n 1")) <= 4
        node.is_old(within=1)
    finally:
        node.console(
            f"cp -a {DROP_IN} /run/kept/; umount {mounted}; cp -a /run/kept/. {mounted}/; rm -r /run/kept; {RELOAD}"
        )


def test_two_runs_meet(node):
    first = node.start("LogLevel DEBUG\n", apply=f"{SLOW}; {RELOAD}", seconds=20)
    node.wait_for("ls /run/point 2>/dev/null")
    status, said = node.run("LogLevel QUIET\n", seconds=20)
    assert status != 0
    assert "another run is changing who may reach this machine" in said and "Nothing was changed" in said
    status, said = first.end()
    assert status == 0, said
    assert node.content() == "LogLevel DEBUG\n"
    assert not node.leftovers()


def test_a_step_never_outlives_the_guard(node):
    """The machine sleeps through the guard's time in the middle of a step; what is left of the step must not come after."""
    status, said = node.run(REFUSES, seconds=4, validate=("sleep 30",))
    assert status != 0, said
    node.is_old(within=15)
    time.sleep(5)
    node.is_old(within=1)
