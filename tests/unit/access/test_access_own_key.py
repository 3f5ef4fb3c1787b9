"""Whether a run could log in again, by what sshd's log says of its connection; run for real with a log of its own."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpuwright.render import REPOSITORY

SCRIPT = REPOSITORY / "files/access/usr/local/lib/gpuwright/access-own-key"
LINE = "Accepted {} for alice from 192.0.2.7 port 50022 ssh2{}"


@pytest.fixture
def asked(tmp_path):
    """What it says where sshd's log has this line, and the account will have the key of ``tmp_path/key``."""
    for name in ("key", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    folder = tmp_path / "stage/etc/ssh/authorized_keys.d"
    folder.mkdir(parents=True)
    (folder / "alice").write_text((tmp_path / "key.pub").read_text())
    log, journalctl = tmp_path / "log", tmp_path / "journalctl"
    journalctl.write_text(f"#!/bin/sh\ncat {log}\n")
    journalctl.chmod(0o755)

    def ask(method: str, rest: str):
        log.write_text(LINE.format(method, rest) + "\n")
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SSH_CONNECTION": "192.0.2.7 50022 192.0.2.1 22",
        }
        done = subprocess.run(
            ["sh", SCRIPT, tmp_path / "stage"], env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    def fingerprint(name: str) -> str:
        said = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / name], capture_output=True, text=True, check=True)
        return said.stdout.split()[1]

    return ask, fingerprint


def test_a_key_that_stays_is_fine_and_another_is_named(asked):
    ask, fingerprint = asked
    assert ask("publickey", f": ED25519 {fingerprint('key')}") == (0, "")
    status, said = ask("publickey", f": ED25519 {fingerprint('other')}")
    assert status == 1
    assert f"with the key {fingerprint('other')}, which access.users.alice.keys does not have" in said


def test_a_password_is_no_key(asked):
    ask, _ = asked
    status, said = ask("password", "")
    assert (status, "logged in as alice without a key (password)" in said) == (1, True)


@pytest.mark.parametrize("kind", ["ED25519-CERT", "ECDSA-CERT", "RSA-CERT", "ED25519-SK-CERT"])
def test_of_a_certificate_nothing_is_known_and_that_is_said(asked, kind):
    """The log's last fingerprint is the authority's, which is in no account's file."""
    ask, fingerprint = asked
    status, said = ask(
        "publickey", f": {kind} {fingerprint('other')} ID alice (serial 1) CA ED25519 {fingerprint('other')}"
    )
    assert status == 0
    assert said.startswith("note: this run logged in as alice with a certificate")
