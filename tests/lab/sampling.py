"""Which tests of a room `./run test` runs: a sample by name, everything else is marked `proof`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def mark(items: Sequence[pytest.Item], room: str, sample: dict[str, list[str]]) -> None:
    """Mark as `proof` what is not sampled; a sampled name that no test has would silently run nothing.

    + items: what pytest collected
    + room: folder below tests/ whose tests are meant
    + sample: names of tests by file
    """
    seen: dict[str, set[str]] = {}
    for item in items:
        if item.path.parent.name != room:
            continue
        name = item.originalname if isinstance(item, pytest.Function) else item.name
        seen.setdefault(item.path.name, set()).add(name)
        if name not in sample.get(item.path.name, ()):
            item.add_marker(pytest.mark.proof)
    for file, names in seen.items():
        unknown = set(sample.get(file, ())) - names
        # A selection on the command line (file::test) collects less than the file has.
        if unknown and len(names) > 1:
            raise pytest.UsageError(f"tests/{room}/conftest.py samples {unknown}, which {file} does not have")
