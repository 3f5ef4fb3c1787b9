"""What the other roles need from the operating system: packages, time, logs that survive, careful updates, no core dumps, and
the guard that keeps a change from locking anybody out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from pyinfra import logger
from pyinfra.api import deploy
from pyinfra.context import ctx_host

from gpuwright import guard, sandbox, snapshot
from gpuwright.atomic import File, Validate, files
from gpuwright.ownership import retire
from gpuwright.packages import installed
from gpuwright.render import static, template
from gpuwright.spec.base import Profile
from gpuwright.units import enabled, running
from roles.base import auditing, hardening, operations
from roles.base.facts import JOURNAL, RUNNING, TIMEKEEPERS
from roles.base.spec import BaseSpec, Weekday

ROLE = "base"

# What scripts of this repository call on a node, and nothing else.
PACKAGES = (
    "ca-certificates",  # weights and images come over TLS
    "curl",  # readiness gate, probes, weight downloads
    "iproute2",  # ss: who listens where
    "jq",  # JSON in POSIX sh: completions in the readiness gate, docker inspect
    "nftables",  # tables of our own: neighbour guard, firewall
    "procps",  # free, ps: memory and processes in pre-flight
)

# Package to unit. Any of these stays: systemd-timesyncd conflicts with them and apt would remove them for it.
TIME_DAEMONS = {
    "chrony": "chrony.service",
    "ntpsec": "ntpsec.service",
    "ntp": "ntp.service",
    "openntpd": "openntpd.service",
}

# Security updates by their origin; one that a distribution does not have matches nothing. The pattern of Debian's own
# 50unattended-upgrades also takes point releases. Suites: wiki.debian.org/UnattendedUpgrades, ubuntu.com/security/esm.
SECURITY_ORIGINS = (
    "origin=Debian,codename=${distro_codename}-security,label=Debian-Security",
    "origin=Ubuntu,archive=${distro_codename}-security,label=Ubuntu",
    "origin=UbuntuESM,archive=${distro_codename}-infra-security",
    "origin=UbuntuESMApps,archive=${distro_codename}-apps-security",
)

JOURNALD = "systemd-journald.service"
TIMESYNCD = "systemd-timesyncd.service"
APPARMOR = "apparmor.service"
RECORDER = "gpuwright-gpu-faults.service"
RECORDER_SCRIPT = "/usr/local/lib/gpuwright/gpu-faults"
CORE_DUMPS = tuple(
    f"/etc/{name}/zz-gpuwright.conf"
    for name in ("systemd/system.conf.d", "systemd/coredump.conf.d", "security/limits.d")
)


@deploy("Base")
def base(spec: BaseSpec, profile: Profile) -> None:
    """The lock-out guard, packages, time synchronisation, logs that survive, updates that touch no driver, no core dumps.

    + spec: the role's settings
    + profile: how far the node is hardened
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    present = seen.read(snapshot.PACKAGES)
    container = seen.read(snapshot.SYSTEM).is_container
    time = timekeeping(spec, present, seen.read(TIMEKEEPERS), container)
    ours = time.ours
    if time.note:
        logger.info(f"{host.print_prefix}time: {time.note}")
    if time.warning:
        logger.warning(f"{host.print_prefix}time: {time.warning}")

    wanted = drop_ins(spec, timesyncd=ours, audit=auditing.stays_on(seen, spec, profile))
    recorder = recorder_files()
    files(name="Install the lock-out guard", role=ROLE, files=guard.files())
    enabled(name="Have the lock-out guard look at every boot", units=[guard.UNIT])
    guard.acknowledge()
    installed(name="Install what the other roles need", packages=packages(spec, profile, timesyncd=ours))
    files(
        name="Write the drop-ins of journal, updates, needrestart, time and core dumps",
        role=ROLE,
        files=wanted,
        validate=[Validate(f"APT_CONFIG=.{file.path} apt-config dump") for file in wanted if "apt.conf.d" in file.path],
    )
    running(
        name="Run systemd-journald with its drop-in",
        units=[JOURNALD],
        stale=lambda now: journal_is_stale(now, spec),
    )
    files(name="Write the recorder of GPU faults", role=ROLE, files=recorder)
    running(
        name="Run the recorder of GPU faults",
        units=[RECORDER],
        stale=lambda now: [] if now.read(RUNNING).recorder == recorder_digest() else [RECORDER],
    )
    if "core-dumps" not in spec.deviations:
        operations.core_limit(name="Start services without leave to dump core")
    if hardens(spec, profile, "apparmor") and container:
        logger.info(f"{host.print_prefix}AppArmor: not applicable, the host is a container and has its machine's")
    elif hardens(spec, profile, "apparmor"):
        apparmor(seen)
    if ours and container:
        # The clock belongs to the machine around it: the unit has ConditionVirtualization=!container.
        logger.info(f"{host.print_prefix}time: not applicable, the host is a container and has its machine's clock")
    elif ours:
        running(name="Run systemd-timesyncd", units=[TIMESYNCD])
    elif time.start:
        running(name=f"Run {time.start}, which is installed while nothing keeps the time", units=[time.start])
    audit = () if container else auditing.own_files(spec, profile)
    retire(ROLE, keep=[file.owned for file in (*wanted, *recorder, *audit, *guard.files())])


