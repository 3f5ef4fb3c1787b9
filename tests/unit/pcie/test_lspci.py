"""lspci -vvv: as it comes, and after everything that can happen to it on the way."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest

from roles.pcie import lspci
from roles.pcie.captured import CannotTell

CAPTURES = Path(__file__).parent / "captures"
GIB, MIB = 1024**3, 1024**2


def read(name):
    return (CAPTURES / name).read_text()


def addresses(text):
    """What sysfs lists on the same machine."""
    return [f"0000:{line[:7]}" for line in text.splitlines() if line[2:3] == ":" and line[5:6] == "."]


def parse(text, whole=None):
    return lspci.functions(text, addresses(whole or text))


@pytest.fixture(scope="module")
def off():
    return parse(read("lspci-redirect-off.txt"))


@pytest.fixture(scope="module")
def on():
    return parse(read("lspci-redirect-on.txt"))


def test_control_words_of_bridges(off, on):
    assert [off[address].acs for address in ("0000:00:05.1", "0000:1b:04.0", "0000:1b:08.0")] == [0x11, 0x11, 0x11]
    assert [on[address].acs for address in ("0000:00:05.1", "0000:1b:04.0", "0000:1b:08.0")] == [0x1D, 0x11, 0x1D]
    assert [on[address].redirects for address in ("0000:00:05.1", "0000:1b:04.0", "0000:1b:08.0")] == [
        True,
        False,
        True,
    ]


def test_what_only_looks_like_acs_is_none(off):
    gpu = off["0000:1c:00.0"]  # ARICap: … ACS-, ACSViol-
    assert (gpu.acs, gpu.redirects) == (None, None)


def test_a_root_port_without_acs_is_not_called_off(off):
    assert off["0000:80:01.0"].redirects is None
    # The upstream port of a switch is the one bridge that needs none.
    assert (off["0000:1a:00.0"].port, off["0000:1a:00.0"].redirects) == ("Upstream Port", False)


def test_regions_are_the_functions_own(off):
    assert off["0000:1c:00.0"].regions == {0: 64 * MIB, 2: 64 * GIB, 4: 32 * MIB}


def test_driver_node_and_width(off):
    assert [off[address].driver for address in ("0000:1c:00.0", "0000:1e:00.0")] == ["nvidia", "vfio-pci"]
    assert (off["0000:81:00.0"].numa_node, off["0000:81:00.0"].width, off["0000:81:00.0"].is_bridge) == (1, 8, False)
    assert (off["0000:1c:00.0"].width, off["0000:1b:04.0"].is_bridge) == (16, True)


def test_without_root_nothing_is_known():
    seen = parse(read("lspci-unprivileged.txt"))
    assert all(function.denied for function in seen.values())
    assert (seen["0000:00:05.1"].acs, seen["0000:00:05.1"].redirects) == (None, None)


@pytest.mark.parametrize("text", ["", "lspci: Unable to load libkmod resources\n", "bash: lspci: command not found\n"])
def test_a_text_without_functions_is_refused(text):
    with pytest.raises(CannotTell):
        lspci.functions(text, ["0000:00:01.0"])


def test_a_listing_that_lost_a_first_line_is_refused():
    """What follows would be the neighbour's: here, the control word of another bridge."""
    text = read("lspci-redirect-on.txt")
    lines = text.split("\n")
    header = next(index for index, line in enumerate(lines) if line.startswith("1b:08.0"))
    del lines[header - 30 : header + 30]
    with pytest.raises(CannotTell, match="nothing is said of 0000:1b:08"):
        parse("\n".join(lines), text)


def test_a_listing_of_another_machine_is_refused():
    with pytest.raises(CannotTell, match="there is no 0000:"):
        lspci.functions(read("lspci-redirect-on.txt"), ["0000:1c:00.0"])


FIELDS = ("port", "acs", "width", "numa_node", "driver", "redirects")


@pytest.mark.parametrize("name", ["lspci-redirect-off.txt", "lspci-redirect-on.txt", "lspci-unprivileged.txt"])
def test_a_mutated_listing_is_read_right_or_not_at_all(name):
    truth = parse(read(name))
    told = untold = 0
    count = 0
    for mutant in mutations.mutants(read(name), rounds=24):
        count += 1
        try:
            seen = parse(mutant, read(name))
        except CannotTell:
            untold += 1
            continue
        assert seen.keys() == truth.keys(), mutant
        for address, function in seen.items():
            right = truth[address]
            for field in FIELDS:
                value = getattr(function, field)
                assert value in (None, getattr(right, field)), (address, field, mutant)
                told += value is not None
                untold += value is None and getattr(right, field) is not None
            assert function.regions.items() <= right.regions.items(), (address, mutant)
    assert count >= 200
    # Both happen: a parser that says nothing would pass otherwise.
    assert name == "lspci-unprivileged.txt" or min(told, untold) >= 100


@pytest.mark.parametrize("name", ["lspci-redirect-off.txt", "lspci-redirect-on.txt"])
def test_what_harms_nothing_is_read_right(name):
    truth = parse(read(name))
    for mutant in mutations.mutants(read(name), rounds=20, kinds=mutations.HARMLESS):
        assert parse(mutant, read(name)) == truth
