"""What role `memory` does on a node: nothing but look."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, operation
from pyinfra.context import ctx_host

from gpuwright import boot, snapshot
from roles.memory import regime
from roles.memory.facts import COHERENCE
from roles.memory.spec import MemorySpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware


def _faults(
    host: Any, spec: MemorySpec, hardware: Hardware, others: boot.Wishes
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All that is wrong, and of it what waits for a reboot."""
    try:
        seen = snapshot.read(host)
        loaded = boot.drivers_pending(seen.read(boot.BOOT), others)
        found = regime.faults(spec, hardware, seen.read(COHERENCE), seen.read(snapshot.NUMA), loaded)
        return found, tuple(fault for fault in found if regime.waits_for_reboot(fault))
    except snapshot.CouldNotLook as error:
        return (f"seen: nothing ({error}); expected: regime {spec.regime}; do: look at the node",), ()


@operation()
def regime_is(spec: MemorySpec, hardware: Hardware, others: boot.Wishes) -> Generator[FunctionCommand, None, None]:
    """Fail where GPU memory is not as the node file says, and say what a reboot would bring right.

    + spec: the role's settings
    + hardware: which memory nodes the machine has
    + others: drivers that may keep NVIDIA's from its cards until a reboot
    """
    host = ctx_host.get()
    found, _ = _faults(host, spec, hardware, others)
    if not found:
        host.noop("memory is as the node file says")
        return
    yield FunctionCommand(_tell, (spec, hardware, others), {})


def _tell(state: Any, host: Any, spec: MemorySpec, hardware: Hardware, others: boot.Wishes) -> bool:
    # The reboot, if there was one, lies between the plan and now.
    snapshot.forget(host)
    found, pending = _faults(host, spec, hardware, others)
    for fault in found:
        waits = fault in pending
        host.log_styled(
            f"memory: {fault}{'; no engine is started or replaced until then' if waits else ''}",
            fg="yellow" if waits else "red",
            log_func=logger.warning if waits else logger.error,
        )
    return set(found) <= set(pending)
