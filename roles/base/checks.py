"""What role `base` promises: logs survive, time is right, nothing is upgraded or rebooted by surprise."""

from __future__ import annotations

import re

from gpuwright.audit import confinement
from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.guard import GUARDS
from gpuwright.snapshot import OWNED, SYSTEM, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.base import auditing_checks, hardening_checks

# --- observations ---------------------------------------------------------------------------------------------------

# The files that journald has open say where it writes; its own message of use (sd-messages.h,
# SD_MESSAGE_JOURNAL_USAGE) says which cap it runs with. That message is gone after months of uptime: then the merged
# configuration speaks.
JOURNAL = Section(
    "audit-base-journal",
    r"""
pid=$(systemctl show --property=MainPID --value systemd-journald.service)
[ "${pid:-0}" -gt 0 ] || exit 1
find "/proc/$pid/fd" -lname '*.journal' -printf 'open %l\n'
journalctl --quiet --boot --output=json --lines=20 MESSAGE_ID=ec387f577b844b8fa948f33cad9a75e6 |
  jq -r 'select(.JOURNAL_PATH | startswith("/var/")) | "cap \(.MAX_USE)"' | tail -n 1
merged=$(systemd-analyze cat-config systemd/journald.conf)
printf '%s\n' "$merged" | sed -n 's/^ *SystemMaxUse *= */configured /p' | tail -n 1
printf '%s\n' "$merged" | sed -n 's/^ *Compress *= */compress /p' | tail -n 1
du -sB1 /var/log/journal 2>/dev/null | sed 's/^/used /'
exit 0
""",
    str.splitlines,
)

CLOCK = Section("audit-base-clock", "timedatectl show --property=NTPSynchronized --value", str.strip)

# apt's own view of all its files.
UPGRADES = Section(
    "audit-base-upgrades",
    r"""
dpkg-query -W -f '${db:Status-Status}\n' unattended-upgrades 2>/dev/null | sed 's/^/package /'
eval "$(apt-config shell every APT::Periodic::Unattended-Upgrade)"
echo "every ${every:-0}"
apt-config dump Unattended-Upgrade::Package-Blacklist | sed -n 's/^Unattended-Upgrade::Package-Blacklist:: "\(.*\)";$/blocked \1/p'
exit 0
""",
    str.splitlines,
)

# Read as needrestart reads it: Perl, whose main file reads the drop-ins.
NEEDRESTART = Section(
    "audit-base-needrestart",
    r"""
[ -e /etc/needrestart/needrestart.conf ] || { echo absent; exit 0; }
perl -e 'our %nrconf = (); eval do { local (@ARGV, $/) = "/etc/needrestart/needrestart.conf"; <> }; die $@ if $@;
  print $nrconf{restart} // "unset", "\n"'
""",
    str.strip,
)

ACCOUNTS = Section(
    "audit-base-accounts",
    r"""
getent passwd | awk -F: '{print "uid " $3 " " $1}'
awk -F: '$2 == "" {print "blank " $1}' /etc/shadow
""",
    str.splitlines,
)

# Those that systemd found wanting: failed ones of ours, and ours whose file changed under it.
OUR_UNITS = Section(
    "audit-base-units",
    r"""
systemctl list-units --all --plain --no-legend --state=failed 'gpuwright-*' | awk '{print "failed " $1}'
set -f
units=$(systemctl list-units --all --plain --no-legend 'gpuwright-*' | awk '{print $1}')
for unit in $units; do echo "unit $unit"; done
[ -z "$units" ] || systemctl show --property=Id,NeedDaemonReload docker.service $units |
  awk -F= '$1 == "Id" {id = $2} $1 == "NeedDaemonReload" {need = $2}
           $0 == "" {if (need == "yes") print "outdated " id; need = ""} END {if (need == "yes") print "outdated " id}'
exit 0
""",
    str.splitlines,
)

AT_BOOT = Section(
    "audit-base-guard-at-boot",
    "systemctl show --property=LoadState,UnitFileState --value gpuwright-guard.service | paste -sd' '",
    str.strip,
)


