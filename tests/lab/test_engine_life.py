"""The life of an engine on a booted host: real systemd, Docker, SSH and pyinfra; the engine itself is SIMULATED."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from engine_trial import PORT, UNIT, Trial, engine

import lab

pytestmark = pytest.mark.lab

PREFIX = "/usr/local/lib/gpuwright"
CHAT = '{"model":"lab","messages":[{"role":"user","content":"hi"}],"max_tokens":%d,"stream":true}'


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    from lab import images

    images.build("sim")
    [host] = lab.up([os.environ.get("ENGINE_LAB_HOST", "engine-life")], "trixie")
    trial = Trial([host], tmp_path_factory.mktemp("engine"))
    trial.deploy()
    yield trial
    if not os.environ.get("ENGINE_LAB_HOST"):
        host.destroy()


@pytest.fixture(autouse=True)
def fresh(trial: Trial) -> None:
    """Every test begins with an engine that is down and has no evidence; what it was released as stays."""
    trial.sh(
        f"systemctl stop {UNIT}; systemctl reset-failed {UNIT}; docker rm -f gpuwright-main; rm -rf /var/lib/gpuwright/evidence/main; true"
    )
    trial.set()
    trial.role.clear()


def serving(trial: Trial, **changes: object) -> None:
    """Deploy engine "main" with these settings onto a host where it is down."""
    trial.set(**changes)
    trial.deploy()
    assert trial.is_ready()


def mark(trial: Trial) -> str:
    """A journal cursor: what comes after it is news."""
    return trial.sh("journalctl --lines=0 --show-cursor --quiet | sed -n 's/^-- cursor: //p'")


def news(trial: Trial, cursor: str) -> str:
    return trial.sh(f"journalctl --no-pager --quiet --output=cat --unit={UNIT} --after-cursor='{cursor}'")


def test_a_converged_host_has_no_changes(trial: Trial) -> None:
    trial.deploy()
    again = trial.deploy()
    assert again.changed == {}
    assert trial.run("--dry").changed == {}


@pytest.mark.proof
def test_readiness_takes_its_time_and_shows_progress(trial: Trial) -> None:
    """Shortened: 40 seconds stand for the seven minutes of seed 2."""
    trial.set(environment={"SIM_STARTUP_SECONDS": "40"})
    process = trial.begin("-y")
    assert process.stdout
    spoken, published, said = [], [], []
    for line in process.stdout:
        said.append(line)
        if "Start engines that are down" in line or f"[{trial.host.name}] main: " in line:
            spoken.append(time.monotonic())
        if "loading: " in line:
            published.append(trial.is_ready())
    assert process.wait() == 0, "".join(said)
    assert len(published) >= 3, "".join(said)  # the engine's own words are part of the progress
    assert max(b - a for a, b in pairwise(spoken)) < 15.5
    assert published and not any(published)  # nobody is sent to it while it loads
    assert trial.is_ready()
    # The start job ends when the engine is ready, so that engines ordered after one another start one at a time.
    began = time.monotonic()
    trial.sh(f"systemctl restart {UNIT}")
    assert time.monotonic() - began >= 40
    assert trial.is_ready()


def test_a_crash_loop_is_stopped_after_three_starts_and_all_of_it_is_kept(trial: Trial) -> None:
    trial.set(environment={"SIM_CRASH_AT_START": "3", "SIM_SEED_LOG": "Tried to allocate 151 GiB ... 159.43 GiB free"})
    cursor = mark(trial)
    run = trial.run("-y")
    assert run.status == 1
    assert "engine main did not become ready: the engine ended with status 3; evidence: /var/lib/gpuwright/" in run.said
    assert "159.43 GiB free" in run.said  # the last lines of its log
    trial.until(lambda: trial.shows("ActiveState") == "failed", what="the cap")
    assert news(trial, cursor).count("is started, process") == 3
    assert trial.shows("NRestarts") == "3"
    assert "Start request repeated too quickly" in news(trial, cursor)
    assert trial.shows("ExecMainStatus") == "3"
    assert not trial.is_ready()
    folders = trial.evidence()
    assert len(folders) == 3
    containers = set()
    for folder in folders:
        [inspected] = json.loads(trial.sh(f"cat {folder}/inspect.json"))
        containers.add(inspected["Id"])
        assert inspected["State"]["ExitCode"] == 3
        assert "159.43 GiB free" in trial.sh(f"cat {folder}/container.log")
        assert "reason=the engine ended with status 3" in trial.sh(f"cat {folder}/reason")
    assert len(containers) == 3
    assert trial.sh("stat -c %a:%U /var/lib/gpuwright/evidence/main") == "700:root"
    # A deploy's own start does not count, so that it can start again at once.
    trial.set()
    trial.deploy()
    assert trial.is_ready()


@pytest.mark.proof
def test_a_start_that_hangs_ends_at_the_one_deadline(trial: Trial) -> None:
    trial.set(
        environment={"SIM_HANG_AT_START": "1"},
        readiness={"deadline": "15 s", "conditions_limit": "10 s"},
        restart={"delay": "60 s", "burst": 3, "interval": "1 h"},
    )
    began = time.monotonic()
    run = trial.run("-y")
    assert run.status == 1
    assert time.monotonic() - began < 60
    assert "the deadline of a start is 15 s (readiness.deadline in the node file)" in run.said
    assert trial.sh("docker inspect --format '{{.State.Running}}' gpuwright-main") == "false"
    [folder] = trial.evidence()
    assert "the deadline of a start is 15 s" in trial.sh(f"cat {folder}/reason")
    assert "hangs, as SIM_HANG_AT_START says" in trial.sh(f"cat {folder}/container.log")


@pytest.mark.proof
def test_a_stop_that_hangs_is_a_slow_stop_and_not_out_of_memory(trial: Trial) -> None:
    serving(trial, environment={"SIM_HANG_AT_STOP": "1"}, drain="1 s")
    cursor = mark(trial)
    began = time.monotonic()
    trial.sh(f"systemctl stop {UNIT}")
    took = time.monotonic() - began
    assert 5 <= took < 30
    said = news(trial, cursor)
    assert (
        "slow stop: the engine did not end within 5 s of SIGTERM and was killed (137); this is not out of memory"
        in said
    )
    assert "timed out" not in said  # systemd's own limit lies beyond Docker's
    [folder] = trial.evidence()
    reason = trial.sh(f"cat {folder}/reason")
    assert "exit code=137 OOMKilled=false" in reason
    assert "slow stop" in reason


@pytest.mark.proof
def test_a_kill_is_told_from_out_of_memory(trial: Trial) -> None:
    serving(trial)
    cursor = mark(trial)
    trial.sh("docker kill gpuwright-main")
    trial.until(
        lambda: "killed by SIGKILL (137); neither Docker nor the kernel says out of memory" in news(trial, cursor)
    )
    trial.until(trial.is_ready)  # Restart=on-failure
    assert trial.shows("NRestarts") == "1"


@pytest.mark.proof
def test_deploys_never_use_up_the_cap(trial: Trial) -> None:
    """Three restarts by deploys within the hour, and a fourth; the cap is three starts an hour."""
    serving(trial, environment={"GENERATION": "0"})
    for generation in ("1", "2", "3", "4"):
        before = trial.container()
        trial.set(environment={"GENERATION": generation})
        run = trial.deploy()
        assert f"Engine | Replace serving engines on {trial.host.name}" in run.changed[trial.host.name]
        assert trial.container() != before
        assert trial.is_ready()
    assert f"GENERATION={generation}" in trial.sh("docker inspect --format '{{.Config.Env}}' gpuwright-main")


def test_docker_is_restarted_under_a_stream(trial: Trial) -> None:
    serving(trial)
    before, main = trial.container(), trial.shows("MainPID")
    cursor = mark(trial)
    trial.sh(
        f"systemd-run --quiet --unit=client sh -c 'curl -sN http://127.0.0.1:{PORT}/v1/chat/completions "
        f"-d '\\''{CHAT % 200}'\\'' >/tmp/stream; echo $? >/tmp/stream.status'; rm -f /tmp/stream.status; sleep 2"
    )
    trial.sh("systemctl restart docker")
    assert trial.host.run("test -e /tmp/stream.status", check=False).returncode == 1  # still streaming
    trial.until(lambda: trial.host.run("test -s /tmp/stream.status", check=False).returncode == 0, what="the stream")
    assert trial.sh("cat /tmp/stream.status") == "0"
    assert trial.sh("grep -c '^data: ' /tmp/stream") == str(1 + 200 + 1 + 1)
    assert trial.container() == before
    assert trial.shows("MainPID") == main
    assert trial.shows("ActiveState") == "active"
    assert trial.is_ready()
    # And the log goes on in the journal, each line once.
    trial.sh(f"curl -sf http://127.0.0.1:{PORT}/v1/models")
    trial.until(lambda: '"GET /v1/models" 200' in news(trial, cursor))
    said = news(trial, cursor)
    assert said.count('request "POST /v1/chat/completions"') == 1
    assert said.count('request "GET /v1/models"') == 1
    assert "Docker went away; the engine's process" in said
    # Its end is still seen, with the container's own exit code.
    trial.sh("docker kill --signal=TERM gpuwright-main")
    trial.until(lambda: "the engine ended with status 0 and nobody asked it to" in news(trial, cursor))


def test_an_image_that_is_missing(trial: Trial) -> None:
    serving(trial)
    trial.sh(f"systemctl stop {UNIT}; docker rm gpuwright-main; docker image rm $(docker image ls -q)")
    cursor = mark(trial)
    assert trial.host.run(f"systemctl start {UNIT}", check=False).returncode != 0
    assert "seen: image registry.lab:5000/sim@sha256:" in news(trial, cursor)
    assert (
        "is not on this node; expected: present, an engine never pulls; do: systemctl start gpuwright-image-main"
        in news(trial, cursor)
    )
    time.sleep(4)  # twice the restart delay
    assert (trial.shows("ActiveState"), trial.shows("NRestarts"), trial.shows("ExecMainStatus")) == (
        "failed",
        "0",
        "78",
    )
    trial.deploy()
    assert trial.is_ready()


@pytest.mark.proof
def test_a_digest_that_is_wrong(trial: Trial) -> None:
    serving(trial)
    wrong = "sha256:" + "0" * 64
    # In the node file: the image job cannot fetch it, and what serves goes on serving.
    before = trial.container()
    trial.set(image=f"registry.lab:5000/sim@{wrong}")
    run = trial.run("-y")
    assert run.status == 1
    assert "docker pull failed: " in run.said and "an image is missing" in run.said
    assert trial.container() == before and trial.is_ready()
    # On the node, somebody's edit: one sentence, no restart; the next deploy puts it right.
    trial.set()
    trial.sh(f"systemctl stop {UNIT}; sed -i 's/sha256:[0-9a-f]*/{wrong}/' /etc/gpuwright/engines/main.conf")
    cursor = mark(trial)
    assert trial.host.run(f"systemctl start {UNIT}", check=False).returncode != 0
    assert "seen: another digest of the image, registry.lab:5000/sim@sha256:" in news(trial, cursor)
    assert trial.shows("ExecMainStatus") == "78"
    trial.deploy()
    assert trial.is_ready()


@pytest.mark.proof
def test_weights_that_are_not_complete(trial: Trial) -> None:
    serving(trial)
    trial.sh(f"systemctl stop {UNIT}; truncate -s 4095 /srv/models/lab/tiny/*/model.safetensors")
    cursor = mark(trial)
    assert trial.host.run(f"systemctl start {UNIT}", check=False).returncode != 0
    assert "model.safetensors is 4095; expected: 4096 bytes as the manifest says" in news(trial, cursor)
    trial.sh("truncate -s 4096 /srv/models/lab/tiny/*/model.safetensors")
    trial.deploy()


NVIDIA_SMI = r"""#!/bin/sh
# A STAND-IN of the lab, not NVIDIA's: one GPU that does not exist, held by whom /run/held says.
case $* in
  -L) echo "GPU 0: Lab stand-in (UUID: GPU-00000000-1ab0-0000-0000-000000000000)" ;;
  --query-compute-apps*) cat /run/held ;;
  --query-gpu*) echo "GPU-00000000-1ab0-0000-0000-000000000000, 30" ;;
