"""Waiting for apt: who has it locked is named, and a container's lock is not this machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuwright import packages

LOCK = Path("/var/lib/dpkg/lock-frontend")
pytestmark = pytest.mark.skipif(
    not (os.geteuid() == 0 and LOCK.exists() and shutil.which("unshare")), reason="needs root and dpkg"
)


def wait(limit: int, every: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", packages.FREE, "sh", str(limit), str(every)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def quiet():
    """Nobody uses apt on this machine just now; a test cannot wait for that."""
    if wait(0).returncode:
        pytest.skip("somebody has this machine's apt locked")


def test_nobody_has_it(quiet):
    done = wait(0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_who_has_it_is_named_with_the_command_and_what_to_do(quiet):
    with LOCK.open() as held:
        done = wait(2)
        assert not held.closed
    assert done.returncode == 1
    assert done.stdout.count("apt is locked by process") == 2
    assert f"process {os.getpid()} (" in done.stdout and "waiting, up to 2 s, 1 s so far" in done.stdout
    assert "has had apt locked for 2 s; wait until it is done, or end it, and run this again" in done.stderr


def test_a_lock_of_a_container_is_not_ours(quiet):
    """The same path, in a file system of its own: that is how an apt inside a container looks from the host."""
    script = (
        "mount -t tmpfs none /var/lib/dpkg && exec sh -c 'exec 9>/var/lib/dpkg/lock-frontend; echo held; read -r _'"
    )
    inside = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert inside.stdout is not None and inside.stdout.readline() == "held\n"
        assert Path(f"/proc/{inside.pid}/fd/9").readlink() == LOCK
        assert wait(0).returncode == 0
    finally:
        inside.kill()
        inside.wait()
