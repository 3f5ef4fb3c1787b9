"""One converged host for all tests that only need one; each test leaves the node file as it was."""

from __future__ import annotations

import copy

import fleet
import pytest


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
