"""One booted machine for all tests that only need one: emulated, a boot takes minutes. `./run proof` runs them all.

`./run test` takes what is sampled here: two boots at most.
"""

from __future__ import annotations

import pytest
import sampling

import lab

SAMPLE = {
    "test_machine.py": [
        "test_it_boots_through_firmware_and_grub",
        "test_numa_nodes_of_which_one_has_no_processors",
        "test_iommu_groups_and_ports_with_acs",
        "test_a_word_for_grub_reaches_the_next_kernel",
    ],
}


def pytest_collection_modifyitems(items):
    sampling.mark(items, "machine", SAMPLE)


@pytest.fixture(scope="session")
def machine():
    """A machine of kind `hbm` with a blank disk that has the packages of the roles. Tests share it: leave it as you found it, or `reset` it."""
    [machine] = lab.up_machines(["node-1"], "hbm", blank=True)
    yield machine
    machine.power_off()  # what it was at its first boot is kept: the next file of tests goes back to that in seconds


@pytest.fixture
def blank_machine(machine):
    """The same machine, made blank before the test and after it."""
    machine.reset()
    yield machine
    machine.reset()
