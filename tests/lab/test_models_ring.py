"""Role models on a booted host: the ring, damage, reboot in the middle, a controller that is gone, the token."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest
from models_trial import REPO, Trial, blank

from lab import hub

pytestmark = pytest.mark.lab

SHARD = "model-00003-of-00005.safetensors"
TOKEN = "hf_" + "SEKRETlab0123456789abcdefghijklmn"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    trial = blank("mod-1", "trixie", tmp_path_factory.mktemp("models"))
    yield trial
    hub.control("faults", method="DELETE")
    hub.control("access", {})
    trial.host.destroy()


@pytest.fixture(autouse=True)
def _no_faults(trial: Trial) -> None:
    hub.control("faults", method="DELETE")


def wait_until(condition, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.3)


def state(trial: Trial) -> dict:
    return json.loads(trial.sh("cat /run/gpuwright/models/llm.json"))


def test_ring(trial: Trial) -> None:
    dry = trial.run("--dry")
    assert dry.status == 0, dry.said
    assert trial.sh("ls /srv/models 2>/dev/null; id -u gpuwright-models 2>/dev/null", check=False) == ""

    first = trial.deploy()
    assert set(first.changed) <= set(dry.changed), "a change that the dry run did not predict"
    assert "llm: verified, 12 files, 24.0 MiB" in first.said
    manifest = json.loads(trial.sh(f"cat {trial.weights}.manifest.json"))
    assert (manifest["repo"], manifest["revision"], len(manifest["files"])) == (REPO, trial.commit, 12)

    trial.sh(f"cd {trial.weights} && jq -r '.files[] | .sha256 + \"  \" + .path' ../*.json | sha256sum --check --quiet")
    # Readable by the engine's user, writable by nobody but the job's.
    trial.sh(f"setpriv --reuid 10001 --regid 10001 --clear-groups cat {trial.weights}/{SHARD} >/dev/null")
    assert trial.sh(f"find {trial.weights} -perm /022") == ""
    assert trial.sh(f"find {trial.weights} ! -user gpuwright-models") == ""

    assert trial.run("--dry").changed == []
    again = trial.deploy()
    assert again.changed == []

    trial.host.reboot()
    wait_until(lambda: trial.sh("systemctl is-active gpuwright-model-llm", check=False) == "active")
    assert trial.deploy().changed == []


def test_the_unit_is_hardened_and_bound(trial: Trial) -> None:
    show = dict(
        line.split("=", 1)
        for line in trial.sh(
            "systemctl show gpuwright-model-llm -p User,NoNewPrivileges,ProtectSystem,Type"
        ).splitlines()
    )
    assert show == {
        "User": "gpuwright-models",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "Type": "oneshot",
    }
    exposure = trial.sh("systemd-analyze security --no-pager gpuwright-model-llm | tail -n 1", check=False)
    assert float(exposure.split(":")[1].split()[0]) < 3.0, exposure


def test_damage_is_found_by_the_next_run_named_and_repaired(trial: Trial) -> None:
    trial.deploy()
    hub.control("requests", method="DELETE")
    trial.sh(f"printf damaged | dd of={trial.weights}/{SHARD} bs=1 seek=4096 conv=notrunc status=none")
    assert trial.run("--dry").changed != []
    run = trial.deploy()
    assert [name for name in run.changed if "Start downloads" in name]
    assert f"wrong bytes: {SHARD}, expected sha256:" in trial.journal()
    size = int(trial.sh(f"stat -c %s {trial.weights}/{SHARD}"))
    assert trial.served() == size
    assert trial.deploy().changed == []


def test_hidden_damage_is_found_by_the_verification(trial: Trial) -> None:
    trial.deploy()
    trial.sh(
        f"cd {trial.weights} && touch -r {SHARD} /tmp/stamp && printf x | dd of={SHARD} bs=1 seek=5000 conv=notrunc "
        f"status=none && touch -r /tmp/stamp {SHARD}"
    )
    assert trial.deploy().changed == []  # size and time stamp say nothing
    assert trial.host.run("systemctl start gpuwright-model-verify@llm", check=False).returncode != 0
    said = trial.journal("gpuwright-model-verify@llm")
    assert f"wrong bytes: {SHARD}, expected sha256:" in said
    assert "systemctl restart gpuwright-model-llm.service" in said
    trial.sh(f"test ! -e {trial.weights}.manifest.json")
    assert trial.deploy().changed != []
    trial.sh("systemctl start gpuwright-model-verify@llm")
    assert trial.deploy().changed == []


def test_reboot_in_the_middle_resumes(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    trial.fault(kind="slow", rate=400_000, times=None)
    trial.models["wait"] = False
    trial.deploy()
    trial.models["wait"] = True
    wait_until(lambda: state(trial)["bytes"] > 6_000_000)
    trial.host.power_cycle()
    hub.control("faults", method="DELETE")
    hub.control("requests", method="DELETE")
    wait_until(lambda: trial.sh(f"ls {trial.weights}.manifest.json", check=False) != "", timeout=90)
    assert "resuming " in trial.journal()
    assert trial.served() < 24_000_000
    wait_until(lambda: trial.sh("systemctl is-active gpuwright-model-llm", check=False) == "active")
    assert trial.deploy().changed == []


def test_controller_gone_and_the_node_finishes_alone(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    trial.fault(kind="slow", rate=800_000, times=None)
    process = trial.start("-y")
    wait_until(lambda: trial.sh("ls /run/gpuwright/models/llm.json 2>/dev/null", check=False) != "")
    wait_until(lambda: state(trial)["bytes"] > 1_000_000)
    process.kill()
    process.communicate()
    wait_until(lambda: trial.sh(f"ls {trial.weights}.manifest.json", check=False) != "", timeout=90)
    assert trial.deploy().changed == []


def test_progress_is_shown_in_the_run_and_in_the_journal(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    trial.fault(kind="slow", rate=250_000, times=None)
    run = trial.deploy()
    shown = [line for line in run.said.splitlines() if " of 24.0 MiB (" in line and "/s" in line]
    assert shown, run.said
    assert "files verified" in trial.journal()


def test_a_job_that_gives_up_ends_the_run_with_its_sentence(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    trial.models["items"]["llm"]["revision"] = "0" * 40
    run = trial.run("-y")
    trial.models["items"]["llm"]["revision"] = trial.commit
    assert run.status == 1
    assert f"llm: {REPO} has no commit {'0' * 40} (HTTP 404); run: gpuwright pin" in run.said
    assert "Traceback" not in run.said
    restarts = trial.sh("systemctl show -p NRestarts --value gpuwright-model-llm")
    assert restarts == "0"
    trial.deploy()


def test_disk_guard_looks_at_the_stores_own_file_system(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    trial.sh("mkdir -p /srv/small && mount -t tmpfs -o size=20m none /srv/small")
    try:
        trial.models["store"] = "/srv/small/models"
        run = trial.run("-y")
        assert run.status == 1
        assert "llm: disk full: the file system of /srv/small/models has " in run.said
    finally:
        trial.models["store"] = "/srv/models"
        trial.deploy()
        trial.sh("umount /srv/small")


def test_two_models_at_once_and_one_removed(trial: Trial) -> None:
    trial.models["items"]["second"] = {"repo": "lab/tiny", "revision": hub.publish("lab/tiny")}
    run = trial.deploy()
    assert "second: verified" in run.said
    removed = trial.models["items"].pop("second")
    dry = trial.run("--dry")
    assert any("gpuwright-model-second.service" in name for name in dry.changed)
    trial.deploy()
    assert trial.sh("systemctl list-unit-files --no-legend 'gpuwright-model-second*'", check=False) == ""
    trial.sh(f"test -e /srv/models/lab/tiny/{removed['revision']}.manifest.json")  # weights go only on request
    assert trial.deploy().changed == []


def test_from_a_directory_on_the_node(trial: Trial) -> None:
    trial.deploy()
    trial.sh("rm -rf /srv/usb && mkdir -p /srv/usb && cp -r /srv/models/lab /srv/usb/ && rm -rf /srv/models/lab")
    item = trial.models["items"]["llm"]
    trial.models["items"]["llm"] = {**item, "source": f"/srv/usb/{REPO}/{trial.commit}"}
    hub.control("requests", method="DELETE")
    try:
        assert "llm: verified" in trial.deploy().said
        assert trial.served() == 0
        assert trial.deploy().changed == []
        trial.sh("rm -rf /srv/usb /srv/models/lab")
        run = trial.run("-y")
        assert run.status == 1
        assert f"llm: source directory /srv/usb/{REPO}/{trial.commit} is missing" in run.said
    finally:
        trial.models["items"]["llm"] = item
        trial.deploy()


def test_the_token_reaches_the_job_and_nothing_else(trial: Trial) -> None:
    trial.deploy()
    trial.forget_weights()
    hub.control("access", {"private": [REPO], "tokens": {TOKEN: [REPO]}})
    trial.fault(kind="slow", rate=1_500_000, times=None)
    run = trial.run("-y")
    assert run.status == 1
    assert f"llm: the hub refuses {REPO}: HTTP 401, token not given" in run.said

    trial.models["token"] = {"env": "TEST_HUB_TOKEN"}
    trial.environment["TEST_HUB_TOKEN"] = TOKEN
    shapes = [TOKEN, base64.b64encode(TOKEN.encode()).decode().rstrip("=")]
    # The shell that looks has the words too: with a letter in brackets they do not match themselves.
    search = "|".join(f"[{shape[4]}]{shape[5:-4]}" for shape in shapes)
    process = trial.start("-y", "--diff", "-vvv", "--debug")
    ended = futures.ThreadPoolExecutor(1).submit(process.communicate)  # its output would fill the pipe
    looks, found = 0, set()
    while not ended.done():
        looks += 1
        found |= set(trial.sh(f"grep -slE '{search}' /proc/[0-9]*/cmdline /proc/[0-9]*/environ", check=False).split())
        time.sleep(0.2)
    output, said = ended.result()
    assert process.returncode == 0, said
    assert looks > 3
    assert found == set()
    everything = "\n".join(
        [
            output,
            said,
            trial.sh("journalctl --no-pager -o verbose"),
            trial.sh("systemctl show 'gpuwright-model-*'; systemctl cat 'gpuwright-model-*'"),
            trial.sh("cat /run/gpuwright/models/*.json /etc/gpuwright/models/*.conf"),
        ]
    )
    for shape in shapes:
        assert shape not in everything
    assert trial.sh("stat -c '%a %U' /etc/gpuwright/models/hub-token") == "600 root"
    assert TOKEN not in Path(trial.directory / "inventory.py").read_text()
    hub.control("access", {})
