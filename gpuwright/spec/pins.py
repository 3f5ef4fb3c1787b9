"""inventory/pins.lock.yaml: the digests and commits that tags and branches resolved to.

images: {"docker.io/vllm/vllm-openai:v0.31.0": "sha256:…"}
models: {"nvidia/GLM-5.3-Flash-NVFP4@main": "<40 hexadecimal digits>"}
caddy: {"2.11.7/amd64": {url: "https://…", sha256: "…"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gpuwright.spec import document, sentence
from gpuwright.spec.base import Commit, Digest, Sha256, Strict
from gpuwright.spec.document import Document
from gpuwright.spec.fault import Fault, Path_, Refused, dotted
from gpuwright.spec.node import NodeSpec

LOCK_FILE = "pins.lock.yaml"


class CaddyPin(Strict):
    """Where a node gets a Caddy release, and the sha256 of the binary."""

    url: str | None = None
    sha256: Sha256


class Lock(Strict):
    """The whole lock file. `file` is where it came from, for sentences."""

    images: dict[str, Digest] = Field(default_factory=dict, description='"repository:tag" to digest')
    models: dict[str, Commit] = Field(default_factory=dict, description='"organisation/name@branch" to commit')
    caddy: dict[str, CaddyPin] = Field(default_factory=dict, description='"version/architecture" to binary')


def read(given: Mapping[str, Any] | str | None, inventory: Path) -> Lock:
    """The lock: what an inventory gives, or the file beside it; a missing file pins nothing. Raises Refused."""
    if isinstance(given, Mapping):
        source = Document("pins", dict(given))
    else:
        file = inventory.parent / (given or LOCK_FILE)
        if not file.exists() and given is None:
            return Lock()
        source = document.load(file)
    try:
        return Lock.model_validate(source.data)
    except ValidationError as error:
        raise Refused(sentence.faults(error, source, Lock)) from None


def fill(spec: NodeSpec, lock: Lock, source: Document) -> tuple[NodeSpec, list[Fault]]:
    """The description with digests and commits from the lock; a fault for whatever has neither."""
    missing: list[Fault] = []

    def unpinned(path: Path_, what: str, only: str) -> None:
        mark = source.mark(path)
        sentence_ = f"is not pinned; run: gpuwright pin INVENTORY --only {only}"
        missing.append(Fault(mark.file, mark.line, dotted(path), what, sentence_, unpinned=True))

    changes: dict[str, Any] = {}
    if spec.engine is not None:
        engines = {}
        for name, engine in spec.engine.engines.items():
            image = engine.image
            key = f"{image.repository}:{image.tag}"
            if image.digest is None and image.tag is not None:
                if key in lock.images:
                    image = image.model_copy(update={"digest": lock.images[key]})
                else:
                    unpinned(("engine", "engines", name, "image"), key, key)
            engines[name] = engine.model_copy(update={"image": image})
        changes["engine"] = spec.engine.model_copy(update={"engines": engines})
    if spec.models is not None:
        items = {}
        for name, model in spec.models.items.items():
            key = f"{model.repo}@{model.revision}"
            if model.commit is None:
                if key in lock.models:
                    model = model.model_copy(update={"commit": lock.models[key]})
                else:
                    unpinned(("models", "items", name, "revision"), key, key)
            items[name] = model
        changes["models"] = spec.models.model_copy(update={"items": items})
    return spec.model_copy(update=changes), missing
