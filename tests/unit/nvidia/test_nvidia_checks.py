"""The role's controls on made-up nodes: right is green, one thing wrong is its control red, and what cannot be seen is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge
from gpuwright.snapshot import CouldNotLook, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.nvidia import checks
from roles.nvidia.checks import CONTROLS, Told
from roles.nvidia.facts import Card, Exchange, Kernel, Module, Nvidia, Package, Specification, Unit

VERSION = "580.95.05"
UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")
CARDS = tuple(
    Card(
        index,
        uuid,
        f"00000000:{index}1:00.0",
        "a card",
        97887,
        "12.0",
        450.0,
        600.0,
        300.0,
        600.0,
        True,
        False,
        False,
        True,
    )
    for index, uuid in enumerate(UUIDS)
)
RIGHT = Nvidia(
    module=Module(VERSION, True, {"RegistryDwords": "ForceP2P=0x11"}, True),
    smi=True,
    cards=CARDS,
    smi_failed=None,
    library="580.95",
    devices=(),
    nvswitches=1,
    packages={name: Package(name, f"{VERSION}-1", True, "installed") for name in ("libcuda1", "nvidia-driver-cuda")},
    kernels=(Kernel("6.12", True, VERSION, "a key"),),
    running_kernel="6.12",
    secure_boot=True,
    specifications=(Specification("/run/cdi/nvidia.yaml", UUIDS, VERSION),),
    units={"nvidia-fabricmanager": Unit(True, True, "active", "success")},
    fabric_manager=VERSION,
    toolkit="1.18.2",
    known=tuple((card.index, card.uuid, card.bus) for card in CARDS),
    trusted="keys: asymmetric: a key: 0123",
)
QUIET = Told(True, ("NVRM: loading NVIDIA UNIX Open Kernel Module",), "")
SPEC = NodeSpec.model_validate(
    {
        "gpuwright": 1,
        "summary": "a machine",
        "kernel": {},
        "hardware": {"gpus": {"count": 2, "power_range_watts": [300, 600]}},
        "nvidia": {
            "source": "distribution",
            "version": VERSION,
            "power_limit_watts": 450,
            "registry": {"ForceP2P": "0x11"},
            "uvm_hmm": "off",
        },
    }
)


class Seen(Snapshot):
    """A snapshot of values, not of texts."""

    def __init__(self, driver: Nvidia | None, told: Told | None = QUIET) -> None:
        super().__init__({})
        object.__setattr__(self, "values", {"nvidia": driver, "audit-nvidia-logs": told})

    def read(self, section):
        value = self.values[section.name]
        if value is None:
            raise CouldNotLook(f"{section.name}: exit status 1")
        return value


def outcomes(driver: Nvidia | None = RIGHT, told: Told | None = QUIET, spec: NodeSpec = SPEC) -> dict[str, Outcome]:
    found = {}
    for control in CONTROLS:
        seen = Seen(driver, told)
        try:
            verdict = control.predicate(seen, spec)
        except CouldNotLook:
            found[control.id[-3:]] = Outcome.ERROR
        else:
            found[control.id[-3:]] = verdict.outcome
    return found


def card(**changes):
    return replace(RIGHT, cards=(replace(CARDS[0], **changes), CARDS[1]))


def package(**changes):
    return replace(RIGHT, packages={**RIGHT.packages, "libcuda1": replace(RIGHT.packages["libcuda1"], **changes)})


DOCTORED = {
    "001": (replace(RIGHT, module=replace(RIGHT.module, version="580.65.06")), {"002", "007"}),
    "002": (package(version="595.58.03-1"), set()),
    "003": (replace(RIGHT, kernels=(*RIGHT.kernels, Kernel("6.13", False, "", ""))), set()),
    "004": (replace(RIGHT, module=replace(RIGHT.module, open=False)), set()),
    "005": (package(held=False), set()),
    "006": (replace(RIGHT, cards=CARDS[:1]), set()),
    "007": (replace(RIGHT, units={"nvidia-fabricmanager": Unit(True, True, "failed", "exit-code")}), set()),
    "008": (card(persistence=False), set()),
    "009": (card(power=600.0), set()),
    "010": (card(mig_pending=True), set()),
    "011": (replace(RIGHT, module=replace(RIGHT.module, params={"RegistryDwords": ""})), set()),
    "012": (replace(RIGHT, trusted="keys: asymmetric: another key: 0123"), set()),
    "013": (replace(RIGHT, exchange=Exchange(before=VERSION, wanted="595.58.03")), set()),
}
LOGS = {
    "014": Told(True, ("NVRM: GPU 0000:01:00.0 is already bound to NovaCore.",), ""),
    "015": Told(
        True,
        (),
        "Start-Date: 2026-01-01  06:50:54\nCommandline: /usr/bin/unattended-upgrade\n"
        "Upgrade: libnvidia-ml1:amd64 (580.65.06-1, 580.95.05-1)\n",
    ),
}


def test_right_is_green():
    assert set(outcomes().values()) == {Outcome.PASS}


@pytest.mark.parametrize("control", DOCTORED)
def test_one_thing_wrong_is_its_control_red(control):
    driver, also = DOCTORED[control]
    red = {key for key, outcome in outcomes(driver).items() if outcome is Outcome.FAIL}
    assert red == {control, *also}


@pytest.mark.parametrize("control", LOGS)
def test_logs_are_read(control):
    assert {key for key, outcome in outcomes(told=LOGS[control]).items() if outcome is Outcome.FAIL} == {control}


def test_every_control_is_doctored():
    assert DOCTORED.keys() | LOGS.keys() == {control.id[-3:] for control in CONTROLS}


def test_what_cannot_be_seen_is_an_error_of_all_that_read_it():
    found = outcomes(None, None)
    assert set(found.values()) == {Outcome.ERROR}


def test_a_bare_machine_fails_where_it_must_and_crashes_nowhere():
    """Neither driver, nor packages, nor systemd: a container on somebody's machine, say."""
    bare = Nvidia(None, False, (), None, "", (), 0, {}, (), "6.1", None, (), None, "", "")
    found = outcomes(bare, Told(False, (), ""))
    assert found["001"] is Outcome.FAIL
    assert found["002"] is Outcome.ERROR
    assert found["006"] is Outcome.ERROR
    assert found["014"] is Outcome.ERROR
    assert Outcome.PASS not in {found[key] for key in ("003", "004", "005", "007", "008", "009", "011")}


