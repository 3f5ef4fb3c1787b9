"""What each profile sets on a node in general, with the reason: one table for files, controls and page."""

from __future__ import annotations

from gpuwright.audit import references as ref
from gpuwright.hardening import Setting, everywhere

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
        "`base.unattended_upgrades: false`",
        ref.UPDATES,
    ),
    Setting(
        "needrestart",
        everywhere("lists only"),
        "its own mode restarts Docker or an engine in the middle of traffic",
        "nothing; what runs with old libraries does so until somebody restarts it",
        "-",
        ref.UPDATES,
    ),
    Setting(
        "time",
        everywhere("one daemon"),
        "two daemons pull the clock to and fro; logs and certificates go by it",
        "nothing; one that the site has stays",
        "`base.time_sync: false`",
        ref.CLOCK,
    ),
)