@dataclass(frozen=True)
class Timekeeping:
    """Who keeps the time: our systemd-timesyncd, or a daemon of the site; what to start, and what to say."""

    ours: bool
    start: str | None = None  # a unit of the site's, where nothing keeps the time
    note: str = ""
    warning: str = ""


def timekeeping(spec: BaseSpec, present: Collection[str], keeping: Sequence[str], container: bool) -> Timekeeping:
    """One daemon keeps the time, and none of the site's is ever stopped for that.

    + present: installed packages
    + keeping: units of time daemons that are enabled or run
    + container: the clock is its machine's, so nothing is started
    """
    warning = ""
    if len(keeping) > 1:
        warning = (
            f"{' and '.join(keeping)} pull the clock to and fro; keep one: systemctl disable --now the others. "
            "This run stops none of them"
        )
    package = next((name for name in TIME_DAEMONS if name in present), None)
    theirs = [unit for unit in keeping if unit != TIMESYNCD]
    if not spec.time_sync:
        return Timekeeping(ours=False, warning=warning)
    if theirs or package:
        name = package or theirs[0]
        if keeping:
            return Timekeeping(False, None, f"{name} keeps it already; systemd-timesyncd is not installed", warning)
        if container:
            return Timekeeping(False, None, f"{name} is installed; the host is a container and has its machine's clock")
        return Timekeeping(False, TIME_DAEMONS[name], f"{name} is installed and keeps nothing; this run enables it")
    return Timekeeping(ours=True)


def apparmor(seen: snapshot.Snapshot) -> None:
    """Load the profiles now and at every boot; a kernel that booted without it needs words and a reboot."""
    if seen.read(RUNNING).apparmor:
        running(name="Run AppArmor with its profiles", units=[APPARMOR])
    else:
        logger.warning(
            f"{ctx_host.get().print_prefix}AppArmor is off in the running kernel; put apparmor=1 and security=apparmor into "
            "kernel.words, or say in base.deviations why this node is without it"
        )


def hardens(spec: BaseSpec, profile: Profile, name: str) -> bool:
    """Whether the profile sets this on the node; `name` as in `base.deviations`."""
    return name not in spec.deviations and hardening.named(name).value(profile) is not None


def recorder_digest() -> str:
    """Tells which script the recorder runs."""
    return hashlib.sha256(static(f"base{RECORDER_SCRIPT}")).hexdigest()[:12]


def recorder_files() -> list[File]:
    """The recorder of GPU faults and its unit."""
    unit = f"/etc/systemd/system/{RECORDER}"
    return [
        File(RECORDER_SCRIPT, static(f"base{RECORDER_SCRIPT}"), "0755"),
        File(unit, template(f"base{unit}.j2", digest=recorder_digest(), sandbox=sandbox.gpu_faults().lines())),
    ]


def packages(spec: BaseSpec, profile: Profile, timesyncd: bool) -> list[str]:
    """The role's packages, in order."""
    chosen = [*PACKAGES, *spec.extra_packages]
    if timesyncd:
        chosen.append("systemd-timesyncd")
    if spec.unattended_upgrades:
        chosen.append("unattended-upgrades")
    if hardens(spec, profile, "apparmor"):
        chosen.append("apparmor")
    return chosen


def drop_ins(spec: BaseSpec, timesyncd: bool, audit: bool) -> list[File]:
    """The role's files; ``audit``: the kernel's audit is on, or shall be."""
    chosen = [
        File("/etc/needrestart/conf.d/gpuwright.conf", static("base/etc/needrestart/conf.d/gpuwright.conf")),
        File(
            "/etc/systemd/journald.conf.d/gpuwright.conf",
            template("base/etc/systemd/journald.conf.d/gpuwright.conf.j2", max_use=spec.journal_max_use, audit=audit),
        ),
    ]
    name = "etc/apt/apt.conf.d/52gpuwright-unattended-upgrades"
    content = template(
        f"base/{name}.j2",
        on=spec.unattended_upgrades,
        origins=(*SECURITY_ORIGINS, *spec.upgrade_origins),
        blocklist=[blocked(prefix) for prefix in spec.blocked_upgrades],
        days=day_numbers(spec),
    )
    chosen.append(File(f"/{name}", content))
    if "core-dumps" not in spec.deviations:
        chosen += [File(path, static(f"base{path}")) for path in CORE_DUMPS]
    if timesyncd and spec.time_servers:
        name = "etc/systemd/timesyncd.conf.d/gpuwright.conf"
        chosen.append(File(f"/{name}", template(f"base/{name}.j2", servers=spec.time_servers)))
    return chosen


def day_numbers(spec: BaseSpec) -> list[int]:
    """The days of unattended upgrades, numbered as they are there: names would depend on the node's language."""
    return sorted((get_args(Weekday).index(day) + 1) % 7 for day in spec.upgrade_days)


def blocked(prefix: str) -> str:
    """A package name prefix as unattended-upgrades matches it: a Python regular expression, anchored.

    Full stop and plus go into brackets: apt.conf has an escape rule of its own for backslashes.
    """
    return "^" + re.sub(r"[.+]", r"[\g<0>]", prefix)


def journal_is_stale(seen: snapshot.Snapshot, spec: BaseSpec) -> list[str]:
    """For `running`: journald runs with another limit, or into memory only."""
    journal = seen.read(JOURNAL)
    capped = journal.max_use is None or abs(journal.max_use - spec.journal_max_use) < 2**16  # rounded to a page
    return [] if journal.persistent and capped else [JOURNALD]
