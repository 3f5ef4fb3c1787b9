"""Every control of every node, on one snapshot per node."""

import pytest

from gpuwright.audit.control import Outcome


def test_control(node, control, result):
    if result.outcome in (Outcome.NOT_APPLICABLE, Outcome.MANUAL, Outcome.WAIVED):
        pytest.skip(f"{result.outcome.value}: {result.verdict.actual}")
    if result.outcome is Outcome.FAIL:
        pytest.fail(
            f"{node.name}: {control.id} {control.title}\n"
            f"  seen:     {result.verdict.actual}\n"
            f"  expected: {result.verdict.expected}\n"
            f"  why:      {control.reason}\n"
            f"  do:       {control.remedy}\n"
            f"  risk:     {control.risk}",
            pytrace=False,
        )
    assert result.outcome is Outcome.PASS
