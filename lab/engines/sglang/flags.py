"""Write SGLang's flag table from its wheel, without importing it: roles/engine/flags/sglang-<version>.json.

    pip download --no-deps sglang && python lab/engines/sglang/flags.py sglang-*.whl > roles/engine/flags/sglang-….json

SGLang has no build for a CPU that the lab could run, so its parser cannot be asked. Its flags are declared as annotated
fields (``tp_size: A[int, Arg(help=…, aliases=[…])]``) in ``sglang/srt/arg_groups/fields/``, from which
``arg_utils.add_cli_args_from_dataclass`` makes arguments, and a few by hand in ``server_args.py``. Both are read as
syntax trees here, by the same rules. A list of choices that cannot be computed that way is left out and named on
standard error: the flag is then known, and its value is not checked.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = "sglang/srt/"
# Where the constants live that lists of choices are made of.
_CONSTANTS = (
    "arg_groups/choices.py",
    "utils/common.py",
    "model_executor/cuda_graph_config.py",
    "function_call/parser_names.py",
    "parser/reasoning_parser_names.py",
)
# Computed by functions when arguments are parsed: what those functions return.
_COMPUTED = {
    "--reasoning-parser": "REASONING_PARSER_NAMES",
    "--tool-call-parser": "TOOL_CALL_PARSER_NAMES",
    "--sampling-backend": "SAMPLING_BACKEND_CHOICES",
}

Flags = dict[str, dict[str, Any]]


class _Unknown(Exception):
    """An expression that needs the program to run."""


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_value(element, known) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key, known): _value(value, known) for key, value in zip(keys, values, strict=True) if key}
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left, known) + _value(right, known)
        case ast.Call(func=ast.Name(id="set" | "list" | "frozenset" | "tuple"), args=[argument]):
            return _value(argument, known)
        case ast.Name() | ast.Attribute() if ast.unparse(node) in known:
            return known[ast.unparse(node)]
    raise _Unknown(ast.unparse(node))


def _assignments(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.expr, str]]:
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield prefix + name, value, prefix
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield prefix + name, value, prefix
            case ast.ClassDef(name=name, body=inner):
                yield from _assignments(inner, f"{prefix}{name}.")


def _constants(trees: list[ast.Module]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for tree in trees:
        for name, value, scope in _assignments(tree.body):
            inside = {key.removeprefix(scope): one for key, one in known.items() if key.startswith(scope)}
            try:
                known[name] = _value(value, known | inside)
            except (_Unknown, TypeError):
                continue
    return known


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {one.arg: one.value for one in call.keywords if one.arg}


def _choices(flag: str, node: ast.expr, known: dict[str, Any]) -> dict[str, Any]:
    try:
        values = _value(node, known)
    except _Unknown as unknown:
        print(f"{flag}: choices are computed ({unknown}); its value will not be checked", file=sys.stderr)
        return {}
    return {"choices": sorted(str(value) for value in values)}


def _field(name: str, annotation: ast.expr, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The flags of ``name: A[type, "help"]`` or ``A[type, Arg(…)]``, as arg_utils.add_cli_args_from_dataclass adds them."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="A" | "Annotated"), slice=ast.Tuple(elts=[kind, *metadata])):
            pass
        case _:
            return
    given: dict[str, ast.expr] | None = None
    for one in metadata:
        match one:
            case ast.Call(func=ast.Name(id="Arg")):
                given = _keywords(one)
                break
            case ast.Constant(value=str()):
                given = {}
                break
    if given is None or ("no_cli" in given and _value(given["no_cli"], known)):
        return
    first = _value(given["cli_name"], known) if "cli_name" in given else "--" + name.replace("_", "-")
    names = [first, *(_value(given["aliases"], known) if "aliases" in given else [])]
    described, negated = _described(first, kind, given, known)
    for one in names:
        yield one, described
        if negated:
            yield one.replace("--", "--no-", 1), described


def _described(
    flag: str, kind: ast.expr, given: dict[str, ast.expr], known: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    text = re.sub(r"^Optional\[(.*)\]$", r"\1", ast.unparse(kind))
    text = re.sub(r" \| None$", "", text)
    action = ast.unparse(given["action"]) if "action" in given else ""
    nargs = _value(given["nargs"], known) if "nargs" in given else None
    described: dict[str, Any] = {"kind": {"+": "values", "*": "values", "?": "optional"}.get(str(nargs), "value")}
    if action.endswith("BooleanOptionalAction"):
        return {"kind": "switch"}, True
    if action:
        return {"kind": "values" if "Path" in action else "switch"}, False
    if text == "bool":
        return {"kind": "switch"}, False
    if re.match(r"(List|list)\[", text) and "type_parser" not in given:
        described["kind"] = "values"
    if text in ("int", "float") and "type_parser" not in given:
        described["type"] = text
    if "choices" in given:
        described |= _choices(flag, given["choices"], known)
    elif isinstance(kind, ast.Subscript) and (literal := re.search(r"Literal(\[.*?\])", ast.unparse(kind))):
        described |= _choices(flag, ast.parse(literal[1], mode="eval").body, known)
    return described, False


def _by_hand(tree: ast.Module, known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``parser.add_argument("--flag", …)`` of ServerArgs.add_cli_args."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
                given = _keywords(node)
                action = ast.unparse(given["action"]) if "action" in given else ""
                switch = action.endswith(("store_true'", "StoreTrueAction"))
                described: dict[str, Any] = {"kind": "switch" if switch else "value"}
                if flag in _COMPUTED:
                    values = known[_COMPUTED[flag]]
                    described["choices"] = sorted([*values, *(["auto"] if flag.endswith("-parser") else [])])
                elif "choices" in given:
                    described |= _choices(flag, given["choices"], known)
                yield flag, described


def table(wheel: Path) -> dict[str, Any]:
    """The flag table of the SGLang in ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:

        def tree(name: str) -> ast.Module:
            return ast.parse(archive.read(_ROOT + name))

        known = _constants([tree(name) for name in _CONSTANTS])
        fields = sorted(name for name in archive.namelist() if name.startswith(f"{_ROOT}arg_groups/fields/"))
        flags: Flags = {}
        for name in fields:
            for statement in ast.walk(tree(name.removeprefix(_ROOT))):
                match statement:
                    case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation):
                        flags.update(_field(field, annotation, known))
        flags.update(_by_hand(tree("server_args.py"), known))
    return {
        "engine": "SGLang",
        "version": wheel.name.split("-")[1],
        "package": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "made_by": "lab/engines/sglang/flags.py, reading the package's declarations without running them",
        "flags": dict(sorted(flags.items())),
    }


def written(content: dict[str, Any]) -> str:
    """JSON with one flag on a line, so that a diff between versions reads like a change log."""
    head = json.dumps({name: value for name, value in content.items() if name != "flags"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content["flags"].items())
    return f'{head[:-2]},\n "flags": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".whl"):
        sys.exit(__doc__)
    sys.stdout.write(written(table(Path(sys.argv[1]))))