def test_without_systemd_the_fabric_manager_cannot_be_told():
    assert outcomes(replace(RIGHT, units=None))["007"] is Outcome.ERROR


def test_a_machine_without_cards_asks_for_none():
    none = replace(RIGHT, cards=(), known=(), module=None, nvswitches=0, fabric_manager="", specifications=())
    spec = SPEC.model_copy(update={"hardware": SPEC.hardware.model_copy(update={"gpus": type(SPEC.hardware.gpus)()})})
    found = outcomes(none, spec=spec)
    assert {key for key, outcome in found.items() if outcome is Outcome.PASS} <= {"005", "013", "015"}
    assert Outcome.FAIL not in found.values()


def test_a_frozen_driver_of_another_release_is_for_a_person():
    spec = SPEC.model_copy(update={"nvidia": SPEC.nvidia.model_copy(update={"hold": True, "version": "595.58.03"})})
    assert outcomes(spec=spec)["001"] is Outcome.MANUAL


def test_predicates_read_what_their_controls_name():
    answers = Snapshot({"nvidia": (1, ""), "audit-nvidia-logs": (1, "")})
    for control in CONTROLS:
        assert "failed in judging" not in judge(control, answers, SPEC).verdict.actual
    assert checks.TOLD.parse("journal\nNVRM: x\nhistory\n") == Told(True, ("NVRM: x",), "")
