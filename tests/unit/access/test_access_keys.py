"""Public keys: what ssh-keygen makes is read as it is, and what cannot be used is refused without being shown."""

from __future__ import annotations

import subprocess

import pytest

from roles.access import keys


def made(tmp_path, *options: str) -> str:
    """A public key by ssh-keygen."""
    file = tmp_path / "key"
    file.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-C", "alice@laptop", "-f", file, *options], check=True)
    return (tmp_path / "key.pub").read_text().strip()


@pytest.mark.parametrize(
    ("options", "bits"), [(("-t", "ed25519"), None), (("-t", "ecdsa"), None), (("-t", "rsa", "-b", "3072"), 3072)]
)
def test_keys_are_read_as_ssh_keygen_makes_them(tmp_path, options, bits):
    line = made(tmp_path, *options)
    key = keys.parse(line, smallest_rsa=3072)
    assert key.line == line
    assert key.bits == bits
    said = subprocess.run(["ssh-keygen", "-l", "-f", tmp_path / "key.pub"], capture_output=True, text=True, check=True)
    assert key.fingerprint == said.stdout.split()[1]


def test_options_before_the_key_stay(tmp_path):
    line = 'from="10.0.0.0/8",command="echo a b" ' + made(tmp_path, "-t", "ed25519")
    assert keys.parse(line).line == line


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda line: "alice's key", "is no public key"),
        (lambda line: line.replace("ssh-ed25519", "ssh-rsa", 1), "is damaged"),
        (lambda line: line[:40] + " alice", "is damaged"),
        (lambda line: line.replace("ssh-ed25519 ", "ssh-dss ", 1), "is a DSA key"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path, change, sentence):
    line = made(tmp_path, "-t", "ed25519")
    with pytest.raises(keys.BadKey, match=sentence) as refused:
        keys.parse(change(line))
    assert line.split()[1] not in str(refused.value)


def test_small_rsa_is_refused_by_profile(tmp_path):
    line = made(tmp_path, "-t", "rsa", "-b", "2048")
    assert keys.parse(line, keys.SMALLEST_RSA["baseline"])
    with pytest.raises(keys.BadKey, match="is an RSA key of 2048 bits; 3072 is the least here"):
        keys.parse(line, keys.SMALLEST_RSA["strict"])


def test_files_hold_several_keys_and_each_counts_once(tmp_path):
    one, two = made(tmp_path, "-t", "ed25519"), made(tmp_path, "-t", "ed25519")
    (tmp_path / "team.pub").write_text(f"# the team\n{one}\n\n{two}\n")
    found = keys.authorized((str(tmp_path / "team.pub"), one))
    assert [key.line for key in found] == [one, two]


def test_a_private_key_is_refused_and_not_shown(tmp_path):
    made(tmp_path, "-t", "ed25519")
    with pytest.raises(keys.BadKey, match="is a private key"):
        keys.read(str(tmp_path / "key"))
    with pytest.raises(keys.BadKey, match="no readable file on this controller"):
        keys.read(str(tmp_path / "missing.pub"))
