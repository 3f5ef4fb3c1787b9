"""systemd units: what must run does run, with what is on disk now."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Sequence

from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot

# Keys that systemd ignores without a word when they stand in the wrong section; public units have them there
# (gpu-node.md 7.17). systemd.unit(5), systemd.service(5).
_KEYS = {
    "Unit": """
        StartLimitIntervalSec StartLimitBurst StartLimitAction OnFailure OnSuccess Wants Requires After Before BindsTo
        PartOf Conflicts RequiresMountsFor Description Documentation DefaultDependencies
    """,
    "Service": """
        Type ExecStart ExecStartPre ExecStartPost ExecStop ExecStopPost ExecReload Restart RestartSec SuccessExitStatus
        RestartPreventExitStatus TimeoutStartSec TimeoutStopSec TimeoutSec RemainAfterExit RuntimeMaxSec NotifyAccess
        KillMode KillSignal User Group Environment EnvironmentFile LoadCredential NUMAPolicy NUMAMask
    """,
    "Install": "WantedBy RequiredBy Alias Also",
}
_SECTION_OF = {key: section for section, keys in _KEYS.items() for key in keys.split()}
_RENAMED = {"StartLimitInterval": "StartLimitIntervalSec"}


def lint(path: str, text: str) -> list[str]:
    """Faults that systemd-analyze does not report: a known key in the wrong section, an old name, a duplicate section key.

    Returns one sentence per fault, with the line number.
    """
    faults = []
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif line and line[0] not in "#;" and "=" in line:
            key = line.partition("=")[0].strip()
            if key in _RENAMED:
                faults.append(f"line {number}: {key}= is called {_RENAMED[key]}= since systemd 230")
            wanted = _SECTION_OF.get(key)
            if wanted == "Service" and section in ("Socket", "Mount", "Swap"):
                continue
            if wanted and section != wanted:
                faults.append(
                    f"line {number}: {key}= belongs in [{wanted}], not in [{section}]; systemd would ignore it"
                )
    return faults


_ENSURE = r"""
set -u
failed() {
  echo "gpuwright: $1 did not become active on $(uname -n)" >&2
  systemctl status --no-pager --lines=0 "$1" >&2
  journalctl --no-pager --quiet --lines=15 --unit="$1" >&2
  exit 1
}
"""


@operation()
def running(
    units: Sequence[str],
    stale: Callable[[snapshot.Snapshot], Sequence[str]] | None = None,
    reload: bool = False,
    dropped_into: Sequence[str] = (),
) -> Generator[StringCommand, None, None]:
    """Enable and start `units`; restart (or reload) those that `stale` names.

    + units: unit names, in the order to start them
    + stale: says which of them run with something else than what they should; it asks the running thing, not the
      files, so that a run killed between a change and its restart is healed by the next one
    + reload: `systemctl reload` instead of a restart
    + dropped_into: units of others into which the role has put a drop-in; they are read anew, and left as they run

    daemon-reload follows systemd's own word (NeedDaemonReload=), for the same reason.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    try:
        found = seen.read(snapshot.UNITS)
    except snapshot.CouldNotLook:
        found = {}
    state = {unit: found.get(unit, {}) for unit in units}
    needs_reload = any(
        properties.get("NeedDaemonReload") == "yes" or properties.get("LoadState") != "loaded"
        for properties in state.values()
    ) or any(found.get(unit, {}).get("NeedDaemonReload") == "yes" for unit in dropped_into)
    enable = [
        unit
        for unit, p in state.items()
        if p.get("UnitFileState") not in ("enabled", "static", "indirect", "generated")
    ]
    start = [unit for unit, p in state.items() if p.get("ActiveState") not in ("active", "activating", "reloading")]
    outdated = [unit for unit in (stale(seen) if stale else ()) if unit in state and unit not in start]
    if not (needs_reload or enable or start or outdated):
        host.noop(f"{', '.join(units)}: running with what they should")
        return
    steps = [_ENSURE]
    if needs_reload:
        steps.append("systemctl daemon-reload || exit 1")
    if enable:
        steps.append(f"systemctl enable -q {shlex.join(enable)} || exit 1")
    for unit in outdated:
        steps.append(f"systemctl {'reload' if reload else 'restart'} {shlex.quote(unit)} || failed {shlex.quote(unit)}")
    for unit in start:
        # A deploy's own start never counts against the start limit (DESIGN section 3).
        quoted = shlex.quote(unit)
        steps.append(f"systemctl reset-failed {quoted} 2>/dev/null; systemctl start {quoted} || failed {quoted}")
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote("\n".join(steps)))


@operation()
def enabled(units: Sequence[str]) -> Generator[StringCommand, None, None]:
    """Have `units` started at the next boot; they are not started now, because their time is another one."""
    host = ctx_host.get()
    try:
        found = snapshot.read(host).read(snapshot.UNITS)
    except snapshot.CouldNotLook:
        found = {}
    state = [found.get(unit, {}) for unit in units]
    if all(p.get("UnitFileState") == "enabled" and p.get("NeedDaemonReload") == "no" for p in state):
        host.noop(f"{', '.join(units)}: enabled")
        return
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote(f"systemctl daemon-reload && systemctl enable -q {shlex.join(units)}"))
