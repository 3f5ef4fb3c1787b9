"""What a YAML scalar is here, and where it was written."""

from __future__ import annotations

import pytest

from gpuwright.spec import document


def load(tmp_path, text):
    file = tmp_path / "node.yaml"
    file.write_text(text)
    return document.load(file)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # the words of JSON, and nothing like them
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("True", "True"),
        ("NULL", "NULL"),
        # numbers
        ("0", 0),
        ("-7", -7),
        ("18001", 18001),
        ("0.94", 0.94),
        ("1e3", 1000.0),
        ("1.5e-3", 0.0015),
        # what YAML 1.1 would read as something else
        ("0755", "0755"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("0b11", "0b11"),
        ("22:22", "22:22"),
        ("1_000", "1_000"),
        ("2026-11-29", "2026-11-29"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("+1", "+1"),
        ("1.", "1."),
        ("=", "="),
        ("1111111111111111111111111111111111111111", "1" * 40),
        # quotes make text
        ('"18001"', "18001"),
        ("'true'", "true"),
        ("'null'", "null"),
    ],
)
def test_scalars(written, value, tmp_path):
    found = load(tmp_path, f"key: {written}\n").data["key"]
    assert (found, type(found)) == (value, type(value))


def test_marks_are_the_lines_of_keys_and_entries(tmp_path):
    source = load(tmp_path, "# note\na:\n  b: 1\n\n  c:\n    - x\n    - {d: 2}\n")
    lines = {path: mark.line for path, mark in source.marks.items()}
    assert lines == {
        (): 2,
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c"): 5,
        ("a", "c", 0): 6,
        ("a", "c", 1): 7,
        ("a", "c", 1, "d"): 7,
    }
    assert source.mark(("a", "c", 1, "missing", "deeper")).line == 7


def test_an_alias_repeats_a_value(tmp_path):
    assert load(tmp_path, "a: &x {b: 1}\nc: *x\n").data == {"a": {"b": 1}, "c": {"b": 1}}


def test_unreadable_file_is_a_sentence(tmp_path, monkeypatch):
    file = tmp_path / "node.yaml"
    file.write_text("a: 1\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "read_bytes", refuse)
    with pytest.raises(document.Refused, match="cannot be read: Permission denied"):
        document.load(file)
