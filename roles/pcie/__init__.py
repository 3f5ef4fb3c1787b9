"""Role `pcie`: what the IOMMU and the bridges do with traffic between accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyinfra import logger
from pyinfra.api import OperationError, deploy
from pyinfra.context import ctx_host

from gpuwright import sandbox, snapshot
from gpuwright.atomic import File, Validate, files
from gpuwright.ownership import retire
from gpuwright.packages import installed
from gpuwright.peers import PeerGroup
from gpuwright.render import static, template
from gpuwright.units import running
from roles.pcie import operations, p2p
from roles.pcie.facts import TOPOLOGY, Topology
from roles.pcie.judgement import redirecting
from roles.pcie.spec import PcieSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

ROLE = "pcie"
UNIT = "gpuwright-acs.service"
SETTINGS = "/etc/gpuwright/pcie/acs.conf"
RULES = "/etc/udev/rules.d/90-gpuwright-acs.rules"
SCRIPTS = "/usr/local/lib/gpuwright"

# udev has a check of its own from systemd 254.
_UDEV_VERIFY = f"udevadm verify --help >/dev/null 2>&1 || exit 0; udevadm verify --resolve-names=never .{RULES}"

CONSEQUENCES = {
    "pt": "the host's own devices reach memory and one another untranslated; interrupt remapping and VFIO guests stay "
    "possible, and a faulty or hostile device is no longer confined to its own buffers",
    "translated": "every device is confined to its own buffers; peer traffic is translated too, and where ACS redirect is on, "
    "the first all-reduce can hang or copies can arrive wrong (gpu-node.md 2.1)",
    "off": "no device is confined and no VFIO guest can have one; without interrupt remapping a host of 255 threads or more "
    "loses x2APIC and with it processors (gpu-node.md 0.5)",
}


@deploy("PCIe")
def pcie(spec: PcieSpec, hardware: Hardware, peers: Sequence[PeerGroup]) -> None:
    """Say what the IOMMU's mode costs, keep ACS redirect cleared on the bridges above accelerators, at every boot, and put in
    place what judges P2P before engines of several GPUs start.

    + spec: the role's settings
    + hardware: how accelerators are told from other devices
    + peers: GPUs between which P2P is judged

    The mode itself is words on the kernel command line, which role `kernel` writes. Raises OperationError, before anything
    changes, on a host with VFIO guests.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    judging = p2p.files(spec.p2p, peers)
    kept = [*(file.owned for file in judging), *(p2p.CLAIMS if judging else ())]
    if seen.read(snapshot.SYSTEM).is_container:
        logger.info(f"{host.print_prefix}pcie: not applicable, the host is a container and has its machine's bus")
        retire(ROLE, keep=kept)
        judge_p2p(judging, peers)
        return
    try:
        topology = seen.read(TOPOLOGY)
    except snapshot.CouldNotLook as error:
        raise OperationError(f"{host.name}: the PCIe topology cannot be read ({error}). Nothing was changed.") from None
    refuse(host.name, topology, spec)
    now = topology.iommu(topology.accelerators(hardware.accelerators)).mode
    logger.info(f"{host.print_prefix}pcie.iommu: {now} now, {spec.iommu} wanted: {CONSEQUENCES[spec.iommu]}")
    if spec.iommu == "translated" and spec.acs_redirect == "kept":
        logger.warning(f"{host.print_prefix}pcie: iommu: translated and acs_redirect: kept are both asked for here")

    installed(name="Install pciutils, which reads and sets ACS control words", packages=["pciutils"])
    wanted = role_files(spec, hardware)
    if wanted:
        files(
            name="Write the unit that clears ACS redirect above accelerators, and the rule that repeats it after a rescan",
            role=ROLE,
            files=wanted,
            validate=[Validate(_UDEV_VERIFY)],
        )
        running(
            name=f"Run {UNIT}: no bridge above an accelerator redirects",
            units=[UNIT],
            stale=lambda later: [UNIT] if redirecting(later.read(TOPOLOGY), hardware) else (),
        )
    retire(ROLE, keep=[*(file.owned for file in wanted), *kept])
    judge_p2p(judging, peers)


def judge_p2p(judging: Sequence[File], peers: Sequence[PeerGroup]) -> None:
    """Put in place what judges. Nothing is judged here: engines want the unit when they start, with their image on the node
    and their GPUs idle."""
    if judging:
        installed(name="Install what P2P scripts use: jq, pciutils", packages=["jq", "pciutils"])
        engines = ", ".join(group.engine for group in peers)
        files(name=f"Write what judges P2P of engines {engines}", role=ROLE, files=judging, claims=p2p.CLAIMS)


@deploy("PCIe verified")
def pcie_verified(spec: PcieSpec, hardware: Hardware) -> None:
    """Read back, after the one reboot of role kernel, what the IOMMU and the bridges really do.

    + spec: the role's settings
    + hardware: how accelerators are told from other devices
    """
    host = ctx_host.get()
    if snapshot.read(host).read(snapshot.SYSTEM).is_container:
        return
    operations.verified(
        name=f"IOMMU in mode {spec.iommu}, ACS redirect {spec.acs_redirect} on {host.name}",
        spec=spec,
        hardware=hardware,
    )


def role_files(spec: PcieSpec, hardware: Hardware) -> list[File]:
    """The role's files: none where redirect is kept."""
    if spec.acs_redirect == "kept":
        return []
    told_by = hardware.accelerators
    settings = template(
        f"pcie{SETTINGS}.j2",
        vendor=told_by.vendor,
        classes=told_by.classes,
        vfio_guests_accepted=spec.vfio_guests_accepted,
    )
    rules = template(f"pcie{RULES}.j2", vendor=told_by.vendor, classes=told_by.classes)
    unit = f"/etc/systemd/system/{UNIT}"
    return [
        File(SETTINGS, settings),
        File(f"{SCRIPTS}/acs-word", static(f"pcie{SCRIPTS}/acs-word"), "0755"),
        File(f"{SCRIPTS}/acs-clear", static(f"pcie{SCRIPTS}/acs-clear"), "0755"),
        File(unit, template(f"pcie{unit}.j2", sandbox=sandbox.acs().lines())),
        File(RULES, rules),
    ]


def refuse(name: str, topology: Topology, spec: PcieSpec) -> None:
    """Raise OperationError, in one sentence, where guests depend on what the role would take away."""
    if topology.vfio_holders is None:
        raise OperationError(
            f"{name}: whether programs hold devices of VFIO can be seen by root alone; deploy as root."
        )
    guests = "; ".join(topology.vfio_guests)
    if not guests:
        return
    if spec.iommu == "off":
        raise OperationError(
            f"{name}: this host gives devices to guests ({guests}), which needs an IOMMU, and the node file has "
            "pcie.iommu: off; use pt. Nothing was changed."
        )
    if spec.acs_redirect == "cleared" and not spec.vfio_guests_accepted:
        raise OperationError(
            f"{name}: this host gives devices to guests ({guests}), and without ACS redirect a guest's device can reach "
            "others below the same bridge; set pcie.acs_redirect: kept, or say in pcie.vfio_guests_accepted why that is "
            "acceptable here. Nothing was changed."
        )
