"""What the engine role can change: fetch images, start what is down, replace what serves."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, StringCommand, operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host, ctx_state

from gpuwright import atomic, snapshot
from gpuwright.boot import Barrier
from gpuwright.ownership import Owned
from gpuwright.peers import VERDICTS, PeerVerdict
from gpuwright.refusal import say_no
from gpuwright.watched import Watched
from roles.engine.facts import ENGINES, IMAGES, EngineState, image_present

SCRIPTS = "/usr/local/lib/gpuwright"


@dataclass(frozen=True)
class Wanted:
    """One engine as it must be. `config` is what its container's label ``gpuwright.config`` must say."""

    name: str
    repository: str
    digest: str
    config: str
    separation: str | None
    """Label ``gpuwright.p2p`` of a container without P2P; None where P2P is not judged."""
    manifest: str
    files: tuple[atomic.File, ...]
    claims: tuple[Owned, ...]

    @property
    def unit(self) -> str:
        """The engine's unit."""
        return f"gpuwright-engine-{self.name}.service"

    @property
    def image_unit(self) -> str:
        """The job that fetches its image."""
        return f"gpuwright-image-{self.name}.service"


def _script(lines: Sequence[str]) -> str:
    return shlex.quote("\n".join(lines))


# --- images -----------------------------------------------------------------------------------------------------------


@operation()
def images(engines: Sequence[Wanted]) -> Generator[PyinfraCommand, None, None]:
    """Run the image jobs of engines whose image is not on the node; their progress is shown.

    + engines: all engines of the node
    """
    host = ctx_host.get()
    try:
        found = snapshot.read(host).read(IMAGES)
    except snapshot.CouldNotLook:
        found = frozenset()
    missing = [engine for engine in engines if not image_present(found, engine.repository, engine.digest)]
    if not missing:
        host.noop(f"the images of {len(engines)} engines are on the node")
        return
    snapshot.forget(host)
    units = shlex.join(engine.image_unit for engine in missing)
    follow = " ".join(f"--unit={shlex.quote(engine.image_unit)}" for engine in missing)
    yield Watched(
        "sh",
        "-c",
        _script(
            [
                "systemctl daemon-reload",
                f"journalctl --quiet --follow --lines=0 --output=cat {follow} & follower=$!",
                f"systemctl start {units}; status=$?",
                "sleep 1; kill $follower",
                f'[ $status = 0 ] || echo "an image is missing: systemctl status {units}"',
                "exit $status",
            ]
        ),
    )


# --- activation ---------------------------------------------------------------------------------------------------------


def _states(host: Any) -> dict[str, EngineState]:
    try:
        return snapshot.read(host).read(ENGINES)
    except snapshot.CouldNotLook:
        return {}


def _verdicts(host: Any) -> Mapping[str, PeerVerdict]:
    try:
        # An engine that nothing on the node judges yet is one that was never judged.
        return defaultdict(lambda: PeerVerdict("missing", "never judged"), snapshot.read(host).read(VERDICTS))
    except snapshot.CouldNotLook as error:
        unknown = PeerVerdict("unknown", str(error))
        return defaultdict(lambda: unknown)


def _runs_as_it_should(state: EngineState, engine: Wanted, verdicts: Mapping[str, PeerVerdict]) -> bool:
    """Whether its container is made of what the node file says, and uses P2P as the verdict says that holds now.

    A verdict that no longer holds counts as a difference: the GPUs can be judged again only while the engine is down.
    Where nobody can look at the verdict, what runs stays.
    """
    if state.config != engine.config:
        return False
    if engine.separation is None:
        return not state.separation
    verdict = verdicts[engine.name]
    if verdict.word == "unknown":
        return True
    return verdict.tried and state.separation == ("" if verdict.word == "good" else engine.separation)


def _to_replace(
    states: dict[str, EngineState], verdicts: Mapping[str, PeerVerdict], engines: Sequence[Wanted]
) -> list[Wanted]:
    """Engines that serve with another configuration. What runs is asked, not what is on disk: a run killed between a
    change and its restart is healed by the next one."""
    found = [(states[engine.name], engine) for engine in engines if engine.name in states]
    return [engine for state, engine in found if state.serving and not _runs_as_it_should(state, engine, verdicts)]


def _held_back(host: Any, barrier: Barrier, engines: Sequence[Wanted]) -> bool:
    """Whether `engines` wait for a reboot; the sentence names them and the reasons."""
    reasons = barrier.holds_back(snapshot.read(host), planning=not ctx_state.get().is_executing)
    if not reasons or not engines:
        return False
    names = ", ".join(engine.name for engine in engines)
    host.log_styled(
        f"engine {names} waits for a reboot, because {'; '.join(reasons)}; reboot the node (a down engine then starts by "
        "itself) or set kernel.reboot: when-needed, and run the deploy again",
        fg="yellow",
        log_func=logger.warning,
    )
    return True


def _is_up(state: EngineState | None, engine: Wanted, verdicts: Mapping[str, PeerVerdict]) -> bool:
    return state is not None and state.serving and _runs_as_it_should(state, engine, verdicts)


# What is known of an engine that the node does not know.
_NEW = EngineState("")


