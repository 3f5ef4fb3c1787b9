"""docs/proof.md names every lab test, and keeps the line that `./run proof` writes below."""

from pathlib import Path

from lab import proof

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = (REPOSITORY / "docs" / "proof.md").read_text()


def test_the_mark_of_the_record_stands_once():
    assert PAGE.count(proof.MARK) == 1


def test_every_file_of_tests_on_hosts_is_named():
    head = PAGE.partition(proof.MARK)[0]
    files = [*(REPOSITORY / "tests" / "lab").glob("test_*.py"), *(REPOSITORY / "tests" / "bench").glob("test_*.py")]
    assert [file.name for file in files if str(file.relative_to(REPOSITORY)) not in head] == []
