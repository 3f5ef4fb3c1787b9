"""``./run proof``: every test, every point of every drill, without a limit; the record goes to docs/proof.md.

An issue is done on a recorded run of its part, so this file never writes what it has not just seen.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

# What is run, in this order. A suite that fails does not keep the next one from being recorded.
SUITES = {
    "unit": ["tests/unit"],
    "lab": ["tests/lab"],
    "bench": ["tests/bench"],
}


@dataclass
class Outcome:
    """One suite's result: outcome per test, in order of execution, and wall-clock seconds."""

    tests: list[tuple[str, str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def counts(self) -> Counter[str]:
        """Tests per outcome."""
        return Counter(outcome for _, outcome, _ in self.tests)


def _run(suite: str, paths: list[str], directory: Path, arguments: list[str]) -> Outcome:
    report = directory / f"{suite}.xml"
    started = time.monotonic()
    print(f"proof: {suite}", file=sys.stderr, flush=True)
    # An empty marker expression runs what `./run test` leaves out.
    command = [sys.executable, "-m", "pytest", *paths, "-m", "", f"--junitxml={report}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GPUWRIGHT_RECORD": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    outcome = Outcome(seconds=time.monotonic() - started)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            outcome.tests.append((name, bad, float(case.get("time", 0))))
    return outcome


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


def record(outcomes: dict[str, Outcome]) -> str:
    """The run as Markdown: date, commit, machine, a line per suite, every lab test with its outcome and seconds."""
    dirty = " with uncommitted changes" if _git("status", "--porcelain") else ""
    lines = [
        "## The last run",
        "",
        f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        f"- commit: {_git('rev-parse', '--short=12', 'HEAD')}{dirty}",
        f"- machine: {os.cpu_count()} cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 1024**3} GiB, "
        f"Linux {platform.release()}, {platform.machine()}",
        "- command: `./run proof`",
        "",
        "| suite | passed | failed | skipped | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for suite, outcome in outcomes.items():
        counts = outcome.counts
        failed = counts["failure"] + counts["error"]
        lines.append(f"| {suite} | {counts['passed']} | {failed} | {counts['skipped']} | {outcome.seconds:.0f} |")
    for suite in outcomes:
        if suite == "unit":
            continue
        lines += ["", f"### {suite}", "", "| test | outcome | seconds |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {bad} | {seconds:.1f} |" for name, bad, seconds in outcomes[suite].tests]
    return "\n".join(lines) + "\n"


MARK = "<!-- everything below is written by ./run proof -->\n"


def main() -> None:
    """Run all suites; further arguments go to pytest (``-k engine`` records nothing, it is not the whole run)."""
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        outcomes = {suite: _run(suite, paths, Path(directory), arguments) for suite, paths in SUITES.items()}
    page = REPOSITORY / "docs" / "proof.md"
    if arguments:
        print(record(outcomes))
    else:
        head = page.read_text().partition(MARK)[0] if page.exists() else "# Proof\n\n"
        page.write_text(f"{head}{MARK}\n{record(outcomes)}")
        print(f"proof: recorded in {page.relative_to(REPOSITORY)}", file=sys.stderr)
    bad = sum(outcome.counts["failure"] + outcome.counts["error"] for outcome in outcomes.values())
    empty = [suite for suite, outcome in outcomes.items() if not outcome.tests]
    sys.exit(1 if bad or empty else 0)


if __name__ == "__main__":
    main()
