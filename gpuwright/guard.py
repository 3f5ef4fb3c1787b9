"""The lock-out guard: a change of who may reach a node stands only if a new connection proves it (DESIGN section 4).

Before the change the old state is kept on the node and a timer there is armed that puts it back. The change is made; a
connection of its own (new TCP, new authentication, the run's own user and rights) then has to disarm it. So a run that
dies anywhere leaves either the armed guard or the final state, and a node that nobody reaches any more heals itself.

Role `base` installs the guard, because it outlives the roles that use it: taking one of them away is guarded, too.
"""

from __future__ import annotations

import base64
import getpass
import logging
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import gevent  # type: ignore[import-untyped]
from pyinfra import logger
from pyinfra.api import StringCommand, operation
from pyinfra.api.exceptions import ConnectError
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host

from gpuwright import atomic, ownership, sandbox, snapshot
from gpuwright.atomic import File, Validate
from gpuwright.ownership import RECORD, Owned
from gpuwright.render import static, template
from gpuwright.snapshot import Section, register

SECONDS = 120
"""How long a change may wait for its proof (DESIGN section 4: two minutes)."""

PROGRAM = "/usr/local/lib/gpuwright/guard"
UNIT = "gpuwright-guard.service"
_STATE = "/var/lib/gpuwright/guard"


def files() -> list[File]:
    """What the guard needs on a node."""
    return [
        File(PROGRAM, static(f"base{PROGRAM}"), "0755"),
        File(
            f"/etc/systemd/system/{UNIT}",
            template(f"base/etc/systemd/system/{UNIT}.j2", sandbox=sandbox.guard().lines()),
        ),
    ]


# --- what a node says of its guard ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """The guard while it is armed (`state` "armed"), or what it did: "fired.deadline", "fired.restart", "fired.asked"."""

    state: str
    role: str
    who: str
    seconds: int
    at: str  # UTC: when it was armed, or when it put the old state back

    @property
    def is_armed(self) -> bool:
        """Whether the old state may still come back."""
        return self.state == "armed"

    def __str__(self) -> str:
        if self.is_armed:
            return f"{self.who} is changing role {self.role}; its lock-out guard was armed at {self.at} for {self.seconds} s"
        why = {
            "fired.deadline": f"no new connection was confirmed within {self.seconds} s",
            "fired.restart": "the node went down before a new connection was confirmed",
            "fired.asked": "no new connection was possible",
        }.get(self.state, self.state)
        return f"the lock-out guard put the old state of role {self.role} back at {self.at}: {why} (run of {self.who})"


def _parse(text: str) -> tuple[Guard, ...]:
    guards = []
    for line in text.splitlines():
        head, _, about = line.partition("\t")
        state, at, first = head.split(" ", 2)
        words = dict(word.split("=", 1) for word in (first, *about.split("\t")) if word)
        guards.append(
            Guard(state, words["role"], words["who"], int(words["seconds"]), at.removeprefix("at=")),
        )
    return tuple(guards)


GUARDS = register(
    Section("guard", f"[ -x {PROGRAM} ] || exit 0\n{PROGRAM} status", _parse),
)


def seen(host: Any) -> tuple[Guard, ...]:
    """What the node's guard is doing or did. A node without one has nothing to say."""
    try:
        return snapshot.read(host).read(GUARDS)
    except snapshot.CouldNotLook:
        return ()


def announce(host: Any) -> None:
    """Say at the start of a run what the guard did since, or that another run is at it."""
    for guard in seen(host):
        logger.warning(f"{host.print_prefix}{guard}")


@operation()
def _forget_notes() -> Generator[StringCommand, None, None]:
    snapshot.forget(ctx_host.get())
    yield StringCommand("sh", "-c", shlex.quote(f"rm -rf {_STATE}/fired.*"))


def acknowledge() -> None:
    """Take the note away that this run has read out; an audit is red as long as it lies there."""
    host = ctx_host.get()
    for guard in seen(host):
        if not guard.is_armed:
            _forget_notes(name=f"Note that {guard}")


