"""Every cross-check and every row of the compatibility table is tripped by a file in broken/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuwright.spec import document, rules
from gpuwright.spec.fault import Refused
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules import compatibility

BROKEN = Path(__file__).parent / "broken"


def described():
    """The broken files whose single values are all of the right type."""
    for file in sorted(BROKEN.glob("*.yaml")):
        try:
            data = document.load(file).data
            yield NodeSpec.model_validate_json(json.dumps(data), strict=True, context={"directory": BROKEN})
        except (Refused, ValueError):
            continue


@pytest.fixture(scope="module")
def specs():
    return list(described())


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rule(rule, specs):
    assert any(list(rule(spec)) for spec in specs)


@pytest.mark.parametrize("row", compatibility.TABLE, ids=lambda row: row.name)
def test_row(row, specs):
    assert row.source
    assert any(
        row.refuses(compatibility.Pairing(spec.hardware, engine, spec.models.items[engine.model]))
        for spec in specs
        if spec.engine and spec.models
        for engine in spec.engine.engines.values()
        if engine.model in spec.models.items
    )
