"""What role `access` promises: who may log in, how, and what they may do then. sshd and sudo are asked, not their files."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwright.audit import privileged
from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Outcome, Predicate, Verdict, judged, not_applicable, waived, without
from gpuwright.snapshot import Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.access import AUDIT_SCRIPT, accounts, keys, sshd
from roles.access.spec import AccessSpec

# --- observations ---------------------------------------------------------------------------------------------------

Effective = dict[str, dict[str, list[str]]]


def _effective(text: str) -> Effective:
    """User to keyword to the different values it has for this user, by address."""
    found: Effective = {}
    asked: dict[tuple[str, str], dict[str, list[str]]] = {}
    for line in text.splitlines():
        user, address, keyword, value = [*line.split(" ", 3), ""][:4]
        asked.setdefault((user, address), {}).setdefault(keyword, []).append(value)
    for (user, _), keywords in asked.items():
        for keyword, values in keywords.items():
            known = found.setdefault(user, {}).setdefault(keyword, [])
            if (value := " ".join(values)) not in known:
                known.append(value)
    if not found:
        raise ValueError("sshd answers nothing")
    return found


_ASKED = "|".join(
    sorted(
        {name for name in sshd.BY_NAME}
        | {name.lower() for name in (*sshd.ALGORITHMS, "HostKeyAlgorithms")}
        | {"allowusers", "authorizedkeysfile"}
    )
)

# Every login account and one that does not exist, from this machine, from elsewhere, and from where Match blocks have
# other values.
EFFECTIVE = Section(
    "audit-access-effective",
    rf"""
configuration=/etc/ssh
addresses=$({sshd.ADDRESSES})
for user in $(getent passwd | awk -F: '$7 !~ /(nologin|false|sync|shutdown|halt)$/ {{print $1}}' | head -n 200) nobody-of-that-name; do
  for address in $addresses; do
    /usr/sbin/sshd -T -C "user=$user,host=localhost,addr=$address" | grep -E '^({_ASKED}) ' | sed "s/^/$user $address /"
  done
done
""",
    _effective,
)

# The keys that sshd would take for an account, wherever it is told to look.
KEYS = Section(
    "audit-access-keys",
    r"""
getent passwd | awk -F: '$7 !~ /(nologin|false|sync|shutdown|halt)$/ {print $1 " " $6}' | head -n 200 | while read -r user home; do
  said=$(/usr/sbin/sshd -T -C "user=$user,host=localhost,addr=127.0.0.1")
  # Whoever is certified by one of these is let in, too.
  printf '%s\n' "$said" | sed -n 's/^trustedusercakeys //p' | grep -vx none | sed 's/^/authority /'
  for file in $(printf '%s\n' "$said" | sed -n 's/^authorizedkeysfile //p'); do
    file=$(printf '%s' "$file" | sed "s|%u|$user|g; s|%h|$home|g; s|^\([^/]\)|$home/\1|")
    [ -e "$file" ] || continue
    ssh-keygen -l -f "$file" | awk -v user="$user" -v file="$file" '{print "key " user " " $2 " " file}'
  done
done
getent passwd | awk -F: '$7 !~ /(nologin|false|sync|shutdown|halt)$/ {print "login " $1}'
getent shadow | awk -F: -v day=$(($(date +%s) / 86400)) '$8 != "" && $8 + 0 <= day {print "expired " $1}'
exit 0
""",
    str.splitlines,
)

HOST_KEYS = Section(
    "audit-access-host-keys",
    r"""
/usr/sbin/sshd -T | sed -n 's/^hostkey //p' | while read -r key; do
  [ -e "$key" ] || continue
  stat -c 'file %a %U %n' "$key"
  ssh-keygen -l -f "$key" 2>/dev/null | awk -v key="$key" '
    {kind = $NF; gsub(/[()]/, "", kind); bits = $1} END {print "hostkey " (kind == "" ? "UNKNOWN" : kind) " " bits + 0 " " key}'
