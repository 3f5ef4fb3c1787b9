"""GPUs in containers, on booted hosts with 0, 1, 4 and 8 cards: the ring, what breaks by hand, and engines that keep their GPUs.

STAND-INS: the cards, the driver and the toolkit's program (lab/gpus, lab/repository); the engine is SIMULATED. What apt, systemd
and Docker do with them is real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import cdi_trial
import pytest
import sabotage
from cdi_trial import TOOLKIT, audit, cards, inside, red
from engine_trial import UNIT, Trial

from gpuwright.audit.control import Outcome
from lab import gpus

pytestmark = pytest.mark.lab

PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
CDI = "Containers | Keep one CDI specification, of the loaded driver"
HOLD = "Containers | Hold the container toolkit"
KEPT = "/run/cdi/nvidia.yaml"
_REFRESH = "systemctl reset-failed nvidia-cdi-refresh.service; systemctl restart nvidia-cdi-refresh.service"


def mine(trial: Trial, run) -> list[str]:
    """What a run changed on the host, of role containers."""
    return [name for name in run.changed.get(trial.host.name, []) if name.startswith("Containers")]


def everything(trial: Trial, run) -> list[str]:
    return run.changed.get(trial.host.name, [])


def serving(trial: Trial) -> None:
    trial.until(trial.is_ready, what="the engine")


# --- the ring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_the_ring(count, tmp_path):
    trial = cdi_trial.blank(f"cdi-ring-{count}", count, tmp_path)
    try:
        dry = trial.run("--dry")
        assert dry.status == 0, dry.said
        assert not trial.sh("command -v dockerd nvidia-ctk; true")

        first = trial.deploy()
        assert set(everything(trial, first)) <= set(everything(trial, dry))
        assert everything(trial, trial.deploy()) == []
        serving(trial)

        versions = trial.sh(f"dpkg-query -W -f '${{Package}}=${{Version}}\\n' {' '.join(PACKAGES)} 2>/dev/null; true")
        held = set(trial.sh("apt-mark showhold").split()) & set(PACKAGES)
        if count:
            assert sorted(versions.split()) == sorted(f"{name}={TOOLKIT}-1" for name in PACKAGES)
            assert held == set(PACKAGES)
            assert inside(trial) == cards(trial)
            assert len(inside(trial)) == count
        else:
            # The node file names a toolkit, and the machine has no GPUs: nothing of it is there.
            assert (versions, held) == ("", set())
            assert "features" not in trial.sh("cat /etc/docker/daemon.json")
        assert red(trial) == {}

        trial.sh("apt-mark unhold containerd docker.io >/dev/null")
        broken = {"GPW-CONT-010"}
        if count:
            trial.sh(
                f"sed -i 's/[.]so[.]580[.]95[.]05/.so.570.10.10/' {KEPT}; mkdir -p /etc/cdi; cp {KEPT} /etc/cdi/by-hand.yaml"
            )
            trial.sh(
                "apt-mark unhold nvidia-container-toolkit-base >/dev/null; systemctl disable -q nvidia-cdi-refresh.service"
            )
            broken |= {"GPW-CONT-020", "GPW-CONT-022", "GPW-CONT-023", "GPW-CONT-024"}
        assert set(red(trial)) == broken
        trial.deploy()
        assert red(trial) == {}
        assert everything(trial, trial.deploy()) == []

        trial.host.reboot()
        serving(trial)
        assert red(trial) == {}
        assert everything(trial, trial.run("--dry")) == []
        if count:
            assert inside(trial) == cards(trial)
    finally:
        trial.host.destroy()


# --- one host with four cards ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    made = cdi_trial.blank(os.environ.get("CDI_LAB_HOST", "cdi-1"), 4, tmp_path_factory.mktemp("cdi"))
    made.engines[made.host.name] = {"main": cdi_trial.on_gpus([2, 3])}
    made.deploy()
    yield made
    if not os.environ.get("CDI_LAB_HOST"):
        made.host.destroy()


@pytest.fixture
def node(four: Trial) -> Iterator[Trial]:
    """That host; whatever a test does to cards, specifications and daemon.json is undone."""
    serving(four)
    yield four
    gpus.plug(four.host, gpus.cards(four.host.name, 4))
    four.sh(
        "rm -rf /etc/cdi; systemctl reset-failed nvidia-cdi-refresh.service; systemctl restart nvidia-cdi-refresh.service"
    )
    four.containers = {"toolkit": cdi_trial.toolkit()}
    four.deploy()
    assert red(four) == {}


def test_an_engine_has_its_own_cards_by_uuid_and_no_other(node):
    assert inside(node) == cards(node)[2:]
    asked = node.sh("docker inspect --format '{{json .HostConfig.DeviceRequests}}' gpuwright-main")
    assert all(f"nvidia.com/gpu={uuid}" in asked for uuid in cards(node)[2:])
    assert '"cdi"' in asked and '"gpu"' not in asked


@pytest.mark.parametrize("control", sabotage.WITH_GPUS)
def test_a_sabotage_turns_exactly_its_control_red(node, control):
    entry = sabotage.SABOTAGES[control]
    before = audit(node)
    assert before[control].outcome is Outcome.PASS
    try:
        node.sh(f"set -e\n{entry.do}", timeout=300)
        after = audit(node)
        turned = {key: one.verdict.actual for key, one in after.items() if one.outcome is not before[key].outcome}
        assert set(turned) == {control, *entry.also}, turned
        assert after[control].outcome is Outcome.FAIL
        if entry.heals:
            node.deploy()
            assert red(node) == {}
    finally:
        node.sh(entry.undo, timeout=300)
    node.until(lambda: red(node) == {}, what="green controls")


# --- specifications --------------------------------------------------------------------------------------------------


def test_a_second_specification_is_named_moved_away_and_kept(node):
    node.sh(f"rm -rf /var/lib/gpuwright/containers/cdi; mkdir -p /etc/cdi; cp {KEPT} /etc/cdi/nvidia.yaml")
    dry = node.run("--dry")
    assert mine(node, dry) == [CDI]
    assert "CDI: /etc/cdi/nvidia.yaml defines devices that /run/cdi/nvidia.yaml has, too" in dry.said
    assert node.sh("ls /etc/cdi") == "nvidia.yaml", "a dry run moves nothing"
    run = node.deploy()
    assert everything(node, run) == [CDI]
    assert "/etc/cdi/nvidia.yaml is moved to /var/lib/gpuwright/containers/cdi" in run.said
    assert node.sh("ls /etc/cdi; ls /var/lib/gpuwright/containers/cdi") == "etc-cdi-nvidia.yaml"
    node.sh(f"cp {KEPT} /etc/cdi/nvidia.yaml")
    node.deploy()
    assert node.sh("ls /var/lib/gpuwright/containers/cdi").split() == ["etc-cdi-nvidia.yaml", "etc-cdi-nvidia.yaml.~1~"]


def test_docker_refuses_a_device_that_two_files_of_a_folder_have(node):
    """Why the second file is in the way: what Docker itself makes of it."""
    uuid = cards(node)[0]
    image = node.sh("docker inspect --format '{{.Image}}' gpuwright-main")
    run = f"docker run --rm --network none --entrypoint nvidia-smi --device nvidia.com/gpu={uuid} {image} -L"
    assert uuid in node.sh(run)
    node.sh(f"cp {KEPT} /run/cdi/by-hand.yaml; sleep 1")
    try:
        said = node.host.run(f"{run} 2>&1", check=False)
        assert said.returncode != 0
        assert f"unresolvable CDI devices nvidia.com/gpu={uuid}" in said.stdout
        assert "GPW-CONT-022" in red(node)
    finally:
        node.deploy()
    assert uuid in node.sh(run)


def test_a_specification_of_another_driver_is_made_again(node):
    node.sh(f"sed -i 's/[.]so[.]580[.]95[.]05/.so.570.10.10/' {KEPT}")
    assert "hands in files of driver 570.10.10" in red(node)["GPW-CONT-023"]
    run = node.deploy()
    assert everything(node, run) == [CDI]
    assert "CDI: /run/cdi/nvidia.yaml hands in files of driver 570.10.10" in run.said
    assert "570.10.10" not in node.sh(f"cat {KEPT}")


def test_a_card_that_came_is_found_and_one_that_went_leaves_the_specification(node):
    five = gpus.cards(node.host.name, 5)
    gpus.plug(node.host, five)
    assert f"does not name {five[4].uuid}" in red(node)["GPW-CONT-023"]
    assert everything(node, node.deploy()) == [CDI]
    assert five[4].uuid in node.sh(f"cat {KEPT}")
    gpus.plug(node.host, gpus.cards(node.host.name, 4))
    assert f"names {five[4].uuid}" in red(node)["GPW-CONT-023"]
    assert everything(node, node.deploy()) == [CDI]


def test_a_specification_that_cannot_be_made_ends_the_run_with_its_reason(node):
    gpus.plug(node.host, gpus.cards(node.host.name, 4), module="550.90.07")  # user space is of 580.95.05
    try:
        run = node.run("-y")
        assert run.status == 1
        assert "hands in files of driver 580.95.05; expected: those of 550.90.07, which is loaded" in run.said
        assert "Traceback" not in run.said
    finally:
        gpus.plug(node.host, gpus.cards(node.host.name, 4), module=cdi_trial.DRIVER)
        gpus.plug(node.host, gpus.cards(node.host.name, 4))


# --- the toolkit -----------------------------------------------------------------------------------------------------


def test_nothing_but_the_node_file_moves_the_toolkit(node):
    said = node.sh(
        "apt-get -q update >/dev/null; DEBIAN_FRONTEND=noninteractive apt-get -y -q dist-upgrade 2>&1", timeout=300
    )
    candidate = node.sh("apt-cache policy nvidia-container-toolkit | sed -n 's/ *Candidate: //p'")
    assert candidate == f"{TOOLKIT}-1", "the pin holds where a hold was taken off"
    assert f"{TOOLKIT}-1" in node.sh("dpkg-query -W nvidia-container-toolkit"), said

    running = node.container()
    for version in ("1.20.0", "1.18.0"):  # on, and back below where it was: all four at once
        node.containers = {"toolkit": cdi_trial.toolkit(version)}
        node.deploy()
        assert {line.split()[1] for line in node.sh(f"dpkg-query -W {' '.join(PACKAGES)}").splitlines()} == {
            f"{version}-1"
        }
        assert set(node.sh("apt-mark showhold").split()) >= set(PACKAGES)
        assert red(node) == {}
        assert everything(node, node.run("--dry")) == []
    assert node.container() == running, "an engine keeps what it was given"


def test_a_hold_that_somebody_took_off_is_named_and_put_back(node):
    node.sh("apt-mark unhold nvidia-container-toolkit libnvidia-container1 docker.io >/dev/null")
    found = red(node)
    assert found["GPW-CONT-020"] == "not held: nvidia-container-toolkit; not held: libnvidia-container1"
    assert found["GPW-CONT-010"] == "not held: docker.io"
    run = node.deploy()
    assert everything(node, run) == ["Containers | Hold Docker and containerd at their version", HOLD]
    assert red(node) == {}


def test_another_key_is_refused_before_anything_changes(node):
    node.containers = {"toolkit": {**cdi_trial.toolkit(), "repository_fingerprint": "0" * 40}}
    run = node.run("-y")
    assert run.status == 1
    assert "containers.toolkit.repository_key" in run.said and f"the node file names {'0' * 40}" in run.said
    assert "Traceback" not in run.said


def test_the_vendors_toolkit_is_judged_and_never_touched(node):
    node.containers = {"toolkit": {"source": "vendor"}}
    run = node.deploy()
    removed = [name for name in everything(node, run) if "no longer names" in name]
    assert len(removed) == 1 and "hold nvidia-container-toolkit" in removed[0]
    assert not set(node.sh("apt-mark showhold").split()) & set(PACKAGES)
    node.sh(f"mkdir -p /etc/cdi; cp {KEPT} /etc/cdi/nvidia.yaml")
    run = node.deploy()
    assert everything(node, run) == []
    assert (
        "CDI (containers.toolkit.source: vendor, so nothing is touched): /etc/cdi/nvidia.yaml defines devices"
        in run.said
    )
    assert node.sh("ls /etc/cdi") == "nvidia.yaml"
    assert set(red(node)) == {"GPW-CONT-022"}


# --- engines keep their GPUs ------------------------------------------------------------------------------------------


def test_an_engine_keeps_its_gpus_when_systemd_reads_its_units_again(node):
    before = node.sh("systemctl show --property=UnitsLoadTimestampMonotonic --value")
    container = node.container()
    node.containers = {
        "toolkit": cdi_trial.toolkit(),
        "log_max_files": 6,
    }  # a restart of Docker, and so a daemon-reload
    run = node.deploy()
    assert "docker.service: restart (log-opts); running containers go on" in run.said
    assert node.sh("systemctl show --property=UnitsLoadTimestampMonotonic --value") != before
    assert inside(node) == cards(node)[2:]
    assert (node.container(), node.shows("ActiveState")) == (container, "active")


def test_an_engine_that_lost_a_gpu_in_a_run_ends_it(node):
    uuid = cards(node)[3]
    node.sh("nsenter --mount --target $(docker inspect --format '{{.State.Pid}}' gpuwright-main) rm /dev/nvidia3")
    try:
        node.containers = {"toolkit": cdi_trial.toolkit(), "log_max_files": 7}
        run = node.run("-y")
        assert run.status == 1
        assert f"after systemd read its units again, gpuwright-main: it does not see {uuid}" in run.said
        assert "restart it (systemctl restart gpuwright-engine-main)" in run.said
        assert set(red(node)) == {"GPW-CONT-026"}
    finally:
        node.sh(f"systemctl restart {UNIT}", timeout=300)
    assert inside(node) == cards(node)[2:]


def test_an_engine_keeps_its_cards_when_another_one_falls_silent(node):
    """nvidia-smi then numbers the others anew: number 2 is the card that was 3."""
    four, own = gpus.cards(node.host.name, 4), inside(node)
    gpus.plug(node.host, [replace(card, hidden=number == 0) for number, card in enumerate(four)])
    node.sh(_REFRESH)
    assert cards(node).index(own[0]) == 1
    node.sh(f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}", timeout=300)
    serving(node)
    assert inside(node) == own


def test_an_engine_whose_own_card_is_silent_is_refused(node):
    four = gpus.cards(node.host.name, 4)
    gpus.plug(node.host, [replace(card, hidden=number == 3) for number, card in enumerate(four)])
    node.sh(_REFRESH)
    # The tests before have started it as often as its limit allows.
    node.host.run(f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}", check=False, timeout=300)
    assert f"without {four[3].uuid}, which was GPU 3 when all answered; expected: GPU 3" in node.journal()
    assert node.shows("ActiveState") == "failed"


# --- Docker ----------------------------------------------------------------------------------------------------------


def test_a_docker_of_the_snap_store_is_refused(node):
    node.sh("mkdir -p /var/snap/docker")
    try:
        run = node.run("-y")
        assert run.status == 1
        assert "Docker is installed as a snap, which reads neither /etc/docker nor GPU drivers" in run.said
    finally:
        node.sh("rm -r /var/snap")


def test_a_flag_of_the_unit_that_daemon_json_sets_too_is_found_before_the_restart(node):
    pid = node.sh("systemctl show docker.service --property=MainPID --value")
    node.sh(
        "mkdir -p /etc/systemd/system/docker.service.d; printf '[Service]\\nExecStart=\\nExecStart=/usr/sbin/dockerd -H fd:// "
        "--log-driver=journald --feature=cdi\\n' >/etc/systemd/system/docker.service.d/zz-site.conf; systemctl daemon-reload"
    )
    try:
        run = node.run("-y")
        assert run.status == 1
        assert (
            "log-driver would be in /etc/docker/daemon.json and docker.service already starts dockerd with --log-driver"
            in run.said
        )
        assert "features would be in /etc/docker/daemon.json" in run.said
        assert node.sh("systemctl show docker.service --property=MainPID --value") == pid
    finally:
        node.sh("rm /etc/systemd/system/docker.service.d/zz-site.conf; systemctl daemon-reload")
