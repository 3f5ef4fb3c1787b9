"""``./run proof``: every test, every point of every drill, without a limit; the record goes to docs/proof.md.

Each file of tests is recorded as soon as it has run, with its own date and commit: a run that is cut short leaves what it has
seen. This file never writes what it has not just seen.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "proof.md"
MARK = "<!-- everything below is written by ./run proof -->\n"
HEAD = "| tests | passed | failed | skipped | seconds | date (UTC) | commit |\n| --- | --- | --- | --- | --- | --- | --- |\n"


def targets() -> list[str]:
    """What is run, in this order: all unit tests, every file of lab and of machine tests, the benchmark."""
    files = [path for room in ("lab", "machine") for path in sorted((REPOSITORY / "tests" / room).glob("test_*.py"))]
    return ["tests/unit", *(path.relative_to(REPOSITORY).as_posix() for path in files), "tests/bench"]


def run(target: str) -> str | None:
    """Run one target to its end; returns its row, None when somebody ended it before: half a file is no proof of it."""
    started = time.monotonic()
    print(f"proof: {target}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        # An empty marker expression runs what `./run test` leaves out.
        command = [sys.executable, "-m", "pytest", target, "-m", "", f"--junitxml={report}"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GPUWRIGHT_RECORD": "1"}
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if ended == pytest.ExitCode.INTERRUPTED and not any(len(case) for case in cases):
        return None
    outcomes = Counter(
        next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed") for case in cases
    )
    failed = outcomes["failure"] + outcomes["error"] + (0 if cases else 1)
    commit = _git("rev-parse", "--short=12", "HEAD") + (
        " + changes" if _git("status", "--porcelain", "--", ":!docs") else ""
    )
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}"
    seconds = time.monotonic() - started
    return (
        f"| `{target}` | {outcomes['passed']} | {failed} | {outcomes['skipped']} | {seconds:.0f} | {date} | {commit} |"
    )


def record(row: str) -> None:
    """Put one row into docs/proof.md in place of the same target's row of an earlier run."""
    text = PAGE.read_text() if PAGE.exists() else f"# Proof\n\n{MARK}"
    head, _, tail = text.partition(MARK)
    rows = {line.split("`")[1]: line for line in tail.splitlines() if re.match(r"\| `", line)}
    rows[row.split("`")[1]] = row
    order = {target: number for number, target in enumerate(targets())}
    known = sorted((target for target in rows if target in order), key=lambda target: order[target])
    machine = (
        f"{os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1024**3:.0f} GiB, "
        f"Linux {platform.release()}, {platform.machine()}"
    )
    body = "\n".join(rows[target] for target in known)
    PAGE.write_text(
        f"{head}{MARK}\n## What ran\n\n`./run proof` on {machine}. Each row has the commit it ran on.\n\n{HEAD}{body}\n"
    )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Run everything, or the targets named: ``./run proof tests/lab/test_ring.py``."""
    chosen = sys.argv[1:] or targets()
    if unknown := [target for target in chosen if target not in targets()]:
        sys.exit(f"proof: {', '.join(unknown)}: not one of {', '.join(targets())}")
    bad = 0
    for target in chosen:
        row = run(target)
        if row is None:
            sys.exit(f"proof: {target} was interrupted, and its row stays what it was")
        record(row)
        bad += row.split(" | ")[2] != "0"
    print(f"proof: recorded in {PAGE.relative_to(REPOSITORY)}", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
