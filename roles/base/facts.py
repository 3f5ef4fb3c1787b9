"""What this role reads from a node: the journal as journald runs it, and what its other parts run with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuwright.snapshot import Section, register


@dataclass(frozen=True)
class Journal:
    """The journal that journald writes to."""

    persistent: bool
    max_use: int | None  # bytes, as journald itself last said; None where it has not said so in this boot


def parse(text: str) -> Journal:
    """What the script prints, typed."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    said = values.get("MAX_USE", "")
    return Journal(values["PERSISTENT"] == "yes", int(said) if said.isdecimal() else None)


# journald says its limits when it opens a journal, with a message id of its own (SD_MESSAGE_JOURNAL_USAGE): what it
# runs with, not what a file asks for.
JOURNAL = register(
    Section(
        "journal",
        r"""
machine=$(cat /etc/machine-id)
[ -d "/var/log/journal/$machine" ] && echo PERSISTENT=yes || echo PERSISTENT=no
journalctl -q -b -n 1 -o export --output-fields=MAX_USE JOURNAL_NAME='System Journal' \
  MESSAGE_ID=ec387f577b844b8fa948f33cad9a75e6 | grep -a '^MAX_USE=' | tail -n 1
exit 0
""",
        parse,
    )
)


# By unit, so that a daemon with two names is one.
TIMEKEEPERS_SCRIPT = r"""
systemctl show --property=Id,LoadState,ActiveState,UnitFileState systemd-timesyncd.service chrony.service chronyd.service \
  ntp.service ntpd.service ntpsec.service openntpd.service |
  awk -F= '$1 != "" {value[$1] = $2} $0 == "" || $1 == "UnitFileState" {if (value["Id"] != "") print value["Id"], value["LoadState"], value["ActiveState"], value["UnitFileState"]; if ($0 == "") delete value}' |
  sort -u
"""


def keeping(lines: Iterable[str]) -> list[str]:
    """Of the daemons that keep the time: the units that do now, or will from the next boot on."""
    rows = [line.split() for line in lines]
    return sorted({row[0] for row in rows if row[1] == "loaded" and (row[2] == "active" or "enabled" in row[3:])})


TIMEKEEPERS = register(
    Section("timekeepers", TIMEKEEPERS_SCRIPT, lambda text: tuple(keeping(text.splitlines()))),
)


@dataclass(frozen=True)
class Running:
    """What systemd and our recorder of GPU faults run with, and whether the kernel has AppArmor on."""

    core_limit: str  # DefaultLimitCORE= as the manager has it: bytes, or infinity
    recorder: str  # the digest of its script that the recorder was started with; "" where it does not run
    apparmor: bool


def _running(text: str) -> Running:
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return Running(values["CORE"], values["RECORDER"].rpartition(" ")[2], values["APPARMOR"] == "Y")


RUNNING = register(
    Section(
        "base",
        r"""
echo "CORE=$(systemctl show --property=DefaultLimitCORE --value)"
pid=$(systemctl show --property=MainPID --value gpuwright-gpu-faults.service)
[ "${pid:-0}" -gt 0 ] && said=$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) || said=
echo "RECORDER=${said% }"
echo "APPARMOR=$(cat /sys/module/apparmor/parameters/enabled 2>/dev/null || echo N)"
""",
        _running,
    )
)
