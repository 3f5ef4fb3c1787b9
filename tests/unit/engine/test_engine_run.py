"""The main process: exit codes, the log without duplicates, a daemon that goes away."""

from __future__ import annotations

import os
import signal

import pytest
from engine_node import REFERENCE, Node, until


def line(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02d}.000000000Z {text}\n"


def prepared(node: Node, run: str = "") -> None:
    (node.fake / "run").write_text(run)
    status, output = node.run("engine-prestart")
    assert status == 0 and not node.exists("run/gpuwright/engines/main/refused"), output


@pytest.mark.parametrize("code", [1, 3, 137])
def test_it_ends_with_the_exit_code_of_the_container(node: Node, code: int) -> None:
    prepared(node, f"exit {code}")
    assert node.run("engine-run")[0] == code


def test_an_end_with_status_0_that_nobody_asked_for_is_a_failure(node: Node) -> None:
    """Restart=on-failure must see one: the engine does not serve any more."""
    prepared(node, "exit 0")
    status, output = node.run("engine-run")
    assert status == 1
    assert "the engine ended with status 0 and nobody asked it to" in output


def test_the_arguments_of_docker_create(node: Node) -> None:
    prepared(node, "exit 3")
    node.run("engine-run")
    arguments = (node.fake / "create").read_text().splitlines()
    image = arguments.index(REFERENCE)
    assert arguments[image + 1 : image + 4] == ["serve", "/model", "--served-model-name=lab"]
    assert f"gpuwright.config={node.wanted.config}" in arguments[:image]
    assert f"--publish=127.0.0.1:{node.port}:8000" in arguments[:image]


def test_137_is_not_read_as_out_of_memory(node: Node) -> None:
    prepared(node, "exit 137")
    assert "killed by SIGKILL (137); neither Docker nor the kernel says out of memory" in node.run("engine-run")[1]


def test_137_is_out_of_memory_when_docker_says_so(node: Node) -> None:
    (node.fake / "oom").write_text("true\n")
    prepared(node, "exit 137")
    assert "out of memory: the kernel killed the engine (137)" in node.run("engine-run")[1]


def test_137_is_out_of_memory_when_the_kernel_says_so(node: Node) -> None:
    """Docker's OOMKilled misses the death of a child."""
    container = "5f1d0c0ffee0000000000000000000000000000000000000000000000000beef"
    node.program(
        "journalctl", f'echo "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/docker-{container}.scope,pid=7"'
    )
    prepared(node, "exit 137")
    assert "out of memory" in node.run("engine-run")[1]


def test_a_stop_that_needs_sigkill_is_a_slow_stop(node: Node) -> None:
    prepared(node, "trap '' TERM; while :; do sleep 0.1; done")
    process = node.begin("engine-run")
    until(lambda: "is started" in node.output("engine-run"))
    assert node.run("engine-stop")[0] == 0
    assert process.wait(10) == 137
    assert (
        "slow stop: the engine did not end within 2 s of SIGTERM and was killed (137); this is not out of memory"
        in (node.output("engine-run"))
    )
    assert "slow stop" in node.read("run/gpuwright/engines/main/reason")


def test_sigterm_stops_the_container(node: Node) -> None:
    """systemd's way to end a start that failed or was given up."""
    prepared(node)
    process = node.begin("engine-run")
    until(lambda: "is started" in node.output("engine-run"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    assert "stop -t 2 gpuwright-main" in node.calls


def test_it_outlives_a_restart_of_docker_and_repeats_no_line(node: Node) -> None:
    log = node.fake / "log"
    log.write_text(line(1, "one") + line(2, "two"))
    prepared(node)
    process = node.begin("engine-run")
    until(lambda: "two" in node.output("engine-run"))
    (node.fake / "away").touch()
    until(lambda: "the engine goes on" in node.output("engine-run"))
    with log.open("a") as out:
        out.write(line(3, "while Docker was away"))
    (node.fake / "away").unlink()
    until(lambda: "while Docker was away" in node.output("engine-run"))
    assert process.poll() is None
    (node.fake / "log").open("a").write(line(4, "last words"))
    node.run("engine-stop")
    assert process.wait(10) == 143
    said = node.output("engine-run").splitlines()
    assert [text for text in said if text in ("one", "two", "while Docker was away", "last words")] == [
        "one",
        "two",
        "while Docker was away",
        "last words",
    ]
    assert "Cannot connect" not in node.output("engine-run")
    assert node.calls.count(next(call for call in node.calls if call.startswith("create"))) == 1


def test_an_engine_that_ends_while_docker_is_away(node: Node) -> None:
    prepared(node, "while [ ! -e end ]; do sleep 0.05; done; exit 5")
    process = node.begin("engine-run")
    until(lambda: "is started" in node.output("engine-run"))
    (node.fake / "away").touch()
    until(lambda: "the engine goes on" in node.output("engine-run"))
    (node.fake / "end").touch()
    until(lambda: (node.fake / "exit").exists())
    assert process.poll() is None
    (node.fake / "away").unlink()
    assert process.wait(10) == 5


def test_a_container_that_docker_refuses(node: Node) -> None:
    (node.fake / "refuse").write_text("Error response from daemon: unresolvable CDI devices\n")
    prepared(node)
    status, output = node.run("engine-run")
    assert status == 125  # in RestartPreventExitStatus=
    assert "Docker refused the container: Error response from daemon: unresolvable CDI devices" in output


def test_a_daemon_that_goes_away_before_the_container_is_made(node: Node) -> None:
    prepared(node)
    (node.fake / "away").touch()
    assert node.run("engine-run")[0] == 75  # worth another attempt


def test_limits_are_asked_for_where_the_machine_allows_them(node: Node) -> None:
    prepared(node, "exit 3")
    _, output = node.run("engine-run")
    arguments = (node.fake / "create").read_text()
    for limit in ("memlock", "nofile"):
        assert (f"--ulimit={limit}=" in arguments) is not (f"does not allow {limit}=" in output)


def test_gpus_are_given_by_uuid(node: Node) -> None:
    prepared(node, "exit 3")
    node.write("run/gpuwright/engines/main/gpus", "GPU-a\nGPU-b\n")
    node.run("engine-run")
    arguments = (node.fake / "create").read_text().splitlines()
    assert [a for a in arguments if a.startswith("--device")] == [
        "--device=nvidia.com/gpu=GPU-a",
        "--device=nvidia.com/gpu=GPU-b",
    ]


def test_a_container_left_without_its_main_process_is_stopped(node: Node) -> None:
    prepared(node)
    process = node.begin("engine-run")
    until(lambda: "is started" in node.output("engine-run"))
    process.kill()
    process.wait()
    status, output = node.run("engine-evidence", SERVICE_RESULT="signal", EXIT_CODE="killed", EXIT_STATUS="KILL")
    assert status == 0
    assert "still runs without its unit" in output
    pid = int((node.fake / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (folder,) = node.path("var/lib/gpuwright/evidence/main").iterdir()
    assert "unit result=signal, main process killed KILL" in (folder / "reason").read_text()
