"""nvidia-smi's matrices: as they come, and after everything that can happen to them on the way."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import mutations
import pytest
from p2p_node import SCRIPTS

from roles.pcie import topo
from roles.pcie.captured import CannotTell

CAPTURES = Path(__file__).parent / "captures"
LINKS = sorted(CAPTURES.glob("topo-m-*.txt"))
STATUSES = sorted(CAPTURES.glob("topo-p2p-*.txt"))


def read(name):
    return (CAPTURES / name).read_text()


def test_six_gpus_with_escapes_and_affinity():
    seen = topo.links(read("topo-m-6-gpus-ansi.txt"))
    assert seen.gpus == 6
    assert {seen.between[0, other] for other in (2, 3)} == {"NODE"}
    assert (seen.between[4, 5], seen.between[5, 4], seen.between[0, 5], seen.between[3, 3]) == (
        "PIX",
        "PIX",
        "SYS",
        "X",
    )


def test_rows_of_network_cards_and_lines_around_the_matrix_are_left_out():
    seen = topo.links(read("topo-m-nics-banner.txt"))
    assert (seen.gpus, seen.between[0, 1]) == (2, "PIX")


def test_spaces_instead_of_tabs():
    assert topo.links(read("topo-m-3-spaces.txt")).between[1, 2] == "NODE"
    assert topo.links(read("topo-m-2-affinity-spaces.txt")).between[1, 0] == "PXB"


def test_nvlink_is_a_kind_of_its_own():
    assert topo.links(read("topo-m-2-nvlink.txt")).between[1, 0] == "NV12"


def test_statuses():
    seen = topo.statuses(read("topo-p2p-3-mixed.txt"))
    assert (seen.between[0, 1], seen.between[0, 2], seen.between[2, 1]) == ("OK", "GNS", "NS")


@pytest.mark.parametrize("card", ["NIC0", "mlx5_0", "mlx5_bond_0", "rocep65s0f0"])
def test_network_cards_are_named_in_several_ways(card):
    text = f"\tGPU0\t{card}\tGPU1\nGPU0\t X \tNODE\tPHB\n{card}\tNODE\t X \tPIX\nGPU1\tPHB\tPIX\t X \n"
    assert topo.links(text).between[0, 1] == "PHB"
    assert on_a_node([text]) == [{(0, 1): "PHB"}]


CONTRADICTIONS = [
    ("", "no line of GPU0"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "no line of GPU0"),
    ("\tGPU0\tGPU1\nGPU0\t X \tSYS\n", "no row of GPU1"),
    ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tPIX\t X \n", "GPU0 to GPU1 is SYS, and back PIX"),
    ("\tGPU0\tGPU1\nGPU0\tSYS\t X \nGPU1\tSYS\t X \n", "itself in another column"),
    ("\tGPU0\tGPU1\nGPU0\t X \tXYZ\nGPU1\tXYZ\t X \n", "known values"),
    ("\tGPU0\tGPU2\nGPU0\t X \tSYS\nGPU2\tSYS\t X \n", "not GPU0 and up"),
    ("\tGPU0\tGPU1\tCPU Aff\nGPU0\t X \tSYS\t0\nGPU1\tSYS\t X \t0\n", "column names is damaged"),
]


@pytest.mark.parametrize(("text", "sentence"), CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_with_the_reason(text, sentence):
    with pytest.raises(CannotTell, match=sentence):
        topo.links(text)


@pytest.mark.parametrize("capture", [*LINKS, *STATUSES], ids=lambda path: path.stem)
def test_a_mutated_matrix_is_read_right_or_not_at_all(capture):
    parse = topo.links if capture in LINKS else topo.statuses
    truth = parse(capture.read_text())
    right = refused = 0
    for mutant in mutations.mutants(capture.read_text(), rounds=24):
        try:
            seen = parse(mutant)
        except CannotTell:
            refused += 1
            continue
        assert seen.between == truth.between, mutant
        right += 1
    assert right + refused >= 200
    # Both happen: a parser that refuses everything would pass otherwise.
    assert min(right, refused) >= 40


@pytest.mark.parametrize("capture", [*LINKS, *STATUSES], ids=lambda path: path.stem)
def test_what_harms_nothing_is_read_right(capture):
    parse = topo.links if capture in LINKS else topo.statuses
    truth = parse(capture.read_text())
    for mutant in mutations.mutants(capture.read_text(), rounds=20, kinds=mutations.HARMLESS):
        assert parse(mutant) == truth


# --- the same on nodes: what a P2P verdict's fingerprint is made of ------------------------------------------------------

# The real function of p2p-common; nvidia-smi is a FAKE that prints a file.
LOOK = r"""
. "$1"; shift
timeout() { shift; "$@"; }
nvidia-smi() { [ "$1" != topo ] || cat "$capture"; }
for capture; do
  look
  if [ -n "$unseen" ]; then printf '!%s\n' "$unseen"; else printf '%s\n' "${links//$'\n'/,}"; fi
