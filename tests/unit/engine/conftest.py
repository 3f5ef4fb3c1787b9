"""The fixture of the engine scripts' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_node import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "node")
    yield node
    node.close()
