"""What role `pcie` promises: accelerators that reach one another directly, whole, and apart from guests."""

from __future__ import annotations

from collections.abc import Callable

from gpuwright.audit.control import Control, Verdict, judged, not_applicable, waived, without
from gpuwright.audit.systemd import blocks
from gpuwright.snapshot import SYSTEM, CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import sizes
from roles.pcie import p2p_checks
from roles.pcie.facts import TOPOLOGY, Function, Topology, expected

UNIT = "gpuwright-acs.service"

# As systemd has it, whoever changed it.
ACS_UNIT = Section(
    "audit-pcie-unit",
    f"systemctl show --property=Id,LoadState,ActiveState,UnitFileState,Result {UNIT}",
    lambda text: blocks(text)[UNIT],
)

_Judge = Callable[[Topology, tuple[Function, ...], NodeSpec], Verdict]


def _on_a_machine(judge: _Judge) -> Callable[[Snapshot, NodeSpec], Verdict]:
    """A container sees its machine's bus; nothing of it is its own."""

    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        system = seen.read(SYSTEM)
        if system.is_container:
            return not_applicable(f"this is a container ({system.virtualization}); its bus is its machine's")
        topology = seen.read(TOPOLOGY)
        return judge(topology, topology.accelerators(spec.hardware.accelerators), spec)

    return predicate


def _list(functions: tuple[Function, ...]) -> str:
    return ", ".join(f.address for f in functions) or "no accelerator"


# --- predicates -----------------------------------------------------------------------------------------------------


