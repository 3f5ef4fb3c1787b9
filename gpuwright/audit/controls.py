"""Which controls a node has to meet: those of the roles its node file names."""

from __future__ import annotations

import importlib
from typing import Any

from gpuwright.audit.control import Control
from gpuwright.snapshot import Section
from gpuwright.spec.node import NodeSpec

ROLES = (
    "base",
    "access",
    "firewall",
    "kernel",
    "pcie",
    "memory",
    "nvidia",
    "containers",
    "models",
    "engine",
    "gateway",
)

MOVED = {"GPW-ACCS-019": "GPW-BASE-015", "GPW-ACCS-020": "GPW-BASE-016"}
"""Ids of former reports to what the promise is called now; such an id is never given again."""


def of_role(role: str) -> tuple[Control, ...]:
    """The controls of one role, in the order its ``checks.py`` lists them."""
    controls: tuple[Control, ...] = importlib.import_module(f"roles.{role}.checks").CONTROLS
    return controls


def every() -> tuple[Control, ...]:
    """All controls there are."""
    return tuple(control for role in ROLES for control in of_role(role))


def of_node(spec: NodeSpec) -> tuple[Control, ...]:
    """The controls of a node, role by role. What a role proves does not arise where the role is absent."""
    return tuple(control for role in spec.roles for control in of_role(role))


def sections(controls: tuple[Control, ...]) -> list[Section[Any]]:
    """What a node is asked, each once."""
    found = {section.name: section for control in controls for section in control.observed}
    return [found[name] for name in sorted(found)]
