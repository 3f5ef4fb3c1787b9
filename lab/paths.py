"""Where the lab keeps its things."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path("/var/cache/gpuwright-lab")


def state() -> Path:
    """The lab's directory; everything in it goes with the lab. ``GPUWRIGHT_LAB_DIR`` makes a second lab."""
    return Path(os.environ.get("GPUWRIGHT_LAB_DIR") or "/var/lib/gpuwright-lab").absolute()


def make_private(directory: Path) -> Path:
    """Create a directory only its owner may enter."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def write_json(path: Path, content: object) -> None:
    """Replace ``path`` in one step, so that a reader never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` against other runs of the lab; waits for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
