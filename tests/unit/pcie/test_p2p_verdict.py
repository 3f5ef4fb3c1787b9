"""The node's side of the P2P verdict, on recorded documents of the probe. nvidia-smi, docker, systemctl and setpci are FAKES."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from p2p_node import BRIDGES, IMAGE, STORED, Node, recorded, uuid


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def test_a_good_document_is_a_good_verdict_until_something_changes(node: Node) -> None:
    assert node.verdict()[0] == "missing"
    said = node.run("p2p-verify")
    assert "copies between GPUs" in said  # the probe's own progress
    assert "P2P of engine main: good" in said
    word, sentence = node.verdict()
    assert word == "good"
    assert "every copy and every all-reduce was right (tried 20" in sentence
    assert "nothing changed since" in node.run("p2p-verify")
    assert len(node.runs) == 1


def test_how_the_probe_is_shut_in(node: Node) -> None:
    node.configure((0, 1), {"NCCL_P2P_LEVEL": "SYS"})
    node.run("p2p-verify")
    (run,) = node.runs
    for wanted in (
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--user=10001:10001",
        "--pull=never",
        "--restart=no",
        f"--device=nvidia.com/gpu={uuid(0)}",
        f"--device=nvidia.com/gpu={uuid(1)}",
        "--env=NCCL_P2P_LEVEL=SYS",
        f"--entrypoint=python3 {IMAGE} /p2p-probe.py --gpus=2 --groups=2 --sizes=4096,65536,1048576,16777216,268435456",
        "--without-p2p=NCCL_P2P_DISABLE=1",
    ):
        assert wanted in run
    assert uuid(2) not in run
    assert "--gpus=all" not in run


@pytest.mark.parametrize(
    ("name", "gpus", "word", "sentence"),
    [
        ("good-2", 2, "good", "every copy and every all-reduce was right"),
        ("good-4", 4, "good", "every copy and every all-reduce was right"),
        ("corrupt-one-way", 2, "bad", "GPU 1 to GPU 0: 2044 of 4096 bytes wrong"),
        ("hang-2", 2, "bad", "all-reduce of 2 GPUs (0, 1) hangs: no end after 15 s"),
        ("hang-at-2-not-4", 4, "bad", "all-reduce of 2 GPUs (0, 3) hangs"),
        ("hang-at-4", 4, "bad", "all-reduce of 4 GPUs (0, 1, 2, 3) hangs"),
    ],
)
def test_recorded_documents(tmp_path: Path, name: str, gpus: int, word: str, sentence: str) -> None:
    node = Node(tmp_path / "node", gpus)
    node.answers(recorded(name))
    node.run("p2p-verify")
    seen, said = node.verdict()
    assert seen == word
    assert said.startswith(sentence)


def test_one_gpu_is_no_verdict_on_pairs(node: Node) -> None:
    node.answers(recorded("one-gpu"), status=69)
    node.run("p2p-verify")
    assert node.verdict()[0] == "none"
    assert "1 GPU is visible; P2P is judged between two or more, so no pair is judged" in node.verdict()[1]


def test_a_document_about_other_gpus_is_no_verdict(node: Node) -> None:
    other = recorded("good-2")
    other["gpus"][1]["uuid"] = uuid(3)
    node.answers(other)
    node.run("p2p-verify")
    assert node.verdict()[0] == "none"
    assert "something else than a document about GPUs 0 1" in node.verdict()[1]


def test_a_good_document_without_all_pairs_is_not_believed(node: Node) -> None:
    half = recorded("good-2")
    half["copies"].pop()
    node.answers(half)
    node.run("p2p-verify")
    assert node.verdict()[0] == "missing"
    assert "cannot be read" in node.verdict()[1]


@pytest.mark.parametrize(
    ("status", "said", "sentence"),
    [
        (125, "docker: Error response from daemon: CDI device injection failed", "Docker refused the probe: copies"),
        (127, "", "the image has no python3"),
        (137, "", "the probe was killed (status 137): out of memory, or by hand"),
        (143, "", "the probe was killed (status 143)"),
        (1, "Traceback", "the probe ended with status 1: Traceback"),
        (0, "", "the probe answered with something else"),
    ],
)
def test_each_end_without_a_document_has_one_sentence(node: Node, status: int, said: str, sentence: str) -> None:
    node.answers("", status)
    if said:
        node.write("fake/said", said + "\n")
    node.run("p2p-verify")
    word, seen = node.verdict()
    assert word == "none"
    assert sentence in seen


def test_a_probe_that_does_not_end_is_a_hang(node: Node) -> None:
    node.configure((0, 1), limit=1)
    node.write("fake/sleep", "")
    node.run("p2p-verify")
    assert node.verdict()[0] == "bad"
    assert "hangs: the probe did not end within 1 s" in node.verdict()[1]


def test_an_image_that_is_not_there(node: Node) -> None:
    (node.fake / "image").unlink()
    node.run("p2p-verify")
    assert node.runs == []
    assert "is not on this node (systemctl start gpuwright-image-main)" in node.verdict()[1]


def test_docker_that_is_away(node: Node) -> None:
    node.write("fake/away", "")
    node.run("p2p-verify")
    assert node.runs == []
    assert "Docker does not answer (Cannot connect to the Docker daemon)" in node.verdict()[1]


def change_driver(node: Node) -> None:
    node.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  580.20.02  Release Build\n")


def change_options(node: Node) -> None:
    node.write("proc/driver/nvidia/params", 'RegistryDwords: "ForceP2P=0x11"\n')


def change_kernel(node: Node) -> None:
    node.program("uname", "echo 6.18.99")


def change_image(node: Node) -> None:
    file = node.root / "etc/gpuwright/pcie/p2p/main.conf"
    file.write_text(file.read_text().replace("b" * 64, "c" * 64))


def change_settings(node: Node) -> None:
    node.configure((0, 1), {"NCCL_P2P_LEVEL": "SYS"})


def change_acs(node: Node) -> None:
    node.write("fake/acs", "001d\n")


def change_iommu(node: Node) -> None:
    node.write("sys/kernel/iommu_groups/1/type", "DMA\n")


def change_card(node: Node) -> None:
    gpus = node.fake / "gpus"
    gpus.write_text(gpus.read_text().replace(uuid(1), uuid(9)))


def change_slot(node: Node) -> None:
    gpus = node.fake / "gpus"
    gpus.write_text(gpus.read_text().replace("00000000:42:00.1", "00000000:52:00.0"))


def change_links(node: Node) -> None:
    node.links("SYS")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (change_driver, "the driver was NVIDIA UNIX Open Kernel Module 580.10.01 Release Build and is"),
        (change_options, "the options of the driver was"),
        (change_kernel, "the kernel was"),
        (change_image, "the image was sha256:bbb"),
        (change_settings, "the NCCL settings was (nothing) and is NCCL_P2P_LEVEL=SYS"),
        (change_acs, f"{BRIDGES[0]} ACS 001d {BRIDGES[1]} ACS 001d"),
        (change_iommu, "IOMMU DMA"),
        (change_card, uuid(9)),
        (change_slot, "0000:52:00.0"),
        (change_links, "the topology was GPU 0 to GPU 1: NODE and is GPU 0 to GPU 1: SYS"),
    ],
)
@pytest.mark.parametrize("name", ["good-2", "corrupt-one-way"])
def test_expires_with_each_thing_it_depends_on(node: Node, name: str, change, what: str) -> None:
    node.answers(recorded(name))
    node.run("p2p-verify")
    assert node.verdict()[0] in ("good", "bad")
    change(node)
    word, sentence = node.verdict()
    assert word == "expired"
    assert what in sentence
    # and is judged again, when the GPUs are idle
    if change is not change_card:
        node.run("p2p-verify")
        assert node.verdict()[0] in ("good", "bad")
    assert len(node.runs) == (1 if change is change_card else 2)


def test_serving_engines_are_left_alone_and_keep_their_verdict(node: Node) -> None:
    node.run("p2p-verify")
    change_driver(node)
    node.write("fake/unit", "active\nrunning\n")
    said = node.run("p2p-verify")
    assert "not judged again now: engine main is up (active running)" in said
    assert node.verdict()[0] == "expired"
    # Between two attempts nothing holds the GPUs.
    node.write("fake/unit", "activating\nauto-restart\n")
    node.run("p2p-verify")
    assert node.verdict()[0] == "good"


def test_busy_gpus_are_not_judged_and_the_try_is_kept(node: Node) -> None:
    """Kept, so that a deploy does not take the engine down again and again for a try that comes to the same."""
    node.write("fake/apps", f"{uuid(3)}, 7, other\n{uuid(1)}, 4711, python3\n")
    said = node.run("p2p-verify")
    assert f"GPU {uuid(1)} is held by process 4711 (python3)" in said
    assert uuid(3) not in said
    assert node.runs == []
    assert node.verdict()[0] == "none"
    (node.fake / "apps").unlink()
    node.run("p2p-verify")
    assert node.verdict()[0] == "good"


def test_could_not_look_is_not_good(node: Node) -> None:
    node.run("p2p-verify")
    node.write("fake/smi-fails", "")
    word, sentence = node.verdict()
    assert word == "unknown"
    assert "Driver/library version mismatch" in sentence
    assert "engines start without it" in node.run("p2p-verify")
    (node.fake / "smi-fails").unlink()
    assert node.verdict()[0] == "good"
    (node.root / "proc/driver/nvidia/version").unlink()
    assert node.verdict() == ("unknown", "could not look: no NVIDIA driver is loaded (/proc/driver/nvidia/version)")


def test_a_card_that_is_gone(node: Node) -> None:
    node.run("p2p-verify")
    gpus = node.fake / "gpus"
    _, *others = gpus.read_text().splitlines()
    # Those after it move up: GPU 0 and GPU 1 are there, and are not the pair that was judged.
    gpus.write_text("".join(f"{number}{line[line.index(',') :]}\n" for number, line in enumerate(others)))
    sentence = "could not look: nvidia-smi lists 3 GPUs and the node has 4, so a number may mean another card"
    assert node.verdict() == ("unknown", sentence)
    judged = len(node.runs)
    node.run("p2p-verify")
    assert len(node.runs) == judged, "nothing is judged that could be another card"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '"good"', '{"schema": 1, "probe": {"verdict": "good"}}', '{"schema": 2}', "null"]
)
def test_a_damaged_verdict_is_none(node: Node, text: str) -> None:
    node.write(STORED, text)
    assert node.verdict()[0] in ("missing", "expired")


def test_a_forged_word_alone_is_not_enough(node: Node) -> None:
    node.answers(recorded("corrupt-one-way"))
    node.run("p2p-verify")
    document = node.stored
    document["probe"] |= {"verdict": "good", "copies": []}
    node.write(STORED, json.dumps(document))
    assert node.verdict()[0] == "missing"


def test_setpci_that_is_missing_is_not_off(node: Node) -> None:
    node.program("setpci", "exit 1")
    node.run("p2p-verify")
    assert f"{BRIDGES[0]} ACS none" in node.stored["fingerprints"]["topology"][0]
    assert len(node.stored["fingerprints"]["topology"]) == 3  # two GPUs and the link between them


def test_again_asks_for_another_try(node: Node) -> None:
    node.run("p2p-verify")
    node.run("p2p-verify", "--again", "main")
    assert len(node.runs) == 2


# --- one at a time ------------------------------------------------------------------------------------------------------

LOCK = "run/gpuwright/p2p.lock"


def test_while_somebody_else_probes_nothing_is_judged(node: Node, held) -> None:
    """A real lock, of another process: two probes on the same GPUs would measure one another."""
    with held(node.root / LOCK):
        process = node.begin("p2p-verify")
        assert process.stdout is not None
        assert process.stdout.readline() == "another probe of P2P runs; waiting for it\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        assert node.runs == []
        assert node.verdict()[0] == "missing"  # who only asks does not wait
    said, _ = process.communicate(timeout=60)
    assert "P2P of engine main: good" in said
    assert len(node.runs) == 1


def test_the_probe_runs_under_the_lock_and_leaves_it_free(node: Node) -> None:
    docker = node.root / "bin/docker"
    free = f'flock --shared --nonblock "$GPUWRIGHT_ROOT/{LOCK}" true && echo free >>"$FAKE/lock" || echo taken >>"$FAKE/lock"'
    docker.write_text(docker.read_text().replace("run)\n", f"run)\n{free}\n"))
    assert "another probe" not in node.run("p2p-verify")
    assert (node.fake / "lock").read_text() == "taken\n"
    subprocess.run(["flock", "--nonblock", node.root / LOCK, "true"], check=True)
