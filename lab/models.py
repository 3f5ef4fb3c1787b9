"""A tiny model for real engines: a directory like one of the Hub's, the same bytes wherever and whenever it is written.

LAB ONLY, and nothing was trained: the weights are written by hand. The network is a Llama whose attention and MLP add
nothing, so the next token depends on the last one alone, by a table in ``lm_head``. That is enough for what the lab
asks of a real engine: answers that end, tool calls that a grammar makes well-formed (the table prefers to close a
string, an object, an answer), and the same answer every time. Written with the standard library alone, so that the
machine that drives the lab needs neither torch nor tokenizers. ``--load-format dummy`` works too and ignores the weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

CONTEXT = 1_048_576
"""Tokens: as long as the longest node file promises; a token's cache is 256 bytes here."""

ANSWER = "This answer comes from a tiny lab model with hand-written weights."
"""What the model says to any chat, unless a grammar forbids it."""

_HEAD = 64  # attention head size, one that vLLM's CPU attention supports
_HIDDEN = 384  # at least one dimension for each token, a multiple of _HEAD
_INTERMEDIATE = 64
_END, _TURN, _DONE, _CALL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|call|>"
_SPECIAL = (_END, _TURN, _DONE, _CALL)
_TAGS = ("<tool_call>", "</tool_call>")

# transformers renders with trim_blocks and lstrip_blocks: a line that only holds a tag leaves nothing behind.
_TEMPLATE = """\
{% if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}
{{ messages[0].content }}
{% endif %}
Functions you may call:
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
Answer a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role != 'system' %}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if tools and messages[-1].role == 'user' %}
<|call|>
{%- endif %}
{% endif %}"""


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's convention)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = (chr(256 + n) for n in range(256))
    return [chr(byte) if byte in printable else next(spare) for byte in range(256)]


_LETTERS = _byte_letters()


def _spelled(text: str) -> str:
    return "".join(_LETTERS[byte] for byte in text.encode())


def _words() -> list[str]:
    """The answer cut into the tokens it is said in, and the word that fills an empty string."""
    first, *rest = ANSWER.removesuffix(".").split(" ")
    return [_spelled(first), *(_spelled(" " + word) for word in rest), _spelled("lab")]


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token ids and merges: special tokens, tags, the 256 bytes, and every prefix of the answer's words."""
    tokens = dict.fromkeys([*_SPECIAL, *_TAGS, *_LETTERS])
    merges: dict[tuple[str, str], None] = {}
    for word in _words():
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            tokens[word[: end + 1]] = None
    return {token: number for number, token in enumerate(tokens)}, list(merges)


def _scores(ids: dict[str, int]) -> dict[int, dict[int, float]]:
    """For each last token, the score of each next one; what is not named scores -4.

    The order below is what a grammar leaves to choose from: end, close, go on; white space and odd bytes come last.
    """
    *sentence, filler = (ids[word] for word in _words())
    call, called = (ids[tag] for tag in _TAGS)
    done = ids[_DONE]

    def byte(character: str) -> int:
        return ids[_spelled(character)]

    anywhere = {byte(chr(code)): 0.0 for code in range(ord("!"), ord("~") + 1) if chr(code) != "\\"}
    anywhere |= {sentence[0]: 6, call: 5.5, called: 5.25, byte('"'): 5, byte("}"): 4, byte("]"): 3.5, done: 3}
    anywhere |= {byte(":"): 2.5, byte(","): 2, byte("{"): 1.5, byte("["): 1, byte("1"): 0.5, byte(" "): -1}
    table = {number: dict(anywhere) for number in ids.values()}
    for last, following in zip(sentence, [*sentence[1:], byte(".")], strict=True):
        table[last][following] = 8
    table[byte('"')][filler] = 8  # a string that was just opened; after one that was closed a grammar forbids it
    table[filler][byte('"')] = 8
    table[byte(" ")][byte("{")] = 8  # arguments that nothing describes are an object all the same
    table[ids[_CALL]][call] = 8  # the template asks for a call; what comes after <tool_call> needs a grammar
    for last in (byte("."), byte("}"), byte("]"), called):
        table[last][done] = 8
    return table


def _bfloat16(value: float) -> bytes:
    """The upper half of a float32; every value used here is exact in it."""
    return struct.pack("<f", value)[2:]


def _tensors(ids: dict[str, int]) -> Iterator[tuple[str, list[int], bytes]]:
    zero, one = _bfloat16(0), _bfloat16(1)
    quiet = _bfloat16(-4)
    rows = len(ids)
    yield (
        "model.embed_tokens.weight",
        [rows, _HIDDEN],
        b"".join(zero * number + one + zero * (_HIDDEN - number - 1) for number in range(rows)),
    )
    layer = "model.layers.0."
    for name, out, into in (
        ("self_attn.q_proj", _HIDDEN, _HIDDEN),
        ("self_attn.k_proj", _HEAD, _HIDDEN),
        ("self_attn.v_proj", _HEAD, _HIDDEN),
        ("self_attn.o_proj", _HIDDEN, _HIDDEN),
        ("mlp.gate_proj", _INTERMEDIATE, _HIDDEN),
        ("mlp.up_proj", _INTERMEDIATE, _HIDDEN),
        ("mlp.down_proj", _HIDDEN, _INTERMEDIATE),
    ):
        yield f"{layer}{name}.weight", [out, into], zero * (out * into)
    for name in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        yield f"{name}.weight", [_HIDDEN], one * _HIDDEN
    table = _scores(ids)
    columns = range(_HIDDEN)
    yield (
        "lm_head.weight",
        [rows, _HIDDEN],
        b"".join(
            b"".join(_bfloat16(table[last][number]) if number in table.get(last, {}) else quiet for last in columns)
            for number in range(rows)
        ),
    )


def _safetensors(tensors: Iterator[tuple[str, list[int], bytes]]) -> bytes:
    """The container format: length of the header, header as JSON, bytes of the tensors one after another."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, shape, content in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _added(ids: dict[str, int]) -> list[dict[str, object]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": ids[token], "content": token, **plain, "special": token in _SPECIAL} for token in (*_SPECIAL, *_TAGS)
    ]


def tiny() -> dict[str, bytes]:
    """Every file of the model by its name; the same bytes on every call."""
    ids, merges = _vocabulary()
    assert len(ids) <= _HIDDEN, "each token needs a dimension of its own"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": _HIDDEN // _HEAD,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": len(ids),
        "bos_token_id": ids[_END],
        "eos_token_id": ids[_DONE],
        "pad_token_id": ids[_END],
        "torch_dtype": "bfloat16",
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(ids),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": None,
        "eos_token": _DONE,
        "pad_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    generation = {"bos_token_id": ids[_END], "eos_token_id": [ids[_DONE], ids[_END]], "pad_token_id": ids[_END]}
    documents = {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
    }
    files = {name: (json.dumps(content, indent=1) + "\n").encode() for name, content in documents.items()}
    return files | {"model.safetensors": _safetensors(_tensors(ids))}


def write(directory: Path) -> None:
    """Write the model's files into ``directory``, which is made when it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tiny().items():
        # An unchanged file keeps its time stamp: the hub need not hash it again.
        if not (directory / name).exists() or (directory / name).read_bytes() != content:
            (directory / name).write_bytes(content)
