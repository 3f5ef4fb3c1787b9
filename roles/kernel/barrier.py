"""The one reboot: what it is for, what is exchanged before it, and what the node became by it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator, Sequence
from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.connectors.util import clear_askpass_cache
from pyinfra.context import ctx_host

from gpuwright import boot, snapshot
from gpuwright.boot import Boot, Wishes
from gpuwright.deploy import report
from gpuwright.refusal import refusal, say_no
from gpuwright.snapshot import CouldNotLook
from gpuwright.watched import Watched
from roles.kernel import operations
from roles.kernel.files import SCRIPTS

# Once a node has not come back as it should, no further node of this run is rebooted. One process is one run.
_failed: list[str] = []

BROUGHT_BY = (
    "sysinit.target",  # sysctl values, modules, devices
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "gpuwright-driver-settle.service",
    "gpuwright-gpu-settings.service",
    "gpuwright-acs.service",
    "docker.service",
)
"""What brings that which a run reads back after a reboot. Not all of systemd's start-up: an engine that loads its model and weights
that are fetched belong to it, too, and `systemctl is-system-running` says "starting" for as long as they take."""

# udev first: what it starts is a job by the time its queue is empty. The file is there as long as it is not (systemd,
# udev_queue_is_empty).
_STARTING = f"""
if [ -e /run/udev/queue ]; then echo 0 udev; fi
systemctl list-jobs --no-legend {" ".join(BROUGHT_BY)}
"""

_RECORD = rf"""
set -eu
mkdir -p {boot.STATE}
{{ cat /proc/sys/kernel/random/boot_id; cat; }} >{boot.STATE}/reboot.new
sync {boot.STATE}/reboot.new
mv -fT {boot.STATE}/reboot.new {boot.STATE}/reboot
"""


def not_again(seen: Boot, reasons: Sequence[str]) -> bool:
    """Whether a reboot for these very reasons has been tried and changed nothing."""
    if not seen.attempt:
        return False
    before, *tried = seen.attempt
    return before != seen.boot_id and set(reasons) <= set(tried)


def _refuse_after_failure(state: Any, host: Any) -> bool:
    if _failed:
        return say_no(state, host, f"not rebooted: {_failed[0]} in this run; put that right, then run the deploy again")
    if type(host.connector).__name__ == "LocalConnector":
        return say_no(
            state, host, "not rebooted: this run itself is on this machine; reboot it, then run the deploy again"
        )
    return True


def _boot_id(host: Any) -> str | None:
    """The present boot's id, over the connection there is; None where nobody answers."""
    try:
        status, output = host.run_shell_command("cat /proc/sys/kernel/random/boot_id", print_output=False, _timeout=15)
    except Exception:  # whatever a dying connection raises
        return None
    return output.stdout.strip() if status else None


def _wait_for_boot(state: Any, host: Any, before: str, timeout: int) -> bool:
    """Reconnect until another boot answers; a line every 15 seconds, or when an attempt to connect ends after those."""
    began = time.monotonic()
    said = 0.0
    time.sleep(3)
    while True:
        # Nothing may be asked over the old connection any more, not even to tidy up.
        clear_askpass_cache(host)
        host.disconnect()
        host.connect(show_errors=False)
        answer = _boot_id(host) if host.connected else None
        waited = time.monotonic() - began
        if answer is not None and answer != before:
            logger.info(f"{host.print_prefix}back after {waited:.0f} s")
            return True
        if waited > timeout:
            _failed.append(f"{host.name} did not come back within {timeout} s of its reboot")
            return say_no(
                state, host, f"did not come back within {timeout} s (kernel.reboot_timeout); look at its console"
            )
        if waited - said >= 15:
            said = waited
            doing = "still shutting down" if answer == before else "no answer yet"
            logger.info(f"{host.print_prefix}rebooting for {waited:.0f} of at most {timeout} s: {doing}")
        time.sleep(2)


def _settle(state: Any, host: Any, change: boot.Change, timeout: int) -> bool:
    """Wait until the node has verified what was exchanged, or gone back with a second reboot; say which."""
    began = time.monotonic()
    said = 0.0
    while True:
        word, sentence = "pending", "no answer"
        try:
            status, output = host.run_shell_command(f"{change.script} outcome", print_output=False, _timeout=30)
            if status:
                word, _, sentence = output.stdout.strip().partition(" ")
        except Exception:  # whatever a dying connection raises
            status = False
        if word == "good":
            logger.info(f"{host.print_prefix}{sentence}")
            return True
        waited = time.monotonic() - began
        if word == "failed" or waited > timeout:
            sentence = (
                sentence if word == "failed" else f"{change.what} was not verified within {timeout} s: {sentence}"
            )
            _failed.append(f"the change of {change.what} failed on {host.name}")
            return say_no(state, host, sentence)
        if waited - said >= 15:
            said = waited
            logger.info(f"{host.print_prefix}{change.what}: verifying for {waited:.0f} s: {sentence}")
        if not status:
            _connect_anew(host)
        time.sleep(2)