# --- the guarded change ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Undo:
    """How the old state is put back.

    `paths` are files: their content, mode and owner now, or that there is none. `keep` is sh run before the change and
    `after` sh run when the files are back, both in a private directory of the guard's own: what the one writes there
    (a table as it is loaded) the other reads. `after` does not run while the node boots: then files are all there is.
    """

    paths: tuple[str, ...] = ()
    keep: str = ""
    after: str = ""

    def lines(self) -> str:
        """What ``guard arm`` reads on standard input. Raises ValueError for a path that no line can hold."""
        for path in self.paths:
            if not path.startswith("/") or re.search(r"[\t\n]", path):
                raise ValueError(f"{path!r} is no absolute path the guard can keep")
        scripts = {"keep": self.keep, "after": self.after}
        return "".join(
            [
                *(f"path\t{path}\n" for path in dict.fromkeys(self.paths)),
                *(f"{name}\t{base64.b64encode(text.encode()).decode()}\n" for name, text in scripts.items() if text),
            ]
        )


class Guarded(StringCommand):
    """Arm, change step by step, prove by a new connection, disarm; or put the old state back and fail.

    A step is one remote command, and ends at the latest with the guard's time.
    """

    def __init__(self, role: str, steps: Sequence[StringCommand], undo: Undo, seconds: int = SECONDS) -> None:
        super().__init__(f"guarded change of role {role}:", *(bit for step in steps for bit in step.bits))
        self.role, self.steps, self.undo, self.seconds = role, tuple(steps), undo, seconds

    def execute(self, state: Any, host: Any, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        """Called by pyinfra; never in a dry run."""
        return _Attempt(self, state, host, dict(connector_arguments)).run()


# A connection that is cut by the change itself hangs instead of failing.
_ANSWER_SECONDS = 20.0
# After the guard's time a node has this long to be reachable again before the run gives up on it.
_GRACE_SECONDS = 45.0


class _Attempt:
    """One guarded change on one node."""

    def __init__(self, change: Guarded, state: Any, host: Any, arguments: dict[str, Any]) -> None:
        self.change, self.state, self.host, self.arguments = change, state, host, arguments
        self.id = secrets.token_hex(8)
        self.armed_at = 0.0

    def run(self) -> tuple[bool, CommandOutput]:
        snapshot.forget(self.host)
        try:
            done, said = self._arm()
            if not done:
                return False, said
            done, said = self._change()
            if not done:
                self._withdraw()
                return False, said
            return self._prove(), CommandOutput([])
        finally:
            snapshot.forget(self.host)

    def _arm(self) -> tuple[bool, CommandOutput]:
        who = re.sub(r"[\s=]+", "-", f"{getpass.getuser()}@{socket.gethostname()}:{os.getpid()}")
        command = StringCommand(
            PROGRAM, "arm", self.id, str(self.change.seconds), shlex.quote(self.change.role), shlex.quote(who)
        )
        done, said = self._here(command, limit=60.0, _stdin=self.change.undo.lines())
        self.armed_at = time.monotonic()
        if done:
            logger.info(
                f"{self.host.print_prefix}the lock-out guard is armed: without a new connection within "
                f"{self.change.seconds} s the old state of role {self.change.role} comes back"
            )
        return done, said

    def _change(self) -> tuple[bool, CommandOutput]:
        said = CommandOutput([])
        for step in self.change.steps:
            done, said = self._here(StringCommand(PROGRAM, "run", self.id, *step.bits), **step.connector_arguments)
            if not done:
                return False, said
            for line in said.stderr.splitlines():
                if line.startswith("note: "):
                    logger.info(f"{self.host.print_prefix}{line.removeprefix('note: ')}")
        return True, said

    def _withdraw(self) -> None:
        done, _ = self._here(StringCommand(PROGRAM, "withdraw", self.id), limit=self._left() + 5)
        if done:
            self._tell("the change failed, and the old state is back")
        else:
            self._wait_for_the_guard("the change failed")

    def _prove(self) -> bool:
        if not isinstance(self.host.connector, SSHConnector):
            # @local and its like: there is no connection that the change could have cut.
            return self._here(StringCommand(PROGRAM, "disarm", self.id))[0]
        reasons: list[str] = []
        pause = 0.5
        # paramiko prints a traceback for every connection that fails; what matters is said below.
        logging.getLogger("paramiko.transport").setLevel(logging.CRITICAL)
        # Half of the time is for trying, so that the other half is left to put things back in good order.
        while time.monotonic() < self.armed_at + self.change.seconds / 2:
            reason = self._disarm_anew()
            if not reason:
                return True
            # The first may be an sshd that is reloading, a later one its answer to those that it refused: all are told.
            if reason not in reasons:
                reasons.append(reason)
            gevent.sleep(pause)
            # Since OpenSSH 9.8 refused logins add up to minutes in which sshd talks to nobody (PerSourcePenalties).
            pause = min(2 * pause, 8.0)
        why = "; then: ".join(reasons[:3]) or "there was no time to try"
        self._tell(f"no new connection after the change of role {self.change.role}: {why}")
        done, _ = self._here(StringCommand(PROGRAM, "restore", "asked", self.id), limit=self._left() + 5)
        if done:
            self._tell("the old state is back; nothing of this change is left")
        else:
            self._wait_for_the_guard("this connection is cut, too")
        return False

    def _wait_for_the_guard(self, what: str) -> None:
        self._tell(f"{what}; the guard on the node puts the old state back by itself within {round(self._left())} s")
        gevent.sleep(self._left())
        reason = ""
        while time.monotonic() < self.armed_at + self.change.seconds + _GRACE_SECONDS:
            reason, said = self._anew(StringCommand(PROGRAM, "status"))
            if not reason and f"id={self.id}" not in "\n".join(
                line for line in said.splitlines() if line.startswith("armed ")
            ):
                self._tell("the guard put the old state back; the node is reachable again")
                return
            gevent.sleep(1)
        self._tell(
            f"the node is still not reachable ({reason or 'its guard is still armed'}) although the guard's time is up: "
            "look at its console, and there at: journalctl -u gpuwright-guard"
        )

    def _disarm_anew(self) -> str:
        """Empty when a new connection disarmed the guard, otherwise why not."""
        reason, _ = self._anew(StringCommand(PROGRAM, "disarm", self.id))
        return reason

    def _anew(self, command: StringCommand) -> tuple[str, str]:
        """Run a command through a connection of its own: why that failed, or empty; and what it said."""
        connector = type(self.host.connector)(self.state, self.host)
        try:
            with gevent.Timeout(_ANSWER_SECONDS):
                connector.connect()
                command, arguments = self._unprompted(command, {})
                done, said = connector.run_shell_command(command, **arguments)
        except ConnectError as error:
            return str(error), ""
        except gevent.Timeout:
            return f"no answer within {_ANSWER_SECONDS:.0f} s", ""
        except Exception as error:  # paramiko has many, and none of them may keep the old state away
            return f"{type(error).__name__}: {error}", ""
        finally:
            if connector.client is not None:
                connector.client.close()
        return ("" if done else said.stderr.strip() or "the command failed"), said.stdout

    def _left(self) -> float:
        """Seconds until the guard acts by itself."""
        return max(0.0, self.armed_at + self.change.seconds - time.monotonic())

    def _here(self, command: StringCommand, limit: float = 0.0, **arguments: Any) -> tuple[bool, CommandOutput]:
        """Run a command through the connection the run has."""
        # A step ends with the guard's time at the latest; what has not answered soon after is cut.
        limit = limit or self._left() + 5
        try:
            with gevent.Timeout(limit):
                command, arguments = self._unprompted(command, arguments)
                done, said = self.host.run_shell_command(command, **arguments)
                return done, said
        except gevent.Timeout:
            self._tell(f"no answer within {limit:.0f} s")
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
        return False, CommandOutput([])

    def _unprompted(self, command: StringCommand, more: dict[str, Any]) -> tuple[StringCommand, dict[str, Any]]:
        """The command with the run's own rights, but for this: where sudo asks for a password now, that is a failure.

        pyinfra would ask a person for it, and the guard's time would go by.
        """
        arguments = {**self.arguments, **more}
        known = arguments.get("_sudo_password") or self.host.connector_data.get("prompted_sudo_password")
        if not arguments.get("_sudo") or known:
            return command, arguments
        sudo = ["sudo", "-H", "-n", *(["-i"] if arguments.get("_use_sudo_login") else [])]
        sudo += ["-u", arguments["_sudo_user"]] if arguments.get("_sudo_user") else []
        fault = shlex.quote("gpuwright: this user cannot become root without a password any more")
        script = (
            f"{shlex.join(sudo)} true >/dev/null 2>&1 </dev/null || {{ echo {fault} >&2; exit 1; }}; "
            f"exec {shlex.join(sudo)} {command.get_raw_value()}"
        )
        without = {"_sudo": False, "_sudo_user": None, "_use_sudo_login": False, "_preserve_sudo_env": False}
        return _shell(script), {**arguments, **without}

    def _tell(self, sentence: str) -> None:
        logger.error(f"{self.host.print_prefix}lock-out guard: {sentence}")


# --- operations -----------------------------------------------------------------------------------------------------


def _shell(script: str) -> StringCommand:
    return StringCommand("sh", "-c", shlex.quote(script))


@operation()
def change(
    role: str,
    files: Sequence[File],
    undo: Undo,
    validate: Sequence[Validate] = (),
    claims: Sequence[Owned] = (),
    remove: Sequence[Owned] = (),
    apply: str = "",
    stale: Callable[[snapshot.Snapshot], Sequence[str]] | None = None,
    seconds: int = SECONDS,
) -> Generator[StringCommand, None, None]:
    """Write and remove files that decide who may reach the node, make them count, and keep that only if it is proven.

    + role: whose record the files go to
    + files: the whole set, as for `atomic.files`
    + undo: `keep`, `after` and further paths; every file that is written or removed, and the role's record, are
      among its paths without being named
    + validate: refusals, before anything is written
    + claims: further things recorded with the files
    + remove: what the role owned and no longer wants; files, units, tables
    + apply: sh that makes the files count (reload a service, load a table); runs when a file changed or `stale` says so
    + stale: says why what runs is not what the files say; it asks the running thing
    + seconds: the guard's time

    Nothing happens, and nothing is armed, when all is right already.
    """
    host = ctx_host.get()
    wrong, unrecorded = atomic.pending(host, files, claims)
    try:
        reasons = list(stale(snapshot.read(host))) if stale else []
    except snapshot.CouldNotLook:
        reasons = ["it could not be seen what runs"]
    if not (wrong or unrecorded or remove or reasons):
        host.noop(f"role {role}: {len(files)} files are right, and so is what runs")
        return
    steps = []
    if wrong or unrecorded:
        steps.append(atomic.write(role, files, wrong, validate, claims))
    if remove:
        steps.append(ownership.removal(role, remove))
    if apply:
        steps.append(_shell(apply))
    paths = (*(file.path for file in wrong), *ownership.paths(remove), f"{RECORD}/{role}", *undo.paths)
    yield Guarded(role, steps, Undo(paths, undo.keep, undo.after), seconds)


@operation()
def retire(
    role: str, things: Sequence[Owned], undo: Undo, apply: str = "", seconds: int = SECONDS
) -> Generator[StringCommand, None, None]:
    """Take away what `role` owned, guarded: without it the run must still be able to connect.

    + things: what is recorded for the role
    + undo: as for `change`
    + apply: sh that makes the removal count
    + seconds: the guard's time
    """
    steps = [ownership.removal(role, things), *([_shell(apply)] if apply else [])]
    yield Guarded(
        role, steps, Undo((*ownership.paths(things), f"{RECORD}/{role}", *undo.paths), undo.keep, undo.after), seconds
    )
