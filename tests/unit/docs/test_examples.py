"""What docs/node-files.md shows is accepted as it stands there: the whole file, and every part put over it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwright.spec import document, load, pins

REPOSITORY = Path(__file__).resolve().parents[3]
BLOCKS = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "node-files.md").read_text(), re.DOTALL)


def over(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: over(below.get(key), value) for key, value in above.items()}}


def read(text: str, directory: Path) -> dict[str, Any]:
    file = directory / "part.yaml"
    file.write_text(text)
    return document.load(file).data


def test_there_is_a_whole_file_and_parts():
    assert BLOCKS[0].startswith("gpuwright: 1")
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_it_is_accepted(block, tmp_path):
    data = over(read(BLOCKS[0], tmp_path), read(block, tmp_path))
    file = tmp_path / "nodes" / "chat.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    loaded = load.load(file, tmp_path / "prod.py", {}, pins.Pins(pins.Lock(), tmp_path / "pins.lock.yaml"))
    assert all(fault.unfinished for fault in loaded.unfinished)
    assert loaded.spec.engine is not None and "chat" in loaded.spec.engine.engines
