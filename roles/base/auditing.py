"""What the kernel's audit records, by profile: one table for the rules on the node, the comparison with what is loaded, and the page.

Nothing here follows every start of a program, every chmod or every file that is removed: a compiler that runs at the start of
an engine does thousands of each (security.md 3.2). Containers have no login uid, so that rules about logins never see them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from pyinfra import logger
from pyinfra.api import StringCommand, deploy, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot
from gpuwright.atomic import File, files
from gpuwright.audit import references as ref
from gpuwright.audit.references import References
from gpuwright.hardening import LeftOut, Setting, from_cis1, in_strict
from gpuwright.packages import installed
from gpuwright.render import static, template
from gpuwright.snapshot import Section, Snapshot, register
from gpuwright.spec.base import Profile
from gpuwright.units import running
from gpuwright.watched import Watched
from roles.base.spec import BaseSpec

ROLE = "base"
FILE = "/etc/audit/rules.d/zz-gpuwright.rules"
SCRIPT = "/usr/local/lib/gpuwright/audit-rules"
UNIT = "auditd.service"

_WAIVER = "`base.deviations: {audit: …}`, all rules together"
_LOGIN = "-F auid!=unset"


@dataclass(frozen=True)
class Rules:
    """Rules with one key, under which ``ausearch -k`` finds what they record."""

    key: str
    strict_only: bool
    reason: str
    references: References
    watched: tuple[str, ...] = ()  # files and folders whose changes are recorded; a folder ends with /
    calls: tuple[str, ...] = ()  # rules about system calls, without key

    @property
    def lines(self) -> list[str]:
        """As auditctl reads them."""
        watches = [
            f"-a always,exit -F {'dir' if path.endswith('/') else 'path'}={path.rstrip('/')} -F perm=wa"
            for path in self.watched
        ]
        return [f"{line} -F key={self.key}" for line in (*watches, *self.calls)]


def _both(rest: str) -> tuple[str, str]:
    """For programs of 64 and of 32 bits."""
    return (f"-a always,exit -F arch=b64 {rest}", f"-a always,exit -F arch=b32 {rest}")


RULES: tuple[Rules, ...] = (
    Rules(
        "gpuwright-accounts",
        False,
        "who gets an account, a group or another way to log in",
        ref.AUDIT_RULES.only("6.2.3.8"),
        (
            *("/etc/passwd", "/etc/shadow", "/etc/group", "/etc/gshadow", "/etc/security/opasswd"),
            *("/etc/nsswitch.conf", "/etc/pam.conf", "/etc/pam.d/", "/etc/ssh/", "/root/.ssh/"),
        ),
    ),
    Rules(
        "gpuwright-sudo",
        False,
        "who may become root",
        ref.AUDIT_RULES.only("6.2.3.1"),
        ("/etc/sudoers", "/etc/sudoers.d/"),
    ),
    Rules(
        "gpuwright-root",
        False,
        "a person who logged in runs something as somebody else; engines and containers have no login",
        ref.AUDIT_RULES.only("6.2.3.2"),
        calls=_both("-S execve -C uid!=euid -F auid!=unset"),
    ),
    Rules(
        "gpuwright-clock",
        False,
        "the clock is set; the small steps of a time daemon are another call and are not recorded",
        ref.AUDIT_RULES.only("6.2.3.4"),
        ("/etc/localtime",),
        (*_both("-S adjtimex,settimeofday"), *_both("-S clock_settime -F a0=0x0")),
    ),
    Rules(
        "gpuwright-network",
        False,
        "the machine's name, networks and nameservers",
        ref.AUDIT_RULES.only("6.2.3.5"),
        (
            "/etc/hosts",
            "/etc/hostname",
            "/etc/issue",
            "/etc/issue.net",
            "/etc/network/",
            "/etc/netplan/",
            "/etc/systemd/network/",
        ),
        _both(f"-S sethostname,setdomainname {_LOGIN}"),
    ),
    Rules("gpuwright-audit", False, "what is recorded is changed", ref.AUDIT_RULES.only(), ("/etc/audit/",)),
    Rules(
        "gpuwright-apparmor",
        False,
        "what confines programs",
        ref.AUDIT_RULES.only("6.2.3.14"),
        ("/etc/apparmor/", "/etc/apparmor.d/"),
    ),
    Rules(
        "gpuwright-modules",
        False,
        "code is loaded into the kernel",
        ref.AUDIT_RULES.only("6.2.3.19"),
        ("/etc/modprobe.d/", "/etc/modules-load.d/"),
        ("-a always,exit -F arch=b64 -S init_module,finit_module,delete_module",),
    ),
    Rules(
        "gpuwright-docker",
        False,
        "Docker, containerd and their settings are changed",
        ref.AUDIT_DOCKER,
        (
            *(
                "/usr/bin/dockerd",
                "/usr/bin/containerd",
                "/usr/bin/runc",
                "/usr/sbin/runc",
                "/etc/docker/",
                "/etc/containerd/",
            ),
            *("/usr/lib/systemd/system/docker.service", "/usr/lib/systemd/system/docker.socket"),
        ),
    ),
    Rules(
        "gpuwright-serving",
        False,
        "what this repository put there is changed: engines, keys of the gateway, firewall, scripts, units",
        ref.AUDIT_DOCKER.only(),
        ("/etc/gpuwright/", "/usr/local/lib/gpuwright/", "/etc/systemd/system/"),
    ),
    Rules(
        "gpuwright-mounts",
        True,
        "a person who logged in mounts something",
        ref.AUDIT_STRICT.only("6.2.3.10"),
        calls=_both(f"-S mount {_LOGIN}"),
    ),
    Rules(
        "gpuwright-logins",
        True,
        "the records of logins are changed by something else than a login",
        ref.AUDIT_STRICT.only("6.2.3.11", "6.2.3.12"),
        ("/var/log/lastlog", "/var/log/wtmp", "/var/log/btmp"),
    ),
)

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "audit daemon",
        from_cis1("on; a full disk stops its log, not the node"),
        "what changes who may do what is known afterwards",
        "nothing; the daemon keeps 40 MiB by the distribution's settings, the oldest go",
        _WAIVER,
        ref.AUDIT_ON,
    ),
    *(
        Setting(
            f"rules `{rules.key}`",
            (in_strict if rules.strict_only else from_cis1)("recorded"),
            rules.reason,
            "nothing",
            _WAIVER,
            rules.references,
        )
        for rules in RULES
    ),
    Setting(
        "rules locked, audited from boot on",
        in_strict("`-e 2`, `audit=1`, `audit_backlog_limit=8192`"),
        "who becomes root does not switch the recording off first",
        "rules change at a reboot alone; the words need one themselves (role `kernel`)",
        _WAIVER,
        ref.AUDIT_LOCKED,
    ),
)

LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("audit rules for chmod, chown, unlink, rename and denied opens of logins (CIS 6.2.3.7, .9, .13)", "a compiler that a person runs makes tens of thousands of records, and the log of an hour is all that is left", "rules for the files that decide"),
    LeftOut("audit rules for every start of a program", "JIT compilers of an engine start thousands of programs", "programs that a login runs as somebody else"),
    LeftOut("auditd halts the machine when its disk is full (CIS 6.2.2.3)", "what the node serves", "the log stops and says so"),
    LeftOut("a wait for auditd when it does not keep up (`backlog_wait_time`)", "every program of the node, engines too, waits", "0: what is lost is counted, and the audit says so"),
)  # fmt: skip


def wanted(spec: BaseSpec, profile: Profile) -> bool:
    """Whether the profile sets this on the node."""
    return profile != "baseline" and "audit" not in spec.deviations


def stays_on(seen: Snapshot, spec: BaseSpec, profile: Profile) -> bool:
    """Whether journald must not turn the kernel's audit off: the profile has it on, or the site has."""
    if seen.read(snapshot.SYSTEM).is_container:
        return False
    try:
        return wanted(spec, profile) or seen.read(LOADED).status.get("enabled", "0") != "0"
    except snapshot.CouldNotLook:
        return False


