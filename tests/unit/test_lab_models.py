"""The lab's tiny model: the same bytes everywhere, in the formats that a real engine reads."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import jinja2
import pytest

from lab import models


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return models.tiny()


@pytest.fixture(scope="module")
def header(files: dict[str, bytes]) -> dict[str, Any]:
    content = files["model.safetensors"]
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length])


def test_bytes_never_change_unnoticed(files):
    """A commit id in the lab's hub stands for these bytes; images and caches are keyed by it."""
    digest = hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()
    assert digest == "6ebe3532c407afeb077ef0d987eae4b60d08612cb72dfef49583515358776938"
    assert models.tiny() == files


def test_tensors_lie_end_to_end_and_fill_the_file(files, header):
    (length,) = struct.unpack("<Q", files["model.safetensors"][:8])
    position = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        rows, columns = (*tensor["shape"], 1)[:2]
        assert tensor["data_offsets"] == [position, position + 2 * rows * columns], name
        position = tensor["data_offsets"][1]
    assert 8 + length + position == len(files["model.safetensors"])


def test_shapes_agree_with_the_configuration(files, header):
    config = json.loads(files["config.json"])
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))
    assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert header["model.layers.0.self_attn.q_proj.weight"]["shape"] == [
        config["num_attention_heads"] * config["head_dim"],
        config["hidden_size"],
    ]


def test_the_table_says_the_answer_and_then_stops(files):
    """Follows the highest score from token to token, as an engine does at temperature 0."""
    ids = json.loads(files["tokenizer.json"])["model"]["vocab"]
    tokens = {number: token for token, number in ids.items()}
    table = models._scores(ids)
    last, said = ids["Ċ"], []  # the line break after <|im_start|>assistant
    while tokens[last] != "<|im_end|>":
        assert len(said) < 20
        last = max(table[last], key=lambda number: table[last][number])
        said.append(tokens[last])
    assert "".join(said[:-1]).replace("Ġ", " ") == models.ANSWER


@pytest.mark.parametrize(
    ("messages", "tools", "ending"),
    [
        ([{"role": "user", "content": "hi"}], None, "<|im_start|>assistant\n"),
        ([{"role": "user", "content": "hi"}], [{"name": "f"}], "<|im_start|>assistant\n<|call|>"),
        (
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "sunny"},
            ],
            [{"name": "f"}],
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>\n'
            "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["chat", "tools", "after a tool's result"],
)
def test_template_asks_for_a_call_only_when_one_is_due(files, messages, tools, ending):
    source = json.loads(files["tokenizer_config.json"])["chat_template"]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers sets it
    prompt = environment.from_string(source).render(messages=messages, tools=tools, add_generation_prompt=True)
    assert prompt.endswith(ending)


def test_written_as_a_directory(tmp_path: Path, files):
    models.write(tmp_path / "a" / "b")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == files
