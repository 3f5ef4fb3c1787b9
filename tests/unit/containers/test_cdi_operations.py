"""What the GPU half does to a node: the commands run in a folder that stands for its root, with a systemctl that only writes down."""

import json
import os
import shlex
import subprocess
import types

import pytest
from pyinfra.api import FunctionCommand, OperationError
from test_cdi import LISTED, UUIDS, file, node, units

from roles.containers.gpus import operations


class Node:
    """A node whose state is `seen`, and what a run does and says there."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.root, self.noops, self.said, self.seen, self.inside = tmp_path, [], [], node(file()), ""
        self.host = types.SimpleNamespace(
            name="gpu-1", print_prefix="[gpu-1] ", noop=self.noops.append, get_fact=lambda fact: self.inside
        )
        self.host.log_styled = lambda sentence, **how: self.said.append(sentence)
        monkeypatch.setattr(operations, "ctx_host", types.SimpleNamespace(get=lambda: self.host))
        snapshot = types.SimpleNamespace(read=lambda section: self.seen)
        monkeypatch.setattr(operations.snapshot, "read", lambda host: snapshot)
        monkeypatch.setattr(operations.snapshot, "forget", lambda host: None)
        for level in ("info", "warning"):
            monkeypatch.setattr(operations.logger, level, self.said.append)
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin/systemctl"
        program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n')
        program.chmod(0o755)

    def run(self, commands) -> list[str]:
        """Execute them; returns what systemctl was told."""
        for command in commands:
            if isinstance(command, FunctionCommand):
                if not command.function(None, self.host):
                    raise OperationError(self.said[-1])
                continue
            script = shlex.split(command.get_raw_value())[2]
            for folder in ("/etc/cdi", "/run/cdi", "/var/lib/gpuwright"):
                script = script.replace(folder, f"{self.root}{folder}")
            path = f"{self.root}/bin:{os.environ['PATH']}"
            done = subprocess.run(["sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OperationError(done.stderr.strip())
        calls = self.root / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def gpu_node(tmp_path, monkeypatch):
    return Node(tmp_path, monkeypatch)


def specification():
    return operations.specification._inner()


def test_a_node_as_it_should_be_is_left_alone(gpu_node):
    assert list(specification()) == []
    assert gpu_node.noops == ["/run/cdi/nvidia.yaml is the only one, and as the driver is"]


def test_without_a_driver_nothing_is_made(gpu_node):
    gpu_node.seen = node(module="", cards=[])
    assert list(specification()) == []
    assert gpu_node.noops == ["no driver is loaded"]


def test_a_second_specification_is_moved_away_and_kept_under_a_name_of_its_own(gpu_node):
    kept = gpu_node.root / "var/lib/gpuwright/containers/cdi"
    there = gpu_node.root / "etc/cdi/nvidia.yaml"
    there.parent.mkdir(parents=True)
    for content in ("first", "second"):
        there.write_text(content)
        gpu_node.seen = node(file(), file("/etc/cdi/nvidia.yaml"))
        commands = list(specification())
        gpu_node.seen = node(file())  # as it is after the move
        assert gpu_node.run(commands) == []
    assert not there.exists()
    assert (kept / "etc-cdi-nvidia.yaml").read_text() == "second"
    assert (kept / "etc-cdi-nvidia.yaml.~1~").read_text() == "first"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert "[gpu-1] CDI: /etc/cdi/nvidia.yaml defines devices that /run/cdi/nvidia.yaml has, too" in gpu_node.said


@pytest.mark.parametrize(
    "before", [node(), node(file(driver="570.10.10")), node(file(uuids=UUIDS)), node(file(uuids=UUIDS[:1]))]
)
def test_a_missing_or_stale_specification_is_made_again(gpu_node, before):
    gpu_node.seen = before
    commands = list(specification())
    gpu_node.seen = node(file())
    assert gpu_node.run(commands) == ["reset-failed nvidia-cdi-refresh.service", "restart nvidia-cdi-refresh.service"]


def test_refresh_units_that_are_off_are_switched_on(gpu_node):
    gpu_node.seen = node(file(), units=units(service="disabled", path="inactive"))
    commands = list(specification())
    gpu_node.seen = node(file())
    assert gpu_node.run(commands) == [
        "enable -q nvidia-cdi-refresh.service",
        "enable -q --now nvidia-cdi-refresh.path",
    ]


def test_what_still_does_not_fit_ends_the_run_in_one_sentence(gpu_node):
    gpu_node.seen = node(file(driver="570.10.10"))
    with pytest.raises(OperationError) as ended:
        gpu_node.run(list(specification()))
    assert str(ended.value) == (
        "CDI: /run/cdi/nvidia.yaml hands in files of driver 570.10.10; expected: those of 580.95.05, which is loaded; do: "
        "systemctl restart nvidia-cdi-refresh.service"
    )


def test_one_card_that_fell_silent_is_told_and_ends_nothing(gpu_node):
    gpu_node.seen = node(file(uuids=UUIDS[:1]))
    gpu_node.run(list(specification()))
    assert f"does not name {UUIDS[1]}; expected: every card that the driver has" in gpu_node.said[-1]


# --- after systemd read its units again ------------------------------------------------------------------------------


def inside(**changes) -> str:
    one = {
        "name": "gpuwright-main",
        "engine": "main",
        "status": 0,
        "answer": LISTED,
        "requests": [{"driver": "cdi", "ids": [f"nvidia.com/gpu={uuid}" for uuid in UUIDS[:2]]}],
    }
    return json.dumps({**one, **changes})


def kept(reloaded="12345"):
    return list(operations.gpus_kept._inner(reloaded=reloaded))


def test_nobody_is_asked_while_systemd_read_nothing_again(gpu_node):
    gpu_node.inside = inside(answer="")
    assert kept() == []
    assert gpu_node.noops == ["systemd read no unit again"]


def test_looking_is_no_change(gpu_node):
    gpu_node.inside = inside()
    assert kept(reloaded="1") == []
    assert gpu_node.noops == ["1 containers have their GPUs"]


def test_where_systemd_does_not_tell_everybody_is_asked(gpu_node, monkeypatch):
    """Before systemd 250."""
    gpu_node.seen = types.SimpleNamespace(reloaded="")
    gpu_node.inside = inside()
    assert kept(reloaded="") == []
    assert gpu_node.noops == ["1 containers have their GPUs"]


def test_an_engine_that_lost_a_gpu_ends_the_run(gpu_node):
    gpu_node.inside = inside(answer=LISTED.splitlines()[0])
    with pytest.raises(OperationError) as ended:
        gpu_node.run(kept(reloaded="1"))
    assert str(ended.value) == (
        f"gpuwright: after systemd read its units again, gpuwright-main: it does not see {UUIDS[1]}; restart it (systemctl restart "
        "gpuwright-engine-main)"
    )


def test_a_container_of_somebody_else_is_a_warning(gpu_node):
    lost = {
        "status": 255,
        "answer": "Failed to initialize NVML: Unknown Error",
        "requests": [{"driver": "", "ids": []}],
    }
    gpu_node.inside = inside(name="theirs", engine="", **lost)
    assert kept(reloaded="1") == []
    [said] = gpu_node.said
    assert said.startswith(
        "[gpu-1] container theirs: its GPUs are gone (Failed to initialize NVML: Unknown Error); start it again with"
    )


def test_a_docker_that_does_not_answer_is_told(gpu_node):
    gpu_node.inside = "Cannot connect to the Docker daemon"
    assert kept(reloaded="1") == []
    assert "cannot be seen" in gpu_node.said[0]
