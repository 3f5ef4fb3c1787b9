"""What role `nvidia` promises: one release everywhere, every card there and set as asked, and no change left half done."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, manual, not_applicable, without
from gpuwright.snapshot import CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.nvidia import diagnosis, equality, judgement
from roles.nvidia.equality import Finding, Kind
from roles.nvidia.facts import NVIDIA, Nvidia

# --- observations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What logs say of the driver: lines of this boot, and packages that moved since it."""

    journal: bool
    lines: tuple[str, ...]
    history: str


def _parse_told(text: str) -> Told:
    head, *rest = text.splitlines() or [""]
    if head not in ("journal", "no journal"):
        raise ValueError(head)
    at = rest.index("history")
    return Told(head == "journal", tuple(rest[:at]), "\n".join(rest[at + 1 :]))


# The kernel's lines, and those of what runs beside the driver since it last started: an older start's fault is mended.
TOLD = Section(
    "audit-nvidia-logs",
    r"""
lines() { grep -E 'NVRM|nvidia|Nvidia|NVIDIA|[Ff]abric [Mm]anager|CDI|BAR [0-9]|module|command line parameters' | tail -n 400; }
if command -v journalctl >/dev/null && [ -d /run/systemd/system ]; then
  echo journal
  journalctl --quiet --dmesg --boot --output=cat 2>/dev/null | lines
  for unit in nvidia-persistenced nvidia-fabricmanager nvidia-cdi-refresh docker; do
    since=$(systemctl show --property=ExecMainStartTimestamp --value $unit.service 2>/dev/null)
    [ -z "$since" ] || journalctl --quiet --boot --output=cat --since "$since" -u $unit.service 2>/dev/null | lines
  done
else
  echo 'no journal'
  dmesg 2>/dev/null | lines
fi
echo history
[ ! -r /var/log/apt/history.log ] || tail -c 60000 /var/log/apt/history.log
exit 0
""",
    _parse_told,
)

# --- predicates -----------------------------------------------------------------------------------------------------


def _cards(seen: Snapshot, spec: NodeSpec) -> Nvidia | Verdict:
    """The driver, or that the question does not arise."""
    now = seen.read(NVIDIA)
    if spec.hardware.gpus.count == 0 and not now.cards and not any(device.gpu for device in now.devices):
        return not_applicable("the node file names no card, and there is none")
    return now


def _found(seen: Nvidia, *kinds: Kind) -> list[str]:
    return [_sentence(finding) for finding in equality.findings(seen) if finding.kind in kinds]


def _sentence(finding: Finding) -> str:
    return f"{finding.seen}; expected: {finding.expected}; do: {finding.remedy}"


