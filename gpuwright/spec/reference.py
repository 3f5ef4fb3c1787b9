"""docs/settings.md, made from the models: ``python -m gpuwright.spec.reference > docs/settings.md``.

What a person may write stands in one place, the models; this page says it again in the order of a node file.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gpuwright.spec.base import Commit, ControllerPath, Digest, Image, Name, NodePath, Seconds, SecretRef, Sha256, Size
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.sentence import PATTERNS

_KINDS: tuple[tuple[Any, str], ...] = (
    (Size, "size"),
    (Seconds, "duration"),
    (Name, "name"),
    (Digest, "digest"),
    (Commit, "commit"),
    (Sha256, "sha256"),
    (NodePath, "path on the node"),
    (ControllerPath, "path on the controller"),
)

_HEAD = """\
# Settings

Every setting of a node file. Written by `python -m gpuwright.spec.reference > docs/settings.md`; a test compares it with the
models that read node files. How a node file is made: [node-files.md](node-files.md).

The path in the first column is what `set:` in an inventory takes. `<name>` is a name that you choose, `<n>` a position in a
list, counted from 0. A setting without a default is required where its part is written at all.

- **size**: a number and a binary unit (B, KiB, MiB, GiB, TiB), as in `64 GiB`. **duration**: a whole number and `s`, `min`
  or `h`, as in `30 min`. A bare number is refused.
- **name**: 1 to 31 of a-z, 0-9 and `-`, starting with a letter. **digest**: `sha256:` and 64 hexadecimal digits. **commit**: 40 of
  them. **sha256**: 64 of them.
- **path on the controller**: relative to the inventory's folder, or absolute. **path on the node**: absolute, without spaces,
  quotes, `$`, `%`, `.` and `..`.
- **secret reference**: `{env: NAME}`, `{file: path}` (on the controller) or `{command: line}` (a shell line there); never the
  value.
- Words that YAML 1.1 takes for something else stay text: `no`, `22:22`, `0755`. Booleans are `true` and `false`.

Sources in brackets: seeds 1 and 2 are field reports, seed 3 is a sizing page (calculated, not measured); gpu-node.md and security.md
are the project's research notes. They are named for whoever asks, and are no part of this repository.
"""


@dataclass
class Table:
    """One part of the page: a heading, the part's own docstring, and a row per setting."""

    heading: str
    intro: str
    rows: list[tuple[str, str, str, str, str]] = field(default_factory=list)


def page() -> str:
    """The whole of docs/settings.md."""
    text = [_HEAD]
    for table in _tables():
        text += [f"## {table.heading}", "", table.intro, ""]
        text += ["| setting | type | default | allowed | what it is, and why |", "| --- | --- | --- | --- | --- |"]
        text += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table.rows]
        text.append("")
    return "\n".join(text)


def _tables() -> Iterator[Table]:
    """The top of a node file, then one table per part of it, each followed by its alternatives."""
    top = Table("The top", _intro(NodeSpec))
    parts: list[Table] = []
    for name, info in NodeSpec.model_fields.items():
        models = _models(info.annotation)
        if not models:
            top.rows.append(_row(info.alias or name, info))
            continue
        part = Table(f"`{name}`", _intro(models[0]))
        parts.append(part)
        parts += _fill(part, models[0], name)
    yield from (top, *parts)


def _fill(table: Table, model: type[BaseModel], prefix: str) -> list[Table]:
    """Rows for every setting of `model`; returns a table for each alternative (engine kinds, TLS modes) in it."""
    alternatives: list[Table] = []
    for name, info in model.model_fields.items():
        path = f"{prefix}.{info.alias or name}"
        models = [found for found in _models(info.annotation) if found is not SecretRef]
        if len(models) != 1 or info.description:
            table.rows.append(_row(path, info))
        below = path + _step(info.annotation)
        if len(models) == 1:
            alternatives += _fill(table, models[0], below)
        for member in models if len(models) > 1 else ():
            key = str(info.discriminator)
            value = get_args(member.model_fields[key].annotation)[0]
            own = Table(f"`{below}` with `{key}: {value}`", _intro(member))
            rest = _fill(own, member, below)
            # which alternative it is must be written, whatever the model's own default
            own.rows[0] = (own.rows[0][0], "word", "required", f"`{value}`", "which of them these settings are")
            alternatives += [own, *rest]
    return alternatives


def _row(path: str, info: FieldInfo) -> tuple[str, str, str, str, str]:
    why = (info.description or "").replace("<", "&lt;")
    return (f"`{path}`", _words(_own(info)), _default(info), _limits(_own(info)).replace("<", "&lt;") or "-", why)


