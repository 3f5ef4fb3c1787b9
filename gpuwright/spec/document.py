"""Reads a YAML file into plain data and remembers where every value stands.

Only what a node file needs is read: one document of mappings, lists and scalars. Scalars follow the JSON schema of
YAML 1.2: ``true``, ``false``, ``null``, numbers without leading zeros; everything else is text. So ``no``, ``22:22``,
``0755`` and ``2026-11-29`` stay what was written, where YAML 1.1 (PyYAML's default) makes a boolean, two numbers and a
date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpuwright.spec.fault import Fault, Refused, SettingPath, dotted, relative

MAX_BYTES = 1024**2
MAX_DEPTH = 32
MAX_VALUES = 20_000

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FRACTION = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Mark:
    """Where a value was written, and as what."""

    file: str
    line: int
    raw: str | None = None


@dataclass
class Document:
    """Plain data with the mark of every value, by path; a key's own mark where the value is a mapping or a list."""

    file: str
    data: dict[str, Any]
    marks: dict[SettingPath, Mark] = field(default_factory=dict)

    def mark(self, path: SettingPath) -> Mark:
        """The mark of a path, or of the nearest part above it that was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.marks:
                found = self.marks[path[:length]]
                return found if length == len(path) else Mark(found.file, found.line)
        return Mark(self.file, 0)


class _Loader(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer):
    """PyYAML up to the node graph; which type a scalar has is decided here, not by YAML 1.1."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        self.depth = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return "plain" if kind is yaml.ScalarNode and implicit[0] else "untagged"

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"is nested more than {MAX_DEPTH} levels deep", problem_mark=mark)

    def ascend_resolver(self) -> None:
        self.depth -= 1


def load(file: Path) -> Document:
    """Read one node file. Raises Refused with every fault that can be told."""
    name = relative(file)
    root = _compose(name, _text(name, file))
    document = Document(name, {})
    builder = _Builder(document)
    data = builder.value(root, ())
    if builder.faults:
        raise Refused(builder.faults)
    if not isinstance(data, dict):
        raise Refused([Fault(name, root.start_mark.line + 1, "", "", _NOT_A_MAPPING)])
    document.data = data
    return document


_NOT_A_MAPPING = "is not a node file; it starts with keys such as 'gpuwright: 1' and 'summary: …'"


def _text(name: str, file: Path) -> str:
    """The file's text, or the one reason why it is not text that a node file can be."""

    def refuse(sentence: str, line: int = 0) -> Refused:
        return Refused([Fault(name, line, "", "", sentence)])

    if not file.exists():
        raise refuse("does not exist")
    if not file.is_file():
        raise refuse("is not a file")
    if file.stat().st_size > MAX_BYTES:
        raise refuse(f"is larger than 1 MiB ({file.stat().st_size} bytes); a node file is a few KiB")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise refuse("starts with a byte order mark; save it as UTF-8 without one", 1)
    if b"\0" in raw:
        raise refuse("contains a NUL byte; it is not a text file", raw[: raw.index(b"\0")].count(b"\n") + 1)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise refuse("is not UTF-8; save it as UTF-8", raw[: error.start].count(b"\n") + 1) from None
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r" *\t", line):
            raise refuse("is indented with a tab; indent with spaces", number)
    return text


def _compose(name: str, text: str) -> yaml.Node:
    try:
        root = _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        sentence = f"contains the control character U+{error.character:04X}"
        raise Refused([Fault(name, line, "", "", sentence)]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Refused([Fault(name, line, "", "", _syntax(error))]) from None
    if root is None:
        raise Refused([Fault(name, 1, "", "", "is empty; it starts with 'gpuwright: 1'")])
    return root


_SYNTAX = (
    # PyYAML's words, and what they mean to somebody who edits a node file
    (r"nested more than", "{0}"),
    (r"another document", "holds a second document ('---'); one node file describes one kind of machine"),
    (r"undefined alias", "uses an alias (*name) whose anchor (&name) does not stand above it"),
    (r"<block end>|not allowed here", "does not fit the lines above it: check indentation, ':' and quotes"),
    (r"expected ':'", "is not 'key: value'; is the ':' or the space behind it missing?"),
    (r"',' or '([}\]])'", "has no ',' or '{1}' where one must be"),
    (r"character '(.+)' that cannot", "has a value that starts with {1}; put it in quotes"),
    (r"end of stream", "ends inside quotes; a closing quote is missing"),
    (r"escape character '(.+)'", "has \\{1} in double quotes; write it in single quotes, or double the backslash"),
)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    for pattern, words in _SYNTAX:
        if found := re.search(pattern, problem):
            return words.format(problem, *found.groups())
    return f"is not YAML: {problem}"


class _Builder:
    """Turns composed nodes into plain data; collects faults instead of stopping at the first."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.faults: list[Fault] = []
        self.values = 0
        self.open: set[int] = set()

    def fault(self, node: yaml.Node, path: SettingPath, sentence: str, seen: str = "") -> None:
        self.faults.append(Fault(self.document.file, node.start_mark.line + 1, dotted(path), seen, sentence))

    def value(self, node: yaml.Node, path: SettingPath, key: yaml.Node | None = None) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            self.fault(node, (), f"grows beyond {MAX_VALUES} values; aliases repeat too much")
            raise Refused(self.faults)
        if id(node) in self.open:
            self.fault(node, path, "is an alias of something it stands in; write the value out")
            return None
        if node.tag not in ("plain", "untagged"):
            tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            self.fault(node, path, "carries a YAML tag; write the plain value", tag)
            return None
        mark = (key or node).start_mark
        if isinstance(node, yaml.ScalarNode):
            self.document.marks[path] = Mark(self.document.file, mark.line + 1, node.value)
            return _scalar(node)
        self.document.marks[path] = Mark(self.document.file, mark.line + 1)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            return self._mapping(node.value, path)
        finally:
            self.open.discard(id(node))

    def _mapping(self, pairs: list[tuple[yaml.Node, yaml.Node]], path: SettingPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in pairs:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in ("plain", "untagged"):
                self.fault(key, path, "has a key that is not plain text")
            elif key.value == "<<" and key.tag == "plain":
                self.fault(key, path, "uses a merge key ('<<'), which is not read; repeat the settings")
            elif key.value in data:
                first = f"stands here a second time; the first is in line {lines[key.value]}"
                self.fault(key, (*path, key.value), first)
            else:
                lines[key.value] = key.start_mark.line + 1
                data[key.value] = self.value(value, (*path, key.value), key)
        return data


def _scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.tag != "plain":
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text)
    if _FRACTION.fullmatch(text):
        return float(text)
    return text