esac
"""
CDI = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
# A STAND-IN of the lab: gives the container a variable instead of a device.
devices:
  - name: GPU-00000000-1ab0-0000-0000-000000000000
    containerEdits: {env: [LAB_STAND_IN_GPU=0]}
"""


def test_gpus_are_held_and_then_freed(trial: Trial) -> None:
    """Simulated: nvidia-smi and the CDI specification are stand-ins, the waiting and Docker's CDI are real."""
    held = "GPU-00000000-1ab0-0000-0000-000000000000, 4711, python3, 22000 MiB"
    trial.host.run("cat >/usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi", stdin=NVIDIA_SMI)
    trial.host.run("mkdir -p /etc/cdi; cat >/etc/cdi/lab-stand-in.yaml", stdin=CDI)
    trial.host.run("cat >/run/held", stdin=held + "\n")
    trial.hardware = {"gpus": {"count": 1, "memory": "1 GiB"}}
    try:
        trial.set(gpus=[0])
        cursor = mark(trial)
        process = trial.begin("-y")
        trial.until(lambda: "held by process 4711" in news(trial, cursor), what="the wait")
        time.sleep(3)
        assert trial.shows("ActiveState") == "activating"
        trial.sh(": >/run/held")
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
        assert trial.is_ready()
        environment = trial.sh("cat /proc/$(docker inspect --format '{{.State.Pid}}' gpuwright-main)/environ")
        assert "LAB_STAND_IN_GPU=0" in environment
    finally:
        trial.hardware = {}
        trial.sh("rm -f /usr/local/bin/nvidia-smi /etc/cdi/lab-stand-in.yaml /run/held")


