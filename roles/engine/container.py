"""What an engine's container is made of: docker's arguments, the engine's command line, and the hash that names both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from roles.engine.spec import Engine, SglangSettings, VllmSettings

# security.md 2.4: no user entry in the image is needed, but Python's getpwuid() is; USER and LOGNAME stand in for it.
USER = 10001
# Every JIT compiler writes below /cache, which is executable and persists per digest.
ENVIRONMENT = {
    "HOME": "/cache",
    "USER": "llm",
    "LOGNAME": "llm",
    "XDG_CACHE_HOME": "/cache",
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "TRITON_CACHE_DIR": "/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
    "FLASHINFER_WORKSPACE_BASE": "/cache",
    "CUDA_CACHE_PATH": "/cache/cuda",
    "HF_HOME": "/cache/huggingface",
    # The weights are on the node, complete and verified: nothing is asked of the hub, nobody is told about use.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # torch.distributed listens on every interface of its namespace otherwise (security.md 2.3).
    "VLLM_HOST_IP": "127.0.0.1",
    # A redirect would lead around the allow-list of media addresses (security.md 2.2, GHSA-3f6c-7fw2-ppm4).
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    # GPUs come through CDI only; images set this to "all" for the older hook.
    "NVIDIA_VISIBLE_DEVICES": "void",
}


# What uses P2P, and what turns each off; one verdict decides on all of them (gpu-node.md 0.6, vllm#51513). Some
# programs only look whether NCCL_P2P_DISABLE is set, so it is never set to 0 (unsloth#10613). NCCL_CUMEM_ENABLE: without P2P, NCCL hung on
# RTX PRO 6000 until it was set (gardenlinux#4556).
_NCCL_WITHOUT_P2P = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
# All-reduces that vLLM 0.32.0 chooses beside its custom one (device_communicators/cuda_communicator.py, envs.py).
_VLLM_WITHOUT_P2P = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}


@dataclass(frozen=True)
class Separation:
    """What an engine gets in addition while its GPUs must not use P2P."""

    nccl: dict[str, str]
    environment: dict[str, str]
    arguments: tuple[str, ...]

    @property
    def all_environment(self) -> dict[str, str]:
        """NCCL's variables and the engine's own."""
        return {**self.nccl, **self.environment}

    @property
    def label(self) -> str:
        """Value of the label ``gpuwright.p2p`` of a container that was made with it; one made without has no such label."""
        parts = json.dumps([self.nccl, self.environment, self.arguments], sort_keys=True)
        return f"off-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"


def separation(engine: Engine) -> Separation:
    """How this engine runs without P2P between its GPUs."""
    if isinstance(engine.settings, VllmSettings):
        return Separation(_NCCL_WITHOUT_P2P, _VLLM_WITHOUT_P2P, ("--disable-custom-all-reduce",))
    arguments = ["--disable-custom-all-reduce"]
    # An older SGLang does not know the flag and would not start; FlashInfer's fusion is its own choice on some cards.
    if _is_at_least(engine.versions.get("sglang") or engine.image.tag or "", (0, 5, 23)):
        arguments.append("--enforce-disable-flashinfer-allreduce-fusion")
    return Separation(_NCCL_WITHOUT_P2P, {}, tuple(arguments))


def _is_at_least(text: str, version: tuple[int, ...]) -> bool:
    found = re.match(r"v?(\d+(?:\.\d+)+)", text)
    return found is not None and tuple(int(part) for part in found[1].split(".")) >= version


def cache_directory(name: str, engine: Engine) -> str:
    """The engine's JIT cache on the node, one per image."""
    return f"/var/lib/gpuwright/cache/{name}/{(engine.image.digest or '').removeprefix('sha256:')[:12]}"


def docker_arguments(name: str, engine: Engine, model_directory: str) -> list[str]:
    """What stands between ``docker create`` and the image (research: security.md 2.4). GPUs are added on the node, by UUID."""
    arguments = [
        f"--network=gpuwright-{name}",
        f"--publish=127.0.0.1:{engine.port}:8000",
        "--restart=no",
        "--pull=never",
        "--init",
        "--read-only",
        f"--tmpfs=/tmp:rw,exec,nosuid,nodev,size={engine.tmp_size}",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--user={USER}:{USER}",
        f"--shm-size={engine.shm_size}",
        f"--pids-limit={engine.pids_limit}",
        # A core file would hold prompts and weights.
        "--ulimit=core=0",
        f"--stop-timeout={engine.stop_timeout}",
        # A format that is readable while Docker is down, unlike `local`.
        "--log-driver=json-file",
        "--log-opt=max-size=64m",
        "--log-opt=max-file=4",
        f"--mount=type=bind,source={model_directory},target=/model,readonly",
        f"--mount=type=bind,source={cache_directory(name, engine)},target=/cache",
        f"--label=gpuwright.engine={name}",
        f"--label=gpuwright.image={engine.image.reference}",
    ]
    if engine.memory is not None:
        arguments.append(f"--memory={engine.memory}")
    arguments += [f"--env={key}={value}" for key, value in {**ENVIRONMENT, **engine.environment}.items()]
    # The command line names its program, whatever the image's own entry point is.
    arguments.append(f"--entrypoint={'vllm' if isinstance(engine.settings, VllmSettings) else 'python3'}")
    return arguments


