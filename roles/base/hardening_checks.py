"""What role `base` promises of the node's hardening: faults kept, one clock, no core dumps, AppArmor, careful updates."""

from __future__ import annotations

import re

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, waived, without
from gpuwright.snapshot import SYSTEM, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.base import RECORDER, SECURITY_ORIGINS, day_numbers, facts, hardening

# --- observations ---------------------------------------------------------------------------------------------------

# What the kernel said of GPUs in the last week, and of it what is not in the record. A fault of this very moment is on its way.
FAULTS = Section(
    "audit-base-gpu-faults",
    rf"""
command -v jq >/dev/null || exit 1
systemctl show --property=ActiveState,UnitFileState --value {RECORDER} | paste -sd' ' | sed 's/^/unit /'
{{
  cat /var/lib/gpuwright/gpu-faults/record* 2>/dev/null | awk '{{print "kept " $2}}'
  journalctl --quiet --no-pager --since=-7d --until=-5s --output=json --output-fields=MESSAGE,SYSLOG_IDENTIFIER _TRANSPORT=kernel |
    jq -r 'select((.MESSAGE | type) == "string" and ("\(.SYSLOG_IDENTIFIER): \(.MESSAGE)" | test("NVRM: .*(Xid|fallen off the bus)|SXid"))) | "said \(._BOOT_ID):\(.__MONOTONIC_TIMESTAMP)"'
}} | awk '$1 == "kept" {{kept[$2]; next}} $1 == "said" {{said++}} $1 == "said" && !($2 in kept) {{missing++; if (missing <= 5) print "missing " $2}}
        END {{for (key in kept) total++; print "said " said + 0 "\nkept " total + 0}}'
exit 0
""",
    str.splitlines,
)

TIMEKEEPERS = Section("audit-base-timekeepers", facts.TIMEKEEPERS_SCRIPT, str.splitlines)

# The limit of this very question is that of a login. systemd's own merged view of the drop-ins says what happens to a dump.
CORES = Section(
    "audit-base-cores",
    r"""
systemctl show --property=DefaultLimitCORE --value | sed 's/^/services /'
runuser -u nobody -- sh -c 'ulimit -Hc' | sed 's/^/logins /'
systemd-analyze cat-config systemd/coredump.conf 2>/dev/null | sed -n 's/^ *Storage *= */storage /p' | tail -n 1
dpkg-query -W -f 'coredump ${db:Status-Status}\n' systemd-coredump 2>/dev/null
exit 0
""",
    str.splitlines,
)

APPARMOR = Section(
    "audit-base-apparmor",
    r"""
echo "on $(cat /sys/module/apparmor/parameters/enabled 2>/dev/null || echo N)"
systemctl show --property=ActiveState,UnitFileState --value apparmor.service | paste -sd' ' | sed 's/^/unit /'
[ ! -r /sys/kernel/security/apparmor/profiles ] || sed 's/^/profile /' /sys/kernel/security/apparmor/profiles
systemctl is-active --quiet docker.service && echo docker
exit 0
""",
    str.splitlines,
)

# As apt has it from all its files, in the words of unattended-upgrades.
ORIGINS = Section(
    "audit-base-origins",
    r"""
dpkg-query -W -f '${db:Status-Status}\n' unattended-upgrades 2>/dev/null | sed 's/^/package /'
apt-config dump | sed -n 's/^Unattended-Upgrade::\(Origins-Pattern\|Allowed-Origins\|Update-Days\):: "\(.*\)";$/\1 \2/p'
exit 0
""",
    str.splitlines,
)


