"""What the table of sshd's keywords comes to; the drop-in itself is judged by a real sshd in tests/lab/test_access_sshd.py."""

from __future__ import annotations

import pytest

from gpuwright.hardening import PROFILES
from gpuwright.render import REPOSITORY
from roles.access import keys, sshd
from roles.access.spec import AccessSpec


def test_an_older_openssh_gets_what_it_has():
    spec = AccessSpec.model_validate({"users": {"root": {"keys": ["r.pub"]}}})
    old = {
        "KexAlgorithms": ("curve25519-sha256", "diffie-hellman-group1-sha1"),
        "Ciphers": ("aes128-cbc", "aes256-ctr"),
        "MACs": ("hmac-md5", "hmac-sha2-256"),
        "PubkeyAcceptedAlgorithms": ("ssh-ed25519", "ssh-rsa"),
        "HostKeyAlgorithms": ("ssh-ed25519", "ssh-rsa"),
    }
    host_keys = [sshd.HostKey("/etc/ssh/ssh_host_ed25519_key", "ED25519", 256)]
    found = sshd.algorithms(spec, "baseline", old, host_keys)
    assert found == {
        "KexAlgorithms": "curve25519-sha256",
        "Ciphers": "aes256-ctr",
        "MACs": "hmac-sha2-256",
        "PubkeyAcceptedAlgorithms": "ssh-ed25519",
        "HostKeyAlgorithms": "ssh-ed25519",
    }
    with pytest.raises(ValueError, match="of what Ciphers may be in profile strict, this OpenSSH has nothing"):
        sshd.algorithms(spec, "strict", {**old, "Ciphers": ("aes128-cbc",)}, host_keys)


def test_pyinfra_can_always_connect():
    """paramiko is what deploys connect with; a profile without an algorithm of its would lock every deploy out."""
    import paramiko

    transport = paramiko.Transport
    for keyword, known in (
        ("KexAlgorithms", transport._preferred_kex),
        ("Ciphers", transport._preferred_ciphers),
        ("MACs", transport._preferred_macs),
    ):
        for allowed in sshd.ALGORITHMS[keyword]:
            assert set(allowed) & set(known), keyword


@pytest.mark.parametrize(
    ("key", "weak"),
    [
        (("DSA", 1024), (True, True, True)),
        (("UNKNOWN", 0), (True, True, True)),
        (("RSA", 1024), (True, True, True)),
        (("RSA", 2048), (False, True, True)),
        (("RSA", 3072), (False, False, False)),
        (("ECDSA", 256), (False, False, True)),
        (("ED25519", 256), (False, False, False)),
    ],
)
def test_which_host_keys_are_weak(key, weak):
    found = tuple(sshd.is_weak(sshd.HostKey("/k", *key), profile, keys.SMALLEST_RSA) for profile in PROFILES)
    assert found == weak


def test_the_page_has_the_table_as_it_is():
    page = (REPOSITORY / "docs/roles/access.md").read_text()
    for keyword in sshd.KEYWORDS:
        values = " | ".join(value or "-" for value in keyword.values)
        assert f"| `{keyword.name}` | {values} | {keyword.may_break} |" in page