def _vllm(settings: VllmSettings) -> Iterator[str]:
    def switch(flag: str, value: bool | None) -> Iterator[str]:
        if value is not None:
            yield f"--{flag}" if value else f"--no-{flag}"

    def option(flag: str, value: object) -> Iterator[str]:
        if value is not None:
            yield f"--{flag}={value}"

    yield from option("tensor-parallel-size", settings.tensor_parallel_size)
    if settings.enable_expert_parallel:
        yield "--enable-expert-parallel"
    yield from option("max-model-len", settings.max_model_len)
    yield from option("max-num-seqs", settings.max_num_seqs)
    yield from option("gpu-memory-utilization", settings.gpu_memory_utilization)
    yield from option("kv-cache-dtype", settings.kv_cache_dtype)
    yield from switch("enable-chunked-prefill", settings.enable_chunked_prefill)
    yield from switch("enable-prefix-caching", settings.enable_prefix_caching)
    if settings.enable_auto_tool_choice:
        yield "--enable-auto-tool-choice"
    yield from option("tool-call-parser", settings.tool_call_parser)
    yield from option("reasoning-parser", settings.reasoning_parser)
    yield from option("load-format", settings.load_format)
    yield from option("dtype", settings.dtype)
    if settings.speculative:
        yield f"--speculative-config={json.dumps(settings.speculative, sort_keys=True)}"
    yield from settings.extra_flags


def _sglang(settings: SglangSettings) -> Iterator[str]:
    def option(flag: str, value: object) -> Iterator[str]:
        if value is not None:
            yield f"--{flag}={value}"

    yield from option("tp-size", settings.tp_size)
    yield from option("ep-size", settings.ep_size)
    yield from option("context-length", settings.context_length)
    yield from option("max-running-requests", settings.max_running_requests)
    yield from option("mem-fraction-static", settings.mem_fraction_static)
    yield from option("kv-cache-dtype", settings.kv_cache_dtype)
    yield from option("attention-backend", settings.attention_backend)
    yield from option("moe-runner-backend", settings.moe_runner_backend)
    yield from option("tool-call-parser", settings.tool_call_parser)
    yield from option("reasoning-parser", settings.reasoning_parser)
    if settings.disable_cuda_graph:
        yield "--disable-cuda-graph"
    # SGLang 0.5.23 has one limit for decode and one for prefill; the old name is ambiguous and refused.
    yield from option("cuda-graph-max-bs-decode", settings.cuda_graph_max_bs)
    # The drain reads the requests in flight there.
    yield "--enable-metrics"
    yield from settings.extra_flags


def command_line(engine: Engine) -> list[str]:
    """The engine's own arguments, after the image."""
    # All interfaces of its own network namespace; the host publishes it on loopback only.
    address = ["--host=0.0.0.0", "--port=8000"]
    if isinstance(engine.settings, VllmSettings):
        return ["serve", "/model", f"--served-model-name={engine.served_name}", *address, *_vllm(engine.settings)]
    model = ["--model-path=/model", f"--served-model-name={engine.served_name}"]
    return ["-m", "sglang.launch_server", *model, *address, *_sglang(engine.settings)]


def configuration(name: str, engine: Engine, model_directory: str) -> str:
    """The sha256, in hex, of everything a container is made of. A running one carries it as label ``gpuwright.config``.

    How long things may take is not part of it: such a change needs no new container.
    """
    parts = {
        "image": engine.image.reference,
        "gpus": engine.gpus,
        "numa_nodes": engine.numa_nodes,
        "container": docker_arguments(name, engine, model_directory),
        "command": command_line(engine),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tool_choice(engine: Engine) -> str:
    """How the gate asks for a tool call (see `Readiness.tool_choice`)."""
    if engine.readiness.tool_choice is not None:
        return engine.readiness.tool_choice
    has_parser = engine.settings.tool_call_parser is not None
    if isinstance(engine.settings, VllmSettings):
        has_parser = has_parser and engine.settings.enable_auto_tool_choice
    return "auto" if has_parser else "required"
