"""Three hosts under plain ``pyinfra … -y``, a changed flag that breaks on the second (issue 2, proof 4). Engines are SIMULATED."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from engine_trial import PORT, Trial, engine

import lab

pytestmark = [pytest.mark.lab, pytest.mark.proof]

# One stream after the other, each counted when it came to its end.
CLIENT = f"""
while [ ! -e /run/client.stop ]; do
  if curl -sfN --max-time 30 http://127.0.0.1:{PORT}/v1/chat/completions \\
    -d '{{"model":"lab","messages":[{{"role":"user","content":"hi"}}],"max_tokens":20,"stream":true}}' | grep -q 'DONE'
  then echo whole; else echo broken; fi
done >/run/client.log
"""


def config(trial: Trial, host: lab.Host) -> str:
    return trial.sh("docker inspect --format '{{index .Config.Labels \"gpuwright.config\"}}' gpuwright-main", host)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    from lab import images

    images.build("sim")
    names = os.environ.get("ENGINE_LAB_FLEET", "fleet-1,fleet-2,fleet-3").split(",")
    hosts = lab.up(names, "trixie")
    trial = Trial(hosts, tmp_path_factory.mktemp("fleet"))
    for host in hosts:
        trial.set(host, **settings(host is hosts[1]))
    trial.deploy()
    yield trial
    if "ENGINE_LAB_FLEET" not in os.environ:
        for host in hosts:
            host.destroy()


def settings(second: bool, *flags: str) -> dict[str, object]:
    """The same engine on each host; on the second the image refuses the new flag, as an older build would."""
    environment = {"SIM_TOKENS_PER_SECOND": "20", "SIM_REFUSE_FLAG": "--enforce-eager" if second else ""}
    return {"settings": {"extra_flags": list(flags)}, "environment": environment}


def test_the_third_host_keeps_serving(trial: Trial) -> None:
    first, second, third = trial.hosts
    before = {host.name: (config(trial, host), trial.container(host)) for host in trial.hosts}
    conf = trial.sh("sha256sum </etc/gpuwright/engines/main.conf", third)
    for host in trial.hosts:
        host.run("cat >/run/client.sh", stdin=CLIENT)
        trial.sh("systemd-run --quiet --collect --unit=load sh /run/client.sh", host)
        trial.set(host, **settings(host is second, "--enforce-eager"))

    run = trial.run("-y")

    for host in trial.hosts:
        trial.sh(
            "touch /run/client.stop; while systemctl -q is-active load; do sleep 0.5; done; rm /run/client.stop", host
        )
    assert run.status == 1
    # The first: replaced.
    assert config(trial, first) != before[first.name][0]
    assert trial.is_ready(first)
    # The second: refused by the engine itself, and the old one serves again.
    assert "unrecognized arguments: --enforce-eager" in run.said
    assert f"[{second.name}] engine main was not replaced: the engine ended with status 2" in run.said
    assert config(trial, second) == before[second.name][0]
    assert trial.is_ready(second)
    # The third: refused by the run, untouched on disk, same container, no stream broken.
    assert (
        f"engine main is not replaced and goes on serving: the replacement of engine main on {second.name} failed in this run"
        in run.said
    )
    assert (config(trial, third), trial.container(third)) == before[third.name]
    assert trial.sh("sha256sum </etc/gpuwright/engines/main.conf", third) == conf
    streams = trial.sh("cat /run/client.log", third).split()
    assert len(streams) >= 5
    assert set(streams) == {"whole"}

    # Put right, the next run goes on where it stopped.
    for host in trial.hosts:
        trial.engines[host.name] = {"main": engine(**(settings(False, "--enforce-eager")))}
    again = trial.deploy()
    assert f"Engine | Replace serving engines on {third.name}" in again.changed[third.name]
    assert all(trial.is_ready(host) for host in trial.hosts)
    assert trial.deploy().changed == {}
