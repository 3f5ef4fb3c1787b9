"""The P2P verdict on a booted host: real systemd, Docker, SSH, pyinfra and audit, and the real scripts.

Lab STAND-INS, for want of GPUs: nvidia-smi, the CDI specification, /proc/driver/nvidia, the SIMULATED engine, and (where a
test says so) the probe, which then prints a recorded document. The probe itself was run on real GPUs: docs/proof.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from engine_trial import UNIT, Trial

import lab
from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect

pytestmark = pytest.mark.lab

RECORDED = REPOSITORY / "tests/unit/pcie/p2p"
PROBE = "/usr/local/lib/gpuwright/p2p-probe.py"
VERDICT = "/var/lib/gpuwright/pcie/p2p/main.json"
UUIDS = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(2)]
OFF = {"NCCL_P2P_DISABLE=1", "NCCL_CUMEM_ENABLE=1", "VLLM_ALLREDUCE_USE_SYMM_MEM=0", "--disable-custom-all-reduce"}
P2P_CONTROLS = ("GPW-ENGN-033", "GPW-PCIE-009", "GPW-PCIE-010")

NVIDIA_SMI = f"""#!/bin/sh
# A STAND-IN of the lab, not NVIDIA's: two GPUs that do not exist.
case $* in
  -L) printf 'GPU %s: Lab stand-in (UUID: %s)\\n' 0 {UUIDS[0]} 1 {UUIDS[1]} ;;
  "topo -m") printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNODE\\nGPU1\\tNODE\\t X \\n' ;;
  *index,uuid,pci.bus_id*) printf '%s, %s, 00000000:F%s:00.0\\n' 0 {UUIDS[0]} 0 1 {UUIDS[1]} 1 ;;
  *uuid,pci.bus_id*) printf '%s, 00000000:F%s:00.0\\n' {UUIDS[0]} 0 {UUIDS[1]} 1 ;;
