"""The one reboot, with a machine and a clock that are stand-ins: what is yielded, what is waited for, what is refused."""

from __future__ import annotations

import itertools
import types

import pytest
from answers import BOOT, boot_answer, snapshot, system
from asked import words
from pyinfra.api import FunctionCommand, StringCommand

from gpuwright.boot import Change, Wishes
from roles import nvidia, pcie
from roles.kernel import barrier, operations
from roles.kernel.barrier import _judge, _refuse_after_failure, _settle, _wait_for_boot, _wait_for_units, reboot

ASKED = words("iommu=pt")
RIGHT = BOOT["line"].replace("\n", " iommu=pt\n")


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Machine:
    """Answers with each boot id of `boots` in turn, the last for ever; None is no answer."""

    name, print_prefix = "gpu-1", "[gpu-1] "

    def __init__(self, *boots):
        self.boots = list(boots)
        self.connected = True
        self.said, self.noops = [], []
        self.connector = types.SimpleNamespace()
        self.connector_data = {}

    def noop(self, description):
        self.noops.append(description)

    def log_styled(self, text, **_):
        self.said.append(text)

    def disconnect(self):
        self.connected = False

    def connect(self, show_errors):
        assert show_errors is False
        self.connected = self.boots[0] is not None
        if not self.connected and len(self.boots) > 1:
            self.boots.pop(0)

    def run_shell_command(self, command, print_output, _timeout):
        assert command == "cat /proc/sys/kernel/random/boot_id"
        answer = self.boots.pop(0) if len(self.boots) > 1 else self.boots[0]
        return answer is not None, types.SimpleNamespace(stdout=answer)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(barrier, "time", clock)
    monkeypatch.setattr(barrier, "clear_askpass_cache", lambda host: None)
    monkeypatch.setattr(barrier, "report", lambda host, reasons: None)
    monkeypatch.setattr(barrier, "_failed", [])
    return clock


def test_it_waits_for_another_boot_over_another_connection(clock):
    machine = Machine("before", "before", None, None, "after")
    assert _wait_for_boot(None, machine, "before", 600)
    assert clock.now < 30


def test_progress_is_said_at_least_every_15_seconds(clock, monkeypatch):
    said = []
    monkeypatch.setattr(barrier, "logger", types.SimpleNamespace(info=lambda text: said.append((clock.now, text))))
    assert _wait_for_boot(None, Machine(*["before"] * 10, *[None] * 30, "after"), "before", 600)
    times = [0.0, *(when for when, _ in said)]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 18
    assert "still shutting down" in said[0][1] and "no answer yet" in said[-2][1]
    assert said[-1][1].startswith("[gpu-1] back after")


def test_one_that_does_not_come_back_stops_the_others(clock):
    machine = Machine(None)
    assert not _wait_for_boot(None, machine, "before", 60)
    assert machine.said == ["did not come back within 60 s (kernel.reboot_timeout); look at its console"]
    other = Machine("x")
    assert not _refuse_after_failure(None, other)
    assert other.said[0].startswith("not rebooted: gpu-1 did not come back within 60 s of its reboot in this run")


def test_the_machine_that_the_run_is_on_is_not_rebooted(clock):
    machine = Machine("x")
    machine.connector = type("LocalConnector", (), {})()
    assert not _refuse_after_failure(None, machine)
    assert "this run itself is on this machine" in machine.said[0]


def seen(monkeypatch, **said):
    answers = snapshot({"system": system(), "boot": boot_answer(**said)})
    monkeypatch.setattr(barrier.snapshot, "read", lambda host: answers)
    monkeypatch.setattr(barrier.snapshot, "forget", lambda host: None)


def test_a_machine_that_did_not_become_what_it_should_fails_and_stops_the_others(clock, monkeypatch):
    machine = Machine("x")
    seen(monkeypatch)
    assert not _judge(None, machine, ASKED)
    assert machine.said == ["rebooted, and still: the kernel runs without iommu=pt (pcie: a reason)"]
    assert not _refuse_after_failure(None, Machine("y"))


