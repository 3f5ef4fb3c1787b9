"""Keys and their file."""

from __future__ import annotations

import base64
import json
import re
import stat
import subprocess
import threading

import bcrypt
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.gateway import keys
from roles.gateway.cli import key as command
from tests.unit.gateway.conftest import caddy

names = st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True).filter(
    lambda name: len(name) <= 40 and not keys._ID.fullmatch(name) and name != "deploy"
)


@settings(max_examples=60, deadline=None)
@given(names, st.integers(1, 99))
def test_the_form_of_a_key(name, generation):
    key_id = keys.new_id(name, generation)
    key, hashed = keys.generate(key_id)
    assert re.fullmatch(r"sk-[A-Za-z0-9]+", key)
    assert key.startswith("sk-" + keys.prefix(key_id))
    assert len(key) == 3 + len(keys.prefix(key_id)) + 56
    user, secret = base64.b64decode(key[3:]).decode().split(":")
    assert user == key_id
    assert re.fullmatch(r"[A-Za-z0-9]{42}", secret)
    assert bcrypt.checkpw(secret.encode(), hashed.encode())
    assert int(hashed.split("$")[2]) == 4
    assert len(secret) < 72, "bcrypt reads 72 bytes"


def test_a_key_has_71_characters():
    assert len(keys.generate("alice-01")[0]) == 71


def test_our_hashes_are_what_caddy_makes():
    """`caddy hash-password` makes a hash that our library verifies, and the other way round (test_requests)."""
    made = subprocess.run(
        [caddy(), "hash-password", "--algorithm", "bcrypt", "--bcrypt-cost", "4", "--plaintext", "s" * 42],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert bcrypt.checkpw(b"s" * 42, made.encode())
    assert keys._HASH.fullmatch(made)
    assert keys._HASH.fullmatch(keys.generate("alice-01")[1])


@pytest.mark.parametrize(
    ("name", "generation", "key_id"),
    [
        ("alice", 1, "alice-01"),
        ("alice", 99, "alice-99"),
        ("alice", 100, "alice-00100"),
        ("bob", 1, "bob-0001"),
        ("carol1", 2, "carol1-0002"),
        ("a", 1, "a-001"),
    ],
)
def test_ids(name, generation, key_id):
    assert keys.new_id(name, generation) == key_id


def test_add_rotate_revoke():
    entries: list[keys.ApiKey] = []
    first, _ = keys.add(entries, "alice", "laptop")
    assert (first.id, first.note) == ("alice-01", "laptop")
    second, _ = keys.rotate(entries, "alice")
    assert (second.id, second.note) == ("alice-02", "laptop")
    assert [entry.id for entry in keys.accepted(entries, None)] == ["alice-01", "alice-02"]
    assert [entry.id for entry in keys.revoke(entries, "alice-1")] == ["alice-01"]
    assert [entry.id for entry in keys.accepted(entries, None)] == ["alice-02"]
    third, _ = keys.rotate(entries, "alice")
    assert third.id == "alice-03"
    assert [entry.id for entry in keys.revoke(entries, "alice")] == ["alice-02", "alice-03"]
    fourth, _ = keys.add(entries, "alice")
    assert fourth.id == "alice-04", "an id in an old log means one key"
    assert keys.parse(keys.dump(entries), "x") == tuple(entries)


def test_which_keys_a_node_accepts():
    entries: list[keys.ApiKey] = []
    for name in ("alice", "bob"):
        keys.add(entries, name)
    keys.rotate(entries, "alice")
    ids = [entry.id for entry in keys.accepted(entries, ["bob", "alice-02"])]
    assert ids == ["bob-0001", "alice-02"]
    with pytest.raises(keys.KeyFileError, match=r"no key is called 'alise'; did you mean 'alice'\?"):
        keys.accepted(entries, ["alise"])


HASH = keys.generate("alice-01")[1]
GOOD = f"  alice-01: {{created: 2026-11-29, hash: {HASH}}}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("keys:\n\talice-01: x\n", "k.yaml:2: not YAML (found character '\\t' that cannot start any token)"),
        ("keys: {a: 1", "k.yaml:1: not YAML (expected ',' or '}', but got '<stream end>')"),
        ("- alice\n", "k.yaml:1: the file must be a mapping of names to values"),
        ("key:\n" + GOOD, "k.yaml:1: unknown entry 'key'; the file has one entry, `keys`"),
        ("keys:\n" + GOOD + GOOD, "k.yaml:3: 'alice-01' is there twice; remove one"),
        ("keys:\n  alice: {created: 2026-11-29}\n", "k.yaml:2: 'alice' is no key id; ids are made by"),
        ("keys:\n  alice-001: {created: 2026-11-29}\n", "k.yaml:2: 'alice-001' is no key id"),
        ("keys:\n  alice-01: x\n", "k.yaml:2: alice-01 must be a mapping of names to values"),
        ("keys:\n  alice-01: {created: soon}\n", "k.yaml:2: alice-01: created is 'soon'; a date is written 2026-11-29"),
        ("keys:\n  alice-01: {created: 2026-11-29}\n", "k.yaml:2: alice-01: a key has a hash, a revoked one has"),
        (f"keys:\n  alice-01: {{hash: {HASH}}}\n", "k.yaml:2: alice-01: `created` is missing"),
        (
            f"keys:\n  alice-01: {{created: 2026-11-29, hahs: {HASH}}}\n",
            "k.yaml:2: alice-01: unknown field 'hahs'; did you mean 'hash'?",
        ),
        (
            "keys:\n  alice-01:\n    created: 2026-11-29\n    hash: sk-YWxpY2UtMDE6\n",
            "k.yaml:4: alice-01: hash is not a bcrypt hash ($2b$04$… with 60 characters)",
        ),
        (
            f"keys:\n  alice-01: {{created: 2026-11-29, hash: {HASH.replace('$04$', '$14$')}}}\n",
            "k.yaml:2: alice-01: bcrypt cost 14; it must be 4",
        ),
        (
            f"keys:\n{GOOD}  alice-00001: {{created: 2026-11-29, revoked: 2026-11-29}}\n",
            "k.yaml: alice-01 and alice-00001 are one generation; remove one",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(text, sentence):
    with pytest.raises(keys.KeyFileError) as refused:
        keys.parse(text, "k.yaml")
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)
    assert "YWxpY2Ut" not in str(refused.value), "what stands there may be a key"


@pytest.mark.parametrize("text", ["", "keys:\n", "keys: {}\n", "# nothing yet\n"])
def test_an_empty_file_has_no_keys(text):
    assert keys.parse(text, "k.yaml") == ()


def test_no_file_has_no_keys(tmp_path):
    assert keys.load(tmp_path / "keys.yaml") == ()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"keys:\x00"])