esac
"""
CDI = "\n".join(
    [
        "cdiVersion: 0.5.0",
        "kind: nvidia.com/gpu",
        "# A STAND-IN of the lab: gives the container a variable instead of a device.",
        "devices:",
        *(f"  - {{name: {uuid}, containerEdits: {{env: [LAB_STAND_IN_{i}=1]}}}}" for i, uuid in enumerate(UUIDS)),
    ]
)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    from lab import images

    images.build("sim")
    [host] = lab.up([os.environ.get("P2P_LAB_HOST", "p2p-1")], "trixie")
    trial = Trial([host], tmp_path_factory.mktemp("p2p"))
    host.run("cat >/usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi", stdin=NVIDIA_SMI)
    host.run("mkdir -p /etc/cdi; cat >/etc/cdi/lab-stand-in.yaml", stdin=CDI)
    host.run("mkdir -p /run/stand-in/nvidia; mount --bind /run/stand-in /proc/driver")
    driver(trial, "580.10.01")
    trial.hardware = {"gpus": {"count": 2, "memory": "1 GiB"}}
    trial.roles = {"kernel": {}, "pcie": {"p2p": {"limit": "60 s"}}}
    trial.set(gpus=[0, 1], settings={"tensor_parallel_size": 2})
    trial.deploy()
    yield trial
    if not os.environ.get("P2P_LAB_HOST"):
        host.destroy()


def driver(trial: Trial, version: str) -> None:
    """A STAND-IN for the loaded driver."""
    trial.sh(f"echo 'NVRM version: NVIDIA UNIX Open Kernel Module  {version}' >/run/stand-in/nvidia/version")
    trial.sh("echo 'RegistryDwords: \"\"' >/run/stand-in/nvidia/params")


def probe_says(trial: Trial, name: str) -> None:
    """A STAND-IN for the probe, in the place of the real one until the next deploy: it prints a recorded document."""
    document = json.dumps((RECORDED / f"{name}.json").read_text())
    trial.host.run(f"cat >{PROBE}", stdin=f"print({document}.replace(chr(10), ''))\n")


def restart(trial: Trial) -> str:
    """What unit and engine say of P2P during one start."""
    cursor = trial.sh("journalctl --lines=0 --show-cursor --quiet | sed -n 's/^-- cursor: //p'")
    trial.sh(f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}")
    units = f"--unit={UNIT} --unit=gpuwright-p2p.service"
    return trial.sh(f"journalctl --no-pager --quiet --output=cat {units} --after-cursor='{cursor}'")


def flags(trial: Trial) -> set[str]:
    """Which of the flags the running container has, by docker inspect, and by the process itself."""
    seen = json.loads(trial.sh("docker inspect gpuwright-main"))[0]
    asked = {*seen["Config"]["Env"], *seen["Config"]["Cmd"]} & OFF
    process = f"/proc/{seen['State']['Pid']}"
    trial.sh(f"test -e {process}")
    # The container's first process is docker-init; the engine is its child.
    said = trial.sh(
        "for p in $(docker top gpuwright-main -eo pid | tail -n +2); do tr '\\0' '\\n' </proc/$p/environ; done"
    )
    assert {flag for flag in OFF if not flag.startswith("--")} & set(said.splitlines()) == asked - {
        "--disable-custom-all-reduce"
    }
    return asked


def audit(trial: Trial) -> dict[str, tuple[Outcome, str]]:
    collected = collect(trial.directory / "inventory.py")
    assert not collected.faults, collected.faults
    name = trial.host.name
    chosen = tuple(c for c in controls.of_node(collected.specs[name]) if c.id in P2P_CONTROLS)
    host = connection.connect(name, collected.hosts[name])
    results = judge_all(chosen, connection.read(host, chosen), collected.specs[name])
    return {result.control.id: (result.outcome, result.verdict.actual) for result in results}


def red(trial: Trial) -> set[str]:
    found = audit(trial)
    assert set(found) == set(P2P_CONTROLS)
    assert not [said for outcome, said in found.values() if outcome is Outcome.ERROR], found
    return {key for key, (outcome, _) in found.items() if outcome is not Outcome.PASS}


def test_a_first_deploy_judges_before_the_engine_starts(trial: Trial) -> None:
    """The real probe in the real container of the engine's image: the SIMULATED engine's has no torch."""
    document = json.loads(trial.sh(f"cat {VERDICT}"))
    assert document["probe"]["verdict"] == "none"
    assert "the image has no usable torch" in document["probe"]["reasons"][0]
    assert flags(trial) == OFF
    assert (
        "starting without P2P between GPUs 0 1, which is slower: none, not judged: the image has no" in trial.journal()
    )
    assert red(trial) == {"GPW-PCIE-009"}
    assert trial.deploy().changed == {}
    assert trial.sh(f"stat -c '%a %U' {VERDICT}") == "644 root"
    assert trial.sh("docker ps --all --filter label=gpuwright.p2p-probe --quiet") == ""


def test_a_good_verdict_leaves_p2p_on_until_it_expires(trial: Trial) -> None:
    probe_says(trial, "good-2")
    said = restart(trial)
    assert "P2P of engine main: good every copy and every all-reduce was right" in said
    assert "P2P between GPUs 0 1 is used" in said
    assert flags(trial) == set()
    assert red(trial) == set()
    # The probe's file is put right, and a verdict that holds is not judged again.
    trial.deploy()
    assert trial.deploy().changed == {}
    assert flags(trial) == set()

    driver(trial, "580.20.02")
    assert red(trial) == {"GPW-ENGN-033", "GPW-PCIE-009"}
    plan = trial.run("--dry")
    changes = [name for names in plan.changed.values() for name in names]
    assert any(
        "main: P2P verdict expired, the driver was NVIDIA UNIX Open Kernel Module 580.10.01 and is" in c
        for c in changes
    )
    trial.deploy()  # down, judged again (the real probe: no torch), and up
    assert flags(trial) == OFF
    assert red(trial) == {"GPW-PCIE-009"}
    assert trial.deploy().changed == {}


def test_an_expired_good_is_not_used_when_nobody_can_judge_again(trial: Trial) -> None:
    probe_says(trial, "good-2")
    restart(trial)
    assert flags(trial) == set()
    drop_in = "/run/systemd/system/gpuwright-p2p.service.d"
    trial.sh(
        f"mkdir -p {drop_in}; printf '[Unit]\\nConditionPathExists=/nowhere\\n' >{drop_in}/skip.conf; systemctl daemon-reload"
    )
    try:
        driver(trial, "580.30.03")
        said = restart(trial)
        assert "starting without P2P between GPUs 0 1, which is slower: expired, the driver was" in said
        assert flags(trial) == OFF
    finally:
        trial.sh(f"rm -r {drop_in}; systemctl daemon-reload")


@pytest.mark.parametrize("name", ["corrupt-one-way", "hang-2"])
def test_a_bad_verdict_turns_off_every_way(trial: Trial, name: str) -> None:
    probe_says(trial, name)
    trial.sh(f"rm -f {VERDICT}")
    said = restart(trial)
    reason = json.loads((RECORDED / f"{name}.json").read_text())["reasons"][0]
    assert f"which is slower: bad, {reason}" in said
    assert flags(trial) == OFF
    assert red(trial) == set()


def test_sabotages(trial: Trial) -> None:
    probe_says(trial, "corrupt-one-way")
    trial.sh(f"rm -f {VERDICT}")
    restart(trial)
    assert red(trial) == set()
    # One flag lost: the half measure that moves a hang to the engine's own all-reduce (vllm#51513).
    conf = "/etc/gpuwright/engines/main.conf"
    trial.sh(f"cp -a {conf} /run/kept.conf; sed -i '/--disable-custom-all-reduce/d' {conf}")
    restart(trial)
    assert flags(trial) == OFF - {"--disable-custom-all-reduce"}
    assert red(trial) == {"GPW-ENGN-033"}
    trial.sh(f"cp -a /run/kept.conf {conf}")
    restart(trial)
    assert red(trial) == set()
    trial.sh(f"chmod 0666 {VERDICT}")
    assert red(trial) == {"GPW-PCIE-010"}
    trial.sh(f"chmod 0644 {VERDICT}; mv {VERDICT} /run/kept.json")
    assert red(trial) == {"GPW-PCIE-009"}
    trial.sh(f"mv /run/kept.json {VERDICT}")
    assert red(trial) == set()


def test_without_the_role_nothing_is_judged_and_the_audit_says_so(trial: Trial) -> None:
    roles, trial.roles = trial.roles, {}
    try:
        trial.deploy()
        assert flags(trial) == set()
        assert trial.sh("ls /usr/local/lib/gpuwright | grep p2p; ls /etc/gpuwright/pcie 2>/dev/null; true") == ""
        outcome, said = audit(trial)["GPW-ENGN-033"]
        assert outcome is Outcome.MANUAL
        assert "the node file has no role pcie" in said
        assert trial.deploy().changed == {}
    finally:
        trial.roles = roles