done
find /etc/ssh /etc/ssh/sshd_config.d /etc/ssh/authorized_keys.d -maxdepth 1 \( -name sshd_config -o -name '*.conf' -o -path '*/authorized_keys.d/*' -o -type d \) \
  -printf 'config %m %u %p\n' 2>/dev/null | sort -u
exit 0
""",
    str.splitlines,
)

# systemd counts from the boot; the time changes at every start and reload of the service. The boot's time is taken first:
# what a busy machine loses between the two must not make sshd look older than it is.
RUNNING = Section(
    "audit-access-running",
    r"""
read -r up _ </proc/uptime
now=$(date +%s.%N)
systemctl show --property=ActiveState --property=StateChangeTimestampMonotonic ssh.service |
  awk -F= -v now="$now" -v up="$up" '
    $1 == "ActiveState" {state = $2} $1 == "StateChangeTimestampMonotonic" {at = $2}
    END {printf "service %s %.3f\n", state, now - up + at / 1000000}'
systemctl show --property=ActiveState --value ssh.socket | sed 's/^/socket /'
find /etc/ssh -maxdepth 2 -type f \( -name sshd_config -o -path '/etc/ssh/sshd_config.d/*.conf' -o -name 'ssh_host_*_key' \) -printf 'changed %C@ %p\n' |
  sort -n -k 2 | tail -n 1
""",
    str.splitlines,
)

SUDO = Section(
    "audit-access-sudo",
    r"""
command -v sudo >/dev/null || exit 1
for user in $(getent passwd | awk -F: '$7 !~ /(nologin|false|sync|shutdown|halt)$/ && $1 != "root" {print $1}' | head -n 200); do
  echo "user $user"
  sudo -l -U "$user" | awk -v user="$user" '
    /^Matching Defaults/ {where = "defaults"; next}
    /may run the following commands/ {where = "rules"; next}
    /^[^ ]/ {where = ""}
    where == "defaults" && /use_pty/ && !/!use_pty/ {print "pty " user}
    where == "rules" && NF {sub(/^ +/, ""); print "rule " user " " $0}'
done
exit 0
""",
    str.splitlines,
)

# Names alone: hashes stay on the node.
ACCOUNTS = Section(
    "audit-access-accounts",
    rf"""
[ -r /etc/shadow ] || exit 1
{accounts.SCRIPT}
""",
    accounts.parse,
)

SCRIPT = Section(
    "audit-access-script",
    rf"""
[ -e {AUDIT_SCRIPT} ] || exit 0
stat -c '%a %U' {AUDIT_SCRIPT}
sha256sum {AUDIT_SCRIPT} | cut -d' ' -f1
""",
    str.split,
)


# --- predicates -----------------------------------------------------------------------------------------------------


def _access(spec: NodeSpec) -> AccessSpec:
    assert spec.access is not None
    return spec.access


def _after(word: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def _waived(spec: NodeSpec, names: Iterable[str], verdict: Verdict) -> Verdict:
    """A pass that only the node file's deviation makes one is a waiver, and says whose."""
    lower = {name.lower() for name in names}
    reasons = [
        f"{name} {deviation.value or 'as sshd has it'}: {deviation.reason}"
        for name, deviation in _access(spec).deviations.items()
        if name.lower() in lower
    ]
    return waived(verdict, reasons)


def _keywords(seen: Snapshot, spec: NodeSpec, names: Iterable[str]) -> Verdict:
    """These keywords have the values of the profile for every account."""
    names = list(names)
    wanted = {
        name: sshd.AS_PRINTED.get(value, value)
        for name, value in sshd.keywords(_access(spec), spec.hardening).items()
        if name in names
    }
    if not wanted:
        verdict = _waived(spec, names, judged(True, "what the profile says", ""))
        return (
            verdict
            if verdict.outcome is Outcome.WAIVED
            else not_applicable(f"profile {spec.hardening} leaves it to sshd")
        )
    effective = seen.read(EFFECTIVE)
    faults = sorted(
        {
            f"{name} is {value} for {user}"
            for user, keywords in effective.items()
            for name, right in wanted.items()
            for value in keywords.get(name.lower(), ["not set"])
            if value != right
        }
    )
    expected = ", ".join(f"{name} {value}" for name, value in wanted.items())
    return _waived(spec, names, without(faults, expected, f"so for {len(effective)} accounts"))


