"""What role `models` can change: make the store, start download jobs, wait for them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra.api import StringCommand, operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.context import ctx_host

from gpuwright import atomic, snapshot
from gpuwright.watched import Watched
from roles.models.facts import MODELS, USER, Models, Stored

SCRIPTS = "/usr/local/lib/gpuwright"


@dataclass(frozen=True)
class Job:
    """One download job as it must be."""

    name: str
    settings: atomic.File
    unit_file: atomic.File

    @property
    def unit(self) -> str:
        """The job's unit."""
        return f"gpuwright-model-{self.name}.service"

    @property
    def fingerprint(self) -> str:
        """sha256 of its settings: a job says in its status with which it ran."""
        return hashlib.sha256(self.settings.data).hexdigest()


def _seen(host: Any) -> Models:
    try:
        return snapshot.read(host).read(MODELS)
    except snapshot.CouldNotLook:
        return Models(False, {}, {})


def _script(lines: Sequence[str]) -> str:
    return shlex.quote("\n".join(lines))


@operation()
def store(path: str) -> Generator[StringCommand, None, None]:
    """Make the user of the jobs and the directory of the weights, readable by engines.

    + path: the store; what already lies below is left as it is
    """
    host = ctx_host.get()
    seen = _seen(host)
    if seen.user and seen.stores.get(path) == f"755 {USER}":
        host.noop(f"{path} belongs to {USER}")
        return
    snapshot.forget(host)
    yield StringCommand(
        "sh",
        "-c",
        _script(
            [
                "set -eu",
                "systemd-sysusers /etc/sysusers.d/gpuwright-models.conf",
                f"install -d -m 0755 -o {USER} -g {USER} {shlex.quote(path)}",
            ]
        ),
    )


@operation()
def started(jobs: Sequence[Job]) -> Generator[StringCommand, None, None]:
    """Start the jobs of models that are not complete, side by side, without waiting for any.

    + jobs: all jobs of the node

    A job that works with the right settings is left alone; one that works with others is restarted and resumes. A
    complete model whose files changed is looked at again, and repaired.
    """
    host = ctx_host.get()
    seen = _seen(host).by_name
    try:
        units = snapshot.read(host).read(snapshot.UNITS)
    except snapshot.CouldNotLook:
        units = {}
    to_start = [job for job in jobs if not _settled(seen.get(job.name), job)]
    to_enable = [job for job in jobs if units.get(job.unit, {}).get("UnitFileState") != "enabled"]
    reload = any(units.get(job.unit, {}).get("NeedDaemonReload", "yes") == "yes" for job in jobs)
    if not to_start and not to_enable and not reload:
        host.noop(f"{len(jobs)} models are complete or on their way")
        return
    snapshot.forget(host)
    lines = ["set -eu", "systemctl daemon-reload"]
    if to_enable:
        lines.append(f"systemctl enable --quiet {shlex.join(job.unit for job in to_enable)}")
    for job in to_start:
        lines.append(f"systemctl reset-failed {job.unit} 2>/dev/null || true")
        lines.append(f"systemctl restart --no-block {job.unit}")
    yield StringCommand("sh", "-c", _script(lines))


def _settled(found: Stored | None, job: Job) -> bool:
    return found is not None and (found.complete(job.fingerprint) or found.on_the_way(job.fingerprint))


@operation()
def verified(jobs: Sequence[Job], wait: bool) -> Generator[PyinfraCommand, None, None]:
    """Show the progress of the jobs until every model is verified; end with a job's own sentence when it gives up.

    + jobs: all jobs of the node
    + wait: false leaves; an enabled node finishes alone
    """
    host = ctx_host.get()
    seen = _seen(host).by_name
    missing = [job for job in jobs if not ((found := seen.get(job.name)) and found.complete(job.fingerprint))]
    if not missing:
        host.noop(f"{len(jobs)} models are complete")
        return
    if not wait:
        host.noop(f"{', '.join(job.name for job in missing)}: the node finishes alone (models.wait)")
        return
    snapshot.forget(host)
    yield Watched(f"{SCRIPTS}/model-await", *(job.name for job in missing))