@pytest.mark.proof
def test_a_full_evidence_disk_never_stops_a_start(trial: Trial) -> None:
    serving(trial)
    folder = "/var/lib/gpuwright/evidence/main"
    trial.sh(f"mkdir -p {folder} && mount -t tmpfs -o size=64k,mode=0700 none {folder}")
    try:
        trial.host.run(f"head -c 200000 /dev/zero >{folder}/ballast", check=False)
        cursor = mark(trial)
        trial.sh(f"systemctl restart {UNIT}")
        assert trial.is_ready()
        assert "the start goes on" in news(trial, cursor)
        # With old attempts instead, these go, and the newest is kept.
        trial.sh(f"rm {folder}/ballast; mkdir {folder}/20200101T000000.000Z")
        trial.host.run(f"head -c 200000 /dev/zero >{folder}/20200101T000000.000Z/container.log", check=False)
        trial.sh(f"systemctl restart {UNIT}")
        assert trial.is_ready()
        assert f"{folder}/20200101T000000.000Z" not in trial.evidence()
        assert "container=" in trial.sh(f"cat {trial.evidence()[-1]}/reason")
    finally:
        trial.sh(f"umount {folder}")


@pytest.mark.proof
def test_a_reboot(trial: Trial) -> None:
    serving(trial)
    before = trial.container()
    trial.host.power_cycle()
    trial.until(trial.is_ready, what="the engine after the power came back")
    assert trial.container() != before
    # The power cut left nobody to keep the evidence: pre-start did.
    assert before in trial.sh("cat /var/lib/gpuwright/evidence/main/*/reason")
    assert trial.deploy().changed == {}
    trial.host.reboot()
    trial.until(trial.is_ready, what="the engine after a reboot")
    assert trial.deploy().changed == {}


