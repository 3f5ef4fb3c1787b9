"""Small deterministic models for the hub stand-in: several weight shards and the small files around them."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

MIB = 1024**2


def make(root: Path, repo: str = "lab/tiny", *, size: int = 24 * MIB, shards: int = 5, seed: int = 1) -> Path:
    """Write a model of about ``size`` bytes to ``<root>/<org>/<name>/`` and return that directory.

    The same arguments give the same bytes, therefore the same commit. The weights are noise in the layout of a
    safetensors file (length, header, data), so that nothing compresses and no two shards are alike.
    """
    directory = root / repo
    directory.mkdir(parents=True, exist_ok=True)
    width = size // shards
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        # Not a multiple of any block size: the last block of a file is where direct I/O goes wrong.
        length = width + number * 4097 + 13
        tensor = f"layers.{number}.weight"
        weight_map[tensor] = name
        _write(directory / name, _shard(tensor, length, f"{seed}/{repo}/{number}"))
    small = {
        "config.json": {"architectures": ["LabForCausalLM"], "num_hidden_layers": shards, "seed": seed},
        "generation_config.json": {"do_sample": False},
        "model.safetensors.index.json": {"metadata": {"total_size": width * shards}, "weight_map": weight_map},
        "tokenizer/tokenizer_config.json": {"model_max_length": 2048},
    }
    for path, content in small.items():
        _write(directory / path, (json.dumps(content, indent=2) + "\n").encode())
    _write(directory / "README.md", f"# {repo}\n\nRandom bytes for the lab; not a model.\n".encode())
    _write(directory / "name with spaces & ünïcode+.txt", b"names are encoded in URLs\n")
    _write(directory / "empty.txt", b"")
    return directory


def _shard(tensor: str, length: int, seed: str) -> bytes:
    header = json.dumps({tensor: {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    state = int.from_bytes(hashlib.sha256(seed.encode()).digest(), "big")
    return len(header).to_bytes(8, "little") + header + random.Random(state).randbytes(length)


def _write(path: Path, content: bytes) -> None:
    # An unchanged file keeps its time stamp, so that the server need not hash it again.
    if path.exists() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