def _wanted_release(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    runs, wanted = judgement.loaded(now), spec.nvidia.version
    if wanted is None:
        return judged(bool(runs), "a driver is loaded", f"{runs or 'none'} is loaded (source vendor, no version named)")
    actual = f"{runs or 'no module'} is loaded, {equality.release(now) or 'no package'} is installed"
    if why := judgement.rejected(spec.nvidia, now):
        actual += f"; {wanted} failed on this node: {why}"
    if spec.nvidia.hold and runs != wanted:
        return manual(
            f"the driver is frozen (nvidia.hold) at {runs or 'none'}; the node file names {wanted}: lift the hold, or name {runs}"
        )
    return judged(runs == wanted, f"driver {wanted}", actual)


def _one_release(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if now.module is None and not now.packages:
        raise CouldNotLook("there is neither a loaded module nor a package of the driver")
    faults = _found(now, "package", "half-installed", "reboot", "library")
    runs = f"module {judgement.loaded(now) or 'none'}, library {now.library or 'unknown'}"
    return without(
        faults, "module, library and packages of one release", f"{runs}, packages {equality.release(now) or 'none'}"
    )


def _next_boot(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if not equality.release(now):
        return not_applicable("no package of a driver is installed")
    if not now.kernels:
        return manual("no kernel is installed on this host; look at the machine that boots it")
    kernels = ", ".join(f"{kernel.release}: {kernel.module or 'none'}" for kernel in now.kernels)
    return without(_found(now, "module-missing"), "every installed kernel has the driver's module", kernels)


def _open(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if now.module is None:
        raise CouldNotLook("no module is loaded")
    kinds = {True: "the open kernel modules", False: "NVIDIA's own kernel modules"}
    return judged(now.module.open == spec.nvidia.open_modules, kinds[spec.nvidia.open_modules], kinds[now.module.open])


def _held(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = seen.read(NVIDIA)
    if not spec.nvidia.ours:
        return not_applicable("the driver is the vendor's, and so are its updates")
    packages = [package.name for package in equality.every_driver_package(now)]
    if not packages:
        return not_applicable("no package of a driver is installed")
    faults = [f"{name} is not held" for name in judgement.unheld(now)]
    return without(faults, "every package of the driver is held", f"{len(packages)} packages are held")


def _all_there(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if not now.smi:
        raise CouldNotLook("nvidia-smi is not installed")
    listed = ", ".join(f"{card.index} {card.uuid}" for card in now.cards)
    return without(
        judgement.cards(spec.nvidia, spec.hardware, now), f"{spec.hardware.gpus.count} cards answer", listed or "none"
    )


def _fabric(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = seen.read(NVIDIA)
    if not now.nvswitches and not now.fabric_manager:
        return not_applicable("this machine has no NVSwitch, and no fabric manager")
    faults = _found(now, "fabric-manager", "fabric-manager-unwanted")
    if now.nvswitches:
        if not now.fabric_manager:
            faults.append(f"{now.nvswitches} NVSwitches and no fabric manager: no GPU behind them computes")
        elif now.units is None:
            raise CouldNotLook("no systemd runs here: whether the fabric manager does cannot be told")
        elif (unit := now.units.get("nvidia-fabricmanager")) is None or unit.active != "active":
            faults.append(f"nvidia-fabricmanager is {unit.active if unit else 'no unit'}")
    actual = f"{now.nvswitches} NVSwitches, fabric manager {now.fabric_manager or 'none'}"
    return without(
        faults, "a fabric manager of the driver's very release where there are NVSwitches, and only there", actual
    )


def _persistent(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if not spec.nvidia.persistence:
        return not_applicable("persistence: false")
    if not now.cards:
        raise CouldNotLook(now.smi_failed or "no card answers")
    faults = [f"{card.uuid} is not in persistence mode" for card in now.cards if card.persistence is False]
    if untold := [card.uuid for card in now.cards if card.persistence is None]:
        raise CouldNotLook(f"{', '.join(untold)} does not tell its persistence mode")
    return without(faults, "every card in persistence mode", f"{len(now.cards)} cards are")


def _power(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    limit = spec.nvidia.power_limit_watts
    if limit is None:
        return not_applicable("no power_limit_watts: the cards keep their own")
    if not now.cards:
        raise CouldNotLook(now.smi_failed or "no card answers")
    if untold := [card.uuid for card in now.cards if card.power is None]:
        raise CouldNotLook(f"{', '.join(untold)} does not tell its power limit")
    faults = [f"{card.uuid} is limited to {card.power:g} W" for card in now.cards if card.power != float(limit)]
    return without(faults, f"every card limited to {limit} W", f"{len(now.cards)} cards are")


def _whole_cards(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if spec.nvidia.mig == "kept":
        return not_applicable("mig: kept")
    if not now.cards:
        raise CouldNotLook(now.smi_failed or "no card answers")
    faults = [
        f"{card.uuid} {'is in MIG mode' if card.mig else 'goes into MIG mode at its next reset'}"
        for card in now.cards
        if card.mig or card.mig_pending
    ]
    return without(faults, "no card is in MIG mode", f"{len(now.cards)} whole cards")


def _options(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.nvidia
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    asked = [
        *(["RegistryDwords"] if spec.nvidia.registry else []),
        *(["uvm_disable_hmm"] if spec.nvidia.uvm_hmm == "off" else []),
    ]
    if not asked:
        return not_applicable("the node file asks for no option of the driver")
    if now.module is None:
        raise CouldNotLook("no module is loaded")
    if "uvm_disable_hmm" in asked and now.module.hmm_disabled is None:
        raise CouldNotLook("nvidia_uvm is not loaded")
    return without(
        judgement.options(spec.nvidia, now), "the driver runs with its options, as it says itself", ", ".join(asked)
    )


def _signed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    if now.secure_boot is None:
        return not_applicable("the firmware tells nothing of Secure Boot: no UEFI, or a container")
    if not now.secure_boot:
        return not_applicable("Secure Boot is off")
    faults = _found(now, "signature")
    if not faults and now.trusted is None:
        raise CouldNotLook("keyctl is not installed: which keys the kernel trusts cannot be told (package keyutils)")
    signers = ", ".join(f"{kernel.release}: {kernel.signer or 'none'}" for kernel in now.kernels)
    return without(faults, "the kernel trusts the signer of every module", signers)


def _settled(seen: Snapshot, spec: NodeSpec) -> Verdict:
    exchange = seen.read(NVIDIA).exchange
    if exchange.wanted:
        return judged(
            False, "no change of the driver is half done", f"{exchange.before} is being changed to {exchange.wanted}"
        )
    failed = "; ".join(exchange.rejected)
    return judged(
        True, "no change of the driver is half done", f"none is{f' (failed here: {failed})' if failed else ''}"
    )


def _quiet(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _cards(seen, spec)
    if isinstance(now, Verdict):
        return now
    told = seen.read(TOLD)
    found = {one.kind: one for one in diagnosis.diagnoses(told.lines)}
    faults = [f"{kind}: {one.meaning}; do: {one.remedy} ({one.line})" for kind, one in found.items()]
    if not told.journal and not told.lines:
        raise CouldNotLook("there is neither a journal nor a kernel log to read")
    return without(
        faults, "no line of this boot's logs tells a fault of the driver", f"{len(told.lines)} lines tell none"
    )


def _unattended(seen: Snapshot, spec: NodeSpec) -> Verdict:
    faults = [
        f"{move.package} went from {move.before} to {move.after} by itself on {move.when}"
        for move in diagnosis.moves(seen.read(TOLD).history)
        if move.unattended
    ]
    return without(faults, "unattended-upgrades moved no package of the driver", "apt's history names none")


# --- the list -------------------------------------------------------------------------------------------------------

_AGAIN = "pyinfra INVENTORY deploy.py"
_REBOOT = "a change of the loaded driver drains the node and reboots it"
_SEEN = (NVIDIA,)


CONTROLS = (
    Control(
        id="GPW-NVID-001",
        title="The loaded driver is the one release that the node file names.",
        reason="Engines were qualified with it; another one is another machine (gpu-node.md 4.1).",
        severity="high",
        observed=_SEEN,
        predicate=_wanted_release,
        remedy=_AGAIN,
        risk=_REBOOT,
    ),
    Control(
        id="GPW-NVID-002",
        title="Module, library and packages are of one release.",
        reason="One library alone that is upgraded stops every new process: Driver/library version mismatch (gpu-node.md section 7, report 9).",
        severity="critical",
        observed=_SEEN,
        predicate=_one_release,
        remedy=_AGAIN,
        risk=_REBOOT,
    ),
    Control(
        id="GPW-NVID-003",
        title="Every installed kernel has the driver's module.",
        reason="DKMS passes over a kernel without headers in silence, and the next boot has no GPU (gpu-node.md 4.1).",
        severity="critical",
        observed=_SEEN,
        predicate=_next_boot,
        remedy=f"{_AGAIN}, or remove a kernel that no headers can be had for",
        risk="none",
    ),
    Control(
        id="GPW-NVID-004",
        title="The kernel modules are of the kind that the node file names.",
        reason="Blackwell works with the open ones alone (gpu-node.md 4.1).",
        severity="high",
        observed=_SEEN,
        predicate=_open,
        remedy=_AGAIN,
        risk=_REBOOT,
    ),
    Control(
        id="GPW-NVID-005",
        title="Every package of the driver is held at its version.",
        reason="An upgrade by passing is an outage at the next start (gpu-node.md section 7, report 9).",
        severity="high",
        observed=_SEEN,
        predicate=_held,
        remedy=_AGAIN,
        risk="none",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-NVID-006",
        title="Every card answers, by its UUID, and NVIDIA's driver has it.",
        reason="A card that is gone gives its index to the next one, and another driver can have taken it (gpu-node.md section 7, report 11).",
        severity="critical",
        observed=_SEEN,
        predicate=_all_there,
        remedy="journalctl -k | grep -iE 'xid|nvrm'; a card that fell off the bus wants a power cycle, one that nova or nouveau has a reboot",
        risk="a power cycle is an outage",
    ),
    Control(
        id="GPW-NVID-007",
        title="A fabric manager of the driver's very release runs where there are NVSwitches, and only there.",
        reason="One of another release, or none, and no GPU computes; without a switch it is a failed unit (gpu-node.md section 7, report 10).",
        severity="high",
        observed=_SEEN,
        predicate=_fabric,
        remedy=_AGAIN,
        risk="engines behind the switches stop when it restarts",
    ),
    Control(
        id="GPW-NVID-008",
        title="Every card is in persistence mode.",
        reason="Without it a card that nobody uses is shut down, and forgets its power limit (gpu-node.md 4.1).",
        severity="medium",
        observed=_SEEN,
        predicate=_persistent,
        remedy=_AGAIN,
        risk="none",
    ),
    Control(
        id="GPW-NVID-009",
        title="Every card has the power limit of the node file.",
        reason="The cards forget it at every boot, and the feed was planned with it (seed 3).",
        severity="high",
        observed=_SEEN,
        predicate=_power,
        remedy="systemctl restart gpuwright-gpu-settings",
        risk="engines slow down or speed up",
    ),
    Control(
        id="GPW-NVID-010",
        title="No card is in MIG mode.",
        reason="An engine gets whole cards; a split one has less memory than it was planned with.",
        severity="medium",
        observed=_SEEN,
        predicate=_whole_cards,
        remedy=_AGAIN,
        risk="a card leaves MIG mode only when nobody uses it",
    ),
    Control(
        id="GPW-NVID-011",
        title="The driver runs with the module options of the node file, as it says itself.",
        reason="The files say what the next load will bring, and sysfs shows some of them empty (gpu-node.md 2.3).",
        severity="medium",
        observed=_SEEN,
        predicate=_options,
        remedy=f"{_AGAIN}, then reboot",
        risk=_REBOOT,
    ),
    Control(
        id="GPW-NVID-012",
        title="Where Secure Boot is on, the kernel trusts the signer of every driver module.",
        reason="A module that is signed with a key that only the firmware knows does not load (deepin kernel#2144).",
        severity="high",
        observed=_SEEN,
        predicate=_signed,
        remedy="mokutil --import KEY and enrol it at the console, or nvidia.source: distribution",
        risk="none",
        references=ref.KERNEL_PROTECTION,
    ),
    Control(
        id="GPW-NVID-013",
        title="No change of the driver is half done.",
        reason="A node between two drivers serves nobody, and its engines wait.",
        severity="high",
        observed=_SEEN,
        predicate=_settled,
        remedy=_AGAIN,
        risk=_REBOOT,
    ),
    Control(
        id="GPW-NVID-014",
        title="No line of this boot's logs tells a fault of the driver.",
        reason="The sentence that explains an outage stands in a log that nobody reads.",
        severity="medium",
        observed=(NVIDIA, TOLD),
        predicate=_quiet,
        remedy="what the finding says; gpuwright driver --diagnose FILE explains any log",
        risk="none",
    ),
    Control(
        id="GPW-NVID-015",
        title="unattended-upgrades has moved no package of the driver.",
        reason="It happened in a night before (gpu-node.md section 7, report 9); what moved once moves again.",
        severity="medium",
        observed=(TOLD,),
        predicate=_unattended,
        remedy=_AGAIN,
        risk="none",
        references=ref.UPDATES,
    ),
)