def test_a_replacement_that_fails_puts_the_previous_engine_back(trial: Trial) -> None:
    serving(trial)
    config = trial.sh("docker inspect --format '{{index .Config.Labels \"gpuwright.config\"}}' gpuwright-main")
    trial.set(settings={"extra_flags": ["--enforce-eager"]}, environment={"SIM_REFUSE_FLAG": "--enforce-eager"})
    run = trial.run("-y")
    assert run.status == 1
    assert "unrecognized arguments: --enforce-eager" in run.said
    assert (
        "engine main was not replaced: the engine ended with status 2; its evidence is in /var/lib/gpuwright/"
        in run.said
    )
    assert "serves again" in run.said
    assert trial.is_ready()
    now = trial.sh("docker inspect --format '{{index .Config.Labels \"gpuwright.config\"}}' gpuwright-main")
    assert now == config
    assert "--enforce-eager" not in trial.sh("cat /etc/gpuwright/engines/main.conf")
    trial.set()
    assert trial.deploy().changed == {}


@pytest.mark.proof
def test_a_replacement_with_dead_tool_calls_is_not_released(trial: Trial) -> None:
    serving(trial)
    trial.set(environment={"SIM_DEAD_TOOL_CALLS": "1", "SIM_TOKENS_PER_SECOND": "1000"})
    run = trial.run("-y")
    assert run.status == 1
    assert "no structured tool_calls entry" in run.said and "serves again" in run.said
    assert trial.is_ready()