def rules(profile: Profile) -> list[Rules]:
    """The profile's."""
    return [one for one in RULES if profile == "strict" or (profile != "baseline" and not one.strict_only)]


def own_files(spec: BaseSpec, profile: Profile) -> list[File]:
    """The rules, and the script that loads them."""
    if not wanted(spec, profile):
        return []
    content = template(f"base{FILE}.j2", rules=rules(profile), locked=profile == "strict")
    return [File(SCRIPT, static(f"base{SCRIPT}"), "0755"), File(FILE, content, "0640")]


# --- what is loaded -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """The kernel's audit as it answers; `status` is empty where it does not."""

    status: dict[str, str]
    rules: frozenset[str]
    there: frozenset[str]  # of the paths above, those where a rule can be: a folder, or a file whose folder exists


def canonical(line: str) -> str:
    """A rule as it can be compared: auditctl lists others than it reads (-w for a watch, -1 for unset, calls in its order)."""
    words = shlex.split(line)
    options = list(zip(words[::2], words[1::2], strict=False))
    found = [f"{value}" for option, value in options if option in ("-F", "-C")]
    found += [f"key={value}" for option, value in options if option == "-k"]
    found += [f"perm={''.join(sorted(value))}" for option, value in options if option == "-p"]
    found += [f"path={value}" for option, value in options if option == "-w"]
    calls = sorted(call for option, value in options if option == "-S" for call in value.split(",") if call != "all")
    fields = {re.sub(r"^dir=", "path=", field) for field in found}
    fields = {re.sub(r"!=(-1|4294967295)$", "!=unset", field) for field in fields}
    fields = {f"perm={''.join(sorted(field[5:]))}" if field.startswith("perm=") else field for field in fields}
    return " ".join([*sorted(fields), *(["calls", *calls] if calls else [])])


