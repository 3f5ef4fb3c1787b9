"""API keys: their form, and ``inventory/keys.yaml`` which holds their names and hashes.

A key is ``sk-`` and base64 of ``<id>:<secret>``. The id is ``<name>-<generation>`` with a length of 2 modulo 3, so that
``<id>:`` always encodes to the same text: the gateway admits known beginnings only and an unknown one never costs it a
hash (security.md 1.2, D3b). The secret is 42 alphanumerics: no padding, never ``+`` or ``/``, safe in any file.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import difflib
import fcntl
import os
import re
import secrets
import string
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bcrypt
import yaml

KEYS_FILE = Path("inventory/keys.yaml")

SECRET_LENGTH = 42
"""Alphanumerics: 250 bits."""

BCRYPT_COST = 4
"""The lowest there is, on purpose: nobody guesses 250 random bits, so slow hashing protects nothing, and every request
with a known id would pay for it (2 s of CPU at cost 14: security.md 1.2)."""

RESERVED = "deploy"
"""The name in the access log of the key that a deploy makes for its questions."""

_ALPHANUMERIC = string.ascii_letters + string.digits
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_ID = re.compile(r"(?P<name>[a-z][a-z0-9]*(-[a-z0-9]+)*)-(?P<generation>\d{1,5})")
_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")


class KeyFileError(Exception):
    """A fault in the file of keys, or in what was asked of it. One sentence."""


@dataclass(frozen=True)
class ApiKey:
    """One generation of one name. A revoked one stays, without its hash, so that its id is never given again."""

    id: str
    created: datetime.date
    hash: str | None
    revoked: datetime.date | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """``alice`` of ``alice-01``."""
        return self.id.rpartition("-")[0]

    @property
    def generation(self) -> int:
        """1 of ``alice-01``."""
        return int(self.id.rpartition("-")[2])

    @property
    def prefix(self) -> str:
        """What every key with this id begins with, after ``sk-``."""
        return prefix(self.id)


def prefix(key_id: str) -> str:
    """base64 of ``<id>:``. Raises ValueError when that has no fixed length (see `new_id`)."""
    if len(key_id) % 3 != 2:
        raise ValueError(f"{key_id!r}: the length of an id is 2 modulo 3")
    return base64.b64encode(f"{key_id}:".encode()).decode()


def new_id(name: str, generation: int) -> str:
    """``alice-01``; the generation gets as many zeros (two to five digits) as the length needs."""
    for width in (2, 3, 4, 5):
        key_id = f"{name}-{generation:0{width}d}"
        if len(key_id) % 3 == 2 and len(key_id) == len(name) + 1 + width:
            return key_id
    raise KeyFileError(f"{name} has had {generation - 1} keys; choose a new name")


def generate(key_id: str) -> tuple[str, str]:
    """A new key with this id: the key itself and its bcrypt hash."""
    secret = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(SECRET_LENGTH))
    key = "sk-" + base64.b64encode(f"{key_id}:{secret}".encode()).decode()
    return key, bcrypt.hashpw(secret.encode(), bcrypt.gensalt(BCRYPT_COST)).decode()


# --- the file -------------------------------------------------------------------------------------------------------

_HEADER = """\
# API keys: names and bcrypt hashes. Written by `gpuwright key add|rotate|revoke`; comments do not survive, use `note`.
# A key is shown once, when it is made, and stored nowhere. Nodes are made to match this file, so a rebuild keeps keys.
# The hashes have bcrypt's lowest cost on purpose: each secret is 250 random bits, which nobody guesses at any speed,
# and the gateway hashes on every request (docs/keys.md). Revoked ids stay listed: an id in an old log means one key.
"""


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _mapping(node: yaml.Node, what: str, where: str) -> Iterator[tuple[str, int, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise KeyFileError(f"{where}:{_line(node)}: {what} must be a mapping of names to values")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key in seen:
            raise KeyFileError(f"{where}:{_line(key_node)}: {key!r} is there twice; remove one")
        seen.add(key)
        yield key, _line(key_node), value_node


def _date(node: yaml.Node, what: str, where: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(str(node.value))
    except ValueError:
        raise KeyFileError(
            f"{where}:{_line(node)}: {what} is {str(node.value)!r}; a date is written 2026-11-29"
        ) from None


def _entry(key_id: str, line: int, node: yaml.Node, where: str) -> ApiKey:
    if not _ID.fullmatch(key_id) or len(key_id) % 3 != 2:
        raise KeyFileError(
            f"{where}:{line}: {key_id!r} is no key id; ids are made by `gpuwright key add NAME`, as alice-01"
        )
    values: dict[str, Any] = {}
    for field, field_line, value in _mapping(node, key_id, where):
        if field in ("created", "revoked"):
            values[field] = _date(value, f"{key_id}: {field}", where)
        elif field == "hash":
            found = _HASH.fullmatch(str(value.value))
            if not found:
                # Never shown: what stands here may be a key that somebody pasted.
                raise KeyFileError(
                    f"{where}:{field_line}: {key_id}: hash is not a bcrypt hash ($2b$04$… with 60 characters); "
                    "make the key again: gpuwright key rotate " + key_id.rpartition("-")[0]
                )
            if int(found["cost"]) != BCRYPT_COST:
                raise KeyFileError(
                    f"{where}:{field_line}: {key_id}: bcrypt cost {int(found['cost'])}; it must be {BCRYPT_COST}, or "
                    "every request costs the gateway CPU time (docs/keys.md)"
                )
            values[field] = str(value.value)
        elif field == "note":
            values[field] = str(value.value)
        else:
            near = difflib.get_close_matches(field, ["created", "revoked", "hash", "note"], 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; allowed: created, hash, note, revoked"
            raise KeyFileError(f"{where}:{field_line}: {key_id}: unknown field {field!r}{hint}")
    if "created" not in values:
        raise KeyFileError(f"{where}:{line}: {key_id}: `created` is missing, a date as 2026-11-29")
    if ("hash" in values) == ("revoked" in values):
        raise KeyFileError(f"{where}:{line}: {key_id}: a key has a hash, a revoked one has `revoked` and no hash")
    return ApiKey(key_id, values["created"], values.get("hash"), values.get("revoked"), values.get("note"))


def parse(text: str, where: str) -> tuple[ApiKey, ...]:
    """The keys of a file's text. Raises KeyFileError with `where` and the line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise KeyFileError(
            f"{where}:{mark.line + 1 if mark else 1}: not YAML ({error.problem or error.context})"
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise KeyFileError(f"{where}:1: not YAML ({str(error).splitlines()[0]})") from None
    if root is None:
        return ()
    keys: list[ApiKey] = []
    for name, line, node in _mapping(root, "the file", where):
        if name != "keys":
            raise KeyFileError(f"{where}:{line}: unknown entry {name!r}; the file has one entry, `keys`")
        if isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~"):
            continue
        keys += [_entry(key_id, key_line, value, where) for key_id, key_line, value in _mapping(node, "keys", where)]
    numbers: dict[tuple[str, int], ApiKey] = {}
    for key in keys:
        if (other := numbers.setdefault((key.name, key.generation), key)) is not key:
            raise KeyFileError(f"{where}: {other.id} and {key.id} are one generation; remove one")
    return tuple(keys)


