"""What is written down about an audit: one document, versioned, without any secret."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from gpuwright.audit.controls import sections
from gpuwright.audit.judge import Result
from gpuwright.snapshot import Section, Snapshot

SCHEMA = 1


@dataclass
class HostReport:
    """One host: when it was looked at, what it answered (as a hash), and every result."""

    host: str
    time: datetime.datetime
    snapshot: Snapshot | None  # None: no connection
    results: list[Result] = field(default_factory=list)

    @property
    def snapshot_sha256(self) -> str | None:
        """Of `Snapshot.to_json`, so that a stored snapshot can be shown to be the one that was judged."""
        return hashlib.sha256(self.snapshot.to_json().encode()).hexdigest() if self.snapshot else None


def version() -> str:
    """Of this tool."""
    try:
        return metadata.version("gpuwright")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"


def document(reports: list[HostReport]) -> dict[str, Any]:
    """JSON-plain. Outcomes stay apart; "error" counts as nothing but an error."""
    return {
        "schema": SCHEMA,
        "tool": {"name": "gpuwright", "version": version()},
        "wording": "technical evidence for the requirements named; no statement of compliance",
        "sections": {section.name: section.script.strip() for section in _sections(reports)},
        "hosts": [
            {
                "host": report.host,
                "time": report.time.astimezone(datetime.UTC).isoformat(timespec="seconds"),
                "snapshot_sha256": report.snapshot_sha256,
                "outcomes": dict(Counter(result.outcome.value for result in report.results)),
                "results": [_entry(result) for result in report.results],
            }
            for report in reports
        ],
    }


def _sections(reports: list[HostReport]) -> list[Section[Any]]:
    return sections(tuple({r.control.id: r.control for report in reports for r in report.results}.values()))


def _entry(result: Result) -> dict[str, Any]:
    control, verdict = result.control, result.verdict
    return {
        "id": control.id,
        "title": control.title,
        "severity": control.severity,
        "outcome": result.outcome.value,
        "expected": verdict.expected,
        "actual": verdict.actual,
        "observed": [section.name for section in control.observed],
        "reason": control.reason,
        "remedy": control.remedy,
        "risk": control.risk,
        "references": {
            "subject": control.references.subject,
            "inferred": control.references.inferred,
            "ids": control.references.ids,
        }
        if control.references.ids
        else None,
    }


def write(path: Path, reports: list[HostReport]) -> None:
    """The document as a file: the old one or the new one, never half of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(document(reports), indent=2, ensure_ascii=False) + "\n")
    new.replace(path)
