"""What is rendered from a node file: every vLLM and SGLang setting, the unit, the container, the hash."""

from __future__ import annotations

import subprocess

import pytest
from engine_node import COMMIT, DIGEST, MODELS, REFERENCE, SCRIPTS

from gpuwright import units
from roles.engine import SCRIPTS as INSTALLED
from roles.engine import container, image_job, wanted
from roles.engine.facts import ENGINES, image_present
from roles.engine.spec import Engine, EngineSpec

BASE = {"image": REFERENCE, "model": "tiny", "served_name": "lab", "port": 18001}


def engine(**settings: object) -> Engine:
    return Engine.model_validate({**BASE, "settings": {"kind": "vllm"}, **settings})


def test_seed_2s_flags() -> None:
    one = engine(
        served_name="glm-5.3-flash",
        settings={
            "kind": "vllm",
            "max_model_len": 1048576,
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.94,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "glm47",
            "reasoning_parser": "glm45",
        },
    )
    assert container.command_line(one) == [
        "serve",
        "/model",
        "--served-model-name=glm-5.3-flash",
        "--host=0.0.0.0",
        "--port=8000",
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


def test_every_other_vllm_setting() -> None:
    one = engine(
        settings={
            "kind": "vllm",
            "tensor_parallel_size": 4,
            "enable_expert_parallel": True,
            "kv_cache_dtype": "fp8",
            "enable_chunked_prefill": False,
            "enable_prefix_caching": False,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "speculative": {"method": "mtp", "num_speculative_tokens": 3},
            "extra_flags": ["--x=1", "--y"],
        }
    )
    assert container.command_line(one)[5:] == [
        "--tensor-parallel-size=4",
        "--enable-expert-parallel",
        "--kv-cache-dtype=fp8",
        "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching",
        "--load-format=dummy",
        "--dtype=bfloat16",
        '--speculative-config={"method": "mtp", "num_speculative_tokens": 3}',
        "--x=1",
        "--y",
    ]


def test_every_sglang_setting() -> None:
    one = engine(
        settings={
            "kind": "sglang",
            "context_length": 262144,
            "max_running_requests": 4,
            "mem_fraction_static": 0.9,
            "tp_size": 4,
            "ep_size": 4,
            "kv_cache_dtype": "fp8_e4m3",
            "attention_backend": "flashinfer",
            "moe_runner_backend": "cutlass",
            "tool_call_parser": "glm47",
            "reasoning_parser": "glm45",
            "disable_cuda_graph": True,
            "cuda_graph_max_bs": 4,
            "extra_flags": ["--z=1"],
        }
    )
    assert container.command_line(one) == [
        "-m",
        "sglang.launch_server",
        "--model-path=/model",
        "--served-model-name=lab",
        "--host=0.0.0.0",
        "--port=8000",
        "--tp-size=4",
        "--ep-size=4",
        "--context-length=262144",
        "--max-running-requests=4",
        "--mem-fraction-static=0.9",
        "--kv-cache-dtype=fp8_e4m3",
        "--attention-backend=flashinfer",
        "--moe-runner-backend=cutlass",
        "--tool-call-parser=glm47",
        "--reasoning-parser=glm45",
        "--disable-cuda-graph",
        "--cuda-graph-max-bs-decode=4",
        "--enable-metrics",
        "--z=1",
    ]
    assert "--entrypoint=python3" in container.docker_arguments("main", one, "/m")


def test_the_container_is_shut() -> None:
    """security.md 2.4, line by line."""
    arguments = container.docker_arguments("main", engine(tmp_size="1 GiB", shm_size="2 GiB"), "/srv/m")
    for wanted_ in (
        "--network=gpuwright-main",
        "--publish=127.0.0.1:18001:8000",
        "--read-only",
        "--tmpfs=/tmp:rw,exec,nosuid,nodev,size=1073741824",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--user=10001:10001",
        "--pull=never",
        "--init",
        "--shm-size=2147483648",
        "--pids-limit=8192",
        "--restart=no",
        "--mount=type=bind,source=/srv/m,target=/model,readonly",
        "--mount=type=bind,source=/var/lib/gpuwright/cache/main/bbbbbbbbbbbb,target=/cache",
        "--env=HF_HUB_OFFLINE=1",
        "--env=USER=llm",
        "--env=LOGNAME=llm",
    ):
        assert wanted_ in arguments
    text = " ".join(arguments)
    for never in ("--gpus", "--privileged", "host", "cpuset", "--ipc", "seccomp"):
        assert never not in text.replace("--host", ""), never


@pytest.mark.parametrize(
    "variable", ["VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"]
)
def test_jit_caches_lie_on_the_executable_volume(variable: str) -> None:
    assert container.ENVIRONMENT[variable].startswith("/cache")


def spec(**role: object) -> EngineSpec:
    return EngineSpec.model_validate({"engines": {"main": {**BASE, "settings": {"kind": "vllm"}}}, **role})


def test_the_hash_names_what_the_container_is_made_of() -> None:
    directory = "/srv/m"
    one = container.configuration("main", engine(), directory)
    changed = [
        engine(settings={"kind": "vllm", "max_num_seqs": 3}),
        engine(image=f"registry.test/sim@sha256:{'e' * 64}"),
        engine(environment={"A": "1"}),
        engine(port=18002),
        engine(gpus=[0]),
    ]
    hashes = {container.configuration("main", other, directory) for other in changed}
    assert len(hashes | {one, container.configuration("main", engine(), "/srv/n")}) == len(changed) + 2
    # How long things may take needs no new container.
    patient = engine(readiness={"deadline": 1200}, drain=5, min_free_memory="1 GiB")
    assert container.configuration("main", patient, directory) == one


def test_the_configuration_is_shell_that_gives_the_words_back(tmp_path: object) -> None:
    settings = {"kind": "vllm", "speculative": {"method": 'it\'s $HOME `id` "x"'}}
    one = EngineSpec.model_validate(
        {"engines": {"main": {**BASE, "settings": settings, "environment": {"E": "a b'c$(id)", "F": ""}}}}
    )
    want = wanted("main", one.engines["main"], one, MODELS)
    conf = want.files[0].data.decode()
    said = subprocess.run(
        ["bash", "-uc", 'eval "$1"; printf "%s\\0" "${container[@]}" -- "${command[@]}"', "x", conf],
        capture_output=True,
        check=True,
    ).stdout.decode()
    words = said.split("\0")[:-1]
    directory = f"/srv/models/lab/tiny/{COMMIT}"
    expected = container.docker_arguments("main", one.engines["main"], directory)
    assert words == [*expected, "--", *container.command_line(one.engines["main"])]


@pytest.mark.parametrize("value", ["a\nb", "a\x00b"])
def test_an_environment_value_of_several_lines_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="environment"):
        engine(environment={"A": value})