def _of(*names: str) -> Predicate:
    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        return _keywords(seen, spec, names)

    return predicate


def _no_passwords(seen: Snapshot, spec: NodeSpec) -> Verdict:
    waivers = _access(spec).password_users
    effective = seen.read(EFFECTIVE)
    names = ("PasswordAuthentication", "KbdInteractiveAuthentication")
    deviating = {name.lower() for name in _access(spec).deviations}
    faults = [
        f"{name} is {value} for {user}"
        for user, keywords in effective.items()
        for name in names
        for value in keywords.get(name.lower(), ["not set"])
        if value != "no"
        and not (name == "PasswordAuthentication" and user in waivers)
        and name.lower() not in deviating
    ]
    verdict = without(faults, "no password is taken, neither by sshd nor through PAM", f"{len(effective)} accounts")
    return _waived(spec, names, waived(verdict, [f"{name}: {why}" for name, why in waivers.items()]))


def _algorithms(seen: Snapshot, spec: NodeSpec) -> Verdict:
    allowed = sshd.allowed(spec.hardening)
    deviations = _access(spec).deviations
    faults = set()
    # A Match block may have types of keys of its own (sshd_config(5), PubkeyAcceptedAlgorithms), so every account is looked at.
    for user, keywords in seen.read(EFFECTIVE).items():
        for name, names in allowed.items():
            own = deviations[name].value if name in deviations else None
            for value in keywords.get(name.lower(), [""]):
                strange = [algorithm for algorithm in value.split(",") if algorithm not in names]
                if strange and not (name in deviations and (own is None or own == value)):
                    faults.add(f"{name} has {', '.join(strange) or 'nothing'} for {user}")
    return _waived(
        spec, allowed, without(sorted(faults), f"only what profile {spec.hardening} allows", "nothing else is offered")
    )


def _only_users(seen: Snapshot, spec: NodeSpec) -> Verdict:
    access = _access(spec)
    if not sshd.only_users(access, spec.hardening):
        return not_applicable("the node file lets others in who have a key (access.only_users)")
    effective = seen.read(EFFECTIVE)
    wanted = " ".join(access.users)
    faults = sorted(
        {
            f"AllowUsers is {value or 'not set'} for {user}"
            for user, keywords in effective.items()
            for value in keywords.get("allowusers", [""])
            if value != wanted
        }
    )
    return without(faults, f"nobody but {', '.join(access.users)}", f"so for {len(effective)} accounts")