def test_one_that_did_is_well(clock, monkeypatch):
    seen(monkeypatch, line=RIGHT)
    assert _judge(None, Machine("x"), ASKED)


def test_what_the_kernel_did_not_know_is_said_after_the_reboot(clock, monkeypatch):
    warned, noted = [], []
    log = types.SimpleNamespace(warning=warned.append, info=noted.append)
    monkeypatch.setattr(operations, "logger", log)
    said = 'Command line: x\nUnknown kernel command line parameters "splash iommu=pt", will be passed to user space.\n'
    seen(monkeypatch, line=RIGHT.replace("quiet", "splash"), said=said)
    assert _judge(None, Machine("x"), ASKED)
    assert warned == ["[gpu-1] kernel: this kernel does not know iommu=pt; it has no effect"]
    assert len(noted) == 1 and "does not know splash of the boot loader's own settings" in noted[0]


def steps(monkeypatch, **said):
    machine = Machine("aa-bb")
    seen(monkeypatch, **said)
    monkeypatch.setattr(barrier, "ctx_host", types.SimpleNamespace(get=lambda: machine))
    return machine, list(reboot._inner(wanted=ASKED, timeout=600))


def test_nothing_needs_it(clock, monkeypatch):
    machine, found = steps(monkeypatch, line=RIGHT)
    assert (found, machine.noops) == ([], ["nothing needs a reboot"])


def test_drain_comes_before_the_reboot_and_the_record_before_both(clock, monkeypatch):
    _, found = steps(monkeypatch)
    shell = [
        str(command.get_raw_value()) if isinstance(command, StringCommand) else command.function.__name__
        for command in found
    ]
    order = [
        "_refuse_after_failure",
        "boot_id",
        "node-drain",
        "systemctl reboot",
        "_wait_for_boot",
        "_wait_for_units",
        "_judge",
        "rm -f",
    ]
    assert len(shell) == len(order)
    assert all(part in step for part, step in zip(order, shell, strict=True)), shell
    assert all(isinstance(command, StringCommand | FunctionCommand) for command in found)


def test_the_same_reasons_do_not_reboot_it_twice(clock, monkeypatch):
    _, [refusal] = steps(monkeypatch, attempt="before\nthe kernel runs without iommu=pt (pcie: a reason)\n")
    machine = Machine("x")
    assert not refusal.function(None, machine, *refusal.args)
    assert "not rebooted again: the last reboot did not bring it" in machine.said[0]


def test_a_record_of_a_reboot_that_helped_is_cleared(clock, monkeypatch):
    _, [command] = steps(monkeypatch, line=RIGHT, attempt="before\nthe kernel runs without iommu=pt\n")
    assert str(command.get_raw_value()) == "rm -f /var/lib/gpuwright/kernel/reboot"


def test_what_is_exchanged_is_exchanged_between_drain_and_reboot_and_settled_after(clock, monkeypatch):
    machine = Machine("aa-bb")
    seen(monkeypatch, line=RIGHT)
    monkeypatch.setattr(barrier, "ctx_host", types.SimpleNamespace(get=lambda: machine))
    waits = Change("nvidia", "nvidia.version", "the driver", lambda seen: ("another driver is wanted",), "/change")
    rests = Change("other", "a reason", "the rest", lambda seen: (), "/rest")
    found = list(reboot._inner(wanted=Wishes(words=ASKED.words, changes=(waits, rests)), timeout=600))
    shell = [
        str(command.get_raw_value()) if isinstance(command, StringCommand) else command.function.__name__
        for command in found
    ]
    order = [
        "_refuse",
        "/rest check",
        "boot_id",
        "node-drain",
        "/change apply",
        "systemctl reboot",
        "_wait_for_boot",
        "_settle",
        "_wait_for_units",
        "_judge",
        "rm",
    ]
    assert len(shell) == len(order), shell
    assert all(part in step for part, step in zip(order, shell, strict=True)), shell


