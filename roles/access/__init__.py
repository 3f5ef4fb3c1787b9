"""Who may log in and become root: accounts, keys, sudo and sshd, changed under the lock-out guard."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pyinfra import logger
from pyinfra.api import Host, OperationError, deploy
from pyinfra.context import ctx_host

from gpuwright import connect, guard, ownership
from gpuwright.atomic import File, Validate, files
from gpuwright.ownership import Owned
from gpuwright.packages import installed
from gpuwright.render import static, template
from gpuwright.spec.base import Profile
from roles.access import keys, operations, sshd
from roles.access.facts import SSH, Ssh, checked, ssh
from roles.access.spec import AccessSpec

ROLE = "access"
CHECK = "/usr/local/lib/gpuwright/access-sshd-check"
AUDIT_SCRIPT = "/usr/local/lib/gpuwright/audit-snapshot"
OWN_KEY = "/usr/local/lib/gpuwright/access-own-key"
SUDOERS = "/etc/sudoers.d/zz-gpuwright"

# sshd runs on its own, or is started by its socket at the first connection (Ubuntu since 22.10). Port and addresses are
# the site's and stay as they are, so the socket never has to be told anything. But an sshd that got its socket from
# systemd loses it over a reload ("Cannot bind any address", seen with OpenSSH 10.0): there it is restarted. Sessions
# outlive both (KillMode=process).
_RELOAD = """\
if systemctl is-active -q ssh.socket; then
  systemctl try-restart ssh.service || exit 1
elif systemctl is-active -q ssh.service; then
  systemctl reload ssh.service || exit 1
  # The signal is on its way: the old sshd must not be the one that answers the proof.
  sleep 1
else
  systemctl start ssh.service || exit 1
fi
"""
_BACK = """\
systemctl reset-failed ssh.service ssh.socket 2>/dev/null
if systemctl is-enabled -q ssh.socket 2>/dev/null; then
  systemctl start ssh.socket
  systemctl try-restart ssh.service
else
  systemctl reload-or-restart ssh.service
