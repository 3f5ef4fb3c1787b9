"""`gpuwright trust` against an SSH server of the test's own (paramiko's; only its key exchange is used)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import paramiko
import pytest
from click.testing import CliRunner

from gpuwright.cli import main
from gpuwright.render import REPOSITORY
from gpuwright.spec import trust


class Sshd:
    """Shows its host keys to whoever connects."""

    def __init__(self, *keys):
        self.keys = keys
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            for key in self.keys:
                transport.add_server_key(key)
            try:
                transport.start_server(server=paramiko.ServerInterface())
            except (paramiko.SSHException, EOFError, OSError):
                transport.close()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)


@pytest.fixture
def sshd():
    servers = []

    def start(*keys):
        servers.append(Sshd(*keys))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def ecdsa():
    return paramiko.ECDSAKey.generate()


@pytest.fixture(scope="module")
def rsa():
    return paramiko.RSAKey.generate(2048)


@pytest.fixture
def inventory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(port):
        (tmp_path / "one.yaml").write_text("gpuwright: 1\nsummary: a host\n")
        (tmp_path / "prod.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            'gpu_nodes = _fleet({"gpu-01": {"node": "one.yaml", "ssh_hostname": "127.0.0.1", '
            f'"ssh_port": {port}}}}}, __file__)\n'
        )
        return tmp_path / "known_hosts"

    return write


def run(*arguments):
    done = CliRunner().invoke(main, ["trust", "prod.py", *arguments])
    assert "Traceback" not in done.output
    return done


def test_first_contact_shows_fingerprints_and_records_every_key(inventory, sshd, ecdsa, rsa):
    server = sshd(ecdsa, rsa)
    known = inventory(server.port)
    done = run("--yes")
    assert done.exit_code == 0
    for key in (ecdsa, rsa):
        assert f"gpu-01  {key.get_name()}  {key.fingerprint}  new" in done.output
    recorded = paramiko.HostKeys(str(known))
    for key in (ecdsa, rsa):
        assert recorded.check(f"[127.0.0.1]:{server.port}", key)
    hint = "No host key is recorded"
    assert hint not in CliRunner().invoke(main, ["check", "prod.py"]).output
    again = run("--yes")
    assert again.exit_code == 0
    assert "known" in again.output
    assert "recorded" not in again.output


def test_nothing_is_recorded_unseen(inventory, sshd, ecdsa):
    known = inventory(sshd(ecdsa).port)
    checked = CliRunner().invoke(main, ["check", "prod.py"]).output
    assert "No host key is recorded for gpu-01; before the first deploy run: gpuwright trust prod.py" in checked
    done = run()
    assert done.exit_code == 1
    assert "nobody is here to look at the fingerprints; compare them and run again with --yes" in done.output
    assert not known.exists()


def test_a_changed_key_is_refused_until_somebody_says_that_the_machine_was_rebuilt(inventory, sshd, ecdsa):
    other = paramiko.ECDSAKey.generate()
    server = sshd(other)
    known = inventory(server.port)
    line = f"[127.0.0.1]:{server.port} {ecdsa.get_name()} {ecdsa.get_base64()}\n"
    stale = f"[127.0.0.1]:{server.port} ssh-ed25519 AAAA\n"
    known.write_text("# kept\n" + line)
    done = run("--yes")
    assert done.exit_code == 1
    assert f"gpu-01  {other.get_name()}  {other.fingerprint}  changed" in done.output
    assert "gpu-01: its key is not the one in known_hosts. Rebuilt? Then run this again with --replace." in done.output
    assert known.read_text() == "# kept\n" + line
    known.write_text("# kept\n" + stale + line)
    assert run("--yes", "--replace").exit_code == 0
    new = f"[127.0.0.1]:{server.port} {other.get_name()} {other.get_base64()}\n"
    assert known.read_text() == "# kept\n" + new


def test_nobody_there(inventory):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    inventory(port)
    done = run("--yes")
    assert done.exit_code == 1
    assert f"gpu-01: cannot reach [127.0.0.1]:{port}: Connection refused" in done.output


def test_something_that_is_not_ssh(inventory, monkeypatch):
    monkeypatch.setattr(trust, "TIMEOUT", 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 200)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        inventory(port)
        done = run("--yes")
        thread.join(5)
    assert done.exit_code == 1
    assert f"gpu-01: [127.0.0.1]:{port} " in done.output


def test_port_22_has_no_brackets():
    assert trust.HostKey("gpu-01", "ssh-ed25519", "AAAA").line == "gpu-01 ssh-ed25519 AAAA"


def test_the_command_itself_says_nothing_else(inventory, sshd, ecdsa):
    """paramiko logs tracebacks about kinds of keys that a host lacks; nobody wants to read those."""
    inventory(sshd(ecdsa).port)
    done = subprocess.run(
        [sys.executable, "-m", "gpuwright", "trust", "prod.py", "--yes"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (f"gpu-01  {ecdsa.get_name()}  {ecdsa.fingerprint}  new\n1 key recorded in known_hosts\n")