done
"""
REFUSED = "nvidia-smi topo -m does not say how the GPUs are linked"


def on_a_node(texts: list[str | bytes]) -> list[dict[tuple[int, int], str] | None]:
    """What `look` takes from each of these answers of nvidia-smi; None where it refuses."""
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, f"{number:04}") for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        done = subprocess.run(
            ["bash", "-c", LOOK, "look", SCRIPTS / "p2p-common", *files],
            env={**os.environ, "GPUWRIGHT_ROOT": directory},
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stderr) == (0, "")
    found: list[dict[tuple[int, int], str] | None] = []
    for line in done.stdout.splitlines():
        if line.startswith("!"):
            assert line == f"!{REFUSED}"
            found.append(None)
            continue
        links = [link.split(" ") for link in line.split(",") if link]
        found.append({(int(one), int(other)): kind for one, other, kind in links})
    assert len(found) == len(texts)
    return found


def pairs(seen: topo.Matrix) -> dict[tuple[int, int], str]:
    """Each two GPUs once."""
    return {(one, other): kind for (one, other), kind in seen.between.items() if one < other}


def test_nodes_read_what_the_controller_reads():
    texts = [capture.read_text() for capture in LINKS]
    assert on_a_node(texts) == [pairs(topo.links(text)) for text in texts]


def test_nodes_refuse_what_contradicts_itself():
    assert on_a_node([text for text, _ in CONTRADICTIONS]) == [None] * len(CONTRADICTIONS)


@pytest.mark.parametrize("capture", LINKS, ids=lambda path: path.stem)
def test_nodes_read_a_mutated_matrix_right_or_not_at_all_and_as_the_controller_does(capture):
    truth = pairs(topo.links(capture.read_text()))
    mutants = list(mutations.mutants(capture.read_text(), rounds=16))
    assert len(mutants) >= 200
    right = 0
    for mutant, seen in zip(mutants, on_a_node(mutants), strict=True):
        if seen is not None:
            assert seen == truth, mutant
            right += 1
        try:
            told = pairs(topo.links(mutant))
        except CannotTell:
            continue
        # What the controller reads past and nvidia-smi never prints: a mark before the first letter, a line cut off.
        past = mutant.startswith(b"\xef\xbb\xbf") if isinstance(mutant, bytes) else not mutant.endswith("\n")
        assert told == seen or (past and seen is None), mutant
    assert 40 <= right <= len(mutants) - 40


@pytest.mark.parametrize("capture", LINKS, ids=lambda path: path.stem)
def test_nodes_read_right_what_harms_nothing(capture):
    truth = pairs(topo.links(capture.read_text()))
    mutants = list(mutations.mutants(capture.read_text(), rounds=8, kinds=mutations.HARMLESS))
    assert on_a_node(mutants) == [truth] * len(mutants)
