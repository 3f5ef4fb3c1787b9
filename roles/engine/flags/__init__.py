"""The flags that engines have: tables read from the packages themselves, and what is wrong with a command line.

``vllm-<version>.json`` was written by asking vLLM's own parser (lab/engines/vllm/parser.py), ``sglang-<version>.json`` by
reading SGLang's declarations (lab/engines/sglang/flags.py). Each names its package and the package's sha256. An engine
that refuses a flag dies after the old one was stopped; a table refuses it before any host is contacted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal["vllm", "sglang"]

_TABLES: dict[Kind, str] = {"vllm": "vllm-0.32.0.json", "sglang": "sglang-0.5.23.json"}
_REMAKE: dict[Kind, str] = {"vllm": "lab/engines/vllm/parser.py", "sglang": "lab/engines/sglang/flags.py"}


@dataclass(frozen=True)
class Table:
    """The flags of one version of one engine: name to ``kind`` (switch, value, values, optional), ``type``, ``choices``."""

    engine: str
    version: str
    package: str
    sha256: str
    flags: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.engine} {self.version}"

    def find(self, name: str) -> dict[str, Any] | None:
        """The flag's entry, through its short form too."""
        entry = self.flags.get(name)
        return self.flags[entry["alias"]] if entry and "alias" in entry else entry


@cache
def table(kind: Kind) -> Table:
    """The committed table of an engine."""
    content = json.loads(Path(__file__).with_name(_TABLES[kind]).read_text())
    return Table(**{name: content[name] for name in ("engine", "version", "package", "sha256", "flags")})


def choices(kind: Kind, flag: str) -> tuple[str, ...]:
    """The values an engine allows for a flag; none where it allows any."""
    entry = table(kind).find(flag)
    return tuple(entry.get("choices", ())) if entry else ()


def unknown_flags(kind: Kind, argv: Sequence[str]) -> list[str]:
    """What the engine would refuse of a command line: one sentence each, beginning with the flag; empty when all is well.

    Flags that take a value may have it in the same word (``--name=value``) or in the next. Words that are no flags
    (``serve``, the model's path) are passed over. Values are checked where the engine has a list of them or wants a number.
    """
    return [f"{flag} {wrong}" for flag, wrong in refusals(kind, argv)]


def refusals(kind: Kind, argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The same as pairs: the flag, and what is wrong with it."""
    known = table(kind)
    argv = list(argv)
    if argv[:1] == ["-m"]:  # Python's, in front of the engine's module
        argv = argv[2:]
    words = iter(enumerate(argv))
    for position, word in words:
        if not re.match(r"--?[A-Za-z]", word) or (kind == "vllm" and re.fullmatch(r"-O(=?\d)?", word)):
            continue
        name, has_value, value = word.partition("=")
        if re.search(r"\s", name):
            flag, given = name.split(maxsplit=1)
            yield flag, f"holds a space; write one flag and its value as {flag}={given}{has_value}{value}"
            continue
        entry = known.find(_plain(name, kind))
        if entry is None:
            yield name, _stranger(known, kind, _plain(name, kind))
            continue
        if entry["kind"] == "switch":
            if has_value:
                yield name, f"takes no value in {known}, and {value!r} is given"
            continue
        given_values = [value] if has_value else []
        if not has_value:
            for following in argv[position + 1 :]:
                if following.startswith("--") or (given_values and entry["kind"] != "values"):
                    break
                given_values.append(following)
                next(words)
        if not given_values and entry["kind"] != "optional":
            yield name, f"needs a value in {known}: {name}=…"
        if "." not in name:  # --config.key=value sets one key of a JSON value
            for one in given_values:
                if wrong := _value(known, entry, one):
                    yield name, wrong


def _plain(name: str, kind: Kind) -> str:
    # vLLM's parser takes underscores for dashes, and --json.key for one key of a JSON value. SGLang's does neither.
    return name.split(".")[0].replace("_", "-") if kind == "vllm" and name.startswith("--") else name


def _stranger(known: Table, kind: Kind, name: str) -> str:
    near = get_close_matches(name, [flag for flag in known.flags if flag.startswith("--")], n=3, cutoff=0.7)
    nearest = f"; the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else ""
    return f"is not a flag of {known}{nearest}. For another version, write its table with {_REMAKE[kind]}"


def _value(known: Table, entry: dict[str, Any], value: str) -> str | None:
    allowed = entry.get("choices")
    if allowed and value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        nearest = f" (the nearest is {near[0]})" if near else ""
        return f"cannot be {value!r} in {known}{nearest}; allowed: {', '.join(allowed)}"
    if number := entry.get("type"):
        try:
            {"int": int, "float": float}[number](value)
        except ValueError:
            return f"wants {'a whole number' if number == 'int' else 'a number'} in {known}, and {value!r} is given"
    return None