def _after(word: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def _bytes(text: str) -> int:
    """A size as journald.conf has it (``256M``, ``2G``, plain bytes). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGTPE]?)B?", text)
    if not match:
        raise ValueError(f"{text!r} is not a size")
    return int(float(match[1]) * 1024 ** " KMGTPE".index(match[2] or " "))


# --- predicates -----------------------------------------------------------------------------------------------------


# A boolean as systemd reads it (systemd.syntax(7)).
_OFF = ("0", "no", "n", "false", "f", "off")


def _journal_persistent(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _after("open", seen.read(JOURNAL))
    written = sorted({path.rpartition("/")[0] for path in found})
    faults = []
    if not any(path.startswith("/var/log/journal/") for path in written):
        faults.append(f"open: {', '.join(written) or 'none'}")
    # A boolean, or from how many bytes on an entry is compressed; the default is yes (journald.conf(5)).
    compress = (_after("compress", seen.read(JOURNAL)) or ["yes"])[0]
    if compress.lower() in _OFF:
        faults.append(f"journald.conf and its drop-ins say Compress={compress}")
    expected = "journald has files below /var/log/journal open, and compresses them"
    return without(faults, expected, f"open: {', '.join(written)}; Compress={compress}")


def _journal_capped(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(JOURNAL)
    wanted = spec.base.journal_max_use
    caps, configured = _after("cap", lines), _after("configured", lines)
    if not caps and not configured:
        return judged(False, f"a cap of {wanted} bytes", "no cap: neither journald nor its configuration names one")
    cap = int(caps[-1]) if caps else _bytes(configured[-1])
    source = "journald says" if caps else "journald.conf and its drop-ins say"
    used = (_after("used", lines) or ["unknown"])[0].split()[0]
    # journald rounds it to a page.
    return judged(abs(cap - wanted) < 2**16, f"at most {wanted} bytes", f"{source} {cap} bytes; in use: {used}")


def _clock(seen: Snapshot, spec: NodeSpec) -> Verdict:
    system = seen.read(SYSTEM)
    if system.is_container:
        return not_applicable(f"this is a container ({system.virtualization}); its clock is its host's")
    answer = seen.read(CLOCK)
    return judged(answer == "yes", "the kernel says the clock is synchronised", f"NTPSynchronized={answer}")


def _upgrades_as_wanted(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(UPGRADES)
    installed = "installed" in _after("package", lines)
    on = installed and _after("every", lines) not in (["0"], [])
    wanted = spec.base.unattended_upgrades
    words = {True: "on", False: "off"}
    detail = f"package {'installed' if installed else 'absent'}, APT::Periodic::Unattended-Upgrade {_after('every', lines)[0]}"
    return judged(on == wanted, f"unattended upgrades {words[wanted]}", f"{words[on]} ({detail})")


def _upgrades_blocked(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(UPGRADES)
    if "installed" not in _after("package", lines):
        return not_applicable("unattended-upgrades is not installed, nothing upgrades by itself")
    # Entries are regular expressions that match at the start of a package's name (unattended-upgrades, README).
    blocked = _after("blocked", lines)
    missing = [name for name in spec.base.blocked_upgrades if not any(_blocks(entry, name) for entry in blocked)]
    return without(
        [f"not blocked: {', '.join(missing)}"] if missing else [],
        f"blocked: {', '.join(spec.base.blocked_upgrades)}",
        f"apt says: {', '.join(blocked)}",
    )


def _blocks(entry: str, name: str) -> bool:
    try:
        return re.match(entry, name) is not None
    except re.error:
        return False


def _needrestart(seen: Snapshot, spec: NodeSpec) -> Verdict:
    mode = seen.read(NEEDRESTART)
    if mode == "absent":
        return not_applicable("needrestart is not installed, nothing restarts by itself after an upgrade")
    return judged(mode == "l", "$nrconf{restart} is 'l' (list only)", f"$nrconf{{restart}} is {mode!r}")


def _no_reboot_waits(seen: Snapshot, spec: NodeSpec) -> Verdict:
    waits = seen.read(SYSTEM).reboot_required
    return judged(not waits, "/run/reboot-required is absent", "present" if waits else "absent")


def _one_root(seen: Snapshot, spec: NodeSpec) -> Verdict:
    accounts = [entry.split(" ", 1) for entry in _after("uid", seen.read(ACCOUNTS))]
    roots = [name for uid, name in accounts if uid == "0"]
    return judged(roots == ["root"], "uid 0: root", f"uid 0: {', '.join(roots)}")


def _no_blank_password(seen: Snapshot, spec: NodeSpec) -> Verdict:
    blank = _after("blank", seen.read(ACCOUNTS))
    return without([f"no password needed: {name}" for name in blank], "every account has a hash or is locked", "none")


def _unique_uids(seen: Snapshot, spec: NodeSpec) -> Verdict:
    by_uid: dict[str, list[str]] = {}
    for entry in _after("uid", seen.read(ACCOUNTS)):
        uid, name = entry.split(" ", 1)
        # uid 0 has a control of its own
        if uid != "0":
            by_uid.setdefault(uid, []).append(name)
    faults = [f"uid {uid}: {', '.join(names)}" for uid, names in by_uid.items() if len(names) > 1]
    return without(faults, "one name per uid", f"{len(by_uid)} accounts, no uid twice")


def _owned_is_there(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = [thing for thing in seen.read(OWNED) if thing.kind in ("file", "unit")]
    if not found:
        return judged(False, "a record of what was deployed", "/var/lib/gpuwright/owned holds none: not deployed")
    faults = [f"gone: {thing.name} (role {thing.role})" for thing in found if thing.mode is None]
    return without(faults, "every recorded file is there", f"{len(found)} files and units")


def _owned_is_roots(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = [thing for thing in seen.read(OWNED) if thing.mode is not None]
    faults = [
        f"{thing.name} is {thing.mode} {thing.user}"
        for thing in found
        if thing.user != "root" or int(thing.mode or "0", 8) & 0o022
    ]
    return without(faults, "owner root, no write for group and others", f"{len(found)} files")


def _units_not_failed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(OUR_UNITS)
    failed = _after("failed", lines)
    return without([f"failed: {unit}" for unit in failed], "none failed", f"{len(_after('unit', lines))} units")


def _units_current(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(OUR_UNITS)
    outdated = _after("outdated", lines)
    faults = [f"changed since systemd read it: {unit}" for unit in outdated]
    return without(faults, "NeedDaemonReload=no", f"{len(_after('unit', lines))} units")


def _guard_quiet(seen: Snapshot, spec: NodeSpec) -> Verdict:
    guards = seen.read(GUARDS)
    return without([str(guard) for guard in guards], "no change waits for its proof, none was taken back", "quiet")


def _guard_at_boot(seen: Snapshot, spec: NodeSpec) -> Verdict:
    said = seen.read(AT_BOOT)
    return judged(said == "loaded enabled", "gpuwright-guard.service: loaded, enabled", said)


# --- the list -------------------------------------------------------------------------------------------------------

CONTROLS = (
    Control(
        id="GPW-BASE-001",
        title="The journal is kept on disk, compressed.",
        reason="Xid lines and the last words of an engine must survive the reboot that follows them.",
        severity="high",
        observed=(JOURNAL,),
        predicate=_journal_persistent,
        remedy="pyinfra INVENTORY deploy.py (role base sets Storage=persistent and Compress=yes)",
        risk="none",
        references=ref.JOURNAL,
    ),
    Control(
        id="GPW-BASE-002",
        title="The journal has the cap of the node file.",
        reason="A journal without a cap fills the disk that models and images need.",
        severity="medium",
        observed=(JOURNAL,),
        predicate=_journal_capped,
        remedy="pyinfra INVENTORY deploy.py (base.journal_max_use)",
        risk="a smaller cap removes the oldest entries at once",
        references=ref.JOURNAL,
    ),
    Control(
        id="GPW-BASE-003",
        title="The clock is synchronised.",
        reason="Logs of several nodes are put side by side by time, and certificates are judged by it.",
        severity="medium",
        observed=(SYSTEM, CLOCK),
        predicate=_clock,
        remedy="timedatectl timesync-status; base.time_sync, or the site's own time service",
        risk="a step of the clock can end sessions that count in wall-clock time",
        references=ref.CLOCK.only("2.3.2.2", "2.3.3.3"),
    ),
    Control(
        id="GPW-BASE-004",
        title="Unattended upgrades are on or off as the node file says.",
        reason="Off by accident means no security fixes; on by accident means upgrades nobody planned.",
        severity="medium",
        observed=(UPGRADES,),
        predicate=_upgrades_as_wanted,
        remedy="pyinfra INVENTORY deploy.py (base.unattended_upgrades)",
        risk="none",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-BASE-005",
        title="Unattended upgrades leave driver, Docker and kernel alone.",
        reason="An upgraded driver userland or Docker ends the running engine (gpu-node.md 4.1, security.md 3.2).",
        severity="high",
        observed=(UPGRADES,),
        predicate=_upgrades_blocked,
        remedy="pyinfra INVENTORY deploy.py (base.upgrade_blocklist)",
        risk="blocked packages get no fixes by themselves: upgrade them in a window",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-BASE-006",
        title="needrestart only lists what it would restart.",
        reason="Its automatic mode restarts Docker or an engine in the middle of traffic.",
        severity="high",
        observed=(NEEDRESTART,),
        predicate=_needrestart,
        remedy="pyinfra INVENTORY deploy.py (role base has the drop-in)",
        risk="none",
        references=ref.MAINTENANCE.only(),
    ),
    Control(
        id="GPW-BASE-007",
        title="No reboot is pending.",
        reason="Nothing reboots by surprise here, so somebody has to plan it; until then the old kernel runs.",
        severity="low",
        observed=(SYSTEM,),
        predicate=_no_reboot_waits,
        remedy="drain the node, then reboot it",
        risk="a reboot ends what the node serves",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-BASE-008",
        title="Only root has uid 0.",
        reason="A second name for root is a second way in that nobody watches.",
        severity="critical",
        observed=(ACCOUNTS,),
        predicate=_one_root,
        remedy="find out who made it, then userdel the other account",
        risk="whoever logs in by that name no longer can",
        references=ref.ACCOUNTS,
    ),
    Control(
        id="GPW-BASE-009",
        title="No account can be entered without a password or key.",
        reason="An empty hash lets anybody in at a console, and over ssh where empty passwords are allowed.",
        severity="critical",
        observed=(ACCOUNTS,),
        predicate=_no_blank_password,
        remedy="passwd --lock NAME",
        risk="whoever logs in that way no longer can",
        references=ref.ACCOUNTS,
    ),
    Control(
        id="GPW-BASE-010",
        title="No two accounts share a uid.",
        reason="Files and log entries of one could be the other's.",
        severity="medium",
        observed=(ACCOUNTS,),
        predicate=_unique_uids,
        remedy="usermod --uid NEW NAME, then chown what it owned",
        risk="files with the old uid are no longer the account's",
        references=ref.ACCOUNTS,
    ),
    Control(
        id="GPW-BASE-011",
        title="Every file that gpuwright recorded on the node is there.",
        reason="A unit or script that somebody removed is missing at the next start, not now.",
        severity="high",
        observed=(OWNED,),
        predicate=_owned_is_there,
        remedy="pyinfra INVENTORY deploy.py",
        risk="none",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-BASE-012",
        title="Files of gpuwright can be changed by root alone.",
        reason="Who can write a script that systemd runs as root is root.",
        severity="critical",
        observed=(OWNED,),
        predicate=_owned_is_roots,
        remedy="pyinfra INVENTORY deploy.py",
        risk="none",
        references=ref.FILE_MODES,
    ),
    Control(
        id="GPW-BASE-013",
        title="No unit of gpuwright has failed.",
        reason="A failed unit is an engine, a download or a guard that is not there.",
        severity="high",
        observed=(OUR_UNITS,),
        predicate=_units_not_failed,
        remedy="systemctl status UNIT; journalctl -u UNIT",
        risk="none",
    ),
    Control(
        id="GPW-BASE-014",
        title="systemd runs its units as they are on disk.",
        reason="A unit changed on disk and not reloaded behaves differently at the next start than at this one.",
        severity="medium",
        observed=(OUR_UNITS,),
        predicate=_units_current,
        remedy="pyinfra INVENTORY deploy.py (or systemctl daemon-reload)",
        risk="containers started with --gpus lose their GPUs at a daemon-reload; ours use CDI and do not",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-BASE-015",
        title="No change of who may reach the node waits for its proof or was taken back.",
        reason="A change that the lock-out guard took back is one that somebody believes to be in effect.",
        severity="medium",
        observed=(GUARDS,),
        predicate=_guard_quiet,
        remedy="read what it says, put the node file right, pyinfra INVENTORY deploy.py",
        risk="none",
    ),
    Control(
        id="GPW-BASE-016",
        title="The lock-out guard looks at every boot.",
        reason="A node that goes down in the middle of a change has to come back the way it was.",
        severity="medium",
        observed=(AT_BOOT,),
        predicate=_guard_at_boot,
        remedy="pyinfra INVENTORY deploy.py",
        risk="none",
    ),
    *hardening_checks.CONTROLS,
    *auditing_checks.CONTROLS,
    Control(
        id="GPW-BASE-027",
        title="Every unit of gpuwright is confined as it was shipped.",
        reason="A drop-in that loosened a unit for an hour of debugging stays for years.",
        severity="high",
        observed=(confinement.SHOWN,),
        predicate=confinement.as_shipped,
        remedy="take the drop-in away (systemctl cat UNIT names it), then systemctl daemon-reload; "
        "it counts from the unit's next start",
        risk="what the drop-in was for does not work any more",
        references=ref.KERNEL_PROTECTION,
    ),
)
