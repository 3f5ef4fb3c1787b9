"""What is known not to work together, one row per finding, each with its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuwright.spec.node import Hardware, NodeSpec
from gpuwright.spec.rules.engines import parallel_size
from gpuwright.spec.rules.found import Found
from roles.engine.spec import Engine, SglangSettings, VllmSettings
from roles.models.spec import Model

Version = tuple[int, ...]


@dataclass(frozen=True)
class Pairing:
    """One engine on one machine with one checkpoint: what the rows look at."""

    hardware: Hardware
    engine: Engine
    model: Model

    @property
    def vllm(self) -> VllmSettings | None:
        return self.engine.settings if isinstance(self.engine.settings, VllmSettings) else None

    @property
    def sglang(self) -> SglangSettings | None:
        return self.engine.settings if isinstance(self.engine.settings, SglangSettings) else None

    @property
    def capability(self) -> Version | None:
        """(12, 0) is SM120; None where the node file does not say."""
        return _version(self.hardware.gpus.compute_capability or "")

    @property
    def is_glm_flash(self) -> bool:
        return "glm-5.3-flash" in self.model.repo.lower()

    @property
    def is_nvfp4(self) -> bool:
        return "nvfp4" in self.model.repo.lower()

    def holds(self, program: str) -> Version | None:
        """The version of a program inside the image: as `versions` says, or vLLM's from a tag such as v0.31.0."""
        if program in self.engine.versions:
            return _version(self.engine.versions[program])
        if program == self.engine.settings.kind:
            return _version((self.engine.image.tag or "").removeprefix("v"))
        return None

    def gpu(self, name: str) -> bool:
        return name.lower() in (self.hardware.gpus.model or "").lower()


def _version(text: str) -> Version | None:
    match = re.match(r"\d+(\.\d+)+", text)
    return tuple(map(int, match[0].split("."))) if match else None


@dataclass(frozen=True)
class Row:
    """`refuses` is true for a pairing that is known to fail; `blames` is the setting, below the engine."""

    name: str
    blames: tuple[str, ...]
    refuses: Callable[[Pairing], bool]
    sentence: str
    source: str


def _older(pairing: Pairing, program: str, oldest: Version) -> bool:
    """True for an older version, and for one that nobody told: the row is about a start that fails after minutes."""
    found = pairing.holds(program)
    return found is None or found < oldest