fi
"""


@deploy("Access")
def access(spec: AccessSpec, profile: Profile, audit_script: bytes, guarded: int) -> None:
    """Accounts, keys, sudo and sshd; what could lock anybody out stays only if a new connection proves that it does not.

    Accounts that the node file no longer names are locked after that, but for the one that the run is logged in as.

    + spec: the role's settings
    + profile: how far the node is hardened
    + audit_script: what the audit asks as root, as one script
    + guarded: seconds that a new connection has to prove the change

    Raises OperationError before anything changes for a node that cannot be made so.
    """
    host = ctx_host.get()
    seen = ssh(host)
    refuse(host.name, seen)
    refuse_auditors(host.name, spec, seen)
    for note in checked(host).notes:
        logger.warning(f"{host.print_prefix}{note}")

    people = [user for user in spec.users if user != "root"]
    weak, _ = host_keys(seen, profile)
    called = scripts(spec, audit_script)
    decisive = wanted(spec, profile, seen)
    recorded = [thing for thing in ownership.recorded_of(host, ROLE) if thing.kind != "account"]
    claims = [file.owned for file in (*called, *decisive)]
    gone = [thing for thing in recorded if thing not in claims]
    for sentence in (*seen.overruled, *notes(spec, seen)):
        logger.warning(f"{host.print_prefix}{sentence}")

    installed(name="Install sudo", packages=["sudo"])
    operations.accounts(name=f"Have accounts for {', '.join(people) or 'nobody but root'}", users=people)
    operations.ed25519_host_key(name="Have an ed25519 host key")
    files(name="Write the scripts that checks and audits call", role=ROLE, files=called)
    guard.change(
        name="Change who may log in and become root" + (f"; take away {', '.join(map(str, gone))}" if gone else ""),
        role=ROLE,
        files=decisive,
        # What asks every account leaves the guard most of its time, half of which is for the proof.
        validate=[
            Validate(f"visudo -cqf .{SUDOERS}"),
            Validate(f"{CHECK} . {min(15, guarded // 4)}"),
            Validate(f"{OWN_KEY} ."),
        ],
        remove=gone,
        undo=guard.Undo(paths=tuple(path for key in weak for path in (key.path, f"{key.path}.pub")), after=_BACK),
        apply=apply(spec, weak),
        stale=lambda now: reasons(now.read(SSH), profile),
        seconds=guarded,
    )
    operations.effective(name="Ask sshd what it would do for every login account")
    # Not guarded: a locked account cannot prove anything any more. The run's own stays, whatever let it in.
    own = spared(host, [thing for thing in ownership.recorded_of(host, ROLE) if thing.name not in people])
    ownership.retire(ROLE, keep=[*claims, *recorded, *own, *(Owned("account", user) for user in people)])


@deploy("Access")
def access_retired(guarded: int) -> None:
    """The role is gone from the node file: what it put there goes, unless this run could not come back without it.

    + guarded: seconds that a new connection has to prove that it can
    """
    host = ctx_host.get()
    things = ownership.recorded_of(host, ROLE)
    if not things:
        return
    files = [thing for thing in things if thing.kind != "account"]
    own = spared(host, things)
    accounts = [thing for thing in things if thing.kind == "account" and thing not in own]
    if files:
        guard.retire(
            name=f"Remove from {host.name} what role {ROLE} put there: {', '.join(map(str, files))}",
            role=ROLE,
            things=files,
            undo=guard.Undo(after=_BACK),
            apply=_RELOAD,
            seconds=guarded,
        )
    if accounts:
        ownership.retire(ROLE, keep=[thing for thing in things if thing not in accounts])


def spared(host: Host, leaving: Sequence[Owned]) -> list[Owned]:
    """Of the accounts that are to be locked: the one that this run is logged in as, which says so."""
    own = connect.account(host)
    found = [thing for thing in leaving if thing.kind == "account" and thing.name == own]
    if found:
        logger.warning(
            f"{host.print_prefix}account {own} is not locked, because this run is logged in as it; deploy once as another"
        )
    if own is None and any(thing.kind == "account" for thing in leaving):
        raise OperationError(
            f"{host.name}: accounts are to be locked, and nothing says which one this run is logged in as; name it (ssh_user)"
        )
    return found


def refuse(name: str, seen: Ssh) -> None:
    """Raise OperationError, in one sentence, for a node that this role cannot work on."""
    if not seen.present:
        raise OperationError(f"{name}: there is no OpenSSH server (/usr/sbin/sshd); install openssh-server first.")
    if not seen.writable:
        raise OperationError(
            f"{name}: /etc is read-only, so who may log in cannot be changed; make it writable "
            "(mount -o remount,rw /), or leave role access out of the node file. Nothing was changed."
        )


def refuse_auditors(name: str, spec: AccessSpec, seen: Ssh) -> None:
    """Raise OperationError, in one sentence, for an audit account that a group makes root: it is there to look only."""
    for account in seen.logins:
        groups = (*account.root_by, *account.sudo_by)
        if account.name in spec.users and spec.users[account.name].sudo == "audit" and groups:
            out = "; ".join(f"gpasswd --delete {account.name} {group}" for group in groups)
            raise OperationError(
                f"{name}: {account.name} has 'sudo: audit' and is in group {' and '.join(groups)}, which makes it root; take it out "
                f"({out}), or name another account. Nothing was changed."
            )


def notes(spec: AccessSpec, seen: Ssh) -> list[str]:
    """What accounts that were there before can do and the node file does not say, one sentence each; nothing of it is changed."""
    named = {*spec.password_users, *spec.console_passwords}
    found = []
    for account in seen.logins:
        if account.password == "usable" and account.name not in named:
            found.append(
                f"{account.name} has a password, which console and su take: usermod --password '*' {account.name}, or name it in "
                "access.console_passwords with a reason"
            )
        if account.root_by and account.name != "root":
            groups = " and ".join(account.root_by)
            found.append(
                f"{account.name} is in group {groups}, which is root by another name: gpasswd --delete {account.name} GROUP"
            )
        may = spec.users[account.name].sudo if account.name in spec.users else "none"
        if account.sudo_by and account.name != "root" and may != "all":
            groups = " and ".join(account.sudo_by)
            found.append(
                f"{account.name} is in group {groups}, so sudo makes it root, and the node file does not say so: "
                f"gpasswd --delete {account.name} GROUP, or give it 'sudo: all'"
            )
    return found


def host_keys(seen: Ssh, profile: Profile) -> tuple[list[sshd.HostKey], list[sshd.HostKey]]:
    """Those that are too weak for the profile, and those to offer; an ed25519 key is among these, if need be a new one."""
    weak = [key for key in seen.host_keys if sshd.is_weak(key, profile, keys.SMALLEST_RSA)]
    kept = [key for key in seen.host_keys if key not in weak]
    if not any(key.path == operations.ED25519 for key in kept):
        kept.append(sshd.HostKey(operations.ED25519, "ED25519", 256))
    return weak, sorted(kept, key=lambda key: (key.type != "ED25519", key.path))


def scripts(spec: AccessSpec, audit_script: bytes) -> list[File]:
    """What nobody is locked out by: the checks, and what the audit asks as root."""
    checks = [File(path, static(f"access{path}"), "0755") for path in (CHECK, OWN_KEY)]
    if sshd.auditors(spec):
        return [*checks, File(AUDIT_SCRIPT, audit_script, "0755")]
    return checks


def wanted(spec: AccessSpec, profile: Profile, seen: Ssh) -> list[File]:
    """The files that decide who may log in. Raises OperationError for an OpenSSH that has nothing of what a profile allows."""
    _, kept = host_keys(seen, profile)
    try:
        drop_in = sshd.drop_in(spec, profile, seen.offered, kept)
        expected = sshd.expected(spec, profile, seen.offered, kept)
    except ValueError as error:
        raise OperationError(f"{error}; choose another profile, or upgrade OpenSSH") from None
    sudoers = template(
        f"access{SUDOERS}.j2",
        everything=[name for name, user in spec.users.items() if user.sudo == "all" and name != "root"],
        audit=sshd.auditors(spec),
        script=AUDIT_SCRIPT,
    )
    chosen = [
        File(sshd.DROP_IN, drop_in, "0600"),
        File(sshd.EXPECTED, "".join(f"{' '.join(line)}\n" for line in expected).encode()),
        File(SUDOERS, sudoers, "0440"),
        # sshd reads it as the account itself, and only where nobody else can write it.
        *(File(f"{sshd.KEYS}/{name}", authorized(user.keys)) for name, user in spec.users.items()),
    ]
    if spec.banner is not None:
        chosen.append(File(sshd.BANNER, f"{spec.banner.rstrip()}\n".encode()))
    return chosen


def authorized(sources: Sequence[str]) -> bytes:
    """One account's whole authorized_keys."""
    lines = "".join(f"{key.line}\n" for key in keys.authorized(tuple(sources)))
    head = "# Owned by gpuwright, role access. Changes here are overwritten; edit the node file.\n"
    return f"{head}{lines}".encode()


def apply(spec: AccessSpec, weak: Sequence[sshd.HostKey]) -> str:
    """sh that makes the files count. A deploy user is shown to be one before anybody depends on it."""
    steps = [f"rm -f {shlex.quote(key.path)} {shlex.quote(f'{key.path}.pub')} || exit 1" for key in weak]
    for name, user in spec.users.items():
        if user.sudo == "all" and name != "root":
            fault = shlex.quote(f"gpuwright: {name} cannot become root without a password; see: sudo -l -U {name}")
            steps.append(f"runuser -u {name} -- sudo -n true || {{ echo {fault} >&2; exit 1; }}")
    return "\n".join([*steps, _RELOAD])


def reasons(seen: Ssh, profile: Profile) -> list[str]:
    """Why what runs is not what the files say."""
    weak, _ = host_keys(seen, profile)
    found = [f"{key.path} is too weak" for key in weak]
    if seen.stale:
        found.append("sshd has not read its files since they changed")
    return found
