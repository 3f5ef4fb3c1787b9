"""Asking from outside: what comes back, and that a key is never shown, however a question fails."""

import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwright.audit import outside
from gpuwright.audit.outside import Place
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.secret import Secret

REPOSITORY = Path(__file__).parents[3]
SEKRET = "sk-SEKRETSEKRETSEKRET"


@contextmanager
def listening(answer):
    """A port on loopback where each connection is read once and answered with `answer`; None never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    heard = []

    def serve():
        held = []
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            heard.append(connection.recv(65536))
            if answer is None:
                held.append(connection)
                continue
            connection.sendall(answer)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1], heard
    finally:
        # wakes the thread that accepts; closing alone would let one more in
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def place(port):
    return Place("127.0.0.1", port, "gateway.lab", False)


def test_the_status_is_the_answers_and_the_key_goes_as_a_bearer():
    with listening(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n") as (port, heard):
        assert outside.status(place(port), outside.anybody(), "GET", "/v1/models", Secret("key", SEKRET)) == 401
    assert heard[0].startswith(b"GET /v1/models HTTP/1.1\r\nHost: gateway.lab")
    assert f"Authorization: Bearer {SEKRET}".encode() in heard[0]


def test_a_closed_connection_is_no_answer():
    with listening(b"") as (port, _):
        assert outside.status(place(port), outside.anybody(), "GET", "/") is None


def test_a_port_is_open_or_not():
    with listening(b"") as (port, _):
        assert outside.is_open("127.0.0.1", port)
    assert not outside.is_open("127.0.0.1", port)


def test_open_ports_are_found_among_thousands_that_are_not():
    with listening(b"") as (first, _), listening(b"") as (second, _):
        around = range(max(1, min(first, second) - 500), min(65536, max(first, second) + 500))
        few = outside.open_ports("127.0.0.1", around, wait=0.5, at_once=300)
        assert {first, second} <= set(few)
        assert few == sorted(few)
    assert not {first, second} & set(outside.open_ports("127.0.0.1", around, wait=0.5))


def test_an_address_that_cannot_be_asked_has_no_shut_ports():
    with pytest.raises(OSError, match=r"255\.255\.255\.255"):
        outside.open_ports("255.255.255.255", [22])


def test_a_place_that_is_not_reached_is_named(monkeypatch):
    with listening(None) as (port, _):
        monkeypatch.setattr(outside, "TIMEOUT_SECONDS", 0.2)
        with pytest.raises(outside.NotReached, match=f"127.0.0.1 port {port}: timed out"):
            outside.status(place(port), outside.anybody(), "GET", "/")
    with pytest.raises(outside.NotReached, match="refused"):
        outside.status(place(port), outside.anybody(), "GET", "/")


FAILING = """
import os
import socket

from gpuwright.audit import outside
from gpuwright.audit.outside import Place
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.base import SecretRef
from gpuwright.spec.secret import resolve

outside.TIMEOUT_SECONDS = 0.2


def ask(port):
    key = resolve(SecretRef(env="SEKRET"), "SEKRET")
    assert outside.status(Place("127.0.0.1", port, "x", False), outside.anybody(), "GET", "/", key) == 200


def test_wrong_answer(answering):
    ask(answering)


def test_no_answer(silent):
    ask(silent)


def test_nobody_there():
    ask(1)
"""

CONFTEST = """
import sys
import pytest
sys.path.insert(0, "tests/unit/audit")
import test_outside


@pytest.fixture
def answering():
    with test_outside.listening(b"HTTP/1.1 503 Unavailable\\r\\nContent-Length: 0\\r\\n\\r\\n") as (port, _):
        yield port


@pytest.fixture
def silent():
    with test_outside.listening(None) as (port, _):
        yield port
"""


def test_a_key_is_never_shown_however_a_question_fails(tmp_path):
    (tmp_path / "test_failing.py").write_text(FAILING)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-l",
            "-vv",
            "--tb=long",
            "--full-trace",
            "-o",
            "addopts=",
            f"--rootdir={tmp_path}",
            f"--junitxml={tmp_path}/junit.xml",
            str(tmp_path),
        ],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "SEKRET": SEKRET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed" in run.stdout, run.stdout
    assert "[secret SEKRET" in run.stdout
    assert SEKRET not in run.stdout + run.stderr + (tmp_path / "junit.xml").read_text()


REASON = "until the tokens arrive in March"


@pytest.mark.parametrize(
    ("access", "allowed"),
    [
        (None, None),
        ({}, {"publickey"}),
        ({"password_users": {"alice": REASON}}, {"publickey", "password"}),
        ({"console_passwords": {"alice": REASON}}, {"publickey"}),
        ({"deviations": {"MaxAuthTries": {"value": "8", "reason": REASON}}}, {"publickey"}),
        (
            {"deviations": {"KbdInteractiveAuthentication": {"value": "yes", "reason": REASON}}},
            {"publickey", "keyboard-interactive"},
        ),
    ],
)
def test_what_sshd_may_offer_is_what_the_node_file_asks_for(access, allowed):
    described = {"gpuwright": 1, "summary": "a node"}
    if access is not None:
        described["access"] = {"users": {"alice": {"keys": ["a.pub"], "sudo": "all"}}, **access}
    assert outside.ssh_methods_allowed(NodeSpec.model_validate(described)) == allowed