def test_not_a_text_file(tmp_path, content):
    path = tmp_path / "keys.yaml"
    path.write_bytes(content)
    with pytest.raises(keys.KeyFileError):
        keys.load(path)


def _run(*arguments: str):
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False)


def test_the_commands(tmp_path):
    file = str(tmp_path / "keys.yaml")
    added = _run("add", "alice", "--note", "laptop", "--file", file)
    assert added.exit_code == 0
    shown = added.stdout.strip()
    assert re.fullmatch(r"sk-[A-Za-z0-9]{68}", shown), "the key alone on standard output"
    assert "alice-01: shown once" in added.stderr
    text = (tmp_path / "keys.yaml").read_text()
    secret = base64.b64decode(shown[3:]).decode().split(":")[1]
    assert shown not in text and secret not in text
    assert "lowest cost on purpose" in text
    assert bcrypt.checkpw(secret.encode(), keys.load(tmp_path / "keys.yaml")[0].hash.encode())

    again = _run("add", "alice", "--file", file)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "alice has a key already (alice-01); a second one: gpuwright key rotate alice" in again.stderr
    assert (tmp_path / "keys.yaml").read_text() == text

    rotated = _run("rotate", "alice", "--file", file)
    assert "Still valid: alice-01; later: gpuwright key revoke alice-01" in rotated.stderr
    assert "alice-01: revoked." in _run("revoke", "alice-01", "--file", file).stdout
    listed = json.loads(_run("list", "--json", "--file", file).stdout)
    assert [(row["id"], row["revoked"] is None) for row in listed] == [("alice-01", False), ("alice-02", True)]
    plain = _run("list", "--file", file).stdout
    assert re.search(r"alice-01 +revoked \d{4}-\d\d-\d\d +created \d{4}-\d\d-\d\d +laptop", plain)
    assert "$2b$" not in plain
    assert stat.S_IMODE((tmp_path / "keys.yaml").stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "Alice"], "'Alice' is no name for a key"),
        (["add", "alice-01"], "'alice-01' is no name for a key"),
        (["add", "a" * 41], "is no name for a key"),
        (["add", "deploy"], "'deploy' is no name for a key"),
        (["rotate", "bob"], "no key is called 'bob'"),
        (["revoke", "bob"], "no key is called 'bob'"),
        (["revoke", "bob-01"], "no key is called 'bob'"),
        (["revoke", "sk-abc"], "that is a key, not a name"),
        (["list"], ""),
    ],
)
def test_what_is_refused(tmp_path, arguments, sentence):
    answer = _run(*arguments, "--file", str(tmp_path / "keys.yaml"))
    assert sentence in answer.stderr
    assert answer.exit_code == (1 if sentence else 0)
    assert "sk-abc" not in answer.output
    assert list(tmp_path.iterdir()) == []


def test_a_broken_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [\n")
    for arguments in (["add", "alice"], ["list"], ["revoke", "alice"]):
        answer = _run(*arguments, "--file", str(path))
        assert answer.exit_code == 1
        assert answer.stderr.startswith(f"Error: {path}:")
    assert path.read_text() == "keys: [\n"


def test_a_folder_that_is_not_there(tmp_path):
    answer = _run("add", "alice", "--file", str(tmp_path / "no" / "keys.yaml"))
    assert answer.exit_code == 1
    assert "no such folder" in answer.stderr


def test_two_editors_lose_nothing(tmp_path):
    path = tmp_path / "keys.yaml"

    def add(number: int) -> None:
        with keys.edit(path) as entries:
            keys.add(entries, f"user{number}x")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys.load(path)) == 8
