"""Users who never stop asking, while one of two engines is killed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import httpx
from fleet import Fleet

from lab.hosts import Host

SECONDS = 20
KILLED_AT = 4
# Two missed checks of two seconds each, and the pause until a pinned session moves on (security.md 1.5).
SETTLED = KILLED_AT + 6
QUESTION: dict[str, Any] = {
    "model": "lab",
    "messages": [{"role": "user", "content": "Are you there?"}],
    "max_tokens": 4,
}


def kill_under_load(site: Fleet, host: Host, engine: str, users: int = 8) -> None:
    """Kill the container of `engine` while `users` ask; the other engine must answer all of them once the gateway knows.

    What was being answered, and sessions pinned to the killed engine, may see 502 or 503 until two checks have missed it.
    """
    started = time.monotonic()
    answers: list[tuple[float, int]] = []

    def user(number: int) -> None:
        with site.client(host, timeout=60) as client:
            while (at := time.monotonic() - started) < SECONDS:
                answers.append((at, _ask(client, f"user-{number}")))
                time.sleep(0.05)

    asking = [threading.Thread(target=user, args=(number,)) for number in range(users)]
    for thread in asking:
        thread.start()
    time.sleep(KILLED_AT)
    killed = _container(host, engine)
    # Docker gives up waiting for the end of a container on a busy machine; whether it ended is asked below.
    host.run(f"docker kill gpuwright-{engine}", check=False)
    for thread in asking:
        thread.join()
    assert killed and _container(host, engine) != killed, "the engine was never killed"
    before = Counter(status for at, status in answers if at < KILLED_AT - 1)
    between = Counter(status for at, status in answers if KILLED_AT - 1 <= at < SETTLED)
    after = Counter(status for at, status in answers if at >= SETTLED)
    assert set(before) == {200}, before
    assert set(between) <= {0, 200, 502, 503}, between
    assert between[200] > 0, "the other engine went on answering"
    assert set(after) == {200} and after[200] >= users, after


def comes_back(site: Fleet, host: Host, engine: str, seconds: float) -> None:
    """The killed engine is started again by systemd, becomes ready, and gets its share of new sessions."""
    deadline = time.monotonic() + seconds
    while host.run(f"test -e /run/gpuwright/ready/{engine}", check=False).returncode:
        assert time.monotonic() < deadline, "the killed engine did not come back"
        time.sleep(1)
    time.sleep(5)  # the gateway asks every two seconds
    served = f"docker logs gpuwright-{engine} 2>&1 | grep -c 'POST /v1/chat/completions' || true"
    known = int(host.run(served).stdout)
    with site.client(host) as client:
        for number in range(30):
            assert _ask(client, f"new-{number}") == 200
    assert int(host.run(served).stdout) > known, "the engine that came back gets its share again"


def _container(host: Host, engine: str) -> str:
    """The id of the engine's running container, "" when there is none."""
    return host.run(f"docker ps -q --no-trunc --filter name=^gpuwright-{engine}$").stdout.strip()


def _ask(client: httpx.Client, session: str) -> int:
    try:
        return client.post("/v1/chat/completions", json=QUESTION, headers={"X-Session-Id": session}).status_code
    except httpx.HTTPError:
        return 0
