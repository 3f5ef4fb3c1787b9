"""What the GPU half changes: the CDI specification is the one that the toolkit renews, and containers still have their GPUs."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from typing import Any

from pyinfra import logger
from pyinfra.api import FactBase, FunctionCommand, StringCommand, operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.context import ctx_host

from gpuwright import snapshot
from gpuwright.refusal import say_no
from roles.containers.gpus import cdi, seen_inside
from roles.containers.gpus.facts import GPUS, PATH, SERVICE, SPECIFICATION

SET_ASIDE = "/var/lib/gpuwright/containers/cdi"
"""Where specifications that are in the way are kept."""


@operation()
def specification() -> Generator[PyinfraCommand, None, None]:
    """One CDI specification for the node's GPUs: the toolkit's, renewed at boot and with the driver, of the driver that is loaded.

    A second one is moved to /var/lib/gpuwright/containers/cdi and never deleted. Without a loaded driver nothing can be made; the
    toolkit's unit does it at the next boot.
    """
    host = ctx_host.get()
    now = snapshot.read(host).read(GPUS)
    findings = cdi.findings(now)
    steps = ["set -u"]
    if any(one.kind in ("refresh-off", "refresh-missing", "toolkit-missing") for one in findings):
        # On a blank host the toolkit has come a moment ago; without it these fail, with systemd's own sentence.
        steps += [f"systemctl enable -q {SERVICE} || exit 1", f"systemctl enable -q --now {PATH} || exit 1"]
    for one in cdi.foreign(now):
        path = shlex.quote(one.path)
        kept = shlex.quote(f"{SET_ASIDE}/{one.path.strip('/').replace('/', '-')}")
        steps += [f"install -d -m 0700 {SET_ASIDE}", f"mv -f --backup=numbered {path} {kept} || exit 1"]
    if cdi.needs_refresh(now):
        # A deploy's own start never counts against the unit's limit.
        steps += [f"systemctl reset-failed {SERVICE} 2>/dev/null", f"systemctl restart {SERVICE} || true"]
    if len(steps) == 1:
        host.noop(f"{SPECIFICATION} is the only one, and as the driver is" if now.module else "no driver is loaded")
        return
    for one in findings:
        logger.info(f"{host.print_prefix}CDI: {one.seen}")
    for one in cdi.foreign(now):
        logger.warning(
            f"{host.print_prefix}CDI: {one.path} is moved to {SET_ASIDE}: two files for the same GPUs go different ways"
        )
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote("\n".join(steps)))
    yield FunctionCommand(_fits, (), {})


def _fits(state: Any, host: Any) -> bool:
    """After the repair: what still does not fit ends this host's run, in one sentence."""
    snapshot.forget(host)
    try:
        left = cdi.findings(snapshot.read(host).read(GPUS))
    except snapshot.CouldNotLook as error:
        return say_no(state, host, f"CDI: whether the specification is right now cannot be seen: {error}")
    for one in left:
        if (
            one.kind == "card-unnamed"
        ):  # one card that fell silent is no reason to leave the others without a specification
            logger.warning(f"{host.print_prefix}CDI: {one}")
    if left := [one for one in left if one.kind != "card-unnamed"]:
        return say_no(state, host, f"CDI: {'; '.join(map(str, left))}")
    return True


class SeenInside(FactBase[str]):
    """What every running container with GPUs sees of them."""

    def command(self) -> StringCommand:
        """One remote command for all containers."""
        return StringCommand("sh", "-c", shlex.quote(seen_inside.SCRIPT))

    def process(self, output: Any) -> str:
        """Its lines."""
        return "\n".join(output)

    @staticmethod
    def default() -> str:
        """No container."""
        return ""


@operation()
def gpus_kept(reloaded: str) -> Generator[StringCommand, None, None]:
    """Ask every running container for its GPUs if systemd read its units again since this run began.

    + reloaded: when systemd had read them last, as the run began

    Containers of --gpus lose them then, without a word (nvidia-container-toolkit#48); those of CDI keep them. Looking changes
    nothing, so this reports no change; an engine that lost a GPU ends the run.
    """
    host = ctx_host.get()
    now = snapshot.read(host).read(GPUS).reloaded
    if now and now == reloaded:
        host.noop("systemd read no unit again")
        return
    try:
        containers = seen_inside.parse(host.get_fact(SeenInside))
    except ValueError as error:
        logger.warning(f"{host.print_prefix}whether containers still have their GPUs cannot be seen: {error}")
        containers = []
    faults = [(one, fault) for one in containers if (fault := one.fault)]
    lost = [f"{one.name}: {fault}" for one, fault in faults if one.engine]
    for one, fault in faults:
        if not one.engine:
            logger.warning(f"{host.print_prefix}container {one.name}: {fault}; it is not gpuwright's")
    if not lost:
        host.noop(f"{len(containers)} containers have their GPUs")
        return
    sentence = f"gpuwright: after systemd read its units again, {'; '.join(lost)}"
    yield StringCommand("sh", "-c", shlex.quote(f"echo {shlex.quote(sentence)} >&2; exit 1"))