class Settling(Machine):
    """Answers the question for the outcome with each of `answers` in turn; an exception is a connection that dies."""

    def __init__(self, *answers):
        super().__init__("x")
        self.answers = list(answers)

    def run_shell_command(self, command, print_output, _timeout):
        assert command == "/change outcome"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return True, types.SimpleNamespace(stdout=answer)


CHANGE = Change("nvidia", "nvidia.version", "the driver", lambda seen: (), "/change")


def test_a_change_that_the_node_verified_is_good(clock):
    assert _settle(None, Settling("pending x", OSError("gone"), "pending x", "good driver 2 is verified"), CHANGE, 600)
    assert not barrier._failed


def test_a_change_that_was_taken_back_fails_and_stops_the_others(clock):
    machine = Settling("pending x", "failed driver 2 did not verify: a reason; 1 was put back and is verified")
    assert not _settle(None, machine, CHANGE, 600)
    assert machine.said == ["driver 2 did not verify: a reason; 1 was put back and is verified"]
    assert not _refuse_after_failure(None, Machine("y"))


def test_a_change_that_nobody_hears_of_again_fails_at_the_limit(clock):
    machine = Settling(OSError("gone"))
    assert not _settle(None, machine, CHANGE, 60)
    assert machine.said == ["the driver was not verified within 60 s: no answer"]
    assert clock.now < 90


class Starting(Machine):
    """Answers the question for what still starts with each of `answers` in turn; an exception is a connection that dies."""

    def __init__(self, *answers):
        super().__init__("x")
        self.answers = list(answers)

    def run_shell_command(self, command, print_output, _timeout):
        assert "/run/udev/queue" in command and "systemctl list-jobs --no-legend" in command
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return True, types.SimpleNamespace(stdout=answer)


@pytest.fixture
def heard(monkeypatch):
    """What is logged."""
    heard = []
    monkeypatch.setattr(barrier, "logger", types.SimpleNamespace(info=heard.append, warning=heard.append))
    return heard


def test_what_is_read_back_is_waited_for_when_ssh_answers_first(clock, heard):
    late = "  91 gpuwright-acs.service start running\n 102 docker.service        start waiting\n"
    assert _wait_for_units(None, Starting(f"0 udev\n{late}", *[late] * 12, OSError("gone"), late, ""), 600)
    assert 25 < clock.now < 40
    assert heard[0] == "[gpu-1] starting for 0 of at most 600 s: udev, gpuwright-acs.service, docker.service"
    assert heard[1].endswith(": gpuwright-acs.service, docker.service")
    assert len(heard) == 2, "a line every 15 seconds"


def test_nothing_is_said_of_a_machine_that_has_started(clock, heard):
    assert _wait_for_units(None, Starting(""), 600)
    assert (clock.now, heard) == (0.0, [])


@pytest.mark.parametrize("answer", ["91 gpuwright-acs.service start running\n", OSError("gone")])
def test_at_the_limit_the_run_goes_on_to_what_it_reads_back_and_says_so(clock, heard, answer):
    assert _wait_for_units(None, Starting(answer), 60)
    assert 60 < clock.now < 90
    unit = "no answer" if isinstance(answer, Exception) else "gpuwright-acs.service"
    assert heard[-1] == (
        f"[gpu-1] still starting after 60 s (kernel.reboot_timeout): {unit}; this run goes on and reads back what there is; "
        "look with: systemctl list-jobs"
    )


def test_engines_and_weights_are_not_waited_for():
    """They are part of systemd's start-up, and take as long as a model is large."""
    ours = {pcie.UNIT, nvidia.SETTINGS_UNIT, nvidia.SETTLE_UNIT}
    assert {unit for unit in barrier.BROUGHT_BY if unit.startswith("gpuwright-")} == ours
