"""inventory/pins.lock.yaml: what tags, branches and releases resolved to.

images: {"docker.io/vllm/vllm-openai:v0.31.0": "sha256:…"}
models: {"nvidia/GLM-5.3-Flash-NVFP4@main": "<40 hexadecimal digits>"}
caddy: {"2.11.7/amd64": {"url": "https://…", "sha256": "<of the binary>"}}
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from gpuwright.spec import document, sentence
from gpuwright.spec.base import Commit, Digest, Sha256, Strict
from gpuwright.spec.document import Document
from gpuwright.spec.fault import Fault, Refused, SettingPath, dotted, relative
from gpuwright.spec.node import NodeSpec

LOCK_FILE = "pins.lock.yaml"

_HEADER = """\
# What tags, branches and releases resolved to; written by `gpuwright pin INVENTORY`, reviewed and committed by you.
"""

Section = Literal["images", "models", "caddy"]


class CaddyPin(Strict):
    """Where a node gets a Caddy release, and the sha256 of the binary (of the file in the archive where it is one)."""

    url: str
    sha256: Sha256


class Lock(Strict):
    """The whole lock file."""

    images: dict[str, Digest] = Field(default_factory=dict, description='"repository:tag" to digest')
    models: dict[str, Commit] = Field(default_factory=dict, description='"organisation/name@branch" to commit')
    caddy: dict[str, CaddyPin] = Field(default_factory=dict, description='"version/architecture" to binary')


@dataclass(frozen=True)
class Pins:
    """A lock and the file it came from; None where the inventory gives its pins itself."""

    lock: Lock
    file: Path | None


@dataclass(frozen=True)
class Wanted:
    """Something that a node file names by a name that can move: where it stands, and its key in the lock."""

    path: SettingPath
    section: Section
    key: str


def read(given: Mapping[str, Any] | str | None, inventory: Path) -> Pins:
    """What an inventory gives, or the file beside it; no file there pins nothing. Raises Refused."""
    file = None
    if isinstance(given, Mapping):
        source = Document(relative(inventory), dict(given))
    else:
        file = inventory.parent / (given or LOCK_FILE)
        source = document.load(file) if given or file.exists() else Document(relative(file), {})
    try:
        return Pins(Lock.model_validate(source.data), file)
    except ValidationError as error:
        raise Refused(sentence.faults(error, source, Lock)) from None


def write(lock: Lock, file: Path) -> None:
    """Replace the lock file: the old one or the new one is there, never a part."""
    plain = {section: dict(sorted(entries.items())) for section, entries in lock.model_dump(mode="json").items()}
    text = _HEADER + yaml.safe_dump(plain, sort_keys=False, width=1000, allow_unicode=True)
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def wanted(spec: NodeSpec) -> Iterator[Wanted]:
    """Every tag, branch and release that the lock has to resolve; `spec` is as written, before `fill`."""
    for name, engine in spec.engine.engines.items() if spec.engine else ():
        if engine.image.digest is None and engine.image.tag is not None:
            yield Wanted(
                ("engine", "engines", name, "image"), "images", f"{engine.image.repository}:{engine.image.tag}"
            )
    for name, model in spec.models.items.items() if spec.models else ():
        if model.commit is None:
            yield Wanted(("models", "items", name, "revision"), "models", f"{model.repo}@{model.revision}")
    if spec.gateway is not None:
        caddy = spec.gateway.caddy
        if caddy.file is None and (caddy.url is None or caddy.sha256 is None):
            architecture = "amd64" if spec.hardware.architecture == "x86_64" else "arm64"
            yield Wanted(("gateway", "caddy"), "caddy", f"{caddy.version}/{architecture}")


def fill(spec: NodeSpec, known: Pins, source: Document, inventory: str) -> tuple[NodeSpec, list[Fault]]:
    """The description with what the lock knows, and a fault for everything it does not know yet."""
    missing: list[Fault] = []
    for item in wanted(spec):
        found = getattr(known.lock, item.section).get(item.key)
        if found is None:
            mark = source.mark(item.path)
            remedy = f"run: gpuwright pin {inventory} --only {item.key}"
            if known.file is None:
                remedy = f"{inventory} gives its pins itself and misses this one"
            words = f"is not pinned; {remedy}"
            missing.append(Fault(mark.file, mark.line, dotted(item.path), item.key, words, unfinished=True))
        elif isinstance(found, CaddyPin):
            spec = _replace(spec, item.path, {"url": found.url, "sha256": found.sha256})
        elif item.section == "images":
            spec = _replace(spec, item.path, {"digest": found})
        else:
            spec = _replace(spec, item.path[:-1], {"commit": found})
    return spec, missing


def _replace(part: Any, path: SettingPath, values: dict[str, Any]) -> Any:
    """A copy of a frozen description with some values replaced at a path."""
    if not path:
        return part.model_copy(update=values)
    key = path[0]
    if isinstance(part, dict):
        return {**part, key: _replace(part[key], path[1:], values)}
    return part.model_copy(update={str(key): _replace(getattr(part, str(key)), path[1:], values)})
