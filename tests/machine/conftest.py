"""One booted machine for all tests that only need one. `./run proof` runs them; `./run test` runs none of them yet.

Emulated, the firmware sometimes spins for minutes after a reboot from inside (seen once in two), so that a test which reboots
says nothing when it fails. Until that is understood, what is to be sampled (two boots at most) stands here for who asks for it:
`pytest tests/machine -m "not proof"`.
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
    machine.destroy()


@pytest.fixture
def blank_machine(machine):
    """The same machine, made blank before the test and after it."""
    machine.reset()
    yield machine
    machine.reset()
