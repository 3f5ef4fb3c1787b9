"""Secrets show as a name and a fingerprint, whatever is done to them."""

from __future__ import annotations

import copy
import json
import pickle
import time

import pytest

from gpuwright.spec import secret
from gpuwright.spec.base import SecretRef
from gpuwright.spec.secret import Secret, SecretError, resolve

VALUE = b"SEKRET-4711"


def test_no_way_of_printing_shows_the_value():
    one = Secret("models.token", VALUE)
    shown = [str(one), repr(one), f"{one}", f"{one!r:>40}", "%s" % one, repr([one]), repr({"a": one})]  # noqa: UP031
    assert all("SEKRET" not in text and "models.token" in text for text in shown)
    assert not hasattr(one, "__dict__")
    for attempt in (lambda: pickle.dumps(one), lambda: json.dumps(one)):
        with pytest.raises(TypeError) as refused:
            attempt()
        assert "SEKRET" not in str(refused.value)
    assert copy.deepcopy([one])[0] is one
    assert one.reveal() == VALUE


def test_fingerprints_compare_within_a_run_and_only_there(monkeypatch):
    one = Secret("a", VALUE).fingerprint
    assert one == Secret("b", VALUE).fingerprint != Secret("a", b"other").fingerprint
    assert len(one) == 8
    monkeypatch.setattr(secret, "_SALT", b"another run")
    assert Secret("a", VALUE).fingerprint != one


def test_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("HUB_TOKEN", "from-env")
    file = tmp_path / "token"
    file.write_text("from-file\r\n")
    assert resolve(SecretRef(env="HUB_TOKEN"), "t").reveal() == b"from-env"
    assert resolve(SecretRef(file=str(file)), "t").reveal() == b"from-file"
    assert resolve(SecretRef(command="printf 'from-command\\n' | cat"), "t").reveal() == b"from-command"


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        ({"env": "NOT_SET"}, "t: environment variable NOT_SET is not set; set it, or change the reference"),
        (
            {"file": "/nowhere/token"},
            "t: cannot read /nowhere/token (No such file or directory); put the secret there, or change the reference",
        ),
        (
            {"command": "echo SEKRET >&2; exit 3"},
            "t: the command that fetches it ended with status 3; run it by hand to see why",
        ),
        ({"command": "true"}, "t: the secret is empty"),
        ({"file": "/dev/null"}, "t: the secret is empty"),
    ],
)
def test_a_source_that_gives_nothing_is_one_sentence(ref, sentence, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(SecretError) as refused:
        resolve(SecretRef(**ref), "t")
    assert str(refused.value) == sentence


def test_a_command_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(secret, "_COMMAND_TIMEOUT", 0.2)
    started = time.monotonic()
    with pytest.raises(SecretError, match=r"gave no answer in 0\.2 s"):
        resolve(SecretRef(command="exec sleep 30"), "t")
    assert time.monotonic() - started < 5
