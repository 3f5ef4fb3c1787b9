"""The gate, against the SIMULATED engine over real HTTP."""

from __future__ import annotations

import re

import pytest
from engine_node import Node, until


def started(node: Node, *flags: str, main: bool = True, **environment: str) -> str:
    """Pre-start, then the simulated engine in the container's place. Returns its pid."""
    assert node.run("engine-prestart")[0] == 0
    return str(node.engine(*flags, **environment).pid)


def ready(node: Node) -> bool:
    return node.exists("run/gpuwright/ready/main")


def test_a_release_is_published(node: Node) -> None:
    pid = started(node, SIM_STARTUP_SECONDS="1")
    status, output = node.run("engine-gate", MAINPID=pid)
    assert status == 0, output
    assert ready(node)
    assert node.path("run/gpuwright/ready/main").stat().st_mode & 0o777 == 0o644  # the gateway's user reads it
    assert node.read("var/lib/gpuwright/engines/main/released").strip() == node.wanted.config
    log = (node.fake / "engine.log").read_text()
    assert log.count('answered "POST /v1/chat/completions" 200') == 2
    assert '"GET /v1/models" 200' in log


def test_another_model_is_listed(node: Node) -> None:
    pid = started(node, "--served-model-name=other")
    status, output = node.run("engine-gate", MAINPID=pid)
    assert status == 1
    assert 'seen: models ["other"]; expected: lab among them' in output
    assert not ready(node)


def test_dead_tool_calls_stop_a_release(node: Node) -> None:
    pid = started(node, SIM_DEAD_TOOL_CALLS="1", SIM_TOKENS_PER_SECOND="5000")
    status, output = node.run("engine-gate", MAINPID=pid)
    assert status == 1
    assert "no structured tool_calls entry" in output
    assert not ready(node)
    assert not node.exists("var/lib/gpuwright/engines/main/released")


def test_dead_tool_calls_are_reported_on_a_restart(node: Node) -> None:
    node.write("var/lib/gpuwright/engines/main/released", node.wanted.config + "\n")
    pid = started(node, SIM_DEAD_TOOL_CALLS="1", SIM_TOKENS_PER_SECOND="5000")
    status, output = node.run("engine-gate", MAINPID=pid)
    assert status == 0, output
    assert "REPORT: a tool request did not come back" in output
    assert ready(node)


def test_no_tool_call_where_the_node_file_says_so(node: Node) -> None:
    node.configure(readiness={"tool_call": False, "deadline": 20, "conditions_limit": 3})
    pid = started(node, SIM_DEAD_TOOL_CALLS="1", SIM_TOKENS_PER_SECOND="5000")
    assert node.run("engine-gate", MAINPID=pid)[0] == 0
    assert (node.fake / "engine.log").read_text().count('answered "POST /v1/chat/completions"') == 1


@pytest.mark.parametrize(
    ("settings", "choice"),
    [
        ({"kind": "vllm"}, "required"),
        ({"kind": "vllm", "enable_auto_tool_choice": True, "tool_call_parser": "x"}, "auto"),
    ],
)
def test_the_parser_is_met_where_there_is_one(node: Node, settings: dict[str, object], choice: str) -> None:
    node.configure(settings=settings)
    assert f"tool_choice={choice}\n" in node.read("etc/gpuwright/engines/main.conf")


def test_the_deadline_counts_from_pre_start(node: Node) -> None:
    node.configure(readiness={"deadline": 3, "conditions_limit": 1})
    pid = started(node, SIM_STARTUP_SECONDS="60")
    status, output = node.run("engine-gate", MAINPID=pid, timeout=10)
    assert status == 1
    assert "the deadline of a start is 3 s" in output
    assert not ready(node)


def test_a_hanging_answer_is_cut_by_the_deadline(node: Node) -> None:
    node.configure(readiness={"deadline": 8, "conditions_limit": 1})
    pid = started(node, SIM_SLOW_TOKENS="4")  # eight tokens take 32 seconds
    status, output = node.run("engine-gate", MAINPID=pid, timeout=20)
    assert status == 1
    # Either the gate's own clock or curl's ends the wait: both fall on the same second.
    assert re.search(r"one completion is awaited(, no answer)? after \d+ s; the deadline of a start is 8 s", output)


def test_an_engine_that_ends_before_it_is_ready(node: Node) -> None:
    assert node.run("engine-prestart")[0] == 0
    engine = node.engine(SIM_CRASH_AT_START="3", SIM_STARTUP_SECONDS="1")
    until(lambda: engine.poll() is not None)
    status, output = node.run("engine-gate", MAINPID=str(engine.pid))
    assert status == 1
    assert "the engine ended before it was ready" in output


def test_a_refused_start_ends_the_gate(node: Node) -> None:
    (node.fake / "images").write_text("")
    assert node.run("engine-prestart")[0] == 0
    assert node.run("engine-gate")[0] == 78


def test_stop_takes_it_from_the_gateway_and_drains(node: Node) -> None:
    node.configure(drain=30)
    pid = started(node, SIM_TOKENS_PER_SECOND="10")
    assert node.run("engine-gate", MAINPID=pid)[0] == 0
    request = '{"model": "lab", "prompt": "x", "max_tokens": 30}'
    node.program("client", f"exec curl -s http://127.0.0.1:{node.port}/v1/completions -d '{request}' >$FAKE/answer")
    import subprocess

    client = subprocess.Popen([node.root / "bin/client"], env=node.environment())
    until(lambda: '"POST /v1/completions"' in (node.fake / "engine.log").read_text())
    status, output = node.run("engine-stop")
    assert status == 0
    assert " of at most 30 s: 1 requests in flight" in output
    assert "drained after" in output
    assert client.wait(1) == 0  # answered before the container was stopped
    assert '"finish_reason": "length"' in (node.fake / "answer").read_text()
    assert not ready(node)
    assert "stop -t 2 gpuwright-main" in node.calls


def test_a_drain_ends_at_its_limit(node: Node) -> None:
    pid = started(node)
    assert node.run("engine-gate", MAINPID=pid)[0] == 0
    node.program("curl", "echo 'vllm:num_requests_running{x=\"y\"} 3.0'")
    status, output = node.run("engine-stop")
    assert status == 0
    assert "stopping with 3 requests in flight after a drain of 2 s" in output
