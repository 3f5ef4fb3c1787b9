"""Pre-start: what is kept, what is waited for, what is refused and in which words."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from itertools import pairwise

import pytest
from engine_node import COMMIT, DIGEST, MODEL, REFERENCE, Node

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"


def refused(node: Node) -> str:
    status, output = node.run("engine-prestart")
    assert status == 0, output  # the main process carries the status: systemd looks at no other
    sentence = node.read("run/gpuwright/engines/main/refused").strip()
    assert sentence in output
    assert node.run("engine-run")[0] == 78
    return sentence


def accepted(node: Node) -> str:
    status, output = node.run("engine-prestart")
    assert status == 0, output
    assert not node.exists("run/gpuwright/engines/main/refused"), output
    return output


def with_gpus(node: Node, held: str = "", listed: str = GPU, temperature: int = 40) -> None:
    node.program(
        "nvidia-smi",
        f"""
case "$*" in
  -L) echo "GPU 0: NVIDIA TEST (UUID: {OTHER})"; echo "GPU 1: NVIDIA TEST (UUID: {listed})" ;;
  --query-compute-apps*) cat "$FAKE/held" ;;
  --query-gpu=uuid,pci.bus_id*) cat "$FAKE/bus" ;;
  --query-gpu*) echo "{OTHER}, 99"; echo "{GPU}, {temperature}" ;;
esac""",
    )
    (node.fake / "held").write_text(held)
    (node.fake / "bus").write_text(f"{OTHER}, 00000000:01:00.0\n{GPU}, 00000000:C1:00.0\n")
    node.write("etc/cdi/nvidia.yaml", f"kind: nvidia.com/gpu\ndevices:\n- name: {GPU}\n- name: {OTHER}\n")


def hbm(node: Node, number: int, file_pages_kib: int, shmem_kib: int = 0) -> None:
    base = f"sys/devices/system/node/node{number}"
    node.write(f"{base}/cpulist", "\n")
    node.write(
        f"{base}/meminfo",
        f"Node {number} MemTotal:  262864896 kB\nNode {number} FilePages:  {file_pages_kib} kB\n"
        f"Node {number} Shmem:  {shmem_kib} kB\n",
    )


def test_a_start_is_prepared(node: Node) -> None:
    node.write("run/gpuwright/ready/main", "")
    output = accepted(node)
    assert "pre-flight passed" in output
    assert not node.exists("run/gpuwright/ready/main")  # users are sent to nobody who is not ready
    assert node.read("run/gpuwright/engines/main/image").strip() == REFERENCE
    assert (node.fake / "network").read_text().strip() == BRIDGE


# Role gateway's rules tell engines' containers from others by the beginning of it.
BRIDGE = f"br-gpw-{hashlib.sha256(b'main').hexdigest()[:8]}"


def test_a_network_with_our_bridge_stays(node: Node) -> None:
    (node.fake / "network").write_text(f"{BRIDGE}\n")
    accepted(node)
    assert not [call for call in node.calls if call.startswith(("network rm", "network create"))]


def test_a_network_with_another_bridge_is_made_anew(node: Node) -> None:
    (node.fake / "network").write_text("br-0123456789ab\n")
    accepted(node)
    assert (node.fake / "network").read_text().strip() == BRIDGE


def test_a_network_that_somebody_else_uses_keeps_no_engine_from_its_start(node: Node) -> None:
    (node.fake / "network").write_text("br-0123456789ab\n")
    (node.fake / "in use").write_text("")
    assert "pre-flight passed" in accepted(node)
    assert (node.fake / "network").read_text() == "br-0123456789ab\n"


def test_image_missing(node: Node) -> None:
    (node.fake / "images").write_text("")
    sentence = refused(node)
    assert sentence.startswith(f"seen: image {REFERENCE} is not on this node; expected: present")
    assert "do: systemctl start gpuwright-image-main" in sentence


def test_another_digest(node: Node) -> None:
    (node.fake / "images").write_text(f"registry.test/sim@sha256:{'d' * 64} sha256:{'c' * 64} amd64\n")
    assert refused(node).startswith(
        f"seen: another digest of the image, registry.test/sim@sha256:{'d' * 64}; expected: {REFERENCE}"
    )


def test_an_image_from_an_archive_runs_by_its_id(node: Node) -> None:
    (node.fake / "images").write_text(f"sim:lab {DIGEST} {'amd64' if node.x86 else 'arm64'}\n")
    accepted(node)
    assert node.read("run/gpuwright/engines/main/image").strip() == DIGEST


def test_another_architecture(node: Node) -> None:
    (node.fake / "images").write_text(f"{REFERENCE} sha256:{'c' * 64} {'arm64' if node.x86 else 'amd64'}\n")
    assert "is built for" in refused(node)


def test_manifest_missing(node: Node) -> None:
    node.path(f"{MODEL}.manifest.json").unlink()
    sentence = refused(node)
    assert sentence.startswith(f"seen: no manifest {MODEL}.manifest.json")
    assert "gpuwright-model-tiny" in sentence


def test_weights_that_are_on_their_way_are_waited_for(node: Node) -> None:
    node.program("systemctl", 'case "$*" in *gpuwright-model-tiny.service) echo activating ;; esac')
    manifest = node.path(f"{MODEL}.manifest.json")
    text = manifest.read_text()
    manifest.unlink()
    threading.Timer(1.5, manifest.write_text, [text]).start()
    assert "the weights are still being fetched by gpuwright-model-tiny" in accepted(node)
    manifest.unlink()
    assert node.run("engine-prestart")[0] == 75


def test_a_file_of_another_size(node: Node) -> None:
    node.write(f"{MODEL}/model.safetensors", "x" * 99)
    assert f"{MODEL}/model.safetensors is 99; expected: 100 bytes" in refused(node)


def test_a_file_missing(node: Node) -> None:
    node.path(f"{MODEL}/model.safetensors").unlink()
    assert f"{COMMIT}/model.safetensors is missing; expected: 100 bytes" in refused(node)


def test_manifest_without_files(node: Node) -> None:
    node.write(f"{MODEL}.manifest.json", '{"files": []}')
    assert "is not readable as a list of files" in refused(node)


def test_gpus_by_uuid_in_the_order_of_nvidia_smi(node: Node) -> None:
    node.configure(gpus=[1])
    with_gpus(node)
    accepted(node)
    assert node.read("run/gpuwright/engines/main/gpus").split() == [GPU]


def listing(node: Node, *uuids: str) -> None:
    """nvidia-smi lists these, numbered from 0 as it does."""
    lines = "; ".join(f"echo 'GPU {number}: NVIDIA TEST (UUID: {uuid})'" for number, uuid in enumerate(uuids))
    node.program("nvidia-smi", f'case "$*" in -L) {lines} ;; esac')
    node.write("etc/cdi/nvidia.yaml", f"kind: nvidia.com/gpu\ndevices: {' '.join(uuids)}\n")


CARDS = [f"GPU-0000000{number}-2222-3333-4444-555555555555" for number in range(4)]


def test_a_number_is_the_same_card_when_another_one_falls_silent(node: Node) -> None:
    """nvidia-smi numbers the cards that answer: number 2 would be the other engine's card."""
    node.configure(gpus=[2], gpu_count=4)
    listing(node, *CARDS)
    accepted(node)
    listing(node, CARDS[0], CARDS[2], CARDS[3])
    accepted(node)
    assert node.read("run/gpuwright/engines/main/gpus").split() == [CARDS[2]]


