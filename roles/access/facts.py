"""What this role reads from a node: its OpenSSH, its host keys, who may log in, and what sshd runs with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pyinfra.api import OperationError

from gpuwright import snapshot
from gpuwright.snapshot import CouldNotLook, Section, register
from roles.access import accounts, sshd
from roles.access.sshd import QUERIES, HostKey

T = TypeVar("T")


@dataclass(frozen=True)
class Account:
    """An account: its number, its shell, and whether it is disabled."""

    uid: int
    shell: str
    disabled: bool


@dataclass(frozen=True)
class Ssh:
    """OpenSSH on a node."""

    writable: bool  # whether /etc can be changed at all
    present: bool
    offered: dict[str, tuple[str, ...]] = field(default_factory=dict)  # keyword of sshd_config to what ssh -Q lists
    host_keys: tuple[HostKey, ...] = ()
    accounts: dict[str, Account] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)  # ssh.service and ssh.socket to their state
    stale: bool = False  # a file of its configuration is younger than what the running sshd read
    overruled: tuple[str, ...] = ()  # what files of others ask for and do not get
    logins: tuple[accounts.LoginAccount, ...] = ()


def parse(text: str) -> Ssh:
    """What the script prints, typed."""
    lines: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition("\t")
        lines.setdefault(word, []).append(rest.split("\t"))
    by_query = {query: tuple(names.split(",")) for query, names in lines.get("offer", [])}
    known = {
        name: Account(int(uid), shell, disabled == "yes") for name, uid, shell, disabled in lines.get("account", [])
    }
    units = {unit: state for unit, state, _ in lines.get("unit", [])}
    loaded = max((float(at) for unit, state, at in lines.get("unit", []) if unit == "ssh.service"), default=0.0)
    changed = float(lines["changed"][0][0]) if "changed" in lines else 0.0
    return Ssh(
        writable=lines["etc"][0][0] == "writable",
        present="offer" in lines,
        offered={keyword: by_query.get(query, ()) for keyword, query in QUERIES.items()},
        host_keys=tuple(HostKey(path, kind, int(bits)) for path, kind, bits in lines.get("hostkey", [])),
        accounts=known,
        units=units,
        # What the clock and systemd's own count of it round away is less than this.
        stale=units.get("ssh.service") == "active" and changed > loaded + 0.05,
        overruled=tuple(
            f"{file} asks for {keyword} {value}{f' in Match {match}' if match else ''}; {sshd.DROP_IN} overrules it"
            for file, keyword, value, match in lines.get("other", [])
        ),
        logins=accounts.parse(text) if "login" in lines else (),
    )


SSH = register(
    Section(
        "access",
        r"""
if [ -w /etc ] && [ -w /etc/ssh ]; then printf 'etc\twritable\n'; else printf 'etc\tread-only\n'; fi
[ -x /usr/sbin/sshd ] || exit 0
for query in kex cipher mac key-sig; do printf 'offer\t%s\t%s\n' $query "$(ssh -Q $query | paste -sd,)"; done
# Those where a package puts them, and wherever else sshd is told to look.
{ printf '%s\n' /etc/ssh/ssh_host_*_key; /usr/sbin/sshd -T 2>/dev/null | sed -n 's/^hostkey //p'; } | sort -u | while read -r key; do
  [ -e "$key" ] || continue
  # A kind that this OpenSSH no longer knows has no length.
  ssh-keygen -l -f "$key" 2>/dev/null | awk -v key="$key" '
    {kind = $NF; gsub(/[()]/, "", kind); bits = $1} END {printf "hostkey\t%s\t%s\t%d\n", key, kind == "" ? "UNKNOWN" : kind, bits}'
done
{ getent shadow; echo --; getent passwd; } | awk -F: -v day=$(($(date +%s) / 86400)) '
  $0 == "--" {shadow_read = 1; next}
  !shadow_read {disabled[$1] = $8 != "" && $8 + 0 <= day ? "yes" : "no"; next}
  {printf "account\t%s\t%s\t%s\t%s\n", $1, $3, $7 == "" ? "/bin/sh" : $7, disabled[$1] ? disabled[$1] : "no"}'
"""
        + accounts.SCRIPT
        + r"""
# systemd counts from the boot; it changes this time at every start and every reload. In this order: what a busy machine
# loses between the two must not make sshd look older than it is.
read -r up _ </proc/uptime
now=$(date +%s.%N)
for unit in ssh.service ssh.socket; do
  systemctl show --property=ActiveState --property=StateChangeTimestampMonotonic $unit | awk -F= -v unit=$unit -v now=$now -v up=$up '
    $1 == "ActiveState" {state = $2} $1 == "StateChangeTimestampMonotonic" {at = $2}
    END {printf "unit\t%s\t%s\t%.3f\n", unit, state, now - up + at / 1000000}'
done
find /etc/ssh -maxdepth 2 -type f \( -name sshd_config -o -path '/etc/ssh/sshd_config.d/*.conf' -o -name 'ssh_host_*_key' \) -printf '%C@\n' |
  sort -n | tail -n 1 | sed 's/^/changed\t/'
set -- /etc/ssh/sshd_config.d/*.conf /etc/ssh/sshd_config
for file in "$@"; do
  [ -e "$file" ] && [ "$file" != /etc/ssh/sshd_config.d/00-gpuwright.conf ] || continue
  awk -v file="$file" '
    {key = tolower($1)}
    key == "match" {match_ = $0; sub(/^[ \t]*[^ \t]+[ \t]+/, "", match_)}
    key ~ /^(passwordauthentication|kbdinteractiveauthentication|challengeresponseauthentication|permitemptypasswords|permitrootlogin)$/ &&
      tolower($2) == "yes" {printf "other\t%s\t%s\t%s\t%s\n", file, $1, $2, match_}' "$file"
done
exit 0
""",
        parse,
    )
)


@dataclass(frozen=True)
class Checked:
    """What sshd would do for the login accounts: one sentence for each thing that it should not, and what was not looked at."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def parse_check(text: str) -> Checked:
    """What access-sshd-check prints, typed."""
    lines = text.splitlines()
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    return Checked(tuple(line for line in lines if not line.startswith("note: ")), tuple(notes))


# Apart from the rest, because it takes as long as the node has accounts, and ends by itself before it is ended.
CHECKED = register(
    Section(
        "access-sshd-check",
        r"""
[ -x /usr/local/lib/gpuwright/access-sshd-check ] || exit 0
/usr/local/lib/gpuwright/access-sshd-check
[ $? -le 1 ]
""",
        parse_check,
    )
)


def ssh(host: Any) -> Ssh:
    """The node's OpenSSH. Raises OperationError, in one sentence, where it cannot be seen."""
    return _seen(host, SSH)


def checked(host: Any) -> Checked:
    """What sshd would do. Raises OperationError, in one sentence, where it cannot be asked."""
    return _seen(host, CHECKED)


def _seen(host: Any, section: Section[T]) -> T:
    try:
        return snapshot.read(host).read(section)
    except CouldNotLook as error:
        raise OperationError(
            f"{host.name}: who may log in cannot be seen ({error}), so role access changes nothing; getent passwd, getent shadow "
            f"and sshd -T have to answer there within {snapshot.SECTION_TIMEOUT_SECONDS} s (a directory service that hangs is "
            "the usual reason)"
        ) from None
