"""OCI images by hand: layers are tars with every date, order and owner fixed, so that one content has one digest."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"  # not compressed: it never leaves the machine
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A file and its digest (``sha256:…``)."""

    path: Path
    digest: str
    size: int


def layer(source: Path, target: Path, *, inside: str = "", owner: int = 0) -> Blob:
    """Pack the directory ``source`` into a layer at ``target``; its files appear below ``inside``, all of user ``owner``."""
    draft = target.with_name(f".{target.name}")
    with draft.open("wb") as out, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in [Path(inside), *Path(inside).parents][::-1]:
            if parent != Path():
                tar.addfile(_entry(tarfile.TarInfo(str(parent)), tarfile.DIRTYPE, 0o755, 0))
        for path in sorted(source.rglob("*")):
            mode = path.lstat().st_mode
            info = tarfile.TarInfo(str(Path(inside) / path.relative_to(source)))
            if stat.S_ISLNK(mode):
                info.linkname = str(path.readlink())
                tar.addfile(_entry(info, tarfile.SYMTYPE, 0o777, owner))
            elif stat.S_ISDIR(mode):
                tar.addfile(_entry(info, tarfile.DIRTYPE, stat.S_IMODE(mode), owner))
            elif stat.S_ISREG(mode):
                info.size = path.lstat().st_size
                with path.open("rb") as content:
                    tar.addfile(_entry(info, tarfile.REGTYPE, stat.S_IMODE(mode), owner), content)
    draft.replace(target)
    return blob(target)


def _entry(info: tarfile.TarInfo, kind: bytes, mode: int, owner: int) -> tarfile.TarInfo:
    info.type, info.mode, info.uid, info.gid, info.mtime = kind, mode, owner, owner, 0
    return info


def blob(path: Path) -> Blob:
    """Hash a file."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return Blob(path, f"sha256:{digest.hexdigest()}", path.stat().st_size)


def image(
    folder: Path,
    layers: Sequence[Blob],
    *,
    architecture: str,
    entrypoint: Sequence[str],
    environment: Mapping[str, str],
    labels: Mapping[str, str],
    workdir: str = "/",
) -> tuple[Blob, Blob]:
    """Write config and manifest into ``folder`` and return both; the manifest's digest is the image's."""
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": list(entrypoint),
            "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
            "WorkingDir": workdir,
            "Labels": dict(sorted(labels.items())),
        },
        "rootfs": {"type": "layers", "diff_ids": [one.digest for one in layers]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "gpuwright lab"} for _ in layers],
    }
    written = _write(folder / "config.json", config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": _CONFIG, "digest": written.digest, "size": written.size},
        "layers": [{"mediaType": _LAYER, "digest": one.digest, "size": one.size} for one in layers],
    }
    return written, _write(folder / "manifest.json", manifest)


def archive(target: Path, reference: str, config: Blob, layers: Sequence[Blob]) -> Path:
    """Write a tar that ``docker load`` reads, for sites without a registry."""
    content = json.dumps(
        [
            {
                "Config": f"{config.digest.removeprefix('sha256:')}.json",
                "RepoTags": [reference],
                "Layers": [f"{one.digest.removeprefix('sha256:')}/layer.tar" for one in layers],
            }
        ]
    ).encode()
    draft = target.with_name(f".{target.name}")
    with tarfile.open(draft, "w") as tar:
        for one in layers:
            info = tarfile.TarInfo(f"{one.digest.removeprefix('sha256:')}/layer.tar")
            info.size = one.size
            with one.path.open("rb") as stream:
                tar.addfile(info, stream)
        info = tarfile.TarInfo(f"{config.digest.removeprefix('sha256:')}.json")
        info.size = config.size
        with config.path.open("rb") as stream:
            tar.addfile(info, stream)
        info = tarfile.TarInfo("manifest.json")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    draft.replace(target)
    return target


def _write(path: Path, content: object) -> Blob:
    path.write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))
    return blob(path)
