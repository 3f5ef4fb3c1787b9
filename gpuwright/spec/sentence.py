"""Turns pydantic's error types into sentences for the person who wrote the value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpuwright.spec.document import Document
from gpuwright.spec.fault import Fault, SettingPath, dotted, shown

_SENTENCES = {
    # pydantic's error type: our sentence, formatted with the error's context
    "bool_type": "must be true or false",
    "int_type": "must be a whole number, without quotes, unit or leading zero",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes or unit",
    "finite_number": "must be a finite number",
    "string_type": "must be text; put it in quotes",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters long",
    "dict_type": "must be a mapping: lines of 'key: value' below it",
    "model_type": "must be a mapping: lines of 'key: value' below it",
    "model_attributes_type": "must be a mapping: lines of 'key: value' below it",
    "tuple_type": "must be a list: [a, b] or lines that start with '- '",
    "list_type": "must be a list: [a, b] or lines that start with '- '",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "missing": "is missing and has no default",
    "value_error": "{error}",
    "none_required": "must be left out",
}

_UNION_MEMBERS = ("str", "int", "float", "bool")
_PLAIN = "must be text, a number, true or false"

_MOST_NAMES = 24
"""A longer list of what is allowed helps nobody; the reference page has it."""

PATTERNS = {
    # a field's pattern: what it means in words
    r"^[0-9a-f]{4}$": "must be four hexadecimal digits in quotes, in lower case, as in '10de' or '0302'",
    r"^[0-9a-f]{40}$": "must be a commit: 40 hexadecimal digits",
    r"^[0-9a-f]{64}$": "must be a sha256: 64 hexadecimal digits",
    r"^\d+\.\d+\.\d+$": "must be a version of three numbers, as in 2.11.7",
    r"^\d{3}\.\d{1,3}(\.\d{2})?$": "must be a driver's release as nvidia-smi shows it, as in 580.95.05",
    r"^(0x[0-9A-Fa-f]{1,8}|\d{1,10})$": "must be a number in quotes, as in '0x11' or '1'",
    r"^[A-Za-z][A-Za-z0-9_]*$": "must be a name of letters, digits and '_'",
    r"^\d+\.\d$": "must be a compute capability in quotes, as in '12.0'",
    r"^\d+([,-]\d+)*$": "must be NUMA nodes in quotes, as in '0' or '0-1' or '0,2'",
    r"^(auto|off|\d+([,-]\d+)*)$": "must be auto, off, or memory nodes in quotes, as in '0' or '0-1,4'",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "must be the name of an environment variable: letters, digits and '_'",
    r"^[^\x00-\x1f]*$": "must be one line of text",
    r"^[^\s@{}\"`]+@[^\s@{}\"`]+$": "must be a mail address",
    r"^https://[^\s{}\"`]+$": "must be an address that starts with https://",
    r"^[\w.:/-]+$": "must be a model name of letters, digits and . : / _ -",
    r"^/[A-Za-z0-9][A-Za-z0-9._-]*$": "must be one path segment of letters, digits and . _ -, as in /glm-5.3-flash",
}

_MOVED = {
    # a setting of former versions: what to do instead
    "access.guard": "is called base.guard now, one setting for every role that it concerns; write it there",
    "firewall.guard": "is called base.guard now, one setting for every role that it concerns; write it there",
    "kernel.baseline_sysctls": "is no switch any more: kernel.deviations leaves the profile's values out and says why, as in "
    "{sysctls: this machine is tuned by its maker}",
    "kernel.unused_modules": "is no list any more: kernel.deviations leaves the profile's out and says why, as in "
    "{modules: this machine's maker chose them}, and kernel.blocked_modules names others",
}


def faults(error: ValidationError, document: Document, model: type[BaseModel]) -> Iterator[Fault]:
    """One fault per error, at the line where the value stands."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # an entry of it is wrong, and has its own fault
        path, allowed = _written_path(detail["loc"], document.data, model)
        value = detail["input"]
        if path and path[-1] in _UNION_MEMBERS and not isinstance(value, dict):
            # one fault per member of a plain union; together they say one thing
            mark = document.mark(path[:-1])
            yield Fault(mark.file, mark.line, dotted(path[:-1]), shown(path[:-1], value, mark.raw), _PLAIN)
            continue
        if detail["type"].startswith("union_tag"):
            path = (*path, str(detail["ctx"]["discriminator"]).strip("'"))
            value = detail["ctx"].get("tag", {})
        key_only = detail["type"] in ("extra_forbidden", "missing", "union_tag_not_found")
        mark = document.mark(path)
        seen = "" if key_only else shown(path, value, mark.raw)
        if _about_a_secret(detail):
            seen = "(hidden)"
        yield Fault(mark.file, mark.line, dotted(path), seen, _sentence(detail, path, allowed))


