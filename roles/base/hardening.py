"""What each profile sets on a node in general, with the reason: one table for files, controls and page."""

from __future__ import annotations

from gpuwright.audit import references as ref
from gpuwright.hardening import Setting, everywhere, from_cis1

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "journal",
        everywhere("on disk, compressed, capped"),
        "Xid lines and the last words of an engine survive the reboot that follows them",
        "nothing; the oldest entries go at the cap",
        "`base.journal_max_use` sets the cap",
        ref.JOURNAL,
    ),
    Setting(
        "security updates",
        everywhere("security origins, block list"),
        "known holes close by themselves; driver, Docker and kernel do not move under an engine",
        "what is blocked gets no fixes by itself: upgrade it in a window",
        "`base.unattended_upgrades: false`; `base.upgrade_origins` names further origins with a reason",
        ref.UPDATES.only("1.2.2.1"),
    ),
    Setting(
        "GPU faults (Xid)",
        everywhere("kept apart from the journal"),
        "a fault is asked about months later, when the journal has forgotten it",
        "nothing; one small process",
        "none: it changes nothing else on the node, and without it a fault is not known any more when it is asked about",
        ref.EVIDENCE,
    ),
    Setting(
        "needrestart",
        everywhere("lists only"),
        "its own mode restarts Docker or an engine in the middle of traffic",
        "nothing; what runs with old libraries does so until somebody restarts it",
        "none: its own mode ends engines in the middle of traffic; who wants it asks needrestart by hand (`-r a`)",
        ref.MAINTENANCE.only(),
    ),
    Setting(
        "time",
        everywhere("one daemon"),
        "two daemons pull the clock to and fro; logs and certificates go by it",
        "nothing; one that the site has stays",
        "`base.time_sync: false`",
        ref.CLOCK.only("2.3.1.1", "2.3.2.2"),
    ),
    Setting(
        "core dumps",
        everywhere("off for services and logins"),
        "a dump of an engine or of the gateway holds prompts, keys and weights",
        "looking into what crashed; a unit with a LimitCORE= of its own keeps it",
        "`base.deviations: {core-dumps: …}`",
        ref.CORE_DUMPS,
    ),
    Setting(
        "AppArmor",
        from_cis1("on, profiles loaded"),
        "a program that is taken over does what its profile lets it do, and no more",
        "programs of the site whose profile is too narrow, from their next start on",
        "`base.deviations: {apparmor: …}`",
        ref.APPARMOR,
    ),
)


def named(deviation: str) -> Setting:
    """The setting that an entry of `base.deviations` is about."""
    return next(setting for setting in SETTINGS if f"{{{deviation}:" in setting.waiver)