@operation()
def start(engines: Sequence[Wanted], wait_for_weights: bool, barrier: Barrier) -> Generator[PyinfraCommand, None, None]:
    """Write the files of all engines that do not serve with another configuration, start those that are down, and wait
    until each is ready; progress at least every 15 seconds.

    + engines: all engines of the node, in the order of their node file
    + wait_for_weights: false leaves an engine whose weights are not complete to the node, which starts it later
    + barrier: while a reboot that it names is pending, nothing is started; what is down is enabled, so that the reboot does

    A serving engine with another configuration is left alone, on disk too: that is `replace`'s work.
    """
    host = ctx_host.get()
    states, verdicts = _states(host), _verdicts(host)
    later = _to_replace(states, verdicts, engines)
    mine = [engine for engine in engines if engine not in later]
    files = [file for engine in mine for file in engine.files]
    wrong, unrecorded = atomic.pending(host, files, [claim for engine in mine for claim in engine.claims])
    down = [engine for engine in mine if not _is_up(states.get(engine.name), engine, verdicts)]
    if not wrong and not unrecorded and not down:
        host.noop(f"{len(mine)} engines serve with what they should")
        return
    if _held_back(host, barrier, down):
        down = [engine for engine in down if states.get(engine.name, _NEW).active in ("inactive", "failed")]
        files = [file for file in wrong if any(file in engine.files for engine in down)]
        if not files:
            host.noop("engines wait for a reboot")
            return
        snapshot.forget(host)
        yield atomic.write("engine", files, claims=[claim for engine in down for claim in engine.claims])
        units = shlex.join(engine.unit for engine in down)
        yield StringCommand("sh", "-c", _script([f"systemctl daemon-reload && systemctl enable --quiet {units}"]))
        return
    snapshot.forget(host)
    if wrong or unrecorded:
        yield atomic.write("engine", files, wrong, claims=[claim for engine in mine for claim in engine.claims])
    wrong_paths = {file.path for file in wrong}
    lines = ["systemctl daemon-reload || exit 1", "set --"]
    for engine in down:
        state = states.get(engine.name, EngineState(engine.name))
        unit = shlex.quote(engine.unit)
        lines.append(f"systemctl enable --quiet {unit} || exit 1")
        coming_up = state.active == "activating" and state.sub != "auto-restart" and state.config == engine.config
        if coming_up and not wrong_paths & {file.path for file in engine.files}:
            lines.append(f'set -- "$@" {engine.name}')
            continue
        if state.active != "inactive":
            lines.append(f"systemctl stop {unit}")
        # A deploy's own start never counts against the start limit (DESIGN section 3).
        lines.append(f"systemctl reset-failed {unit} 2>/dev/null; systemctl start --no-block {unit} || exit 1")
        awaited = f'set -- "$@" {engine.name}'
        if wait_for_weights:
            lines.append(awaited)
        else:
            lines.append(
                f"if [ -e {shlex.quote(engine.manifest)} ]; then {awaited}; else echo "
                f'"{engine.name}: starts when its weights are complete; this run does not wait (models.wait)"; fi'
            )
    lines.append(f'[ $# = 0 ] || exec {SCRIPTS}/engine-await "$@"')
    yield Watched("bash", "-c", _script(lines), "engine-start")


# Once one replacement of this run failed, no further serving engine is touched. One process is one run, and pyinfra alone
# would go on with the next host.
_failed: list[str] = []


def _refuse_after_failure(state: Any, host: Any, name: str) -> bool:
    if _failed:
        return say_no(
            state,
            host,
            f"engine {name} is not replaced and goes on serving: {_failed[0]} failed in this run; "
            "put that right, then run the deploy again",
        )
    return True


class Replacement(Watched):
    """The replacement of one engine; remembers for the whole run that it failed."""

    def __init__(self, what: str, *bits: str) -> None:
        super().__init__(*bits)
        self.what = what

    def execute(self, state: Any, host: Any, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        """As Watched's. A connection lost on the way counts as a failure."""
        status = False
        try:
            status, output = super().execute(state, host, connector_arguments)
        finally:
            if not status:
                _failed.append(self.what)
        return status, output


def may_have_to_replace(host: Any, engines: Sequence[Wanted]) -> bool:
    """Whether an engine of the node could be found serving with another configuration when `replace`'s turn comes."""
    states, verdicts = _states(host), _verdicts(host)
    found = [(states[engine.name], engine) for engine in engines if engine.name in states]
    return any(
        state.active not in ("inactive", "failed") and not _runs_as_it_should(state, engine, verdicts)
        for state, engine in found
    )


def verdicts_that_replace(host: Any, engines: Sequence[Wanted]) -> str:
    """For the plan: which serving engines only differ in P2P, and why; empty when there is none."""
    states, verdicts = _states(host), _verdicts(host)
    said = [
        f"{engine.name}: P2P verdict {verdicts[engine.name].word}, {verdicts[engine.name].sentence}"
        for engine in _to_replace(states, verdicts, engines)
        if states[engine.name].config == engine.config and engine.separation
    ]
    return f" ({'; '.join(said)})" if said else ""


@operation()
def replace(engines: Sequence[Wanted], barrier: Barrier) -> Generator[PyinfraCommand, None, None]:
    """Give serving engines their new configuration: stage, drain, swap, restart, wait until ready; and put the previous one
    back when the new one does not become ready. Call it with ``_serial=True``.

    + engines: all engines of the node
    + barrier: while a reboot that it names is pending, nothing is replaced

    Nothing of a serving engine changes on disk before its turn. After the first failure of a run every further engine of
    every further host is refused.
    """
    host = ctx_host.get()
    turn = _to_replace(_states(host), _verdicts(host), engines)
    if not turn:
        host.noop("no serving engine has another configuration than it should")
        return
    if _held_back(host, barrier, turn):
        host.noop("engines wait for a reboot")
        return
    snapshot.forget(host)
    for engine in turn:
        yield FunctionCommand(_refuse_after_failure, (engine.name,), {})
        yield atomic.write(
            "engine", engine.files, claims=engine.claims, into=f"/var/lib/gpuwright/engines/{engine.name}/next"
        )
        yield Replacement(
            f"the replacement of engine {engine.name} on {host.name}", f"{SCRIPTS}/engine-replace", engine.name
        )
