"""Settings of role `engine`: one systemd unit per engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuwright.spec.base import Image, Name, Port, Seconds, Size, Strict

EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EnvironmentValue = Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$")]


class VllmSettings(Strict):
    """vLLM's flags, each with its reason. Names are the flags' own, with underscores."""

    kind: Literal["vllm"] = "vllm"
    max_model_len: int | None = Field(
        default=None, gt=0, description="tokens; the service's promise, not a tuning knob (seed 2)"
    )
    max_num_seqs: int | None = Field(default=None, gt=0, description="sequences in flight")
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=0.98, description="share of GPU memory vLLM may claim"
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share the weights; as many as `gpus`")
    enable_expert_parallel: bool = Field(
        default=False, description="whole experts per GPU instead of slices of each; NVIDIA's card sets it (seed 3)"
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "bfloat16"] | None = Field(
        default=None,
        description="None: what the checkpoint says (seed 2: fp8 comes from its configuration)",
    )
    enable_chunked_prefill: bool | None = Field(
        default=None, description="one giant prompt does not monopolise the engine (seed 2)"
    )
    enable_prefix_caching: bool | None = Field(default=None, description="shared prefixes are paid once (seed 2)")
    enable_auto_tool_choice: bool = Field(
        default=False, description="the model decides when to call a tool; needs tool_call_parser"
    )
    tool_call_parser: str | None = Field(
        default=None, description="pinned to the image's build; re-test when the image moves (seed 2)"
    )
    reasoning_parser: str | None = Field(
        default=None, description="splits reasoning from the answer; pinned like tool_call_parser"
    )
    load_format: str | None = Field(default=None, description="how weights are read; none: what the files are")
    dtype: str | None = Field(default=None, description="of weights and activations; none: what the checkpoint says")
    speculative: dict[str, str | int | float | bool] | None = Field(
        default=None, description="--speculative-config as JSON: multi-token prediction"
    )
    multimodal: bool = Field(default=False, description="the gateway's body limit grows by 64 MiB")
    extra_flags: tuple[str, ...] = Field(default=(), description="one flag per entry, as --name=value")


class SglangSettings(Strict):
    """SGLang's flags, each with its reason."""

    kind: Literal["sglang"] = "sglang"
    context_length: int | None = Field(
        default=None, gt=0, description="tokens; the service's promise. Above 262144 only without CUDA graphs (seed 1)"
    )
    max_running_requests: int | None = Field(default=None, gt=0, description="sequences in flight")
    mem_fraction_static: float | None = Field(
        default=None, gt=0, le=0.98, description="share of GPU memory for weights and cache"
    )
    tp_size: int = Field(default=1, ge=1, description="GPUs that share the weights; as many as `gpus`")
    ep_size: int = Field(default=1, ge=1, description="GPUs that whole experts are spread over; within tp_size")
    kv_cache_dtype: str | None = Field(default=None, description="none: what the checkpoint says")
    attention_backend: str | None = Field(
        default=None, description="none: SGLang's choice. trtllm ones run on compute capability 10.x only (seed 3)"
    )
    moe_runner_backend: str | None = Field(default=None, description="kernels of the experts; none: SGLang's choice")
    tool_call_parser: str | None = Field(
        default=None, description="pinned to the image's build; re-test when the image moves (seed 2)"
    )
    reasoning_parser: str | None = Field(
        default=None, description="splits reasoning from the answer; pinned like tool_call_parser"
    )
    disable_cuda_graph: bool = Field(
        default=False, description="slower; what contexts above 262144 tokens need (seed 1)"
    )
    cuda_graph_max_bs: int | None = Field(default=None, gt=0, description="largest batch that has a CUDA graph")
    multimodal: bool = Field(default=False, description="the gateway's body limit grows by 64 MiB")
    extra_flags: tuple[str, ...] = Field(default=(), description="one flag per entry, as --name=value")


class Readiness(Strict):
    """One deadline for a whole start: wait for conditions, load, gate."""

    deadline: Seconds = Field(default=900, description="from the first line of pre-start to ready; owned by our script")
    conditions_limit: Seconds = Field(
        default=300, description="how long pre-flight waits for passing conditions (GPUs held, RAM)"
    )
    tool_call: bool = Field(default=True, description="a structured tool call gates a release; restarts only report it")
    tool_choice: Literal["auto", "required"] | None = Field(
        default=None,
        description="None: auto where the engine has a tool call parser, because required is enforced by guided decoding "
        "and never meets the parser",
    )
    completion_tokens: int = Field(default=8, ge=1, description="of the completion that every start must answer")