def load(path: Path = KEYS_FILE) -> tuple[ApiKey, ...]:
    """The keys of a file; none where there is no file. Raises KeyFileError."""
    try:
        return parse(path.read_bytes().decode(), str(path))
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError:
        raise KeyFileError(f"{path}:1: not a text file (UTF-8)") from None
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read ({error.strerror})") from None


def dump(keys: Iterable[ApiKey]) -> str:
    """The text of a file with these keys."""
    entries: dict[str, dict[str, Any]] = {}
    for key in sorted(keys, key=lambda key: (key.name, key.generation)):
        fields = {"created": key.created, "revoked": key.revoked, "note": key.note, "hash": key.hash}
        entries[key.id] = {field: value for field, value in fields.items() if value is not None}
    return _HEADER + yaml.safe_dump({"keys": entries}, sort_keys=False, allow_unicode=True, width=1000)


@contextlib.contextmanager
def edit(path: Path = KEYS_FILE) -> Iterator[list[ApiKey]]:
    """The keys of a file, to be changed in place: written back whole (or not at all) when the block ends well.

    One editor at a time; a reader sees the old file or the new one. Raises KeyFileError.
    """
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeyFileError(f"{path.parent}: no such folder ({error.strerror}); run this in the repository") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        keys = list(load(path))
        yield keys
        text = dump(keys)
        try:
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".keys.", suffix=".tmp", delete=False) as new:
                try:
                    new.write(text)
                    new.flush()
                    os.fchmod(new.fileno(), mode)
                    os.fsync(new.fileno())
                    Path(new.name).replace(path)
                except BaseException:
                    Path(new.name).unlink(missing_ok=True)
                    raise
            os.fsync(directory)
        except OSError as error:
            raise KeyFileError(f"{path}: cannot be written ({error.strerror}); nothing was changed") from None
    finally:
        os.close(directory)