@pytest.mark.proof
def test_a_controller_that_dies_in_the_middle(trial: Trial) -> None:
    """The node finishes a replacement alone, and the next run has nothing to do."""
    serving(trial)
    before = trial.container()
    trial.set(environment={"SIM_STARTUP_SECONDS": "10"})
    process = trial.begin("-y")
    assert process.stdout
    for line in process.stdout:
        if "draining, to be replaced" in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    trial.until(lambda: trial.is_ready() and trial.container() != before, what="the new engine")
    trial.until(lambda: trial.host.run("pgrep -f engine-replace", check=False).returncode == 1)
    assert trial.deploy().changed == {}


@pytest.mark.proof
@pytest.mark.parametrize("moment", ["the old engine serves", "nothing runs", "half of the set is new"])
def test_a_run_that_died_between_change_and_restart_is_healed(trial: Trial, moment: str) -> None:
    """The files say one thing and the container another; the next run asks the container."""
    generation = moment.replace(" ", "-")
    conf, unit = "/etc/gpuwright/engines/main.conf", f"/etc/systemd/system/{UNIT}"
    serving(trial, environment={"GENERATION": generation}, drain="4 s")
    trial.sh(f"cp {conf} /root/new.conf; cp {unit} /root/new.unit; systemctl stop {UNIT}")
    serving(trial)
    before = trial.container()
    trial.sh(f"cp /root/new.unit {unit}" + ("" if moment.startswith("half") else f"; cp /root/new.conf {conf}"))
    if moment == "nothing runs":
        trial.sh(f"systemctl daemon-reload; systemctl stop {UNIT}")
    trial.set(environment={"GENERATION": generation}, drain="4 s")
    trial.deploy()
    assert trial.is_ready()
    assert trial.container() != before
    assert f"GENERATION={generation}" in trial.sh("docker inspect --format '{{.Config.Env}}' gpuwright-main")
    assert trial.deploy().changed == {}


@pytest.mark.proof
def test_an_engine_whose_main_process_is_killed_leaves_no_container_behind(trial: Trial) -> None:
    serving(trial)
    before = trial.container()
    cursor = mark(trial)
    trial.sh(f"systemctl kill --kill-whom=main --signal=KILL {UNIT}")
    trial.until(lambda: trial.is_ready() and trial.container() != before, what="the restart")
    assert "the container still runs without its unit; stopping it" in news(trial, cursor)
    assert trial.sh("docker ps -q --filter label=gpuwright.engine | wc -l") == "1"


def test_settings_that_need_no_new_container_do_not_replace_it(trial: Trial) -> None:
    serving(trial)
    before = trial.container()
    trial.set(readiness={"deadline": "70 s"}, restart={"delay": "3 s"})
    run = trial.deploy()
    assert trial.container() == before
    assert run.changed[trial.host.name] == ["Engine | Start engines that are down"]
    assert trial.shows("RestartUSec") == "3s"
    assert trial.deploy().changed == {}


