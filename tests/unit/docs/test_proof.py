"""docs/proof.md names every lab test, and keeps the line that `./run proof` writes below."""

from pathlib import Path

import pytest

from lab import proof

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs" / "proof.md").read_text()


def test_the_mark_of_the_record_stands_once():
    assert PAGE.count(proof.MARK) == 1


def test_every_file_of_tests_on_hosts_is_named():
    head = PAGE.partition(proof.MARK)[0]
    files = [*(REPOSITORY / "tests" / "lab").glob("test_*.py"), *(REPOSITORY / "tests" / "bench").glob("test_*.py")]
    assert [file.name for file in files if str(file.relative_to(REPOSITORY)) not in head] == []


@pytest.mark.parametrize(
    "second, row", [("pass", "| 2 | 0 | 0 |"), ("assert False", "| 1 | 1 | 0 |"), ("raise KeyboardInterrupt", None)]
)
def test_a_run_that_was_interrupted_has_no_row(tmp_path, second, row):
    """What passed until then is not the file."""
    file = tmp_path / "test_two.py"
    file.write_text(f"def test_one():\n    pass\n\ndef test_two():\n    {second}\n")
    said = proof.run(str(file))
    assert (row in said) if row and said else said is row


def test_a_file_that_cannot_be_read_has_a_red_row(tmp_path):
    file = tmp_path / "test_slip.py"
    file.write_text("import nowhere\n")
    assert "| 0 | 1 | 0 |" in (proof.run(str(file)) or "")
