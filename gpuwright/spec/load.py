"""From a node file (and the settings an inventory puts over it) to a `NodeSpec`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpuwright.spec import document, pins, rules, sentence
from gpuwright.spec.document import Document, Mark
from gpuwright.spec.fault import Fault, Refused, dotted, relative
from gpuwright.spec.node import NodeSpec


def node_file(name: str, inventory: Path) -> Path:
    """``dgx-station-gb300`` lies in nodes/ beside the inventory; a name that ends in .yaml is a path from there."""
    if name.endswith((".yaml", ".yml")):
        return inventory.parent / name
    return inventory.parent / "nodes" / f"{name}.yaml"


@dataclass(frozen=True)
class Loaded:
    """A description, and what only its site can still fill in: pins and names. Nothing deploys while that is open."""

    spec: NodeSpec
    unfinished: tuple[Fault, ...]
    wanted: tuple[pins.Wanted, ...]


def load(file: Path, inventory: Path, overrides: dict[str, tuple[Any, Mark]], known: pins.Pins) -> Loaded:
    """Read, override, validate, pin and cross-check one node description.

    `overrides` maps dotted paths to a value and the mark of the inventory line that sets it. Raises Refused with all
    faults that can be told at once; cross-checks need values of the right type, so they come after those.
    """
    source = document.load(file)
    for path, (value, mark) in overrides.items():
        _override(source, path, value, mark)
    return validated(source, inventory, known)


def validated(source: Document, inventory: Path, known: pins.Pins) -> Loaded:
    """The typed description of a document. Raises Refused."""
    try:
        text = json.dumps(source.data, default=_path_as_text, allow_nan=False)
        context = {"written": True, "directory": inventory.parent}
        spec = NodeSpec.model_validate_json(text, strict=True, context=context)
    except ValidationError as error:
        raise Refused(sentence.faults(error, source, NodeSpec)) from None
    wanted = tuple(pins.wanted(spec))
    spec, unpinned = pins.fill(spec, known, source, relative(inventory))
    found = [*rules.check(spec, source), *unpinned]
    if not all(fault.unfinished for fault in found):
        raise Refused(found)
    return Loaded(spec, tuple(found), wanted)


def plain(spec: NodeSpec) -> dict[str, Any]:
    """JSON-plain data that `typed` turns into the same description again."""
    data: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return data


def typed(data: dict[str, Any]) -> NodeSpec:
    """The description that `plain` made data of."""
    return NodeSpec.model_validate_json(json.dumps(data), strict=True)


def _path_as_text(value: object) -> str:
    """Inventories are Python: a `Path` there is a path here. Everything else has been looked at by `_override`."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError


def _override(source: Document, path: str, value: Any, mark: Mark) -> None:
    """Put `value` at a dotted path; mappings on the way are made, lists are not lengthened."""
    try:
        json.dumps(value, default=_path_as_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        kind = type(value).__name__
        sentence_ = (
            f"is no plain data ({kind}); allowed: text, numbers, True, False, None, lists and dictionaries of those"
        )
        raise Refused([Fault(mark.file, mark.line, path, "", sentence_)]) from None
    parts: list[str | int] = []
    place: Any = source.data
    names = path.split(".")
    for position, name in enumerate(names):
        last = position == len(names) - 1
        key: str | int = int(name) if isinstance(place, list) and name.isdecimal() else name
        parts.append(key)
        if isinstance(place, list) and not (isinstance(key, int) and key < len(place)):
            size = f"{dotted(tuple(parts[:-1]))} has {len(place)} entries, counted from 0"
            raise Refused([Fault(mark.file, mark.line, path, "", f"names no entry: {size}")])
        if isinstance(place, dict) and not last and not isinstance(place.get(name), dict | list):
            if place.get(name) is not None:
                raise Refused([Fault(mark.file, mark.line, path, "", f"has no settings below {dotted(tuple(parts))}")])
            place[name] = {}
        if last:
            place[key] = value
        else:
            place = place[key]
    for known in [known for known in source.marks if known[: len(parts)] == tuple(parts)]:
        del source.marks[known]
    source.marks[tuple(parts)] = mark
