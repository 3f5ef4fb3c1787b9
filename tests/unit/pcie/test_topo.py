"""nvidia-smi's matrices: as they come, and after everything that can happen to them on the way."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest

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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no line of GPU0"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "no line of GPU0"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\n", "no row of GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tPIX\t X \n", "GPU0 to GPU1 is SYS, and back PIX"),
        ("\tGPU0\tGPU1\nGPU0\tSYS\t X \nGPU1\tSYS\t X \n", "itself in another column"),
        ("\tGPU0\tGPU1\nGPU0\t X \tXYZ\nGPU1\tXYZ\t X \n", "known values"),
        ("\tGPU0\tGPU2\nGPU0\t X \tSYS\nGPU2\tSYS\t X \n", "not GPU0 and up"),
        ("\tGPU0\tGPU1\tCPU Aff\nGPU0\t X \tSYS\t0\nGPU1\tSYS\t X \t0\n", "column names is damaged"),
    ],
)
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
