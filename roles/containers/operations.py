"""What this role changes and pyinfra has no operation for: daemon.json, Docker's restarts, the guard, the holds."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Generator, Sequence
from typing import Any

from pyinfra import logger
from pyinfra.api import OperationError, StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import atomic, snapshot, units
from gpuwright.ownership import Owned
from roles.containers import daemon
from roles.containers.facts import APPLIED, CONTAINERS, DOCKER_PACKAGES, TABLE, Docker
from roles.containers.spec import ContainersSpec

ROLE = "containers"
GUARD_UNIT = "gpuwright-neighbour-guard.service"

# Docker keeps neighbours away by itself since 28 (Docker Engine 28 hardening notes, security.md 2.5).
NEIGHBOURS_KEPT_AWAY_SINCE: daemon.Version = (28, 0)

# Before, only our own parser stands between a typing error and a dead daemon (Docker Engine 23.0 release notes).
VALIDATES_SINCE: daemon.Version = (23, 0)
VALIDATE = atomic.Validate(f"dockerd --validate --config-file .{daemon.PATH}")


def plan(host: Any, seen: Docker, spec: ContainersSpec, gpus: int) -> daemon.Merge:
    """What daemon.json becomes on this host. Raises OperationError, one sentence per fault, when it must not be written."""
    try:
        live = daemon.parse(seen.live or "")
    except daemon.BrokenDaemonJson as error:
        raise OperationError(f"{host.name}: {error}. Nothing was written.") from None
    try:
        wanted = daemon.as_written(daemon.wanted(spec, gpus, seen.version), live)
        merge = daemon.merge(last_applied(seen), live, wanted)
    except daemon.BrokenDaemonJson as error:
        raise OperationError(f"{host.name}: {error}. Nothing was written.") from None
    faults = [
        f"{host.name}: {daemon.PATH} already says {setting.name} = {daemon.show(setting.live)}, which gpuwright never "
        f"set, and the node file wants {daemon.show(setting.wanted)}; put the host's value into the node file "
        f"(containers.{_in_node_file(setting)}{_in_its_words(setting)}), or remove it from {daemon.PATH}."
        for setting in merge.conflicts
    ]
    flags = daemon.keys_of_flags(seen.arguments)
    faults += [
        f"{host.name}: {key} would be in {daemon.PATH} and docker.service already starts dockerd with {flags[key]}: "
        f"Docker would not start. Keep one of them: a drop-in for docker.service takes the flag away, and the key goes "
        f"with {'its line in the node file' if key in daemon.wanted(spec, gpus, seen.version) else 'its line in the file'}."
        for key in merge.result
        if key in flags
    ]
    faults += _lost_data(host, seen, merge)
    # On a blank host only now is it known which Docker came.
    if old := without_cdi(host.name, seen, gpus):
        faults.append(old)
    if faults:
        raise OperationError(" ".join([*faults, "Nothing was written."]))
    return merge


def _lost_data(host: Any, seen: Docker, merge: daemon.Merge) -> list[str]:
    """A Docker that changes its data-root starts empty: containers and images are not moved, and engines are gone."""
    info = seen.info or {}
    now, then = info.get("DockerRootDir"), merge.result.get("data-root")
    if not now or now == then or not (info.get("Containers") or info.get("Images")):
        return []
    return [
        f"{host.name}: Docker keeps {info.get('Containers', 0)} containers and {info.get('Images', 0)} images in {now}, "
        f"and the node file wants containers.data_root: {then}, where it would start with none; keep {now}, or stop the "
        f"engines and Docker (`systemctl stop docker.socket docker.service`), move {now} to {then} and deploy again."
    ]


def without_cdi(name: str, seen: Docker, gpus: int) -> str:
    """The sentence for a Docker that cannot give GPUs to containers, "" for one that can."""
    if not gpus or seen.version is None or seen.version >= (25, 0):
        return ""
    return (
        f"{name}: {seen.version_text} cannot give GPUs to containers through CDI, which needs 25 or later; "
        "set containers.source to docker, or install a newer distribution."
    )


def _in_node_file(setting: daemon.Setting) -> str:
    return {
        "data-root": "data_root",
        "log-opts.max-size": "log_max_size",
        "log-opts.max-file": "log_max_files",
    }.get(setting.name, f"daemon.{setting.name}")


def _in_its_words(setting: daemon.Setting) -> str:
    """A size as the node file writes it: "100m" is Docker's word for 100,000,000 bytes."""
    if setting.name != "log-opts.max-size" or not isinstance(setting.live, str):
        return ""
    value = daemon.size(setting.live)
    return f": {value} B" if value else ""


