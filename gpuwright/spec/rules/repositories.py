"""Cross-checks on package repositories of others, whichever role they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpuwright import repository
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def a_key_is_the_one_named(spec: NodeSpec) -> Iterator[Found]:
    for path, key, fingerprint in _keys(spec):
        if key is None or not Path(key).is_file():
            continue  # whether there is a file is another rule's
        try:
            repository.read_key(key, fingerprint)
        except repository.BadKey as error:
            yield Found(path, str(error).removeprefix(f"{key} "))


def _keys(spec: NodeSpec) -> Iterator[tuple[tuple[str, ...], str | None, str | None]]:
    """Where in the node file, the file on the controller, the fingerprint asked for."""
    if spec.nvidia:
        yield ("nvidia", "repository_key"), spec.nvidia.repository_key, spec.nvidia.fingerprint
    if spec.containers:
        toolkit = spec.containers.toolkit
        yield ("containers", "repository_key"), spec.containers.repository_key, None
        yield ("containers", "toolkit", "repository_key"), toolkit.repository_key, toolkit.repository_fingerprint


RULES = (a_key_is_the_one_named,)
