"""What role `pcie` does after everything else: look at what the machine has become."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, operation
from pyinfra.context import ctx_host

from gpuwright import boot, snapshot
from roles.pcie.facts import TOPOLOGY
from roles.pcie.judgement import Fault, faults
from roles.pcie.spec import PcieSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware


def _faults(host: Any, spec: PcieSpec, hardware: Hardware) -> list[Fault]:
    try:
        seen = snapshot.read(host)
        return faults(spec, hardware, seen.read(TOPOLOGY), seen.read(boot.BOOT).line)
    except snapshot.CouldNotLook as error:
        return [Fault(f"seen: nothing ({error}); expected: the PCIe topology; do: look at the node")]


@operation()
def verified(spec: PcieSpec, hardware: Hardware) -> Generator[FunctionCommand, None, None]:
    """Fail where the IOMMU or a bridge is not what the node file says, and name what waits for a reboot instead.

    + spec: the role's settings
    + hardware: how accelerators are told from other devices
    """
    host = ctx_host.get()
    found = _faults(host, spec, hardware)
    if not found:
        host.noop("the IOMMU and the bridges are as the node file says")
        return
    if all(fault.waits_for_reboot for fault in found):
        for fault in found:
            logger.warning(f"{host.print_prefix}pcie: {fault.sentence}; this run goes on")
        host.noop("waits for a reboot")
        return
    yield FunctionCommand(_tell, (spec, hardware), {})


def _tell(state: Any, host: Any, spec: PcieSpec, hardware: Hardware) -> bool:
    # The unit has run, and perhaps the machine was rebooted, between the plan and now.
    snapshot.forget(host)
    found = _faults(host, spec, hardware)
    for fault in found:
        waits = fault.waits_for_reboot
        host.log_styled(
            f"pcie: {fault.sentence}{'; this run goes on' if waits else ''}",
            fg="yellow" if waits else "red",
            log_func=logger.warning if waits else logger.error,
        )
    return all(fault.waits_for_reboot for fault in found)
