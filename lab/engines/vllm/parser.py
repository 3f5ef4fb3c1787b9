"""Ask vLLM's own parser, where vLLM is installed: does it accept these command lines, and which flags does it have.

    python parser.py check < lines.json      # [["serve", "/model", …], …] -> [null or the parser's sentence, …]
    python parser.py table WHEEL             # roles/engine/flags/vllm-<version>.json; WHEEL is the file it came from

LAB ONLY. Runs inside the image or environment that requirements.lock describes, never on a node and never in the
repository's own environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

Action = argparse.Action


def _parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    return parser


def _names_of_parsers() -> dict[str, list[str]]:
    """Choices that vLLM checks after parsing, against its registries."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return {
        "--tool-call-parser": sorted(ToolParserManager.list_registered()),
        "--reasoning-parser": sorted(ReasoningParserManager.list_registered()),
    }


def _refusal(parser: argparse.ArgumentParser, line: list[str], registries: dict[str, list[str]]) -> str | None:
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            # `vllm serve` strips its own name before this parser sees the rest.
            arguments = parser.parse_args(line[1:] if line[:1] == ["serve"] else line)
        validate_parsed_serve_args(arguments)
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2] or "refused"
    except (TypeError, ValueError, KeyError) as error:
        return str(error)
    for flag, known in registries.items():
        name = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if name and name not in known:
            return f"argument {flag}: invalid choice: {name!r} (choose from {', '.join(known)})"
    return None


def _described(action: Action) -> dict[str, Any]:
    """``kind``: switch (no value), value (one), values (one or more), optional (one or none); ``type`` of numbers."""
    if action.nargs == 0:
        kind = "switch"
    else:
        kind = {"+": "values", "*": "values", "?": "optional"}.get(str(action.nargs), "value")
    described: dict[str, Any] = {"kind": kind}
    if action.type in (int, float):
        described["type"] = action.type.__name__
    if action.choices is not None:
        described["choices"] = sorted(str(choice) for choice in action.choices)
    return described


def table(wheel: Path) -> dict[str, Any]:
    """The flag table of this installation; ``wheel`` is named in it with its digest."""
    from vllm.version import __version__

    registries = _names_of_parsers()
    flags: dict[str, dict[str, Any]] = {}
    for action in _parser()._actions:
        long = [name for name in action.option_strings if name.startswith("--")]
        for name in long:
            described = _described(action)
            if name in registries:
                described["choices"] = registries[name]
            flags[name] = described
        for name in action.option_strings:
            if name not in long and long:
                flags[name] = {"alias": long[0]}
    return {
        "engine": "vLLM",
        "version": __version__,
        "package": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "made_by": "lab/engines/vllm/parser.py, asking the package's own argument parser",
        "flags": dict(sorted(flags.items())),
    }


def written(content: dict[str, Any]) -> str:
    """JSON with one flag on a line, so that a diff between versions reads like a change log."""
    flags = content["flags"]
    head = json.dumps({name: value for name, value in content.items() if name != "flags"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in flags.items())
    return f'{head[:-2]},\n "flags": {{\n{lines}\n }}\n}}\n'


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["check"]:
        parser, registries = _parser(), _names_of_parsers()
        json.dump([_refusal(parser, line, registries) for line in json.load(sys.stdin)], sys.stdout)
        return 0
    if arguments[:1] == ["table"] and len(arguments) == 2:
        sys.stdout.write(written(table(Path(arguments[1]))))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
