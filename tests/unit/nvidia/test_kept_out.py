"""Another driver has the cards until a reboot: the run says so and goes on, with ``kernel.reboot: never`` as with every pending reboot."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
from test_nvidia_checks import RIGHT, SPEC

from gpuwright import wishes
from gpuwright.boot import BOOT, Boot
from roles import nvidia
from roles.nvidia import judgement, operations
from roles.nvidia.facts import NVIDIA, Device

CARDS = tuple(Device(f"0000:{slot}1:00.0", "0x030200", "nouveau") for slot in range(2))
TAKEN = replace(RIGHT, module=None, cards=(), library="", devices=CARDS, specifications=())
SENTENCE = "module nouveau is loaded and must not be (kernel: only NVIDIA's own driver may bind the GPUs)"
OTHERS = wishes.other_gpu_drivers(wishes.gathered(SPEC))


class Host:
    """What is on it, and what is said to it."""

    name, print_prefix = "gpu-1", "[gpu-1] "

    def __init__(self, driver, *modules):
        self.values = {NVIDIA: driver, BOOT: Boot(modules=tuple((module, 0) for module in modules))}
        self.said, self.noops = [], []

    def read(self, section):
        return self.values[section]

    def log_styled(self, text, **_):
        self.said.append(text)

    def noop(self, description):
        self.noops.append(description)


def verified(monkeypatch, host, may_wait):
    """What the verification of the driver yields: nothing where the run goes on."""
    monkeypatch.setattr(operations, "ctx_host", types.SimpleNamespace(get=lambda: host))
    state = types.SimpleNamespace(is_executing=True)
    monkeypatch.setattr(operations, "ctx_state", types.SimpleNamespace(get=lambda: state))
    monkeypatch.setattr(operations.snapshot, "read", lambda host: host)
    arguments = {"spec": SPEC.nvidia, "hardware": SPEC.hardware, "others": OTHERS, "may_wait": may_wait}
    return list(operations.verified._inner(**arguments))


def test_the_run_says_what_waits_and_goes_on(monkeypatch):
    host = Host(TAKEN, "nouveau")
    assert verified(monkeypatch, host, may_wait=True) == []
    assert host.said == [f"driver: {SENTENCE}; a reboot brings it"]


@pytest.mark.parametrize(("modules", "may_wait"), [(("nouveau",), False), (("ext4",), True)])
def test_without_a_reboot_to_wait_for_the_run_ends(monkeypatch, modules, may_wait):
    host = Host(TAKEN, *modules)
    [refusal] = verified(monkeypatch, host, may_wait)
    assert not refusal.function(None, host, *refusal.args)
    assert "module none is loaded instead of 580.95.05" in host.said[-1]


def test_nvidias_driver_beside_another_cards_is_judged_as_ever():
    assert judgement.kept_out(Host(RIGHT, "nouveau"), OTHERS) == ()


def settings_step(monkeypatch, host, reboots):
    """Which of its two ways the unit that sets the cards goes: started, or enabled alone."""
    taken = []
    for name in ("running", "enabled"):
        monkeypatch.setattr(nvidia, name, lambda units, way=name, **_: taken.append(way))
    for name in ("held", "daemons_running", "cards_known", "verified"):
        monkeypatch.setattr(operations, name, lambda **_: None)
    monkeypatch.setattr(nvidia, "packages", lambda spec, system: types.SimpleNamespace(driver=()))
    monkeypatch.setattr(nvidia, "ctx_host", types.SimpleNamespace(get=lambda: host))
    monkeypatch.setattr(nvidia.snapshot, "read", lambda host: host)
    host.values[nvidia.snapshot.SYSTEM] = None
    nvidia.nvidia_verified._inner(spec=SPEC.nvidia, hardware=SPEC.hardware, others=OTHERS, reboots=reboots)
    return taken


def test_cards_that_wait_are_set_at_that_boot(monkeypatch):
    """nvidia-smi would fail now, and the unit with it."""
    assert settings_step(monkeypatch, Host(TAKEN, "nouveau"), reboots=False) == ["enabled"]
    assert settings_step(monkeypatch, Host(TAKEN, "nouveau"), reboots=True) == ["running"]
    assert settings_step(monkeypatch, Host(RIGHT), reboots=False) == ["running"]