def _after(word: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


# --- predicates -----------------------------------------------------------------------------------------------------


def _faults_kept(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(FAULTS)
    faults = [f"not kept: boot and microsecond {key}" for key in _after("missing", lines)]
    [unit] = _after("unit", lines)
    if set(unit.split()) != {"active", "enabled"}:
        faults.append(f"{RECORDER} is {unit}")
    said, kept = _after("said", lines)[0], _after("kept", lines)[0]
    return without(
        faults, "every fault of the last week is kept, and the recorder runs", f"{said} said, {kept} kept in all"
    )


def _one_timekeeper(seen: Snapshot, spec: NodeSpec) -> Verdict:
    keeping = facts.keeping(seen.read(TIMEKEEPERS))
    system = seen.read(SYSTEM)
    few = 0 if system.is_container or not spec.base.time_sync else 1
    return judged(
        few <= len(keeping) <= 1,
        "one daemon keeps the time" if few else "no two daemons keep the time",
        ", ".join(keeping)
        or f"none; {'this is a container' if system.is_container else 'no daemon that is known here'}",
    )


def _no_cores(seen: Snapshot, spec: NodeSpec) -> Verdict:
    deviation = spec.base.deviations.get("core-dumps")
    if deviation:
        return waived(judged(True, "services and logins leave no core dumps", ""), [deviation])
    lines = seen.read(CORES)
    faults = [
        f"a limit of {limit} for {who}"
        for who in ("services", "logins")
        for limit in _after(who, lines) or ["?"]
        if limit != "0"
    ]
    storage = (_after("storage", lines) or ["external"])[0]
    if "installed" in _after("coredump", lines) and storage != "none":
        faults.append(f"systemd-coredump keeps them ({storage})")
    return without(faults, "no core dump of services and logins, and none is kept", "limit 0 for services and logins")


def _apparmor(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if hardening.named("apparmor").value(spec.hardening) is None:
        return not_applicable(f"profile {spec.hardening} leaves AppArmor as it is")
    if deviation := spec.base.deviations.get("apparmor"):
        return waived(judged(True, "AppArmor is on", ""), [deviation])
    system = seen.read(SYSTEM)
    if system.is_container:
        return not_applicable(f"this is a container ({system.virtualization}); its confinement is its machine's")
    lines = seen.read(APPARMOR)
    profiles = [match[1] for line in _after("profile", lines) if (match := re.match(r"(\S+)", line))]
    faults = [] if _after("on", lines) == ["Y"] else ["AppArmor is off in the running kernel"]
    if not faults and not profiles:
        faults.append("no profile is loaded")
    if not faults and "docker" in lines and "docker-default" not in profiles:
        faults.append("docker-default, the profile of containers, is not loaded")
    [unit] = _after("unit", lines)
    if set(unit.split()) != {"active", "enabled"}:
        faults.append(f"apparmor.service is {unit.strip() or 'absent'}")
    return without(faults, "on, with profiles, at every boot", f"{len(profiles)} profiles")


def _security_origins(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(ORIGINS)
    if "installed" not in _after("package", lines):
        return not_applicable("unattended-upgrades is not installed, nothing upgrades by itself")
    if not spec.base.unattended_upgrades:
        return not_applicable("unattended upgrades are off (base.unattended_upgrades)")
    taken = _after("Origins-Pattern", lines) + _after("Allowed-Origins", lines)
    known = {*SECURITY_ORIGINS, *spec.base.upgrade_origins}
    faults = [f"also taken: {origin}" for origin in taken if origin not in known]
    faults += [f"not taken: {origin}" for origin in sorted(known - set(taken))]
    verdict = without(faults, "updates from security archives alone", f"{len(taken)} patterns, of security archives")
    return waived(verdict, [f"{origin}: {why}" for origin, why in spec.base.upgrade_origins.items()])


def _stage(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(ORIGINS)
    if "installed" not in _after("package", lines) or not spec.base.unattended_upgrades:
        return not_applicable("nothing upgrades by itself")
    wanted = [str(number) for number in day_numbers(spec.base)]
    found = sorted(_after("Update-Days", lines))
    words = {True: ", ".join(spec.base.upgrade_days), False: "every day"}
    return judged(
        found == wanted, words[bool(wanted)], f"days (0 is Sunday): {', '.join(found)}" if found else "every day"
    )


# --- the list -------------------------------------------------------------------------------------------------------

_AGAIN = "pyinfra INVENTORY deploy.py"

CONTROLS = (
    Control(
        id="GPW-BASE-017",
        title="Every fault that the kernel reports of a GPU is kept apart from the journal.",
        reason="Whether a card is replaced is decided months later, by faults (Xid) that the journal has forgotten by then.",
        severity="medium",
        observed=(FAULTS,),
        predicate=_faults_kept,
        remedy=f"{_AGAIN}; journalctl -u {RECORDER}",
        risk="none",
        references=ref.EVIDENCE,
    ),
    Control(
        id="GPW-BASE-018",
        title="No two daemons keep the time.",
        reason="They pull the clock to and fro, and logs of several nodes no longer go together.",
        severity="medium",
        observed=(SYSTEM, TIMEKEEPERS),
        predicate=_one_timekeeper,
        remedy="systemctl disable --now the one that the site does not want",
        risk="a step of the clock",
        references=ref.CLOCK.only("2.3.1.1"),
    ),
    Control(
        id="GPW-BASE-019",
        title="Services and logins start without leave to dump core.",
        reason="A dump of an engine or of the gateway holds prompts, keys and weights.",
        severity="medium",
        observed=(CORES,),
        predicate=_no_cores,
        remedy=f"{_AGAIN} (base.deviations); a service takes it at its next start",
        risk="nobody can look into what crashed",
        references=ref.CORE_DUMPS,
    ),
    Control(
        id="GPW-BASE-020",
        title="AppArmor is on and has the profile of containers loaded.",
        reason="A program that is taken over, an engine's too, does what its profile lets it do and no more.",
        severity="medium",
        observed=(SYSTEM, APPARMOR),
        predicate=_apparmor,
        remedy=f"{_AGAIN}; a kernel that booted without it: kernel.words apparmor=1 and security=apparmor, then a reboot",
        risk="programs of the site whose profile is too narrow",
        references=ref.APPARMOR,
    ),
    Control(
        id="GPW-BASE-021",
        title="Unattended upgrades take updates from security archives alone.",
        reason="A point release or another archive changes how programs behave, unasked and in the night.",
        severity="medium",
        observed=(ORIGINS,),
        predicate=_security_origins,
        remedy=f"{_AGAIN}; a file of the site that adds to it: apt-config dump Unattended-Upgrade (base.upgrade_origins names it)",
        risk="what came from there comes by hand from now on",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-BASE-022",
        title="Unattended upgrades come on the days of the node file.",
        reason="A fleet that is upgraded in stages meets a bad update on one node first.",
        severity="low",
        observed=(ORIGINS,),
        predicate=_stage,
        remedy=f"{_AGAIN} (base.upgrade_days)",
        risk="none",
        references=ref.UPDATES,
    ),
)
