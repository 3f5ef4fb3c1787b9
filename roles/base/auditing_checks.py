"""What role `base` promises of the kernel's audit: the kernel and the daemon are asked, not the files with the rules."""

from __future__ import annotations

from collections.abc import Callable

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Predicate, Verdict, judged, manual, not_applicable, waived, without
from gpuwright.snapshot import SYSTEM, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.base import auditing
from roles.base.auditing import LOADED

# --- observations ---------------------------------------------------------------------------------------------------

# The daemon has one file of settings, and no way to say which it runs with.
DAEMON = Section(
    "audit-base-auditd",
    r"""
systemctl show --property=ActiveState,UnitFileState --value auditd.service | paste -sd' ' | sed 's/^/unit /'
sed -n 's/^ *\([a-z_]*_action\|max_log_file\|num_logs\) *= */set \1 /p' /etc/audit/auditd.conf 2>/dev/null
find /var/log/audit /etc/audit -maxdepth 2 -printf 'mode %m %U %y %p\n' 2>/dev/null
exit 0
""",
    str.splitlines,
)

# What stops the machine when the log's disk is full or broken (auditd.conf(5)).
_STOPS = ("halt", "single")


def _after(word: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


# --- predicates -----------------------------------------------------------------------------------------------------


def _where_it_arises(judge: Callable[[Snapshot, NodeSpec], Verdict]) -> Predicate:
    """The promise arises with the profile, and not in a container: there nobody can say what its machine's kernel records."""

    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        if spec.hardening == "baseline":
            return not_applicable("profile baseline leaves the kernel's audit as it is")
        if deviation := spec.base.deviations.get("audit"):
            return waived(judged(True, "the kernel's audit as the profile has it", ""), [deviation])
        system = seen.read(SYSTEM)
        if system.is_container:
            return manual(
                f"cannot tell: this is a container ({system.virtualization}), and what happens in it is recorded, or not, by its "
                "machine's kernel; look there"
            )
        return judge(seen, spec)

    return predicate


def _rules(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = seen.read(LOADED)
    if not now.status:
        return judged(False, "the rules of the profile", "the kernel's audit does not answer, or auditctl is not there")
    faults = [f"not loaded: {line}" for line in auditing.missing(now, spec.hardening)]
    faults += [f"loaded and not of this profile: {line}" for line in auditing.superfluous(now, spec.hardening)]
    enabled = now.status.get("enabled", "unknown")
    if spec.hardening == "strict" and enabled != "2":
        faults.append(f"the rules are not locked (enabled {enabled})")
    return without(faults, "the rules of the profile", f"{len(now.rules)} rules, enabled {enabled}")


def _daemon(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now, lines = seen.read(LOADED), seen.read(DAEMON)
    [unit] = _after("unit", lines)
    faults = [] if set(unit.split()) == {"active", "enabled"} else [f"auditd.service is {unit.strip() or 'absent'}"]
    if now.status.get("enabled", "0") == "0":
        faults.append("the kernel's audit is off")
    if now.status.get("pid", "0") == "0":
        faults.append("nobody takes the kernel's records")
    settings = dict(line.split(" ", 1) for line in _after("set", lines) if " " in line)
    faults += [
        f"{name} is {value}: it stops what the node serves"
        for name, value in settings.items()
        if value.lower() in _STOPS
    ]
    if settings.get("max_log_file_action", "").lower() != "rotate":
        faults.append(
            f"max_log_file_action is {settings.get('max_log_file_action', 'not set')}: the log grows without a cap"
        )
    kept = f"{settings.get('num_logs', '?')} files of {settings.get('max_log_file', '?')} MiB"
    return without(
        faults, "auditd takes the records, from boot on, and never stops the node", f"active, enabled, {kept}"
    )


def _nothing_lost(seen: Snapshot, spec: NodeSpec) -> Verdict:
    status = seen.read(LOADED).status
    faults = [] if status.get("lost") == "0" else [f"{status.get('lost', 'unknown')} records lost since the boot"]
    if status.get("failure") == "2":
        faults.append("a record that cannot be written panics the kernel")
    return without(
        faults, "no record lost, and none worth a panic", f"backlog limit {status.get('backlog_limit', 'unknown')}"
    )


def _guarded(seen: Snapshot, spec: NodeSpec) -> Verdict:
    rows = [line.split(" ", 3) for line in _after("mode", seen.read(DAEMON))]
    faults = [] if any(path.startswith("/var/log/audit") for *_, path in rows) else ["/var/log/audit is not there"]
    for mode, owner, kind, path in rows:
        if kind == "l":
            continue
        others = 0o027 if path.startswith("/var/log/audit") or kind == "f" else 0o022
        if owner != "0" or int(mode, 8) & others:
            faults.append(f"{path} is {mode} of uid {owner}")
    return without(
        faults, "records and rules are root's, and nobody else writes them", f"{len(rows)} files and folders"
    )


# --- the list -------------------------------------------------------------------------------------------------------

_AGAIN = "pyinfra INVENTORY deploy.py"

CONTROLS = (
    Control(
        id="GPW-BASE-023",
        title="The kernel records what changes who may do what, by the rules of the profile.",
        reason="After an intrusion the first question is what was changed, when and by whom.",
        severity="medium",
        observed=(SYSTEM, LOADED),
        predicate=_where_it_arises(_rules),
        remedy=f"{_AGAIN}; where the rules are locked (strict), then reboot the node",
        risk="none: none of the rules follows what a compiler does",
        references=ref.AUDIT_RULES,
    ),
    Control(
        id="GPW-BASE-024",
        title="The audit daemon writes from boot on, and a full disk does not stop the node.",
        reason="Records that nobody takes are gone; a daemon that halts the machine for its log stops every engine.",
        severity="medium",
        observed=(SYSTEM, LOADED, DAEMON),
        predicate=_where_it_arises(_daemon),
        remedy=f"{_AGAIN}; systemctl status auditd; /etc/audit/auditd.conf",
        risk="none",
        references=ref.AUDIT_ON,
    ),
    Control(
        id="GPW-BASE-025",
        title="No record of the kernel's audit was lost.",
        reason="Records are lost in a burst, and a burst is what an intruder makes to hide in.",
        severity="low",
        observed=(SYSTEM, LOADED),
        predicate=_where_it_arises(_nothing_lost),
        remedy="find what is recorded so often (aureport --key --summary), take that rule away; auditctl --reset-lost",
        risk="none",
        references=ref.AUDIT_LOSS,
    ),
    Control(
        id="GPW-BASE-026",
        title="Records and rules of the audit can be changed by root alone.",
        reason="A log that others can write proves nothing, and one that others can read tells who logs in when.",
        severity="medium",
        observed=(SYSTEM, DAEMON),
        predicate=_where_it_arises(_guarded),
        remedy="chmod 0750 /var/log/audit; chmod 0640 /var/log/audit/audit.log*",
        risk="none",
        references=ref.AUDIT_FILES,
    ),
)
