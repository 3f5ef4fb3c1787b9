"""What this role can change: packages in place, what is laid by for an exchange, holds, units, the record of cards."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from pyinfra import logger
from pyinfra.api import StringCommand, operation
from pyinfra.api.command import PyinfraCommand
from pyinfra.context import ctx_host, ctx_state

from gpuwright import atomic, boot, snapshot
from gpuwright.ownership import Owned
from gpuwright.refusal import refusal
from gpuwright.watched import Watched
from roles.nvidia import equality, judgement
from roles.nvidia.facts import CARDS, NVIDIA, STATE, Nvidia
from roles.nvidia.spec import NvidiaSpec
from roles.nvidia.wishes import ROLE, SCRIPT

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware


def _present(seen: Nvidia) -> str:
    return equality.release(seen) or "none"


@operation()
def driver(spec: NvidiaSpec) -> Generator[PyinfraCommand, None, None]:
    """Bring the driver's packages to the release of the node file where that needs no reboot; where it does, lay by what the
    exchange between drain and reboot will need, and what would take it back.

    + spec: the role's settings
    """
    host = ctx_host.get()
    whole = snapshot.read(host)
    seen = whole.read(NVIDIA)
    if why := judgement.rejected(spec, seen):
        yield refusal(
            f"driver {spec.version} is not tried again, because it failed on this node ({why}); "
            f"{judgement.loaded(seen) or 'nothing'} is loaded. Name another release in nvidia.version; to try once more: "
            f"rm {STATE}/rejected"
        )
        return
    wrong = judgement.wrong(spec, seen, whole.read(snapshot.SYSTEM))
    if judgement.must_exchange(spec, seen):
        if not wrong or seen.exchange.downloaded == spec.version:
            host.noop(f"driver {spec.version} waits for a reboot")
            return
        snapshot.forget(host)
        yield Watched(SCRIPT, "download")
        return
    if not wrong and (seen.module is not None or not _free_cards(seen)):
        host.noop(f"the packages of driver {spec.version} are in place")
        return
    if wrong:
        logger.info(f"{host.print_prefix}driver: {'; '.join(wrong)}")
    snapshot.forget(host)
    yield Watched(SCRIPT, "install")


def _free_cards(seen: Nvidia) -> bool:
    """Whether a module would find a card: one that another driver has is free after a reboot only."""
    return any(device.gpu and device.driver is None for device in seen.devices)


@operation()
def held(names: Sequence[str]) -> Generator[StringCommand, None, None]:
    """No passing apt moves a package of the driver: one library alone stops every new process (gpu-node.md section 7, report 9).

    + names: what this run installs; with it come others, seen only when they are there
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(NVIDIA)
    missing = judgement.unheld(seen) if equality.every_driver_package(seen) else list(names)
    if not missing:
        host.noop("the driver's packages are held")
        return
    snapshot.forget(host)
    yield atomic.write(ROLE, [], claims=[Owned("hold", package) for package in missing])
    yield StringCommand("apt-mark", "hold", "-q", *missing)


def daemons(spec: NvidiaSpec, seen: Nvidia) -> list[str]:
    """What has to run beside the driver: without the first a card that nobody uses forgets what it was set to, without the second
    no GPU behind a switch computes."""
    wanted = ["nvidia-persistenced"] if spec.persistence else []
    return [*wanted, *(["nvidia-fabricmanager"] if spec.fabric_manager == "auto" and seen.nvswitches else [])]


@operation()
def daemons_running(spec: NvidiaSpec) -> Generator[StringCommand, None, None]:
    """The daemons are enabled and run.

    + spec: the role's settings
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(NVIDIA)
    units = seen.units or {}
    down = [
        name
        for name in daemons(spec, seen)
        if (unit := units.get(name)) is None or not unit.enabled or (unit.active != "active" and seen.module)
    ]
    if not down:
        host.noop(f"{', '.join(daemons(spec, seen)) or 'nothing'} runs")
        return
    snapshot.forget(host)
    # A daemon that ends again a moment after its start has said why; without a module none can run.
    steps = [f"systemctl enable -q {name}.service" for name in down]
    if seen.module or not ctx_state.get().is_executing:
        steps += [
            f"{{ systemctl reset-failed {name}.service 2>/dev/null; systemctl restart {name}.service && sleep 1 && "
            f"systemctl is-active -q {name}.service; }} || {{ journalctl --quiet --no-pager --output=cat --lines=5 -u {name} >&2; "
            "exit 1; }"
            for name in down
        ]
    yield StringCommand("sh", "-c", shlex.quote("\n".join(steps)))


@operation()
def verified(
    spec: NvidiaSpec, hardware: Hardware, others: boot.Wishes, may_wait: bool
) -> Generator[PyinfraCommand, None, None]:
    """Read the driver back; fail where it is not what the node file says and no reboot is left to bring it.

    + spec: the role's settings
    + hardware: how many cards the machine has
    + others: drivers that may keep NVIDIA's from its cards until a reboot
    + may_wait: what only a reboot brings may wait for one (``reboot: never``)
    """
    host = ctx_host.get()
    if not ctx_state.get().is_executing:
        host.noop("what the driver becomes is read back at the end")
        return
    seen = snapshot.read(host)
    try:
        now = seen.read(NVIDIA)
        waits = (*judgement.pending(spec, seen), *judgement.kept_out(seen, others)) if may_wait else ()
    except snapshot.CouldNotLook as error:
        yield refusal(f"whether the driver is what was asked cannot be seen: {error}")
        return
    if waits:
        host.log_styled(f"driver: {'; '.join(waits)}; a reboot brings it", fg="yellow", log_func=logger.warning)
    if not waits and (faults := shortfalls(spec, hardware, now)):
        yield refusal(f"the driver is not what was asked: {'; '.join(faults)}")
        return
    host.noop("the driver is what was asked")


@operation()
def cards_known(hardware: Hardware) -> Generator[StringCommand, None, None]:
    """Where every card answers, record them by UUID, so that one that goes is told by name and not by a number that moved.

    + hardware: how many cards the machine has
    """
    host = ctx_host.get()
    now = snapshot.read(host).read(NVIDIA)
    complete = [(card.index, card.uuid, card.bus) for card in now.cards]
    # A plan cannot know them before their driver is there, and says that they will be.
    planned = not complete and not now.known and not ctx_state.get().is_executing
    if not planned and (complete == list(now.known) or len(complete) != hardware.gpus.count):
        host.noop(f"{len(now.known)} cards are known")
        return
    lines = "".join(f"{index} {uuid} {bus}\n" for index, uuid, bus in complete)
    snapshot.forget(host)
    write = f"mkdir -p {STATE} && cat >{CARDS}.new && sync {CARDS}.new && mv -fT {CARDS}.new {CARDS}"
    yield StringCommand("sh", "-c", shlex.quote(write), _stdin=lines)


def shortfalls(spec: NvidiaSpec, hardware: Hardware, seen: Nvidia) -> list[str]:
    """What is missing after everything was done. The specification for containers is role `containers`' to mend."""
    found = [
        f"{finding.seen}; expected: {finding.expected}; do: {finding.remedy}"
        for finding in equality.findings(seen)
        if not finding.kind.startswith("specification")
        and not (finding.kind == "module-missing" and finding.subject != seen.running_kernel)
    ]
    if hardware.gpus.count == 0:
        return found
    if spec.version and judgement.loaded(seen) != spec.version and not (spec.hold or not spec.ours):
        found.append(f"module {judgement.loaded(seen) or 'none'} is loaded instead of {spec.version}")
    if seen.module is not None:
        found += judgement.cards(spec, hardware, seen)
    return found