def _loaded(text: str) -> Loaded:
    said: dict[str, list[str]] = {"status": [], "rule": [], "there": []}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        said[word].append(rest)
    return Loaded(
        dict(line.split(" ", 1) for line in said["status"] if " " in line),
        frozenset(canonical(line) for line in said["rule"] if line.startswith("-")),
        frozenset(said["there"]),
    )


_WATCHED = sorted({path for one in RULES for path in one.watched})

LOADED = register(
    Section(
        "kernel-audit",
        rf"""
command -v auditctl >/dev/null && auditctl -s 2>/dev/null | sed 's/^/status /' && auditctl -l | sed 's/^/rule /'
for path in {" ".join(_WATCHED)}; do
  [ ! -d "${{path%/*}}" ] || echo "there $path"
done
""",
        _loaded,
    )
)


def missing(seen: Loaded, profile: Profile) -> list[str]:
    """Rules of the profile that are not loaded; a file or folder that this node does not have cannot be watched."""
    return [
        line
        for one in rules(profile)
        for line in one.lines
        if canonical(line) not in seen.rules and _possible(line, one.watched, seen.there)
    ]


def superfluous(seen: Loaded, profile: Profile) -> list[str]:
    """Loaded rules with a key of ours that the profile does not have."""
    right = {canonical(line) for one in rules(profile) for line in one.lines}
    return sorted(rule for rule in seen.rules if "key=gpuwright-" in rule and rule not in right)


def _possible(line: str, watched: Iterable[str], there: frozenset[str]) -> bool:
    path = next((field[5:] for field in canonical(line).split() if field.startswith("path=")), None)
    return path is None or any(one.rstrip("/") == path and one in there for one in watched)


# --- the steps ------------------------------------------------------------------------------------------------------


@operation()
def loaded(profile: Profile) -> Generator[StringCommand, None, None]:
    """Have the kernel follow the profile's rules; locked ones wait for a reboot, and that is said.

    + profile: how far the node is hardened
    """
    host = ctx_host.get()
    try:
        now = snapshot.read(host).read(LOADED)
    except snapshot.CouldNotLook:
        now = Loaded({}, frozenset(), frozenset())
    enabled = now.status.get("enabled", "0")
    if enabled == "2":
        host.noop("the rules are locked until a reboot")
        return
    if enabled == "1" and not missing(now, profile) and not superfluous(now, profile):
        host.noop("the kernel has the rules")
        return
    snapshot.forget(host)
    yield Watched(SCRIPT)


def waits(seen: Snapshot, spec: BaseSpec, profile: Profile) -> str | None:
    """Why the rules of the node file are not in force before a reboot; None where they are, or can be."""
    try:
        now = seen.read(LOADED)
    except snapshot.CouldNotLook:
        return None
    asked: Profile = profile if wanted(spec, profile) else "baseline"
    if now.status.get("enabled") != "2" or not (missing(now, asked) or superfluous(now, asked)):
        return None
    return "rules of the kernel's audit are locked (profile strict); those of the node file are in force after a reboot"


@deploy("Audit")
def audited(spec: BaseSpec, profile: Profile) -> None:
    """What the kernel records, last of all: what is watched is there by then.

    + spec: the settings of role base
    + profile: how far the node is hardened
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    if sentence := waits(seen, spec, profile):
        logger.warning(f"{host.print_prefix}{sentence}")
    if not wanted(spec, profile):
        return
    if seen.read(snapshot.SYSTEM).is_container:
        logger.info(
            f"{host.print_prefix}audit: not set up, the host is a container; whether its machine's kernel records what happens "
            "in it cannot be told from here"
        )
        return
    installed(name="Install the audit daemon", packages=["auditd"])
    running(name="Run the audit daemon", units=[UNIT])
    files(name="Write the rules of the kernel's audit", role=ROLE, files=own_files(spec, profile))
    loaded(name="Load the rules of the kernel's audit", profile=profile)