# --- what can be done -----------------------------------------------------------------------------------------------


def _refuse_key(name: str) -> None:
    if name.startswith("sk-"):
        raise KeyFileError("that is a key, not a name (and now in your shell's history); see: gpuwright key list")


def _check_name(name: str) -> None:
    _refuse_key(name)
    if not _NAME.fullmatch(name) or _ID.fullmatch(name) or len(name) > 40 or name == RESERVED:
        raise KeyFileError(
            f"{name!r} is no name for a key: 1 to 40 of a-z, 0-9 and single '-', a letter first, not ending in '-' and "
            f"digits (those are the generation), and not {RESERVED!r} (a deploy's own probe)"
        )


def _known(keys: Sequence[ApiKey], name: str) -> list[ApiKey]:
    _refuse_key(name)
    found = [key for key in keys if key.name == name]
    if not found:
        near = difflib.get_close_matches(name, {key.name for key in keys}, 1)
        raise KeyFileError(f"no key is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return found


def add(keys: list[ApiKey], name: str, note: str | None = None) -> tuple[ApiKey, str]:
    """The first key of a name, or the next after all were revoked. Returns the entry and the key itself."""
    _check_name(name)
    active = [key.id for key in keys if key.name == name and key.hash]
    if active:
        raise KeyFileError(f"{name} has a key already ({', '.join(active)}); a second one: gpuwright key rotate {name}")
    return _next(keys, name, note)


def rotate(keys: list[ApiKey], name: str, note: str | None = None) -> tuple[ApiKey, str]:
    """The next key of a name; the older ones stay valid until they are revoked."""
    found = _known(keys, name)
    if not any(key.hash for key in found):
        raise KeyFileError(f"every key of {name} is revoked; a new one: gpuwright key add {name}")
    return _next(keys, name, note or next((key.note for key in reversed(found) if key.note), None))


def _next(keys: list[ApiKey], name: str, note: str | None) -> tuple[ApiKey, str]:
    generation = max((key.generation for key in keys if key.name == name), default=0) + 1
    key_id = new_id(name, generation)
    text, hashed = generate(key_id)
    entry = ApiKey(key_id, datetime.datetime.now(datetime.UTC).date(), hashed, note=note)
    keys.append(entry)
    return entry, text


def revoke(keys: list[ApiKey], name_or_id: str) -> list[ApiKey]:
    """Revoke one generation (``alice-01``) or all of a name (``alice``). Returns the entries revoked."""
    match = _ID.fullmatch(name_or_id)
    found = _known(keys, match["name"] if match else name_or_id)
    if match:
        found = [key for key in found if key.generation == int(match["generation"])]
        if not found:
            raise KeyFileError(f"no key is called {name_or_id!r}; see: gpuwright key list")
    active = [key for key in found if key.hash]
    if not active:
        raise KeyFileError(f"{name_or_id} is revoked already")
    today = datetime.datetime.now(datetime.UTC).date()
    revoked = [replace(key, hash=None, revoked=today) for key in active]
    for old, new in zip(active, revoked, strict=True):
        keys[keys.index(old)] = new
    return revoked


def accepted(keys: Sequence[ApiKey], names: Sequence[str] | None) -> tuple[ApiKey, ...]:
    """The valid keys a node accepts: all, or those with these names (``alice``, or one generation ``alice-01``).

    Raises KeyFileError for a name that is not in the file.
    """
    valid = tuple(key for key in keys if key.hash)
    if names is None:
        return valid
    chosen: list[ApiKey] = []
    for name in names:
        if (match := _ID.fullmatch(name)) is not None:
            _known(keys, match["name"])
        else:
            _known(keys, name)
        chosen += [key for key in valid if name in (key.name, key.id)]
    return tuple(key for key in valid if key in chosen)