TABLE: tuple[Row, ...] = (
    Row(
        name="nvfp4-needs-blackwell",
        blames=("model",),
        refuses=lambda p: p.is_nvfp4 and p.capability is not None and p.capability < (10, 0),
        sentence="is an NVFP4 checkpoint, which needs Blackwell (compute capability 10.0 or newer); use the FP8 one",
        source="seed 3: vLLM's recipe, 'requires NVIDIA Blackwell GPUs'",
    ),
    Row(
        name="glm-flash-on-sm120-needs-vllm-0.31",
        blames=("image",),
        refuses=lambda p: (
            p.is_glm_flash and p.vllm is not None and p.capability == (12, 0) and _older(p, "vllm", (0, 31, 0))
        ),
        sentence=(
            "must hold vLLM 0.31.0 or newer for GLM-5.3-Flash on SM120; where the tag is no version, say it: "
            'versions: {vllm: "0.31.0"}'
        ),
        source="seed 3: release notes of vLLM 0.31.0, 'NoPE sparse MLA on the FlashInfer SM120 backend'; vllm#53963",
    ),
    Row(
        name="glm-flash-needs-vllm-0.29",
        blames=("image",),
        refuses=lambda p: p.is_glm_flash and p.vllm is not None and (p.holds("vllm") or (0, 29, 0)) < (0, 29, 0),
        sentence="must hold vLLM 0.29.0 or newer for GLM-5.3-Flash",
        source="seed 3: vLLM's recipe of 2026-10-08",
    ),
    Row(
        name="glm-flash-needs-flashinfer-0.6.17",
        blames=("versions",),
        refuses=lambda p: p.is_glm_flash and p.vllm is not None and (p.holds("flashinfer") or (0, 6, 17)) < (0, 6, 17),
        sentence="must have FlashInfer 0.6.17 or newer for GLM-5.3-Flash (NoPE sparse MLA)",
        source="seed 3: vLLM's recipe of 2026-10-08",
    ),
    Row(
        name="nvidia-nvfp4-has-no-mtp",
        blames=("settings", "speculative"),
        refuses=lambda p: (
            p.model.repo == "nvidia/GLM-5.3-Flash-NVFP4" and p.vllm is not None and p.vllm.speculative is not None
        ),
        sentence=(
            "fails to load with nvidia/GLM-5.3-Flash-NVFP4: size of tensor a (1024) must match (2048); leave it out, "
            "or use RedHatAI's checkpoint, which is faster and less accurate"
        ),
        source="seed 2: 'No speculative decoding'",
    ),
    Row(
        name="hopper-fp8-cache-needs-vllm-0.32",
        blames=("settings", "kv_cache_dtype"),
        refuses=lambda p: (
            p.is_glm_flash
            and p.vllm is not None
            and (p.vllm.kv_cache_dtype or "").startswith("fp8")
            and p.capability == (9, 0)
            and _older(p, "vllm", (0, 32, 0))
        ),
        sentence="on Hopper GLM-5.3-Flash has an FP8 cache only from vLLM 0.32.0 on; use bfloat16 or a newer image",
        source="seed 3: vLLM's recipe and the release notes of 0.32.0",
    ),
    Row(
        name="sglang-cuda-graphs-above-262144",
        blames=("settings", "context_length"),
        refuses=lambda p: (
            p.sglang is not None and (p.sglang.context_length or 0) > 262_144 and not p.sglang.disable_cuda_graph
        ),
        sentence=(
            "aborts on the first token after a cold prompt above about 262,144 tokens while CUDA graphs are on; "
            "lower it to 262144, or set disable_cuda_graph (slower)"
        ),
        source="seed 1: 'The million-token context is not a serving result'",
    ),
    Row(
        name="trtllm-attention-is-sm100",
        blames=("settings", "attention_backend"),
        refuses=lambda p: (
            p.sglang is not None
            and (p.sglang.attention_backend or "").startswith("trtllm")
            and p.capability is not None
            and p.capability[0] != 10
        ),
        sentence="runs on compute capability 10.x only; this machine's is another",
        source="seed 3: 'vLLM führt seine eigenen trtllm-gen-Attention-Kernel nur für Compute Capability 10.x'",
    ),
    Row(
        name="arm64-image-on-x86",
        blames=("image",),
        refuses=lambda p: p.hardware.architecture == "x86_64" and _says(p, r"aarch64|arm64"),
        sentence="is built for arm64, and this machine is x86_64; use a plain vLLM image, 0.31.0 or newer",
        source="seed 3: NVIDIA's own container is built for arm64 and CUDA 13.0",
    ),
    Row(
        name="x86-image-on-arm64",
        blames=("image",),
        refuses=lambda p: p.hardware.architecture == "arm64" and _says(p, r"x86[_-]64|amd64"),
        sentence="is built for x86_64, and this machine is arm64; use an image for aarch64",
        source="seed 2 runs the nightly-aarch64 build",
    ),
    Row(
        name="eight-gb10-fail-to-start",
        blames=("gpus",),
        refuses=lambda p: p.is_glm_flash and p.gpu("GB10") and parallel_size(p.engine) >= 8,
        sentence="eight GB10 units failed to start with this model; use four",
        source="seed 2: 'Against GB10 pods'",
    ),
    Row(
        name="two-gb10-hold-six-sequences",
        blames=("settings", "max_num_seqs"),
        refuses=lambda p: (
            p.is_glm_flash
            and p.gpu("GB10")
            and parallel_size(p.engine) == 2
            and (getattr(p.engine.settings, "max_num_seqs", None) or 7) > 6
        ),
        sentence="two GB10 units hold six sequences of this model; say max_num_seqs: 6 or use four units",
        source="seed 2: 'Against GB10 pods'",
    ),
    Row(
        name="vllm-prompt-embeds",
        blames=("settings", "extra_flags"),
        refuses=lambda p: p.vllm is not None and _flag(p, "--enable-prompt-embeds"),
        sentence="holds --enable-prompt-embeds, which deserialises what clients send (CVE-2025-62164); leave it out",
        source="security.md 2.2",
    ),
    Row(
        name="sglang-custom-logit-processor",
        blames=("settings", "extra_flags"),
        refuses=lambda p: p.sglang is not None and _flag(p, "--enable-custom-logit-processor"),
        sentence="holds --enable-custom-logit-processor, which runs code that clients send (CVE-2026-7304); leave it out",
        source="security.md 2.2",
    ),
)


def _says(pairing: Pairing, pattern: str) -> bool:
    image = pairing.engine.image
    return re.search(pattern, f"{image.repository}:{image.tag or ''}") is not None


def _flag(pairing: Pairing, name: str) -> bool:
    return any(flag.split("=")[0].replace("_", "-") == name for flag in pairing.engine.settings.extra_flags)


def check(spec: NodeSpec) -> Iterator[Found]:
    """Every row on every engine whose model is described."""
    for name, engine in spec.engine.engines.items() if spec.engine else ():
        model = spec.models.items.get(engine.model) if spec.models else None
        if model is None:
            continue  # the rule on models.items says so
        for row in TABLE:
            if row.refuses(Pairing(spec.hardware, engine, model)):
                path = ("engine", "engines", name, *row.blames)
                yield Found(path, f"{row.sentence} [{row.source}]")