def _iommu(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    assert spec.pcie
    now = topology.iommu(accelerators)
    if now.mode == "unknown":
        raise CouldNotLook(f"the IOMMU's mode: {now.evidence}")
    return judged(now.mode == spec.pcie.iommu, f"IOMMU in mode {spec.pcie.iommu}", f"{now.mode} ({now.evidence})")


def _no_redirect(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    assert spec.pcie
    if spec.pcie.acs_redirect == "kept":
        return not_applicable("the node file keeps ACS redirect (pcie.acs_redirect)")
    words = {bridge: topology.acs[bridge] for bridge in topology.paths(accelerators)}
    said = "; ".join(f"{bridge}: {acs}" for bridge, acs in words.items()) or f"{_list(accelerators)}: no bridge above"
    if any(acs.redirects for acs in words.values()):
        return judged(False, "request redirect, completion redirect and egress control clear (0x2c)", said)
    if any(acs.redirects is None for acs in words.values()):
        raise CouldNotLook(f"ACS control words: {said}")
    return judged(True, "request redirect, completion redirect and egress control clear (0x2c)", said)


def _no_guests(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    assert spec.pcie
    if spec.pcie.acs_redirect == "kept":
        return not_applicable("the node file keeps ACS redirect (pcie.acs_redirect)")
    guests, accepted = topology.vfio_guests, spec.pcie.vfio_guests_accepted
    if topology.vfio_holders is None and not guests:
        raise CouldNotLook("programs that hold devices of VFIO: only root can see them")
    verdict = without(
        () if accepted else guests, "no device given to a guest", "no function bound to VFIO, no program holds one"
    )
    # Where there is no guest there is nothing to accept: the pass is a pass.
    return waived(verdict, [f"{guest}: {accepted}" for guest in guests])


def _unit(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.pcie
    system = seen.read(SYSTEM)
    if system.is_container:
        return not_applicable(f"this is a container ({system.virtualization}); its bus is its machine's")
    if spec.pcie.acs_redirect == "kept":
        return not_applicable("the node file keeps ACS redirect (pcie.acs_redirect)")
    unit = seen.read(ACS_UNIT)
    state = f"{unit['ActiveState']} ({unit['Result']}), {unit['UnitFileState'] or unit['LoadState']}"
    right = unit["ActiveState"] == "active" and unit["UnitFileState"] == "enabled"
    return judged(right, f"{UNIT} active and enabled", state)


def _count(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    wanted = expected(spec.hardware)
    told_by = spec.hardware.accelerators
    return judged(
        len(accelerators) == wanted,
        f"{wanted} accelerators (vendor {told_by.vendor}, class {', '.join(told_by.classes)})",
        f"{len(accelerators)}: {_list(accelerators)}",
    )


def _width(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    linked = [f for f in accelerators if f.max_width]
    if not linked:
        return not_applicable(f"{_list(accelerators)}: no link of PCI Express")
    # Speed is not judged: a link at rest is slow (gpu-node.md 2.3).
    faults = [f"{f.address}: x{f.width or 0} of x{f.max_width}" for f in linked if f.width != f.max_width]
    return without(faults, "every lane in use", "; ".join(f"{f.address}: x{f.width}" for f in linked))


def _aperture(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    memory = spec.hardware.gpus.memory
    if memory is None:
        return not_applicable("the node file does not say how much memory a card has (hardware.gpus.memory)")
    if not accelerators:
        return judged(False, f"a region of {sizes(memory)} or more on every accelerator", "no accelerator")
    said = [f"{f.address}: {sizes(f.aperture)}" for f in accelerators]
    small = [line for line, f in zip(said, accelerators, strict=True) if f.aperture < memory]
    return without(small, f"a region of {sizes(memory)} or more on every accelerator", "; ".join(said))


# What takes a card from the engines: guests, and the kernel's own drivers for it (gpu-node.md 4.1).
def _taken_by(driver: str | None) -> bool:
    name = (driver or "").casefold()
    return "vfio" in name or name.startswith(("nouveau", "nova"))


def _driver(topology: Topology, accelerators: tuple[Function, ...], spec: NodeSpec) -> Verdict:
    said = [f"{f.address}: {f.driver or 'no driver'}" for f in accelerators]
    taken = [line for line, f in zip(said, accelerators, strict=True) if _taken_by(f.driver)]
    return without(
        taken, "no accelerator with a driver for guests, nouveau or nova", "; ".join(said) or "no accelerator"
    )


# --- the list -------------------------------------------------------------------------------------------------------

_CONVERGE = "pyinfra INVENTORY deploy.py"

CONTROLS = (
    Control(
        id="GPW-PCIE-001",
        title="The IOMMU works in the mode of the node file.",
        reason="Translated peer traffic has hung collectives and delivered wrong bytes (gpu-node.md 2.1, 7.1).",
        severity="high",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_iommu),
        remedy=f"{_CONVERGE} (pcie.iommu), then the reboot it names",
        risk="a reboot ends what the node serves",
    ),
    Control(
        id="GPW-PCIE-002",
        title="No bridge between an accelerator and its root sends peer traffic up to the root.",
        reason="ACS redirect halves the bandwidth below a switch, and with a translating IOMMU it hangs (gpu-node.md 2.2).",
        severity="high",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_no_redirect),
        remedy=f"systemctl restart {UNIT}, or {_CONVERGE}",
        risk="devices below one bridge are no longer kept apart from one another",
    ),
    Control(
        id="GPW-PCIE-003",
        title="A host whose bridges let peers talk directly gives no device to a guest.",
        reason="A guest's device could reach the memory of others below the same bridge past the IOMMU.",
        severity="critical",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_no_guests),
        remedy="stop the guest, or set pcie.acs_redirect: kept and reboot, or accept it with a reason",
        risk="the guest loses its device",
    ),
    Control(
        id="GPW-PCIE-004",
        title="ACS redirect is cleared at every boot.",
        reason="The kernel sets it again on every bridge when it starts.",
        severity="medium",
        observed=(SYSTEM, ACS_UNIT),
        predicate=_unit,
        remedy=f"journalctl -u {UNIT}; {_CONVERGE}",
        risk="none",
    ),
    Control(
        id="GPW-PCIE-005",
        title="The node has as many accelerators as its node file says.",
        reason="One that fell off the bus is missing from every count but this one until an engine starts.",
        severity="high",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_count),
        remedy="journalctl --dmesg | grep -i -e pci -e xid; reseat the card, or correct hardware.gpus.count",
        risk="none",
    ),
    Control(
        id="GPW-PCIE-006",
        title="Every accelerator's link has all its lanes.",
        reason="A card that trained to fewer lanes works at a fraction of its bandwidth and says nothing.",
        severity="medium",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_width),
        remedy="reseat the card and its riser; look for AER lines in the kernel's log",
        risk="none",
    ),
    Control(
        id="GPW-PCIE-007",
        title="Every accelerator's memory is reachable whole by its peers.",
        reason="A region of 256 MiB is Resizable BAR off: peers then copy through a window (gpu-node.md 2.3).",
        severity="medium",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_aperture),
        remedy="turn on Above 4G Decoding and Resizable BAR in the firmware",
        risk="none",
    ),
    Control(
        id="GPW-PCIE-008",
        title="No accelerator is taken by a driver that keeps it from the engines.",
        reason="nova_core and nouveau bind cards first where nobody blocks them (gpu-node.md 4.1, 7.11); so do guests.",
        severity="high",
        observed=(SYSTEM, TOPOLOGY),
        predicate=_on_a_machine(_driver),
        remedy=f"{_CONVERGE} (role kernel blocks nouveau and nova); unbind guests' devices",
        risk="a guest loses its device",
    ),
    *p2p_checks.CONTROLS,
)