class Restart(Strict):
    """Seed 2: on failure, 60 seconds apart, at most 3 starts per hour."""

    delay: Seconds = Field(default=60, description="RestartSec=")
    burst: int = Field(default=3, ge=1, description="StartLimitBurst=: then the unit stays down and keeps its evidence")
    interval: Seconds = Field(
        default=7200, description="StartLimitIntervalSec=; must exceed burst x the longest attempt"
    )


class Engine(Strict):
    """Unit ``gpuwright-engine-<name>.service``, one container, one bridge network, one loopback port."""

    image: Image = Field(
        description="registry/name@sha256:…, or registry/name:tag for `gpuwright pin`; or its parts, as below"
    )
    model: Name = Field(description="which of models.items it serves")
    served_name: str = Field(pattern=r"^[\w.:/-]+$", description="the model name clients use")
    port: Port = Field(description="published on 127.0.0.1 only")
    gpus: tuple[int, ...] = Field(
        default=(), description="indices into hardware.gpus; given to the container by UUID through CDI"
    )
    numa_nodes: str = Field(
        default="auto",
        pattern=r"^(auto|off|\d+([,-]\d+)*)$",
        description="auto: confined to CPUs and memory of the nodes its GPUs hang on, as the firmware says at every start; "
        "or those nodes, where it does not say; off. Never where HBM is a memory node: error 802 (seed 2)",
    )
    versions: dict[Literal["vllm", "sglang", "flashinfer"], str] = Field(
        default_factory=dict,
        description="what the image holds, for the compatibility table; the engine's own is read from a tag like v0.31.0",
    )
    settings: Annotated[VllmSettings | SglangSettings, Field(discriminator="kind")] = Field(
        description="the engine's own flags"
    )
    environment: dict[EnvironmentName, EnvironmentValue] = Field(
        default_factory=dict, description="container environment; never secrets"
    )
    shm_size: Size = Field(default=16 * 1024**3, description="instead of --ipc=host (security.md 2.4)")
    memory: Size | None = Field(default=None, description="container memory limit; none by default")
    tmp_size: Size = Field(default=8 * 1024**3, description="executable tmpfs on /tmp: JIT compilers load from it")
    pids_limit: int = Field(default=8192, description="processes and threads of the container")
    min_free_memory: Size | None = Field(default=None, description="MemAvailable before a start (seed 1: 77 GiB floor)")
    max_gpu_temperature: int | None = Field(
        default=None, gt=0, description="°C of the engine's GPUs before a start; waited for (seed 1: heat stopped runs)"
    )
    drain: Seconds = Field(
        default=60, description="how long requests in flight may go on after the gateway was told to send no more"
    )
    stop_timeout: Seconds = Field(default=120, description="docker stop -t; seed 1 saw an engine need more than 60 s")
    after: tuple[Name, ...] = Field(
        default=(), description="engines that must be ready first: sequential loading (seed 1)"
    )
    readiness: Readiness = Readiness()
    restart: Restart = Restart()
    qualification: Literal["qualified", "experimental"] = Field(
        default="experimental", description="whether somebody measured this engine on this machine"
    )
    qualification_reason: str = Field(
        default="not yet qualified on this hardware", description="what was measured, or what is missing"
    )


class EngineSpec(Strict):
    """The engines of a node and what happens before each start."""

    page_cache_drop: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: sync and drop before every start wherever a memory node without CPUs exists (seed 2)",
    )
    page_cache_drop_off_reason: str | None = Field(
        default=None, description="why this machine can do without; needed with off"
    )
    file_pages_limit: Size = Field(
        default=1024 * 1024**2, description="FilePages allowed on an HBM node after the drop"
    )
    evidence_max: Size = Field(
        default=512 * 1024**2, description="cap of the evidence folder of one engine; the oldest goes"
    )
    engines: dict[Name, Engine] = Field(description="engines by the name their units, containers and evidence have")
