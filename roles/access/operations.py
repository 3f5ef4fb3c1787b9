"""Accounts and host keys: what pyinfra has no operation for that is done as a set."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping, Sequence

from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot
from gpuwright.ownership import RECORD
from roles.access.facts import Account, checked, ssh

ED25519 = "/etc/ssh/ssh_host_ed25519_key"
_NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")


def wanting(users: Sequence[str], there: Mapping[str, Account]) -> tuple[list[str], list[str]]:
    """Of `users`: those that have no account, and those whose account cannot be logged in to."""
    missing = [user for user in users if user not in there]
    closed = [
        user
        for user in users
        if user in there and (there[user].disabled or there[user].shell.rpartition("/")[2] in _NO_LOGIN)
    ]
    return missing, closed


@operation()
def accounts(users: Sequence[str]) -> Generator[StringCommand, None, None]:
    """Have an account for each of `users`; one that was there stays as it is, one that was disabled is opened again.

    A new account has a group and a home of its own, which nobody else reads, and no password, and is recorded as ours.
    """
    host = ctx_host.get()
    missing, closed = wanting(users, ssh(host).accounts)
    if not missing and not closed:
        host.noop(f"{', '.join(users)}: have accounts")
        return
    steps = ["set -eu", "umask 077", f"mkdir -p {RECORD}"]
    for user in missing:
        # '*' is no password, and unlike '!' not a locked account, which sshd without PAM refuses.
        steps += [
            f"printf 'account\\t%s\\n' {shlex.quote(user)} >>{RECORD}/access",
            # Debian 12's own default lets everybody read a home (its login.defs has no HOME_MODE).
            "useradd --create-home --key HOME_MODE=0700 --user-group --shell /bin/bash --password '*' "
            + shlex.quote(user),
        ]
    for user in closed:
        steps.append(f"usermod --expiredate '' --shell /bin/bash --password '*' {shlex.quote(user)}")
        steps.append(f"printf 'account\\t%s\\n' {shlex.quote(user)} >>{RECORD}/access")
    steps.append(f"sort -u -o {RECORD}/access {RECORD}/access")
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote("\n".join(steps)))


@operation()
def ed25519_host_key() -> Generator[StringCommand, None, None]:
    """Have a host key of the kind that every profile keeps; others are not touched here."""
    host = ctx_host.get()
    if any(key.path == ED25519 for key in ssh(host).host_keys):
        host.noop(f"{ED25519} is there")
        return
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote(f"ssh-keygen -q -t ed25519 -N '' -f {ED25519}"))


@operation()
def effective() -> Generator[StringCommand, None, None]:
    """Fail when sshd would do something else than it shall, although our files are right: a file of somebody else speaks."""
    host = ctx_host.get()
    if not checked(host).faults:
        host.noop("sshd does what it shall for every account")
        return
    yield StringCommand(
        "sh",
        "-c",
        shlex.quote("/usr/local/lib/gpuwright/access-sshd-check | sed '/^note: /d; s/^/gpuwright: /' >&2; exit 1"),
    )
