"""One booted machine for all tests that only need one: emulated, a boot takes minutes. `./run proof` runs them all.

`./run test` takes what is sampled here: two boots, the second by a converge of roles kernel and pcie.
"""

from __future__ import annotations

import pytest
import sampling

import lab

pytest.register_assert_rewrite("hardened")

SAMPLE = {
    "test_machine.py": [
        "test_it_boots_through_firmware_and_grub",
        "test_numa_nodes_of_which_one_has_no_processors",
        "test_iommu_groups_and_ports_with_acs",
    ],
    # The converge: words on the kernel's line, the IOMMU and the bridges' ACS bits, with the second boot in between.
    "test_pcie.py": [
        "test_the_plan_says_what_it_costs_and_what_waits_for_the_reboot",
        "test_one_run_and_one_reboot_make_it_so",
        "test_what_the_boot_still_starts_is_waited_for_before_it_is_read_back",
        "test_a_second_run_changes_nothing",
        "test_bits_set_by_hand_are_seen_and_cleared_by_the_next_run",
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