def unit(**settings: object) -> str:
    one = EngineSpec.model_validate({"engines": {"main": {**BASE, "settings": {"kind": "vllm"}, **settings}}})
    return wanted("main", one.engines["main"], one, MODELS).files[1].data.decode()


def test_the_unit() -> None:
    text = unit(after=["first", "second"], drain=30, stop_timeout=100, readiness={"deadline": 600})
    assert units.lint("x.service", text) == []
    lines = text.splitlines()
    for line in (
        "Wants=docker.service gpuwright-model-tiny.service",
        "After=gpuwright-engine-first.service gpuwright-engine-second.service",
        "StartLimitBurst=3",
        "StartLimitIntervalSec=7200",
        "Restart=on-failure",
        "RestartSec=60",
        "RestartPreventExitStatus=78 125 126 127",
        "KillMode=mixed",
        f"RequiresMountsFor=/srv/models/lab/tiny/{COMMIT}",
    ):
        assert line in lines
    assert lines.index("StartLimitBurst=3") < lines.index("[Service]")
    assert not any(line.startswith("Requires=") for line in lines)
    values = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert int(values["TimeoutStartSec"]) > 600
    assert int(values["TimeoutStopSec"]) > 30 + 100


def test_an_engine_starts_after_the_bridges_were_cleared_and_the_driver_answers() -> None:
    """Redirect that is cleared under an engine is a path that changes under its copies (gpu-node.md 2.2)."""
    after = {name for line in unit().splitlines() if line.startswith("After=") for name in line[6:].split()}
    assert after == {
        "docker.service",
        "gpuwright-model-tiny.service",
        "nvidia-persistenced.service",
        "nvidia-cdi-refresh.service",
        "gpuwright-acs.service",
    }


def test_the_image_job_is_bound_where_the_node_file_says_so() -> None:
    job = image_job("main", engine(), "0").data.decode()
    assert "NUMAPolicy=bind\nNUMAMask=0\n" in job
    assert f"ExecStart=/usr/local/lib/gpuwright/image-fetch {REFERENCE}\n" in job
    assert units.lint("x.service", job) == []
    assert "NUMA" not in image_job("main", engine(), None).data.decode()
    archive = {"repository": "registry.test/sim", "digest": DIGEST, "archive": "/srv/sim.tar"}
    assert f"{REFERENCE} /srv/sim.tar\n" in image_job("main", engine(image=archive), None).data.decode()


def test_every_script_is_installed_and_clean() -> None:
    assert sorted(path.name for path in SCRIPTS.iterdir() if path.name.startswith(("engine-", "image-"))) == sorted(
        INSTALLED
    )
    subprocess.run(["shellcheck", "-x", *[SCRIPTS / name for name in INSTALLED]], check=True)
    for name in INSTALLED:
        assert "Owned by gpuwright, role engine" in (SCRIPTS / name).read_text()


def test_facts() -> None:
    text = (
        "U|main|ActiveState=active\nU|main|SubState=running\nU|main|NRestarts=2\nU|main|Result=success\nU|main|Job=0\n"
        "S|main|yes|abc\nE|main|12|20260101T000000.000Z\nE|main|3|20260101T000001.000Z\n"
        "S|other|no|\n"
        "C|main|5f1d|running|42|0|false|abc|registry.test/sim@sha256:b|off-1\n"
    )
    states = ENGINES.parse(text)
    main = states["main"]
    assert (main.serving, main.config, main.pid, main.restarts, main.released) == (True, "abc", 42, 2, "abc")
    assert main.evidence_kib == 15
    assert not main.job
    assert not states["other"].serving


@pytest.mark.parametrize(
    ("listed", "present"),
    [
        (f"docker.io/a/b@{DIGEST}", True),
        (f"a/b@{DIGEST}", True),
        (DIGEST, True),
        ("a/b@sha256:" + "e" * 64, False),
        (f"c/b@{DIGEST}", False),
    ],
)
def test_images_are_found_under_dockers_short_name(listed: str, present: bool) -> None:
    assert image_present(frozenset({listed}), "docker.io/a/b", DIGEST) is present
