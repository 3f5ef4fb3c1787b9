"""Keys of package repositories, told by their fingerprint; gpg makes them and is the judge."""

import os
import subprocess

import pytest

from gpuwright.repository import BadKey, Repository, files, fingerprints, read_key


@pytest.fixture(scope="module")
def gpg(tmp_path_factory):
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)
    environment = {**os.environ, "GNUPGHOME": str(home)}

    def run(*arguments):
        command = ["gpg", "--batch", "--quiet", "--passphrase", "", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    yield run
    subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=environment, check=False)


def key(gpg, name, kind):
    """Fingerprint and armour of a new key."""
    gpg("--quick-generate-key", name, kind, "default", "never")
    listed = gpg("--with-colons", "--list-keys", name)
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr")), gpg(
        "--armor", "--export", name
    )


@pytest.fixture(scope="module")
def keys(gpg):
    return [key(gpg, f"a test {kind}", kind) for kind in ("ed25519", "rsa2048")]


def test_a_fingerprint_is_gpgs(keys):
    for fingerprint, armour in keys:
        assert fingerprints(armour) == [fingerprint]
        assert fingerprints(armour.replace("BLOCK-----\n\n", "BLOCK-----\nVersion: 1.4\nComment: x\n\n", 1)) == [
            fingerprint
        ]
    assert fingerprints(keys[0][1] + keys[1][1]) == [keys[0][0], keys[1][0]]


def test_the_key_that_is_named_is_taken(keys, tmp_path):
    path = tmp_path / "key.asc"
    path.write_text(keys[0][1])
    spaced = " ".join(keys[0][0][at : at + 4] for at in range(0, 40, 4)).lower()
    assert read_key(str(path), spaced) == path.read_bytes() == read_key(str(path))


def test_another_key_is_refused(keys, tmp_path):
    path = tmp_path / "key.asc"
    path.write_text(keys[0][1] + keys[1][1])
    with pytest.raises(BadKey, match=f"holds the key {keys[1][0]}, and the node file names {keys[0][0]}"):
        read_key(str(path), keys[0][0])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is not an ASCII-armoured public key"),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\nx\n", "there is no public key in it"),
        ("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n!!!\n-----END PGP PUBLIC KEY BLOCK-----\n", "its armour is damaged"),
    ],
)
def test_what_is_no_key_is_refused(tmp_path, content, sentence):
    path = tmp_path / "key.asc"
    path.write_text(content)
    with pytest.raises(BadKey, match=sentence):
        read_key(str(path), "0" * 40)
    with pytest.raises(BadKey, match="cannot be read: No such file"):
        read_key(str(tmp_path / "none.asc"))


def test_a_key_that_is_cut_short_is_refused(keys, tmp_path):
    lines = keys[1][1].splitlines()
    path = tmp_path / "key.asc"
    path.write_text("\n".join([*lines[:4], lines[-1]]))
    with pytest.raises(BadKey, match="it is cut short"):
        read_key(str(path), keys[1][0])


def test_a_flat_source_has_no_components():
    flat, suites = (
        Repository("nvidia", "https://mirror.example/x/", "amd64"),
        Repository("docker", "https://mirror.example/y", "arm64", "trixie", "stable"),
    )
    stored, source = files("nvidia", flat, b"KEY")
    assert (stored.path, stored.content) == ("/etc/apt/keyrings/gpuwright-nvidia.asc", b"KEY")
    assert source.path == "/etc/apt/sources.list.d/gpuwright-nvidia.sources"
    assert source.data.decode().splitlines()[1:] == [
        "Types: deb",
        "URIs: https://mirror.example/x/",
        "Suites: /",
        "Architectures: amd64",
        "Signed-By: /etc/apt/keyrings/gpuwright-nvidia.asc",
    ]
    assert (
        "Suites: trixie\nComponents: stable\nArchitectures: arm64\n"
        in files("containers", suites, b"")[1].data.decode()
    )
