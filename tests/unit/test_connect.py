"""Connections that fail are told in pyinfra's own sentence."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from gpuwright.render import REPOSITORY


def test_a_server_that_hangs_up_is_one_sentence_and_no_traceback(tmp_path):
    """A machine that boots accepts connections before its sshd answers: paramiko logs a traceback for each of them."""
    server = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            connection.close()

    threading.Thread(target=hang_up, daemon=True).start()
    (tmp_path / "known_hosts").write_text("")
    (tmp_path / "node.yaml").write_text("gpuwright: 1\nsummary: a host that boots\n")
    host = {
        "node": "node.yaml",
        "ssh_hostname": "127.0.0.1",
        "ssh_port": server.getsockname()[1],
        "ssh_user": "root",
        "ssh_known_hosts_file": str(tmp_path / "known_hosts"),
    }
    (tmp_path / "inventory.py").write_text(
        f"from gpuwright.spec.fleet import fleet as _fleet\nhosts = _fleet({ {'gpu-01': host}!r}, __file__)\n"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "-y", "inventory.py", REPOSITORY / "deploy.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    server.close()
    assert done.returncode == 1
    assert "[gpu-01]" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
