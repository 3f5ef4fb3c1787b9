"""What `./run test` samples of the lab tests, and one converged host for all tests that only need one.

`./run proof` runs everything. `./run test` has 14 minutes for the lab on two cores: the whole ring on one host, the search for
secrets, and of every drill one or two points. Whatever is not named here is marked `proof`.
"""

from __future__ import annotations

import copy

import fleet
import pytest
import sampling

SAMPLE = {
    "test_audit_sabotage.py": ["test_a_sabotage_turns_exactly_its_control_red"],
    "test_base.py": [],
    "test_connect.py": [
        "test_no_delay_at_first_and_after_a_reconnect",
        "test_a_host_with_another_key_is_not_talked_to",
    ],
    "test_deploy_command.py": ["test_nothing_left_to_do_is_0_and_changes_pending_are_2", "test_interrupted_is_130"],
    "test_guard.py": [
        "test_an_sshd_config_that_refuses_the_controller",
        "test_a_change_that_cuts_every_connection_is_undone_by_the_node_alone",
    ],
    "test_firewall.py": ["test_rules_that_drop_the_controller_heal_themselves"],
    "test_killed_run.py": ["test_killed_where_a_restart_would_be_lost"],
    "test_lab.py": [
        "test_a_blank_host_is_blank",
        "test_a_reboot_from_inside_comes_back_with_its_disk_and_forgets_its_network",
    ],
    "test_removal.py": ["test_an_engine_and_an_alias_go_and_leave_evidence_and_weights"],
    "test_repository.py": ["test_a_driver_is_installed_pinned_and_held"],
    "test_ring.py": ["test_the_ring_on_debian_13"],
    "test_secrets.py": ["test_the_search_finds_what_it_looks_for", "test_no_secret_anywhere"],
    "test_trust.py": ["test_first_contact"],
    "test_two_engines.py": ["test_one_engine_killed_under_load"],
}


def pytest_collection_modifyitems(items):
    sampling.mark(items, "lab", SAMPLE)


@pytest.fixture(scope="session")
def converged(tmp_path_factory):
    """A host of its own with all five roles and the simulated engine, converged once."""
    site = fleet.boot(["site-1"], tmp_path_factory.mktemp("site"))
    site.deploy()
    yield site
    for host in site.hosts:
        host.destroy()


@pytest.fixture
def site(converged):
    """The converged host; what the test changes in the node file is put back, and so is the node."""
    settings = copy.deepcopy(converged.settings)
    yield converged
    if converged.settings != settings:
        converged.settings = settings
        converged.deploy()