def test_the_card_itself_is_silent(node: Node) -> None:
    node.configure(gpus=[1], gpu_count=4)
    listing(node, *CARDS)
    accepted(node)
    listing(node, CARDS[0], CARDS[2], CARDS[3])
    assert refused(node).startswith(
        f"seen: 3 of 4 GPUs, without {CARDS[1]}, which was GPU 1 when all answered; expected: GPU 1"
    )


def test_a_card_that_was_replaced_is_taken_when_all_answer(node: Node) -> None:
    node.configure(gpus=[1], gpu_count=4)
    listing(node, *CARDS)
    accepted(node)
    listing(node, CARDS[0], GPU, *CARDS[2:])
    accepted(node)
    assert node.read("run/gpuwright/engines/main/gpus").split() == [GPU]


def test_a_first_start_with_a_silent_card(node: Node) -> None:
    node.configure(gpus=[0], gpu_count=4)
    listing(node, *CARDS[:3])
    assert refused(node).startswith(
        "seen: 3 GPUs; expected: 4, and with one missing the numbers of the others may mean"
    )


def test_gpu_missing(node: Node) -> None:
    node.configure(gpus=[7])
    with_gpus(node)
    assert refused(node).startswith("seen: 2 GPUs, none with index 7; expected: GPU 7")


