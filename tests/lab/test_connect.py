"""Connections on a booted host: no waiting for Nagle, also after a reconnect; nobody is talked to whose key is not known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lab
from gpuwright.render import REPOSITORY

pytestmark = pytest.mark.lab

DEPLOY = """
import socket
from pyinfra.context import ctx_host, ctx_state
from pyinfra.operations import python
from gpuwright import connect

host, state = ctx_host.get(), ctx_state.get()


def option():
    return host.connector.client.get_transport().sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


print("at first", option())
connect.keep_tuned(state, host)
print("tuned", option())


def again():
    before = host.connector.client.get_transport()
    host.disconnect()
    host.connect()
    assert host.connector.client.get_transport() is not before
    print("reconnected", option())


python.call(name="Lose the line and connect again", function=again)
"""


@pytest.fixture(scope="module")
def host():
    [host] = lab.up(["connect-1"])
    yield host
    host.destroy()


def pyinfra(host, directory: Path, known_hosts: Path):
    data = {"ssh_hostname": host.address, "ssh_user": "root", "ssh_key": str(host.ssh_key)}
    data |= {"ssh_known_hosts_file": str(known_hosts), "ssh_strict_host_key_checking": "yes"}
    (directory / "inventory.py").write_text(f"hosts = [({host.name!r}, {data!r})]\n")
    (directory / "deploy.py").write_text(DEPLOY)
    return subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "-y", "inventory.py", "deploy.py"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_delay_at_first_and_after_a_reconnect(host, tmp_path):
    done = pyinfra(host, tmp_path, host.known_hosts)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "at first 0" in said, "paramiko leaves Nagle's algorithm on; if that changed, connect.py can go"
    assert "tuned 1" in said and "reconnected 1" in said


def test_a_host_whose_key_is_not_known_is_not_talked_to(host, tmp_path):
    empty = tmp_path / "known_hosts"
    empty.touch()
    done = pyinfra(host, tmp_path, empty)
    assert done.returncode == 1
    assert "tuned" not in done.stdout + done.stderr


def test_a_host_with_another_key_is_not_talked_to(host, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    other = tmp_path / "known_hosts"
    other.write_text(f"{host.address} {(tmp_path / 'other.pub').read_text()}")
    done = pyinfra(host, tmp_path, other)
    assert done.returncode == 1
    assert "tuned" not in done.stdout + done.stderr
