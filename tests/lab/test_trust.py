"""The first contact with a host that booted: refused before `gpuwright trust`, accepted after it, refused when the key changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lab
from gpuwright.render import REPOSITORY

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUWRIGHT_LAB_DIR", str(tmp_path_factory.mktemp("lab")))
        [host] = lab.up(["trust-1"])
        yield host
        lab.down()


@pytest.fixture
def site(host, tmp_path):
    (tmp_path / "one.yaml").write_text("gpuwright: 1\nsummary: a lab host\n")
    settings = {"node": "one.yaml", "ssh_hostname": host.address, "ssh_user": "root", "ssh_key": str(host.ssh_key)}
    (tmp_path / "site.py").write_text(
        f"from gpuwright.spec.fleet import fleet as _fleet\nhosts = _fleet({ {host.name: settings}!r}, __file__)\n"
    )
    return tmp_path


def run(site, *arguments):
    return subprocess.run(
        arguments,
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def pyinfra(site):
    return run(site, Path(sys.executable).with_name("pyinfra"), "site.py", "exec", "--", "true")


def test_first_contact(host, site):
    stranger = pyinfra(site)
    assert stranger.returncode != 0
    assert f"No host key for {host.address} found in known_hosts" in stranger.stdout + stranger.stderr

    trusted = run(site, sys.executable, "-m", "gpuwright", "trust", "site.py", "--yes")
    assert (trusted.returncode, trusted.stderr) == (0, "")
    for kind in ("ed25519", "ecdsa", "rsa"):
        own = host.run(f"ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub", check=False).stdout.split()
        if own:  # what the machine prints itself is what the person compares with
            assert f"  {own[1]}  new\n" in trusted.stdout
    assert "ssh-ed25519" in trusted.stdout
    assert pyinfra(site).returncode == 0

    host.run(
        "rm /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; systemctl restart ssh"
    )
    impostor = pyinfra(site)
    assert impostor.returncode != 0
    changed = run(site, sys.executable, "-m", "gpuwright", "trust", "site.py", "--yes")
    assert changed.returncode == 1
    assert f"{host.name}: its key is not the one in known_hosts. Rebuilt?" in changed.stderr
    assert pyinfra(site).returncode != 0

    assert run(site, sys.executable, "-m", "gpuwright", "trust", "site.py", "--yes", "--replace").returncode == 0
    assert pyinfra(site).returncode == 0