def _sentence(detail: ErrorDetails, path: SettingPath, allowed: list[str]) -> str:
    kind = detail["type"]
    context: dict[str, Any] = detail.get("ctx", {})
    if kind == "extra_forbidden" and (now := _MOVED.get(dotted(path))):
        return now
    if kind == "extra_forbidden":
        return "is not a setting here" + nearest(str(path[-1]), allowed)
    if kind == "string_pattern_mismatch":
        return PATTERNS.get(context["pattern"], f"must match {context['pattern']}")
    if kind == "union_tag_not_found":
        return "is missing; it says which kind of settings these are"
    sentence = _SENTENCES.get(kind)
    if sentence is None:  # a type that no setting of ours raises; still a sentence, never jargon
        return "is not a value this setting can have"
    sentence = sentence.format(**context)
    choices = re.findall(r"'([^']+)'", str(context.get("expected", context.get("expected_tags", ""))))
    given = context.get("tag", detail["input"])
    if choices and isinstance(given, str):
        sentence += nearest(given, choices)
    if kind in ("bool_type", "int_type") and isinstance(detail["input"], str):
        sentence += _trap(detail["input"])
    return sentence


def _trap(text: str) -> str:
    """What YAML 1.1 would have made of it, where that surprises."""
    if re.fullmatch(r"(?i)yes|no|on|off|y|n", text):
        return f" (not {text})"
    if re.fullmatch(r"\d[\d_]*_\d+", text):
        return " and without '_'"
    return ""


def nearest(seen: str, allowed: list[str]) -> str:
    """``; did you mean 'x'?``, or what is allowed when nothing is near."""
    found = difflib.get_close_matches(seen.lower(), allowed, n=1, cutoff=0.6)
    if found:
        return f"; did you mean '{found[0]}'?"
    return f"; allowed: {', '.join(allowed)}" if 0 < len(allowed) <= _MOST_NAMES else ""


def _about_a_secret(detail: ErrorDetails) -> bool:
    return "secret" in detail["msg"]


def _written_path(loc: SettingPath, data: Any, model: type[BaseModel]) -> tuple[SettingPath, list[str]]:
    """Pydantic's location without what the writer never wrote (union tags), and the settings allowed where it ends."""
    path: list[str | int] = []
    value: Any = data
    allowed: list[str] = []
    kinds: list[Any] = [model]
    for part in loc:
        if part == "[key]":
            continue
        tagged = _member(kinds, part)
        if tagged is not None and not (isinstance(value, dict) and part in value):
            kinds = [tagged]
            continue
        allowed = _settings(kinds)
        path.append(part)
        value = _child(value, part)
        kinds = _below(kinds, part)
    return tuple(path), allowed


def _child(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return None


def _models(kinds: list[Any]) -> list[type[BaseModel]]:
    """The models among the annotations, unions and Annotated unwrapped."""
    found: list[type[BaseModel]] = []
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        elif not isinstance(kind, type):
            found += _models([part for part in get_args(kind) if not isinstance(part, str | int)])
    return found


def _member(kinds: list[Any], part: str | int) -> type[BaseModel] | None:
    """The member of a tagged union that pydantic put into the location."""
    models = _models(kinds)
    for model in models if len(models) > 1 else []:
        for field in model.model_fields.values():
            if part in get_args(field.annotation) and field.default == part:
                return model
    return None


def _settings(kinds: list[Any]) -> list[str]:
    return [field.alias or name for model in _models(kinds) for name, field in model.model_fields.items()]


def _below(kinds: list[Any], part: str | int) -> list[Any]:
    """Annotations of what stands under `part`."""
    below: list[Any] = []
    for kind in kinds:
        arguments = get_args(kind)
        if isinstance(kind, type) and not arguments and issubclass(kind, BaseModel):
            below += [field.annotation for name, field in kind.model_fields.items() if part in (name, field.alias)]
        elif isinstance(part, int) or dict in (kind, getattr(kind, "__origin__", None)):
            below += arguments[-2:] if arguments and arguments[-1] is Ellipsis else arguments[-1:]
        else:
            below += _below(list(arguments), part) if arguments else []
    return below