def last_applied(seen: Docker) -> dict[str, Any]:
    """What we last applied; nothing where the record is missing or unreadable (a rebuilt host, a foreign file)."""
    try:
        record = json.loads(seen.applied or "{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


@operation()
def daemon_json(spec: ContainersSpec, gpus: int = 0) -> Generator[StringCommand, None, None]:
    """Merge what the node file wants into daemon.json, validate it with dockerd, and record what was applied.

    + spec: the role's settings
    + gpus: how many GPUs containers shall reach through CDI

    Nothing is written when the file is broken or has a conflict.
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(CONTAINERS)
    try:
        merge = plan(host, seen, spec, gpus)
    except OperationError as error:
        # The plan stops the run before anything changes; here the file was changed since, and this host fails alone.
        yield StringCommand("sh", "-c", shlex.quote(f"echo {shlex.quote(f'gpuwright: {error}')} >&2; exit 1"))
        return
    wanted = daemon.as_written(daemon.wanted(spec, gpus, seen.version), daemon.parse(seen.live or ""))
    mode, user, group = seen.owner
    # Never recorded as owned: others have keys in it, so it outlives the role.
    file = atomic.File(daemon.PATH, merge.text.encode(), mode, user, group, shared=True)
    record = atomic.File(APPLIED, (json.dumps(wanted, indent=2) + "\n").encode(), "0600")
    stale_record, _ = atomic.pending(host, [record])
    # Compared by meaning: a site's own indentation is not a difference.
    change = [*stale_record, *([file] if merge.changes or seen.live is None else [])]
    if not change:
        host.noop(f"{daemon.PATH} says what it should")
        return
    for setting in merge.changes:
        put_back = " (changed on the host since the last run; put back)" if setting in merge.drifted else ""
        logger.info(f"{host.print_prefix}daemon.json: {setting}{put_back}")
    snapshot.forget(host)
    # The record goes first: a run killed in between finds its own values and no conflict.
    validate = [VALIDATE] if seen.version and seen.version >= VALIDATES_SINCE else []
    yield atomic.write(ROLE, [record, file], change, validate)


def activation(seen: Docker) -> tuple[str, list[str]]:
    """What it takes that Docker runs with its daemon.json: "", "start", "reload" or "restart", and the keys that say so."""
    if not seen.active:
        return "start", []
    if seen.started is None:
        return "restart", ["it started before what it reads was recorded"]
    try:
        keys = daemon.differing_keys(daemon.parse(seen.started), daemon.parse(seen.live or ""))
    except daemon.BrokenDaemonJson:
        return "", []  # plan() has said so; a restart now would end with no Docker at all
    if not keys:
        return "", []
    return ("reload" if daemon.RELOADABLE.issuperset(keys) else "restart"), keys


_ANSWERS = r"""
tries=60
until docker version >/dev/null 2>&1; do
  tries=$((tries - 1))
  if [ "$tries" -le 0 ] || ! systemctl is-active -q docker.service; then
    echo "gpuwright: Docker does not answer on $(uname -n) after its $1; the end of its log:" >&2
    journalctl --no-pager --quiet --lines=15 --unit=docker.service >&2
    exit 1
  fi
  sleep 0.5
done
"""


@operation()
def docker_running() -> Generator[StringCommand, None, None]:
    """Docker is enabled, up, and runs with the daemon.json that is there.

    What it runs with is read back from the record that docker.service makes at every start and reload, so that a run
    killed before its restart is healed by the next one. Only a key that needs it restarts Docker; SIGHUP does for others.
    """
    host = ctx_host.get()
    whole = snapshot.read(host)
    seen = whole.read(CONTAINERS)
    action, keys = activation(seen)
    enabled = whole.read(snapshot.UNITS).get("docker.service", {}).get("UnitFileState") == "enabled"
    if not action and not seen.needs_daemon_reload and enabled:
        host.noop("docker.service runs with its daemon.json")
        return
    steps = ["set -u"]
    if seen.needs_daemon_reload or action:
        steps.append("systemctl daemon-reload || exit 1")
    if not enabled:
        steps.append("systemctl enable -q docker.service || exit 1")
    if action == "reload":
        steps.append("systemctl reload docker.service || exit 1")
    elif action:
        if action == "restart":
            # live-restore itself is taken over by SIGHUP: containers of a daemon that ran without it survive, too.
            steps.append("systemctl reload docker.service 2>/dev/null || true")
        # A deploy's own restart never counts against the start limit.
        steps.append("systemctl reset-failed docker.service 2>/dev/null || true")
        steps.append(f"systemctl {action} docker.service || true")
    if action:
        steps.append(f"set -- {action}{_ANSWERS}")
        because = f" ({', '.join(keys)})" if keys else ""
        note = "; running containers go on" if action == "restart" else ""
        logger.info(f"{host.print_prefix}docker.service: {action}{because}{note}")
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote("\n".join(steps)))


def guard_wanted(version: daemon.Version | None) -> bool:
    """True unless the installed Docker keeps neighbours away by itself."""
    return version is None or version < NEIGHBOURS_KEPT_AWAY_SINCE


def guard_is_stale(rules: bytes) -> Any:
    """For `units.running`: the guard's table is not what its present rules made, whoever flushed or changed it."""

    def stale(seen: snapshot.Snapshot) -> list[str]:
        docker = seen.read(CONTAINERS)
        right = (hashlib.sha256(rules).hexdigest(), docker.guard_table)
        return [] if docker.guard_table and docker.guard_loaded == right else [GUARD_UNIT]

    return stale


@operation()
def neighbour_guard(files: Sequence[atomic.File]) -> Generator[StringCommand, None, None]:
    """An nftables table of our own that keeps neighbours away from containers, where Docker does not do it itself.

    + files: rules (the first), loader, unit and the drop-in of nftables.service

    Which Docker is installed is known only now: on a blank host the package came a moment ago.
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(CONTAINERS)
    if not guard_wanted(seen.oldest_version):
        host.noop(f"{seen.version_text} keeps neighbours away by itself")
        return
    yield from atomic.files._inner(
        role=ROLE,
        files=files,
        validate=[atomic.Validate(f"nft -c -f .{files[0].path}")],
        claims=[Owned("table", TABLE)],
    )
    yield from units.running._inner(
        units=[GUARD_UNIT],
        stale=guard_is_stale(files[0].data),
        reload=True,
        dropped_into=["nftables.service"],
    )


def to_hold(installed: Sequence[str], held: frozenset[str], among: Sequence[str] = DOCKER_PACKAGES) -> list[str]:
    """Those of `among` (Docker's packages) that are installed and not held yet."""
    return [package for package in among if package in installed and package not in held]


@operation()
def held(packages: Sequence[str], among: Sequence[str] = DOCKER_PACKAGES) -> Generator[StringCommand, None, None]:
    """Docker, containerd and the toolkit are upgraded by an operator only, never by a passing apt (docker/for-linux issue 813).

    + packages: what this run installs; with it come others, seen only when they are there
    + among: what is held of all that is installed

    A hold that the site set itself is left to the site; ours are recorded and go with the role.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    present = seen.read(snapshot.PACKAGES)
    missing = to_hold([*present, *packages], seen.read(CONTAINERS).holds, among)
    if not missing:
        host.noop(f"{', '.join(packages)}: held")
        return
    snapshot.forget(host)
    yield atomic.write(ROLE, [], claims=[Owned("hold", package) for package in missing])
    yield StringCommand("apt-mark", "hold", "-q", *missing)