def test_driver_silent(node: Node) -> None:
    node.configure(gpus=[1])
    node.program("nvidia-smi", 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18')
    assert "nvidia-smi fails (Failed to initialize NVML: Driver/library version mismatch)" in refused(node)


def test_cdi_device_missing(node: Node) -> None:
    node.configure(gpus=[1])
    with_gpus(node)
    node.write("etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n")
    assert f"no CDI device nvidia.com/gpu={GPU}" in refused(node)


def test_held_gpus_are_waited_for(node: Node) -> None:
    node.configure(gpus=[1], readiness={"deadline": 20, "conditions_limit": 10})
    with_gpus(node, held=f"{GPU}, 4711, python3, 22000 MiB\n")
    timer = threading.Timer(2, (node.fake / "held").write_text, [f"{OTHER}, 1, other, 1 MiB\n"])
    timer.start()
    began = time.monotonic()
    output = accepted(node)
    assert time.monotonic() - began >= 2
    assert f" of at most 10 s: GPU {GPU} is held by process 4711 (python3, 22000 MiB)" in output


def test_held_gpus_beyond_the_limit(node: Node) -> None:
    node.configure(gpus=[1], readiness={"deadline": 20, "conditions_limit": 2})
    with_gpus(node, held=f"{GPU}, 4711, python3, 22000 MiB\n")
    status, output = node.run("engine-prestart")
    assert status == 75  # a passing condition: systemd tries again
    assert f"start given up for now: GPU {GPU} is held by process 4711" in output
    assert "held by process 4711" in node.read("run/gpuwright/engines/main/reason")


def test_progress_of_a_wait_comes_every_15_seconds(node: Node) -> None:
    """Without waiting 15 seconds: the script's clock runs ten times as fast."""
    node.configure(min_free_memory=2 * 1024**3, readiness={"deadline": 100, "conditions_limit": 40})
    node.program("sleep", "/bin/sleep 0.05")
    script = (node.root / "bin/now").as_posix()
    node.program("now", 'n=$(cat "$FAKE/clock" 2>/dev/null || echo 0); echo $((n + 1)) | tee "$FAKE/clock"')
    node.write("bash_env", f"now() {{ {script}; }}; readonly -f now\n")
    status, output = node.run("engine-prestart", BASH_ENV=str(node.path("bash_env")))
    assert status == 75
    waited = [int(line.split()[1]) for line in output.splitlines() if line.startswith("waiting,")]
    assert (
        waited[0] <= 2 and [b - a for a, b in pairwise(waited)] and all(15 <= b - a <= 17 for a, b in pairwise(waited))
    )


def test_memory_that_is_not_back(node: Node) -> None:
    node.configure(min_free_memory=2 * 1024**3)
    status, output = node.run("engine-prestart")
    assert status == 75
    assert "MemAvailable is 878 MiB; expected: at least 2048 MiB" in output


def test_hot_gpus(node: Node) -> None:
    node.configure(gpus=[1], max_gpu_temperature=60)
    with_gpus(node, temperature=71)
    status, output = node.run("engine-prestart")
    assert status == 75
    assert f"GPU {GPU} is at 71 °C; expected: at most 60 °C" in output
    assert OTHER not in output


def test_docker_away_is_waited_for(node: Node) -> None:
    (node.fake / "away").touch()
    threading.Timer(1, (node.fake / "away").unlink).start()
    assert "Docker does not answer" in accepted(node)


@pytest.mark.parametrize("number", [1, 26])
def test_the_page_cache_is_dropped_where_hbm_nodes_are(node: Node, number: int) -> None:
    hbm(node, number, file_pages_kib=5000)
    node.write("sys/devices/system/node/node0/cpulist", "0-71\n")
    node.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 5 kB\nNode 0 FilePages: 99999999 kB\n")
    output = accepted(node)
    assert f"HBM as memory of node{number}" in output
    assert node.read("proc/sys/vm/drop_caches") == "1\n"
    assert "sync" in node.calls


def test_no_drop_without_hbm(node: Node) -> None:
    node.write("sys/devices/system/node/node0/cpulist", "0-71\n")
    node.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 5 kB\nNode 0 FilePages: 99999999 kB\n")
    # GH200 has empty placeholder nodes: no memory, no CPUs (gpu-node.md 3.1).
    node.write("sys/devices/system/node/node2/cpulist", "\n")
    node.write("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 0 kB\n")
    accepted(node)
    assert node.read("proc/sys/vm/drop_caches") == ""


def test_no_drop_when_it_is_off(node: Node) -> None:
    hbm(node, 1, file_pages_kib=5000)
    node.configure(spec={"page_cache_drop": "off", "page_cache_drop_off_reason": "measured"})
    accepted(node)
    assert node.read("proc/sys/vm/drop_caches") == ""


def test_file_pages_on_hbm_after_the_drop(node: Node) -> None:
    hbm(node, 1, file_pages_kib=1025 * 1024, shmem_kib=512 * 1024)
    sentence = refused(node)
    assert sentence.startswith("seen: FilePages of HBM node1 is 1025 MiB, of which Shmem 512 MiB")
    assert "expected: at most 1024 MiB" in sentence
    assert "do: find what reads or writes files without NUMAPolicy=bind" in sentence
    assert "shared memory (ls -l /dev/shm)" in sentence


def test_file_pages_on_hbm_where_nothing_drops_them(node: Node) -> None:
    hbm(node, 1, file_pages_kib=1025 * 1024)
    node.configure(spec={"page_cache_drop": "off", "page_cache_drop_off_reason": "a test of what happens then"})
    sentence = refused(node)
    assert "node1 is 1025 MiB, of which Shmem 0 MiB" in sentence
    assert (
        "do: set engine.page_cache_drop to auto, or drop it by hand (sync; echo 1 >/proc/sys/vm/drop_caches)"
        in sentence
    )
    assert "/dev/shm" not in sentence


def test_file_pages_at_the_limit_pass(node: Node) -> None:
    hbm(node, 1, file_pages_kib=1024 * 1024)
    accepted(node)


def test_evidence_of_the_last_container(node: Node) -> None:
    (node.fake / "id").write_text("old1\n")
    (node.fake / "exit").write_text("3\n")
    (node.fake / "log").write_text("2026-01-01T00:00:00.000000000Z Tried to allocate 151 GiB ... 159.43 GiB free\n")
    secret = "hunter2hunter2"
    (node.fake / "inspect.json").write_text(
        json.dumps(
            [
                {
                    "Id": "old1",
                    "Config": {"Env": [f"HF_TOKEN={secret}", "HOME=/cache"], "Cmd": [f"--api-key={secret}"]},
                    "Args": [f"--api-key={secret}", "--max-num-batched-tokens=8192", "--tool-call-parser=x"],
                }
            ]
        )
    )
    output = accepted(node)
    (folder,) = node.path("var/lib/gpuwright/evidence/main").iterdir()
    assert f"evidence of container old1 is in {folder}" in output
    assert "159.43 GiB free" in (folder / "container.log").read_text()
    assert "exit code=3" in (folder / "reason").read_text()
    assert json.loads((folder / "inspect.json").read_text())[0]["Args"][1:] == [
        "--max-num-batched-tokens=8192",
        "--tool-call-parser=x",
    ]
    assert secret not in "".join(file.read_text() for file in folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert not (node.fake / "id").exists()  # removed, after it was kept


def test_evidence_is_kept_once_per_container(node: Node) -> None:
    (node.fake / "id").write_text("old1\n")
    assert node.run("engine-evidence")[0] == 0
    accepted(node)
    assert len(list(node.path("var/lib/gpuwright/evidence/main").iterdir())) == 1


def test_evidence_is_capped_and_the_oldest_goes(node: Node) -> None:
    node.configure(spec={"evidence_max": "1 MiB"})
    (node.fake / "log").write_text("2026-01-01T00:00:00.000000000Z x\n" * 20000)
    root = node.path("var/lib/gpuwright/evidence/main")
    for number in range(12):
        (node.fake / "id").write_text(f"container{number}\n")
        assert node.run("engine-evidence")[0] == 0
    kept = sorted(root.iterdir())
    size = sum(file.stat().st_size for folder in kept for file in folder.iterdir())
    assert size <= 1024**2
    assert 2 <= len(kept) <= 4
    assert "container=container11" in (kept[-1] / "reason").read_text()
    assert "container=container0\n" not in "".join((folder / "reason").read_text() for folder in kept)


def test_evidence_that_cannot_be_kept_does_not_stop_a_start(node: Node) -> None:
    (node.fake / "id").write_text("old1\n")
    node.write("var/lib/gpuwright/evidence", "a file where the directory should be")
    assert "evidence of container old1 is not kept" in accepted(node)


def test_check_of_a_configuration_that_is_not_in_place(node: Node) -> None:
    next_ = node.path("next/main.conf")
    node.write("next/main.conf", node.read("etc/gpuwright/engines/main.conf"))
    assert node.run("engine-prestart", "--check", str(next_)) == (0, "")
    (node.fake / "images").write_text("")
    status, output = node.run("engine-prestart", "--check", str(next_))
    assert status == 1
    assert output.startswith("seen: image")