@pytest.mark.proof
def test_engines_start_one_after_another(trial: Trial) -> None:
    slow = {"SIM_STARTUP_SECONDS": "5"}
    trial.engines[trial.host.name] = {
        "main": engine(environment=slow),
        "second": engine(environment=slow, port=PORT + 1, after=["main"]),
    }
    cursor = mark(trial)
    trial.deploy()
    said = trial.sh(
        f"journalctl --no-pager --output=cat --after-cursor='{cursor}' --unit={UNIT} --unit=gpuwright-engine-second"
    )
    lines = [line for line in said.splitlines() if line.startswith(("ready after", "pre-flight passed"))]
    assert [line.split()[0] for line in lines] == ["pre-flight", "ready", "pre-flight", "ready"]
    # And one that the node file no longer names is gone, but for its evidence.
    trial.set()
    dry = trial.run("--dry")
    assert any("unit gpuwright-engine-second.service" in name for name in dry.changed[trial.host.name])
    trial.deploy()
    left = trial.sh(
        "ls -d /etc/systemd/system/*second* /etc/gpuwright/engines/second* /var/lib/gpuwright/*/second /run/gpuwright/*/second "
        "2>/dev/null; docker ps -aq --filter name=second; docker network ls -q --filter name=second; true"
    )
    assert left.split() == ["/var/lib/gpuwright/evidence/second"]
    assert trial.is_ready()
    assert trial.deploy().changed == {}


def test_the_container_is_shut(trial: Trial) -> None:
    serving(trial)
    [inspected] = json.loads(trial.sh("docker inspect gpuwright-main"))
    host = inspected["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert host["RestartPolicy"]["Name"] in ("", "no")
    assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(PORT)}]}
    assert host["NetworkMode"] == "gpuwright-main"
    assert inspected["Config"]["User"] == "10001:10001"
    pid = inspected["State"]["Pid"]
    assert (
        trial.sh(f"grep -E '^(CapEff|CapBnd):' /proc/{pid}/status | awk '{{print $2}}' | sort -u") == "0000000000000000"
    )
    exec_ = "docker exec gpuwright-main sh -c"
    assert trial.host.run(f"{exec_} 'echo x >/opt/x'", check=False).returncode != 0
    assert trial.host.run(f"{exec_} 'echo x >/model/x'", check=False).returncode != 0
    assert trial.sh(
        f"{exec_} 'cp /bin/true /tmp/t && /tmp/t && cp /bin/true /cache/t && /cache/t && echo executable'"
    ) == ("executable")
    assert trial.sh(f"ss -Hltn 'sport = :{PORT}' | grep -vc 127.0.0.1; true") == "0"


def test_systemctl_cat_reads_like_a_recipe(trial: Trial) -> None:
    serving(trial)
    text = trial.sh(f"systemctl cat {UNIT}")
    order = [
        text.index(f"\n{key}={PREFIX}/engine-{step} main")
        for key, step in (
            ("ExecStartPre", "prestart"),
            ("ExecStart", "run"),
            ("ExecStartPost", "gate"),
            ("ExecStop", "stop"),
            ("ExecStopPost", "evidence"),
        )
    ]
    assert order == sorted(order)
    assert trial.sh(f"systemd-analyze verify {UNIT} 2>&1 | grep gpuwright-engine; true") == ""


@pytest.mark.proof
def test_an_image_from_an_archive(trial: Trial) -> None:
    """A site without a registry: the pinned digest is the image's own id, which Docker computes from its content."""
    serving(trial)
    trial.sh(f"systemctl stop {UNIT}; docker rm gpuwright-main")
    id_ = trial.sh("docker image ls --no-trunc --quiet | head -n 1")
    trial.sh(
        "docker save -o /srv/sim.tar $(docker image ls -q | head -n 1) && docker image rm -f $(docker image ls -q)"
    )
    trial.set(image={"repository": "registry.invalid/sim", "digest": id_, "archive": "/srv/sim.tar"})
    run = trial.deploy()
    assert "loading /srv/sim.tar" in run.said
    assert trial.is_ready()
    assert trial.sh("docker inspect --format '{{.Image}}' gpuwright-main") == id_
    assert trial.deploy().changed == {}
    # An archive of something else is found out.
    trial.set(image={"repository": "registry.invalid/sim", "digest": f"sha256:{'0' * 64}", "archive": "/srv/sim.tar"})
    run = trial.run("-y")
    assert run.status == 1
    assert "seen: /srv/sim.tar does not hold registry.invalid/sim@sha256:000" in run.said
    assert trial.is_ready()
