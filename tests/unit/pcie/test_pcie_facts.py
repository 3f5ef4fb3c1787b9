"""What the section makes of sysfs, on a bus of files with a FAKE setpci, and of answers that are not whole."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import types

import mutations
import pytest
from pyinfra.api import OperationError

from gpuwright import boot
from gpuwright.audit.control import Outcome
from gpuwright.snapshot import CouldNotLook, Snapshot
from gpuwright.spec.node import Accelerators, Gpus, Hardware, NodeSpec
from roles import pcie as role
from roles.pcie import checks, facts, judgement
from roles.pcie.facts import Acs
from roles.pcie.spec import PcieSpec

GPUS = Accelerators()
MACHINE = "ID=debian\nARCHITECTURE=x86_64\nKERNEL=6.12\nVIRTUALIZATION=none\nREBOOT=no"
REGIONS = (
    "0x0000000090000000 0x0000000090ffffff 0x0000000000040200\n"
    "0x0000006000000000 0x0000007fffffffff 0x000000000014220c\n"
    "0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
    "0x0000000000003000 0x000000000000307f 0x0000000000040101\n"
    + "0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 3
    + "0x0000004000000000 0x0000004fffffffff 0x000000000014220c\n"  # of virtual functions
)


def test_paths_lead_from_the_root_port_down(bus):
    seen = bus.topology()
    accelerators = seen.accelerators(GPUS)
    assert [(f.address, f.upstream) for f in accelerators] == [
        ("0000:12:00.0", ("0000:00:01.0", "0000:10:00.0", "0000:11:00.0")),
        ("0000:13:00.0", ("0000:00:01.0", "0000:10:00.0", "0000:11:04.0")),
        ("0000:20:00.0", ("0000:00:02.0",)),
    ]
    assert seen.paths(accelerators) == ("0000:00:01.0", "0000:00:02.0", "0000:10:00.0", "0000:11:00.0", "0000:11:04.0")
    assert [(f.numa_node, f.driver, f.group) for f in accelerators] == [(0, "nvidia", 14), (0, None, 15), (1, None, 16)]


def test_control_words_of_all_bridges_and_of_nothing_else(bus):
    seen = bus.topology()
    assert {address: str(acs) for address, acs in seen.acs.items()} == {
        "0000:00:01.0": "0x001d",
        "0000:00:02.0": "0x0011",
        "0000:00:03.0": "0x001d",
        "0000:00:1f.0": "no ACS",
        "0000:10:00.0": "no ACS",
        "0000:11:00.0": "0x001d",
        "0000:11:04.0": "0x005d",
        "0000:11:08.0": "0x001d",
    }
    assert [seen.acs[f"0000:{a}"].redirects for a in ("00:01.0", "00:02.0", "10:00.0")] == [True, False, False]
    assert judgement.redirecting(seen, Hardware()) == [
        "0000:00:01.0: 0x001d", "0000:11:00.0: 0x001d", "0000:11:04.0: 0x005d"
    ]  # fmt: skip


def test_could_not_look_has_three_reasons_and_none_of_them_is_off(bus):
    directory = (bus.devices / "0000:10:00.0").resolve()
    (directory / "config").write_bytes(b"\x01" * 64)  # what the kernel hands out without privileges
    acs = bus.topology().acs["0000:10:00.0"]
    assert (acs.redirects, acs.word) == (None, None)
    assert "could not look" in str(acs)
    (directory / "config").write_bytes(b"\xff" * 4096)
    assert "does not answer" in str(bus.topology().acs["0000:10:00.0"])
    (bus.bin / "setpci").unlink()
    assert {acs.redirects for acs in bus.topology().acs.values()} == {None}
    assert "pciutils" in str(bus.topology().acs["0000:00:01.0"])


def test_without_privileges_the_size_of_configuration_space_is_still_shown(bus, monkeypatch):
    """sysfs shows 4096 bytes to everybody, and gives 64: then it is not "no ACS"."""
    text = bus.run("-c", facts.script(str(bus.root))).stdout.replace("C 0000:10:00.0 none", "C 0000:10:00.0 denied")
    assert facts.parse(text).acs["0000:10:00.0"] == Acs(unread="only root may read its configuration space")


def test_regions_are_the_functions_own_and_memory(bus):
    bus.add("00:04.0", "0302", vendor="10de", resource=REGIONS)
    function = bus.topology().functions["0000:00:04.0"]
    assert function.regions == {0: 16 * 1024**2, 1: 128 * 1024**3}
    assert function.aperture == 128 * 1024**3
    assert function.upstream == ()  # on the root bus, as in many virtual machines


def test_speed_and_width(bus):
    function = bus.topology().functions["0000:12:00.0"]
    assert (function.width, function.max_width, function.speed) == (16, 16, "2.5 GT/s")


def groups(bus, kinds):
    for group, kind in kinds.items():
        directory = bus.root / f"sys/kernel/iommu_groups/{group}"
        directory.mkdir(parents=True)
        (directory / "type").write_text(f"{kind}\n")
    (bus.root / "sys/class/iommu/dmar0").mkdir(parents=True)
    seen = bus.topology()
    return seen.iommu(seen.accelerators(GPUS))


@pytest.mark.parametrize(
    ("kinds", "mode"),
    [
        ({14: "identity", 15: "identity", 16: "identity"}, "pt"),
        ({14: "DMA", 15: "DMA-FQ", 16: "DMA"}, "translated"),
        ({14: "identity", 15: "DMA-FQ", 16: "identity"}, "mixed"),
        ({14: "identity", 15: "identity"}, "unknown"),
        ({14: "blocked", 15: "blocked", 16: "blocked"}, "mixed"),
    ],
)
def test_the_mode_is_what_the_accelerators_groups_say(bus, kinds, mode):
    assert groups(bus, kinds).mode == mode


def test_off_is_no_iommu_and_no_group(bus):
    seen = bus.topology()
    assert seen.iommu(seen.accelerators(GPUS)).mode == "off"


def test_without_accelerators_the_mode_is_unknown(bus):
    assert groups(bus, {14: "identity"}).mode == "unknown"
    assert bus.topology().iommu(()).mode == "unknown"


@pytest.mark.parametrize("cut", [0, 1, 40, 400, -2, -5])
def test_an_answer_that_was_cut_off_is_no_answer(bus, cut):
    text = bus.run("-c", facts.script(str(bus.root))).stdout.strip()
    seen = Snapshot({"pcie": (0, text[:cut])})
    with pytest.raises(CouldNotLook):
        seen.read(facts.TOPOLOGY)


def test_a_damaged_answer_is_read_right_or_not_at_all(bus):
    groups(bus, {14: "identity", 15: "identity", 16: "identity"})
    text = bus.run("-c", facts.script(str(bus.root))).stdout
    truth = facts.parse(text)
    right = refused = 0
    for mutant in mutations.mutants(text, rounds=24):
        said = mutant.decode(errors="replace") if isinstance(mutant, bytes) else mutant
        try:
            seen = Snapshot({"pcie": (0, said)}).read(facts.TOPOLOGY)
        except CouldNotLook:
            refused += 1
            continue
        right += 1
        for address, acs in seen.acs.items():
            assert acs in (truth.acs[address],) or acs.redirects is None, mutant
        found = seen.accelerators(GPUS)
        assert {f.address for f in found} <= {f.address for f in truth.accelerators(GPUS)}, mutant
        for function in found:
            assert function.upstream == truth.functions[function.address].upstream, mutant
        if len(found) == 3:
            assert seen.iommu(found).mode in ("pt", "mixed", "unknown"), mutant
            assert seen.paths(found) == truth.paths(truth.accelerators(GPUS)), mutant
    assert right + refused >= 200
    assert min(right, refused) >= 20


def test_a_root_bus_below_a_controller_is_no_bridge():
    """As volume management devices have them."""
    text = (
        "U 0\nN 0 0\nP 0000:00:0e.0 ../../../devices/pci0000:00/0000:00:0e.0\n"
        "P 10000:e0:06.0 ../../../devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0\n"
        + "".join(
            f"A {address}/{name}:{value}\n"
            for address, kind in (("0000:00:0e.0", "0x010400"), ("10000:e0:06.0", "0x060400"))
            for name, value in (("class", kind), ("vendor", "0x8086"), ("device", "0x0001"))
        )
        + "C 10000:e0:06.0 word 0000\nEND\n"
    )
    assert facts.parse(text).functions["10000:e0:06.0"].upstream == ("0000:00:0e.0",)


def test_a_machine_without_pci_has_no_functions(tmp_path, bus):
    shutil.rmtree(bus.root / "sys/bus/pci")
    assert bus.topology().functions == {}
    shutil.rmtree(bus.root / "sys/bus")
    assert bus.run("-c", facts.script(str(bus.root))).returncode == 1


def test_how_many_there_should_be():
    assert facts.expected(Hardware(gpus=Gpus(count=4))) == 4
    assert facts.expected(Hardware(gpus=Gpus(count=4), accelerators=Accelerators(count=2))) == 2


# --- what is wrong, and what waits ------------------------------------------------------------------------------------


def sentences(bus, spec, line=""):
    found = judgement.faults(spec, Hardware(), bus.topology(), boot.parse_line(f"BOOT_IMAGE=/vmlinuz ro {line}"))
    return [(fault.sentence, fault.waits_for_reboot) for fault in found]


def test_a_mode_that_the_kernel_was_not_told_yet_waits_for_the_reboot(bus):
    bus.clear()
    groups(bus, {14: "DMA-FQ", 15: "DMA-FQ", 16: "DMA-FQ"})
    assert sentences(bus, PcieSpec(), "quiet intel_iommu=on") == [
        (
            "seen: IOMMU translated (DMA-FQ: 0000:12:00.0, 0000:13:00.0, 0000:20:00.0); expected: pt; do: reboot; the kernel "
            "runs without iommu=pt",
            True,
        )
    ]
    assert sentences(bus, PcieSpec(iommu="translated")) == []


def test_a_mode_that_did_not_come_although_it_was_told_is_a_fault(bus):
    bus.clear()
    groups(bus, {14: "DMA-FQ", 15: "DMA-FQ", 16: "DMA-FQ"})
    [(sentence, waits)] = sentences(bus, PcieSpec(), "iommu=pt intel_iommu=on")
    assert not waits
    assert "as the kernel was told; do: look at" in sentence
    # A later word takes an earlier one back: then it was not told so.
    [(sentence, waits)] = sentences(bus, PcieSpec(), "iommu=pt intel_iommu=on iommu=nopt")
    assert waits


def test_an_iommu_that_the_firmware_has_off_is_a_fault(bus):
    bus.clear()
    [(sentence, waits)] = sentences(bus, PcieSpec(), "iommu=pt intel_iommu=on")
    assert not waits
    assert "turn the IOMMU on in the firmware" in sentence
    assert sentences(bus, PcieSpec(iommu="off")) == []


def test_a_bridge_that_redirects_waits_for_nothing(bus):
    found = sentences(bus, PcieSpec(iommu="off"))
    assert [waits for _, waits in found] == [False, False, False]
    assert found[0][0] == (
        "seen: 0000:00:01.0: 0x001d; expected: no redirect on it; do: journalctl -u gpuwright-acs.service"
    )
    assert sentences(bus, PcieSpec(iommu="off", acs_redirect="kept")) == []


# --- what a plan says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "kind"), [("pt", "identity"), ("translated", "DMA-FQ")])
@pytest.mark.parametrize(
    ("wanted", "consequence"),
    [
        ("pt", "a faulty or hostile device is no longer confined to its own buffers"),
        ("translated", "the first all-reduce can hang or copies can arrive wrong"),
        ("off", "no device is confined and no VFIO guest can have one"),
    ],
)
def test_a_plan_says_what_the_mode_costs_whether_it_changes_or_holds(
    bus, monkeypatch, caplog, now, kind, wanted, consequence
):
    groups(bus, {14: kind, 15: kind, 16: kind})
    answer = re.sub(r"(?m)^U .*", "U 0", bus.run("-c", facts.script(str(bus.root))).stdout)
    seen = Snapshot({"system": (0, MACHINE), "pcie": (0, answer)})
    monkeypatch.setattr(role.snapshot, "read", lambda host: seen)
    host = types.SimpleNamespace(name="gpu-1", print_prefix="[gpu-1] ")
    monkeypatch.setattr(role, "ctx_host", types.SimpleNamespace(get=lambda: host))
    for operation in ("installed", "files", "running", "retire"):
        monkeypatch.setattr(role, operation, lambda *_, **__: None)
    caplog.set_level(logging.INFO, logger="pyinfra")
    role.pcie._inner(PcieSpec(iommu=wanted), Hardware(), ())
    [said] = [line for line in caplog.messages if "pcie.iommu" in line]
    assert said.startswith(f"[gpu-1] pcie.iommu: {now} now, {wanted} wanted: ")
    assert said.endswith(role.CONSEQUENCES[wanted])
    assert consequence in said
    assert "\n" not in said


# --- guests -------------------------------------------------------------------------------------------------------------


def test_a_host_without_guests_is_not_refused(bus):
    role.refuse("gpu-1", dataclasses.replace(bus.topology(), vfio_holders=()), PcieSpec())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "set pcie.acs_redirect: kept, or say in pcie.vfio_guests_accepted why"),
        ({"iommu": "off", "acs_redirect": "kept"}, "needs an IOMMU, and the node file has pcie.iommu: off; use pt"),
        ({"acs_redirect": "kept"}, None),
        ({"vfio_guests_accepted": "the guest is ours and has no neighbours"}, None),
    ],
)
def test_guests_are_refused_unless_accepted_or_left_in_peace(bus, settings, sentence):
    bus.add("00:02.0/20:00.1", "0200", driver="vfio-pci")
    seen = dataclasses.replace(bus.topology(), vfio_holders=("qemu-system-x86",))
    assert seen.vfio_guests == ("0000:20:00.1 is bound to vfio-pci", "qemu-system-x86 holds a device of VFIO")
    if sentence is None:
        role.refuse("gpu-1", seen, PcieSpec(**settings))
        return
    with pytest.raises(OperationError) as refused:
        role.refuse("gpu-1", seen, PcieSpec(**settings))
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("Nothing was changed.")


def test_who_may_not_look_is_not_told_that_there_are_none(bus):
    with pytest.raises(OperationError, match="root alone"):
        role.refuse("gpu-1", dataclasses.replace(bus.topology(), vfio_holders=None), PcieSpec())


def test_guests_whose_risk_is_accepted_are_waived_and_never_out_of_sight(bus):
    [control] = [control for control in checks.CONTROLS if control.id == "GPW-PCIE-003"]
    answer = re.sub(r"(?m)^[UH] .*\n", "", bus.run("-c", facts.script(str(bus.root))).stdout)
    reason = "the guest is ours and has no neighbours"

    def judged(accepted, *said):
        seen = Snapshot({"system": (0, MACHINE), "pcie": (0, "\n".join([*said, answer]))})
        return control.predicate(seen, NodeSpec(gpuwright=1, summary="x", pcie=PcieSpec(vfio_guests_accepted=accepted)))

    held = judged(reason, "U 0", "H qemu-system-x86")
    assert (held.outcome, held.actual) == (Outcome.WAIVED, f"qemu-system-x86 holds a device of VFIO: {reason}")
    assert judged(None, "U 0", "H qemu-system-x86").outcome is Outcome.FAIL
    # Nothing is waived where there is nothing to waive, and who may not look is not told that there is nothing.
    assert judged(reason, "U 0").outcome is Outcome.PASS
    with pytest.raises(CouldNotLook, match="only root"):
        judged(reason, "U 1000")
