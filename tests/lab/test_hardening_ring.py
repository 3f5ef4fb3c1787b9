"""A node that serves goes from no hardening to baseline and from one profile to the next, up to strict, and not one request fails.

It serves before it has roles access, firewall and kernel. Users ask then, and until the end, each time over a new connection: an
old one says nothing about packet filter and sshd. Deployed by root up to baseline, then by an account with sudo, as
docs/roles/access.md has it. In each profile: dry run, converge, second run without a change, audit green, broken by hand, audit red,
converge, green. In strict the engine is started
anew (ready only after a completion and a tool call), and the node reboots. The engine is the simulated one; the kernel's own part is
a machine's (tests/machine/test_hardening_machine.py).
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import fleet
import httpx
import pytest
import sabotage

pytestmark = pytest.mark.lab

PROFILES = ("baseline", "server-cis1", "strict")

# What somebody does to a node in each profile, and the control that says so.
BROKEN = {
    "baseline": ("GPW-BASE-017", sabotage.SABOTAGES["GPW-BASE-017"].do),
    "server-cis1": ("GPW-BASE-011", "rm /etc/systemd/coredump.conf.d/zz-gpuwright.conf"),
    "strict": (
        "GPW-ACCS-007",
        "sed -i '/DisableForwarding/d' /etc/ssh/sshd_config.d/00-gpuwright.conf; systemctl reload ssh",
    ),
}

# What a node that serves is hardened with while its users ask.
HARDENED = {
    "Access | Change who may log in and become root",
    "Firewall | Load the packet filter (table inet gpuwright)",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Users:
    """Users who never stop asking, over a new connection each time; every status they got. 0 is no answer at all."""

    def __init__(self, site: fleet.Fleet, host, count: int = 3) -> None:
        self.site, self.host = site, host
        self.statuses: Counter[int] = Counter()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        question = {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 4}
        while not self._end.is_set():
            try:
                with self.site.client(self.host) as client:
                    self.statuses[client.post("/v1/chat/completions", json=question).status_code] += 1
            except httpx.HTTPError:
                self.statuses[0] += 1
            self._end.wait(0.2)

    def end(self) -> Counter[int]:
        """Stop asking."""
        self._end.set()
        for thread in self._threads:
            thread.join()
        return self.statuses


@pytest.fixture(params=["trixie", "bookworm"])
def site(request, tmp_path_factory) -> Iterator[fleet.Fleet]:
    name = {"trixie": "hard-13", "bookworm": "hard-12"}[request.param]
    site = fleet.boot([name], tmp_path_factory.mktemp(name), release=request.param)
    site.set(name, base__unattended_upgrades=True)
    yield site
    for host in site.hosts:
        host.destroy()


def tool_call(site: fleet.Fleet, host) -> dict:
    """The arguments of a structured tool call through the gateway."""
    question = {
        "model": "lab",
        "messages": [{"role": "user", "content": "What is the weather in Berlin right now? Use the tool."}],
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_tokens": 64,
    }
    with site.client(host) as client:
        answer = client.post("/v1/chat/completions", json=question)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    return json.loads(call["function"]["arguments"])


def harden(site: fleet.Fleet, host) -> None:
    """Put into the node file what the profiles are made of."""
    site.set(
        host.name,
        kernel={},
        access__users={"deploy": {"keys": [f"{host.ssh_key}.pub"], "sudo": "all"}},
        firewall__ssh=[str(host.segment.network)],
        firewall__gateway=["0.0.0.0/0", "::/0"],
    )


def test_from_no_hardening_to_strict_while_it_serves(site):
    [host] = site.hosts
    site.deploy()
    wait_until_served(site, host)
    users = Users(site, host)
    until(lambda: users.statuses[200] > 20)
    harden(site, host)
    said = {}
    for profile in PROFILES:
        site.set(host.name, hardening=profile, console=profile == "strict")
        predicted = site.dry()
        run = site.deploy()
        assert set(run.changed.get(host.name, [])) <= set(predicted.changed.get(host.name, [])), profile
        said[profile] = run.said
        if profile == "baseline":
            assert set(run.all_changed) >= HARDENED, run.all_changed
            # From now on as the account that the node file names; root goes with the next profile.
            site.settings[host.name]["connect"] = {"ssh_user": "deploy", "_sudo": True}
        assert site.deploy().all_changed == [], profile
        assert site.audit() == [], profile

        control, broken = BROKEN[profile]
        console(host, broken)
        red = site.audit()
        assert any(control in name for name in red), (profile, red)
        assert site.deploy().all_changed, profile
        assert site.audit() == [], profile
        assert set(users.statuses) == {200}, (profile, users.statuses)
    statuses = users.end()
    assert set(statuses) == {200}, statuses
    assert statuses[200] > 100, statuses
    assert "audit: not set up, the host is a container" in said["server-cis1"]
    asked = "curl -s -m 5 -o /dev/null -w '%{http_code}' http://127.0.0.1:18001/v1/models || :"
    assert console(host, f"runuser -u daemon -- {asked}") == "000", (
        "past the gateway no account but root's asks an engine"
    )
    assert console(host, asked) == "200"
    assert host.run("true", check=False).returncode != 0, "root does not log in any more"

    # In strict: a start that is ready only after health, model list, completion; then the tool call of a release.
    console(host, "systemctl restart gpuwright-engine-main.service")
    assert console(host, "systemctl is-active gpuwright-engine-main.service") == "active"
    wait_until_served(site, host)
    assert tool_call(site, host)
    site.set(host.name, engine__engines__main__settings__max_num_seqs=9)
    released = site.deploy()
    assert any("Replace serving engines" in name for name in released.changed[host.name]), (
        "the gate asks for a tool call"
    )
    assert tool_call(site, host)

    before = host._init()
    console(host, "systemctl --no-block reboot")
    until(lambda: host._init() not in (0, before))
    wait_until_served(site, host)
    assert site.deploy().all_changed == []
    assert site.audit() == []


def wait_until_served(site: fleet.Fleet, host) -> None:
    question = {"model": "lab", "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 4}
    deadline = time.monotonic() + 240
    while True:
        try:
            with site.client(host, timeout=5) as client:
                if client.post("/v1/chat/completions", json=question).status_code == 200:
                    return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "the node does not serve"
        time.sleep(2)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def console(host, command: str) -> str:
    """What somebody at the machine's console does: no network, no sshd; in strict there is no root over SSH."""
    argv = ["nsenter", "--all", "--target", str(host._init()), "sh", "-c", command]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()
