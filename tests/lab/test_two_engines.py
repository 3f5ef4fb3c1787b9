"""Two simulated engines behind one gateway, one killed under load: only what it was answering is lost, and it comes back."""

from __future__ import annotations

import load
import pytest
from test_removal import SECOND

pytestmark = pytest.mark.lab


def test_one_engine_killed_under_load(site):
    [host] = site.hosts
    site.set("site-1", engine__engines__second=SECOND)
    site.deploy()
    load.kill_under_load(site, host, "second")
    load.comes_back(site, host, "second", seconds=60)
