"""While a reboot that the node file needs is pending, no engine is started or replaced; the run says which and why."""

from __future__ import annotations

import types

import pytest

from gpuwright import atomic
from gpuwright.boot import Barrier, Wishes
from roles.engine import operations
from roles.engine.facts import ENGINES, EngineState
from roles.engine.operations import Wanted

REASON = "the kernel runs without iommu=pt (pcie: peer to peer)"


class Waits(Barrier):
    def holds_back(self, seen, planning):
        return (REASON,)


class Free(Barrier):
    def holds_back(self, seen, planning):
        return ()


WAITS, FREE = Waits(Wishes(), reboots=False), Free(Wishes(), reboots=False)


def wanted(name: str, config: str = "new") -> Wanted:
    file = atomic.File(f"/etc/gpuwright/engines/{name}.conf", config.encode())
    return Wanted(
        name=name,
        repository="repo",
        digest="sha256:1",
        config=config,
        separation=None,
        manifest=f"/srv/{name}.manifest.json",
        files=(file,),
        claims=(),
    )


@pytest.fixture
def node(monkeypatch):
    """A node whose engines are `states`; every file in `wrong` is not on it as it must be."""
    node = types.SimpleNamespace(states={}, wrong=[], said=[], noops=[], name="gpu-1")
    host = types.SimpleNamespace(
        name="gpu-1",
        noop=node.noops.append,
        log_styled=lambda text, **_: node.said.append(text),
    )
    seen = types.SimpleNamespace(read=lambda section: node.states if section is ENGINES else {})
    monkeypatch.setattr(operations, "ctx_host", types.SimpleNamespace(get=lambda: host))
    monkeypatch.setattr(
        operations, "ctx_state", types.SimpleNamespace(get=lambda: types.SimpleNamespace(is_executing=True))
    )
    monkeypatch.setattr(operations.snapshot, "read", lambda host: seen)
    monkeypatch.setattr(operations.snapshot, "forget", lambda host: None)
    monkeypatch.setattr(
        operations.atomic,
        "pending",
        lambda host, files, claims=(): ([file for file in files if file.path in node.wrong], []),
    )
    return node


def shell(commands) -> list[str]:
    return [str(command.get_raw_value()) for command in commands]


def test_a_new_engine_is_written_and_enabled_and_not_started(node):
    engine = wanted("main")
    node.wrong = [engine.files[0].path]
    found = shell(operations.start._inner([engine], wait_for_weights=True, barrier=WAITS))
    assert "systemctl enable --quiet gpuwright-engine-main.service" in found[-1]
    assert not any("systemctl start" in step or "engine-await" in step for step in found)
    [said] = node.said
    assert said.startswith(f"engine main waits for a reboot, because {REASON}; reboot the node")
    node.wrong = []  # the second run
    assert list(operations.start._inner([engine], wait_for_weights=True, barrier=WAITS)) == []
    assert node.noops == ["engines wait for a reboot"]


def test_one_that_serves_as_it_should_goes_on(node):
    node.states = {"main": EngineState("main", active="active", sub="running", ready=True, config="new")}
    assert list(operations.start._inner([wanted("main")], wait_for_weights=True, barrier=WAITS)) == []
    assert node.said == []


def test_one_that_is_coming_up_by_itself_is_not_touched(node):
    engine = wanted("main")
    node.states = {"main": EngineState("main", active="activating", sub="auto-restart", config="old")}
    node.wrong = [engine.files[0].path]
    assert list(operations.start._inner([engine], wait_for_weights=True, barrier=WAITS)) == []
    assert node.said


def test_a_serving_engine_is_not_replaced(node):
    node.states = {"main": EngineState("main", active="active", sub="running", ready=True, config="old")}
    assert list(operations.replace._inner([wanted("main")], barrier=WAITS)) == []
    [said] = node.said
    assert said.startswith("engine main waits for a reboot")
    assert list(operations.replace._inner([wanted("main")], barrier=FREE)) != []


def test_without_a_reason_it_starts(node):
    found = shell(operations.start._inner([wanted("main")], wait_for_weights=True, barrier=FREE))
    assert "systemctl start --no-block gpuwright-engine-main.service" in found[-1]