def _files(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(HOST_KEYS)
    faults = [] if _after("file", lines) and _after("config", lines) else ["no host key or no file of sshd was seen"]
    for line in _after("file", lines):
        mode, owner, path = line.split(" ", 2)
        if owner != "root" or int(mode, 8) & 0o077:
            faults.append(f"{path} is {mode} {owner}")
    for line in _after("config", lines):
        mode, owner, path = line.split(" ", 2)
        if owner != "root" or int(mode, 8) & 0o022:
            faults.append(f"{path} is {mode} {owner}")
    return without(
        faults,
        "private host keys for root's eyes only, sshd's files for root to write",
        f"{len(_after('file', lines))} keys, {len(_after('config', lines))} files and folders",
    )


def _weak_host_keys(seen: Snapshot, spec: NodeSpec) -> Verdict:
    offered = []
    for line in _after("hostkey", seen.read(HOST_KEYS)):
        kind, bits, path = line.split(" ", 2)
        offered.append(sshd.HostKey(path, kind, int(bits)))
    weak = [key for key in offered if sshd.is_weak(key, spec.hardening, keys.SMALLEST_RSA)]
    faults = [f"{key.path}: {key.type} of {key.bits} bits" for key in weak]
    if not any(key.type == "ED25519" for key in offered):
        faults.append("no ed25519 host key")
    return without(
        faults, "an ed25519 host key, and none too weak", ", ".join(f"{key.type} {key.bits}" for key in offered)
    )


def _running(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(RUNNING)
    state, loaded = _after("service", lines)[0].split()
    changed, path = _after("changed", lines)[0].split(" ", 1)
    if state != "active":
        socket = (_after("socket", lines) or [""])[0] == "active"
        return judged(
            socket,
            "sshd runs, or its socket starts it",
            f"ssh.service is {state}, ssh.socket {'is' if socket else 'is not'} active",
        )
    old = float(changed) > float(loaded) + 0.05
    return judged(not old, "sshd has read its files since they changed", f"{path} is younger" if old else "it has")


def _authorized(seen: Snapshot, spec: NodeSpec) -> Verdict:
    users = _access(spec).users
    found: dict[str, set[str]] = {}
    for line in _after("key", seen.read(KEYS)):
        user, fingerprint, _ = line.split(" ", 2)
        found.setdefault(user, set()).add(fingerprint)
    faults = []
    for name, user_spec in users.items():
        wanted = {key.fingerprint for key in keys.authorized(user_spec.keys)}
        faults += [f"{name} could also use {extra}" for extra in sorted(found.get(name, set()) - wanted)]
        faults += [f"{name} lacks {missing}" for missing in sorted(wanted - found.get(name, set()))]
    count = sum(len(known) for name, known in found.items() if name in users)
    deviation = _access(spec).deviations.get("TrustedUserCAKeys")
    known = deviation.value if deviation else "none"
    faults += [f"whoever {file} certifies could be any of them" for file in sorted(set(_after("authority", seen.read(KEYS)))) if known not in (None, file)]  # fmt: skip
    verdict = without(faults, "exactly the keys of the node file", f"{count} keys of {len(users)} accounts")
    return _waived(spec, ["TrustedUserCAKeys"], verdict)


def _accounts(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(KEYS)
    login, expired = _after("login", lines), _after("expired", lines)
    faults = [
        f"{name} {'is disabled' if name in expired else 'has no account with a shell'}"
        for name in _access(spec).users
        if name not in login or name in expired
    ]
    return without(faults, "every account of the node file can log in", f"{len(_access(spec).users)} accounts")


def _sudo(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(SUDO)
    users = _access(spec).users
    may = {line.split(" ", 1)[0] for line in _after("rule", lines)}
    faults = [f"{name} may use sudo and the node file does not say so" for name in sorted(may) if name not in users or users[name].sudo == "none"]  # fmt: skip
    without_pty = [name for name in sorted(may) if name not in _after("pty", lines)]
    faults += [f"use_pty is off for {name}" for name in without_pty]
    faults += [f"{name} may not become root" for name, user in users.items() if user.sudo == "all" and name != "root" and name not in may]  # fmt: skip
    return without(
        faults,
        "sudo for those the node file names, always with a terminal of its own",
        ", ".join(sorted(may)) or "nobody",
    )


def _audit_account(seen: Snapshot, spec: NodeSpec) -> Verdict:
    auditors = sshd.auditors(_access(spec))
    if not auditors:
        return not_applicable("no account of the node file has 'sudo: audit'")
    only = f'(root) NOPASSWD: {AUDIT_SCRIPT} ""'
    lines = seen.read(SUDO)
    faults = []
    for name in auditors:
        rules = [rule.split(" ", 1)[1] for rule in _after("rule", lines) if rule.split(" ", 1)[0] == name]
        if rules != [only]:
            faults.append(f"{name} may run: {'; '.join(rules) or 'nothing'}")
    return without(faults, f"nothing but {AUDIT_SCRIPT} without arguments", ", ".join(auditors))


def _auditors_forward_nothing(seen: Snapshot, spec: NodeSpec) -> Verdict:
    auditors = sshd.auditors(_access(spec))
    if not auditors:
        return not_applicable("the node file has no audit account")
    effective = seen.read(EFFECTIVE)
    faults = [
        f"{name} has DisableForwarding {value}"
        for name in auditors
        for value in effective.get(name, {}).get("disableforwarding", ["not set"])
        if value != "yes"
    ]
    return without(faults, "DisableForwarding yes for audit accounts", ", ".join(auditors))


def _audit_script(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if not sshd.auditors(_access(spec)):
        return not_applicable("no account of the node file has 'sudo: audit'")
    found = seen.read(SCRIPT)
    if not found:
        return judged(False, f"{AUDIT_SCRIPT} is there", "it is not")
    mode, owner, digest = found
    faults = []
    if owner != "root" or int(mode, 8) & 0o022:
        faults.append(f"it is {mode} {owner}")
    if digest != privileged.digest(spec):
        faults.append(f"sha256 {digest}, and this audit would send {privileged.digest(spec)}")
    return without(faults, "root's, and what this audit would send", f"{mode} {owner}, sha256 {digest}")


def _no_account_passwords(seen: Snapshot, spec: NodeSpec) -> Verdict:
    access = _access(spec)
    reasons = {**access.password_users, **access.console_passwords}
    there = seen.read(ACCOUNTS)
    having = [account.name for account in there if account.password == "usable"]
    faults = [f"{name} has a password" for name in having if name not in reasons]
    verdict = without(faults, "no login account has a password", f"so for {len(there)} accounts")
    return waived(verdict, [f"{name}: {reasons[name]}" for name in having if name in reasons])


def _no_root_by_group(seen: Snapshot, spec: NodeSpec) -> Verdict:
    there = seen.read(ACCOUNTS)
    faults = [
        f"{account.name} is in group {', '.join(account.root_by)}"
        for account in there
        if account.name != "root" and account.root_by
    ]
    return without(faults, f"no login account in {', '.join(accounts.ROOT_BY)}", f"so for {len(there)} accounts")


_DEPLOY = "pyinfra INVENTORY deploy.py"

CONTROLS: tuple[Control, ...] = (
    Control(
        id="GPW-ACCS-001",
        title="Root logs in over SSH no further than the profile allows.",
        reason="Who did something is only known where everybody has an account; root by password is guessed at all day.",
        severity="high",
        observed=(EFFECTIVE,),
        predicate=_of("PermitRootLogin"),
        remedy=f"{_DEPLOY} (hardening, access.users)",
        risk="a deploy that connects as root has to connect as an account with sudo first",
        references=ref.SSH_ROOT,
    ),
    Control(
        id="GPW-ACCS-002",
        title="Nobody logs in over SSH by password.",
        reason="Passwords are guessed; a file of somebody else that sorts earlier turns them on again unseen.",
        severity="critical",
        observed=(EFFECTIVE,),
        predicate=_no_passwords,
        remedy=f"{_DEPLOY}; what cannot be overruled is named there (access.password_users for exceptions)",
        risk="whoever has no key cannot log in any more",
        references=ref.SSH_KEYS_ONLY,
    ),
    Control(
        id="GPW-ACCS-003",
        title="Empty passwords are refused over SSH.",
        reason="An account without a password would be anybody's.",
        severity="critical",
        observed=(EFFECTIVE,),
        predicate=_of("PermitEmptyPasswords", "PubkeyAuthentication"),
        remedy=_DEPLOY,
        risk="none",
        references=ref.SSH_EMPTY_PASSWORDS,
    ),
    Control(
        id="GPW-ACCS-004",
        title="sshd offers only ciphers, key exchanges, MACs and key types of the profile.",
        reason="What is offered is what an attacker in the middle can choose.",
        severity="high",
        observed=(EFFECTIVE,),
        predicate=_algorithms,
        remedy=f"{_DEPLOY} (access.deviations for a client that cannot)",
        risk="clients of many years ago cannot connect",
        references=ref.SSH_ALGORITHMS,
    ),
    Control(
        id="GPW-ACCS-005",
        title="Guesses, unfinished logins and sessions per connection are limited.",
        reason="Guessing gets slow, and nobody holds every slot.",
        severity="medium",
        observed=(EFFECTIVE,),
        predicate=_of("MaxAuthTries", "LoginGraceTime", "MaxStartups", "MaxSessions"),
        remedy=_DEPLOY,
        risk="agents that offer many keys run out of tries: IdentitiesOnly yes",
        references=ref.SSH_LIMITS,
    ),
    Control(
        id="GPW-ACCS-006",
        title="Nobody but the accounts of the node file may log in.",
        reason="Every further account is a way in that nobody watches.",
        severity="high",
        observed=(EFFECTIVE,),
        predicate=_only_users,
        remedy=f"{_DEPLOY} (access.users, access.only_users)",
        risk="whoever is not named cannot log in any more",
        references=ref.SSH_WHO,
    ),
    Control(
        id="GPW-ACCS-007",
        title="Connections are forwarded over SSH no further than the profile allows.",
        reason="A forwarded port is a way around the firewall.",
        severity="low",
        observed=(EFFECTIVE,),
        predicate=_of("DisableForwarding", "X11Forwarding"),
        remedy=f"{_DEPLOY} (hardening, access.deviations)",
        risk="ssh -L to an engine on loopback and ssh -J over the node end in strict",
        references=ref.SSH_FORWARDING,
    ),
    Control(
        id="GPW-ACCS-008",
        title="A connection whose other end is gone ends.",
        reason="What stays open stays usable for whoever takes over the other end.",
        severity="low",
        observed=(EFFECTIVE,),
        predicate=_of("ClientAliveInterval", "ClientAliveCountMax"),
        remedy=_DEPLOY,
        risk="none: a client that is there answers by itself",
        references=ref.SSH_IDLE,
    ),
    Control(
        id="GPW-ACCS-009",
        title="No login rests on another machine's word or a user's own environment.",
        reason="Host trust, rhosts, Kerberos and ~/.ssh/environment each let somebody in, or more in, than the keys say.",
        severity="medium",
        observed=(EFFECTIVE,),
        predicate=_of(
            "HostbasedAuthentication",
            "IgnoreRhosts",
            "PermitUserEnvironment",
            "GSSAPIAuthentication",
            "StrictModes",
            "AuthorizedKeysCommand",
            "TrustedUserCAKeys",
        ),
        remedy=f"{_DEPLOY} (access.deviations)",
        risk="logins by Kerberos or by keys from a directory service end",
        references=ref.SSH_TRUST,
    ),
    Control(
        id="GPW-ACCS-010",
        title="Host keys and sshd's files are root's alone.",
        reason="Who reads a host key can be this machine; who writes sshd's files decides who gets in.",
        severity="critical",
        observed=(HOST_KEYS,),
        predicate=_files,
        remedy="chmod 0600 /etc/ssh/ssh_host_*_key; chmod go-w and chown root what is named",
        risk="none",
        references=ref.SSH_FILES,
    ),
    Control(
        id="GPW-ACCS-011",
        title="The node is known by an ed25519 key, and offers no weak one.",
        reason="A weak host key can be computed, and then another machine can say that it is this one.",
        severity="medium",
        observed=(HOST_KEYS,),
        predicate=_weak_host_keys,
        remedy=_DEPLOY,
        risk="whoever knows the node by the weak key alone has to learn the new one",
        references=ref.SSH_ALGORITHMS.only(),
    ),
    Control(
        id="GPW-ACCS-012",
        title="A notice is shown before login where the node file has one.",
        reason="Some laws ask that whoever enters was told; the words are the site's.",
        severity="low",
        observed=(EFFECTIVE,),
        predicate=_of("Banner"),
        remedy=f"{_DEPLOY} (access.banner)",
        risk="none",
        references=ref.SSH_BANNER,
    ),
    Control(
        id="GPW-ACCS-013",
        title="The running sshd has read its files.",
        reason="A file that sshd has not read yet takes effect at the next start, with nobody watching.",
        severity="medium",
        observed=(RUNNING,),
        predicate=_running,
        remedy=f"{_DEPLOY}; or systemctl reload ssh, with a second connection open",
        risk="what the files say now takes effect",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-ACCS-014",
        title="The accounts of the node file have exactly its keys.",
        reason="A key that somebody added is a way back in that outlives them.",
        severity="critical",
        observed=(KEYS,),
        predicate=_authorized,
        remedy=f"{_DEPLOY} (access.users)",
        risk="whoever uses another key cannot log in any more",
        references=ref.NAMED_ADMINISTRATORS,
    ),
    Control(
        id="GPW-ACCS-015",
        title="The accounts of the node file can log in.",
        reason="An account that is disabled is missed in the night it is needed.",
        severity="medium",
        observed=(KEYS,),
        predicate=_accounts,
        remedy=_DEPLOY,
        risk="none",
        references=ref.NAMED_ADMINISTRATORS,
    ),
    Control(
        id="GPW-ACCS-016",
        title="Only accounts that the node file names become root, through sudo with a terminal of its own.",
        reason="Every rule of sudo is a way to root; without a terminal of its own a program can type into the caller's.",
        severity="high",
        observed=(SUDO,),
        predicate=_sudo,
        remedy=f"{_DEPLOY} (access.users); remove rules of others: sudo -l -U NAME",
        risk="whoever relied on such a rule cannot become root any more",
        references=ref.SUDO,
    ),
    Control(
        id="GPW-ACCS-017",
        title="The audit account may run one script as root, without arguments, and nothing else.",
        reason="An account that many people and machines use to look must not be able to change anything.",
        severity="high",
        observed=(SUDO,),
        predicate=_audit_account,
        remedy=f"{_DEPLOY}; remove rules of others: sudo -l -U NAME",
        risk="none",
        references=ref.SUDO,
    ),
    Control(
        id="GPW-ACCS-018",
        title="The audit script is root's, and the one that this audit would send.",
        reason="What another script says is no evidence, and one that others can write runs as root.",
        severity="high",
        observed=(SCRIPT,),
        predicate=_audit_script,
        remedy=_DEPLOY,
        risk="none",
        references=ref.BASELINE,
    ),
    # 019 and 020 are promises of role base now (gpuwright/audit/controls.py, MOVED).
    Control(
        id="GPW-ACCS-021",
        title="sshd's log names the key that logged in.",
        reason="Where several people have a key of one account, only the key's fingerprint says who it was.",
        severity="low",
        observed=(EFFECTIVE,),
        predicate=_of("LogLevel"),
        remedy=f"{_DEPLOY} (access.deviations)",
        risk="none; a few more lines a login",
        references=ref.SSH_LOG,
    ),
    Control(
        id="GPW-ACCS-022",
        title="No login account has a password that the node file does not name.",
        reason="Console and su take it although sshd does not, and a password that came with an image is known to many.",
        severity="high",
        observed=(ACCOUNTS,),
        predicate=_no_account_passwords,
        remedy="usermod --password '*' NAME; or name the account in access.console_passwords, with a reason",
        risk="nobody logs in at the console by that password any more",
        references=ref.LOCAL_PASSWORDS,
    ),
    Control(
        id="GPW-ACCS-023",
        title="No login account is root by way of a group.",
        reason="Who may talk to Docker or LXD, or write the disks, is root without sudo and without a log.",
        severity="critical",
        observed=(ACCOUNTS,),
        predicate=_no_root_by_group,
        remedy="gpasswd --delete NAME GROUP; an open session keeps the group until it ends",
        risk="that account's docker commands need sudo",
        references=ref.DOCKER_ACCESS.only("1.1.2"),
    ),
    Control(
        id="GPW-ACCS-024",
        title="The audit account forwards no connection.",
        reason="An account that many people and machines use to look must be no way to what the node reaches, engines among it.",
        severity="medium",
        observed=(EFFECTIVE,),
        predicate=_auditors_forward_nothing,
        remedy=_DEPLOY,
        risk="ssh -L, -R, -A and -J with that account end; another account has its own profile's value",
        references=ref.SSH_FORWARDING,
    ),
)