def _connect_anew(host: Any) -> None:
    clear_askpass_cache(host)
    host.disconnect()
    host.connect(show_errors=False)


def _wait_for_units(state: Any, host: Any, timeout: int) -> bool:
    """ssh can answer before a unit has done its work: wait until none that is looked at has a job left. At the limit the run goes
    on, and what is read back tells what is wrong."""
    began = time.monotonic()
    due = 0.0
    while True:
        left = ["no answer"]
        try:
            status, output = host.run_shell_command(_STARTING, print_output=False, _timeout=30)
            if status:
                # JOB UNIT TYPE STATE
                left = list(dict.fromkeys(line.split()[1] for line in output.stdout.splitlines() if line.strip()))
        except Exception:  # whatever a dying connection raises
            status = False
        if not left:
            return True
        waited = time.monotonic() - began
        if waited > timeout:
            logger.warning(
                f"{host.print_prefix}still starting after {timeout} s (kernel.reboot_timeout): {', '.join(left)}; this run goes on "
                "and reads back what there is; look with: systemctl list-jobs"
            )
            return True
        if waited >= due:
            due = waited + 15
            logger.info(f"{host.print_prefix}starting for {waited:.0f} of at most {timeout} s: {', '.join(left)}")
        if not status:
            _connect_anew(host)
        time.sleep(2)


def _judge(state: Any, host: Any, wanted: Wishes) -> bool:
    """After the reboot: the machine became what was asked, or the run ends here."""
    snapshot.forget(host)
    try:
        left = boot.pending(snapshot.read(host), wanted)
    except CouldNotLook as error:
        left = (f"what it became cannot be seen: {error}",)
    report(host, left)
    if left:
        _failed.append(f"{host.name} did not become what it should by its reboot")
        return say_no(state, host, f"rebooted, and still: {'; '.join(left)}")
    operations.report_words(host, snapshot.read(host).read(boot.BOOT), wanted)
    return True


@operation()
def reboot(wanted: Wishes, timeout: int) -> Generator[PyinfraCommand, None, None]:
    """Drain the engines, reboot, wait for the new boot over a new connection and for what it starts, and compare what came up with
    what was asked.

    + wanted: what all roles ask for
    + timeout: seconds until the node must answer again, and until it must have started what is looked at

    It happens for what only a reboot brings (gpuwright.boot.pending), never twice for the same reasons, and on no further
    node once one did not come back as it should.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    reasons = boot.pending(seen, wanted)
    now = seen.read(boot.BOOT)
    if not reasons:
        if now.attempt:
            yield StringCommand(f"rm -f {boot.STATE}/reboot")
        else:
            host.noop("nothing needs a reboot")
        return
    changing = [change for change in wanted.changes if change.pending(seen)]
    # What is exchanged has a record of its own of what failed; a power cut is no failure of it.
    if not changing and not_again(now, reasons):
        yield refusal(
            f"not rebooted again: the last reboot did not bring it ({'; '.join(reasons)}); "
            f"to try once more: rm {boot.STATE}/reboot"
        )
        return
    yield FunctionCommand(_refuse_after_failure, (), {})
    snapshot.forget(host)
    # A kernel without its drivers is no reason to stop what serves.
    for change in wanted.changes:
        if change not in changing:
            yield StringCommand(change.script, "check", shlex.quote(now.default))
    yield StringCommand("sh", "-c", shlex.quote(_RECORD), _stdin="".join(f"{reason}\n" for reason in reasons))
    yield Watched(f"{SCRIPTS}/node-drain", shlex.quote(now.default))
    for change in changing:
        yield Watched(change.script, "apply", shlex.quote(now.default))
    # Detached, so that the answer does not wait for the machine to go.
    yield StringCommand("( sleep 1; systemctl reboot ) </dev/null >/dev/null 2>&1 &")
    yield FunctionCommand(_wait_for_boot, (now.boot_id, timeout), {})
    for change in changing:
        yield FunctionCommand(_settle, (change, timeout), {})
    yield FunctionCommand(_wait_for_units, (timeout,), {})
    yield FunctionCommand(_judge, (wanted,), {})
    yield StringCommand(f"rm -f {boot.STATE}/reboot")