def _intro(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").replace("``", "`")


def _models(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and not get_args(kind):
        return [kind] if issubclass(kind, BaseModel) else []
    return [model for part in get_args(kind) if not isinstance(part, str | int) for model in _models(part)]


def _step(kind: Any) -> str:
    """What stands in a path between a setting and the settings below it."""
    return {dict: ".<name>", tuple: ".<n>"}.get(get_origin(kind) or kind, "")


def _own(info: FieldInfo) -> Any:
    """The annotation as it was written, constraints included; without the None of an optional setting."""
    kind: Any = info.annotation
    inner = [part for part in get_args(kind) if part is not type(None)]
    if type(None) in get_args(kind) and len(inner) == 1:
        kind = inner[0]
    return Annotated[(kind, *info.metadata)] if info.metadata else kind


def _words(kind: Any) -> str:
    marks = list(getattr(kind, "__metadata__", ()))
    for known, words in _KINDS:
        if known.__metadata__[0] in marks:
            return words
    if get_origin(kind) is Annotated:
        return _words(get_args(kind)[0])
    if kind is Image:
        return "image"
    if kind is SecretRef:
        return "secret reference"
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_words(arguments[0])}"
        return f"list of {len(arguments)}: {_words(arguments[0])}"
    if origin is dict:
        return (
            f"mapping of {_words(arguments[0])} to {_words(arguments[1])}" if not _models(kind) else "mapping by name"
        )
    if len(_models(kind)) > 1:
        return "one of those below"
    if origin is Literal:
        return "word" if isinstance(arguments[0], str) else "whole number"
    if arguments:
        return ", ".join(_words(part) for part in arguments)
    return {str: "text", int: "whole number", float: "number", bool: "true, false"}.get(kind, "anything JSON has")


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True) if info.default_factory is None else info.default_factory()  # type: ignore[call-arg]
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    words = _words(_own(info))
    if words == "size":
        return f"`{_scaled(value, (('TiB', 1024**4), ('GiB', 1024**3), ('MiB', 1024**2), ('KiB', 1024), ('B', 1)))}`"
    if words == "duration":
        return f"`{_scaled(value, (('h', 3600), ('min', 60), ('s', 1)))}`"
    if isinstance(value, BaseModel):
        return ", ".join(f"`{name}: {given}`" for name, given in value)
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != {} else "`{}`"


def _scaled(value: int, units: tuple[tuple[str, int], ...]) -> str:
    name, factor = next(unit for unit in units if value % unit[1] == 0)
    return f"{value // factor} {name}"


def _limits(kind: Any) -> str:
    """What a value must be beyond its type; a validator is asked for the sentence it has for a wrong value."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        if any(known.__metadata__[0] in marks for known, _ in _KINDS):
            return ""  # said once, at the head of the page
        return "; ".join(filter(None, [_limits(inner), _range(_flat(marks)), *map(_rule, _flat(marks))]))
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(kind) in (tuple, dict):
        return "; ".join(dict.fromkeys(filter(None, (_limits(part) for part in arguments if part is not Ellipsis))))
    return ""


def _flat(marks: list[Any]) -> list[Any]:
    """Constraints, those inside a ``Field(…)`` included."""
    return [mark for outer in marks for mark in (outer.metadata if isinstance(outer, FieldInfo) else [outer])]


def _range(marks: list[Any]) -> str:
    found = {name: getattr(mark, name) for mark in marks for name in ("gt", "ge", "lt", "le") if hasattr(mark, name)}
    if "ge" in found and "le" in found:
        return f"{found['ge']} to {found['le']}"
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    return ", ".join(f"{words[name]} {value}" for name, value in found.items())


def _rule(mark: Any) -> str:
    if pattern := getattr(mark, "pattern", None):
        return PATTERNS.get(pattern, f"matches `{pattern}`").removeprefix("must be ")
    if getattr(mark, "min_length", None):
        return f"at least {mark.min_length} {'entry' if mark.min_length == 1 else 'entries'}"
    if isinstance(mark, AfterValidator | BeforeValidator):
        try:
            TypeAdapter(Annotated[str, mark]).validate_python("\0")
        except ValidationError as error:
            return str(error.errors()[0].get("ctx", {}).get("error", ""))
        except AttributeError:
            return ""  # a validator of mappings: its settings say what they take
    return ""


if __name__ == "__main__":
    print(page(), end="")
