"""The machines that ship, value by value, each with the field report it comes from.

A value changes here only when the report is found to say something else.
"""

from __future__ import annotations

import pytest

from gpuwright import numa
from gpuwright.render import REPOSITORY
from gpuwright.spec import fleet

NODES = sorted(file.stem for file in (REPOSITORY / "inventory/nodes").glob("*.yaml"))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Every shipped node file, read through an inventory of one host each."""
    inventory = tmp_path_factory.mktemp("inventory") / "site.py"
    (inventory.parent / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
    inventory.write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        f"hosts = _fleet({{name: {{'node': name}} for name in {NODES}}}, __file__)\n"
    )
    return fleet.collect(inventory)


def test_what_ships_is_right_as_far_as_it_goes(shipped):
    assert set(NODES) >= {
        "lab",
        "dgx-station-gb300",
        "dgx-station-gb300-redhatai",
        "rtx-pro-6000-x4",
        "rtx-pro-6000-x4-mtp",
        "rtx-pro-6000-x8",
        "rtx-pro-6000-x8-fp8",
        "h200-nvl-x4",
    }
    assert set(shipped.specs) == set(NODES)
    assert [fault for fault in shipped.faults if not fault.unfinished] == []


def test_no_digest_or_commit_is_invented(shipped):
    """The seeds print none, so every image and model waits for `gpuwright pin`."""
    for name, spec in shipped.specs.items():
        assert {engine.image.digest for engine in spec.engine.engines.values()} == {None}, name
        assert [model.commit for model in spec.models.items.values()] == [None], name
    lock = (REPOSITORY / "inventory/pins.lock.yaml").read_text()
    assert "sha256:" not in lock


STATION = {
    # seed 2, "Context length and concurrency"
    "engine.engines.glm.settings.max_model_len": 1_048_576,
    "engine.engines.glm.settings.max_num_seqs": 256,
    # seed 2, "Memory utilization and caching"
    "engine.engines.glm.settings.gpu_memory_utilization": 0.94,
    "engine.engines.glm.settings.enable_chunked_prefill": True,
    "engine.engines.glm.settings.enable_prefix_caching": True,
    # seed 2, "Tool and reasoning parsers"
    "engine.engines.glm.settings.enable_auto_tool_choice": True,
    "engine.engines.glm.settings.tool_call_parser": "glm47",
    "engine.engines.glm.settings.reasoning_parser": "glm45",
    # seed 2, "The API surface"
    "engine.engines.glm.served_name": "glm-5.3-flash",
    "gateway.listen.0.port": 8888,
    # seed 2, "Key takeaways"
    "engine.engines.glm.settings.kind": "vllm",
    "engine.engines.glm.settings.tensor_parallel_size": 1,
    "engine.engines.glm.gpus": (0,),
    "hardware.gpus.count": 1,
    # seed 2, "The KV cache budget": fp8 comes from the checkpoint, it is not a flag
    "engine.engines.glm.settings.kv_cache_dtype": None,
    "engine.engines.glm.settings.extra_flags": (),
    # seed 2, "Why we pinned the container image": the nightly-aarch64 build
    "engine.engines.glm.image.tag": "nightly-aarch64",
    "hardware.architecture": "arm64",
    # seed 2, "The GB300 memory trap"
    "hardware.hbm_numa_nodes": (1,),
    "hardware.cpu_numa_nodes": (0,),
    "memory.regime": "numa",
    "memory.zone_reclaim": "auto",
    "models.numa_nodes": None,  # follows from the two above: test_io_keeps_to_the_nodes_with_cpus
    "engine.page_cache_drop": "auto",
    "engine.page_cache_drop_off_reason": None,
    # seed 2, "The restart policy"
    "engine.engines.glm.restart.delay": 60,
    "engine.engines.glm.restart.burst": 3,
    "engine.engines.glm.restart.interval": 3600,
    # seed 2, "The smoke test": a launch blocker
    "engine.engines.glm.readiness.tool_call": True,
}

GOLDEN = {
    "dgx-station-gb300": {
        **STATION,
        "models.items.glm.repo": "nvidia/GLM-5.3-Flash-NVFP4",  # seed 2, "Key takeaways"
        "engine.engines.glm.settings.speculative": None,  # seed 2, "No speculative decoding"
        "models.items.glm.size": int(190.4 * 1024**3),  # seed 3 (seed 2: 191 GB on disk)
        "engine.engines.glm.qualification": "qualified",
    },
    "dgx-station-gb300-redhatai": {
        **STATION,
        "models.items.glm.repo": "RedHatAI/GLM-5.3-Flash-NVFP4",  # seed 2 names the publisher
        "engine.engines.glm.settings.speculative": {"method": "mtp", "num_speculative_tokens": 1},  # seed 2: with MTP
        "models.items.glm.size": None,  # no seed says it
        "engine.engines.glm.qualification": "experimental",
    },
}

SERVER_EDITION = {
    # seed 3, "NVFP4 auf vier Server-Edition-Karten": NVIDIA's settings
    "engine.engines.glm.settings.kind": "vllm",
    "engine.engines.glm.settings.tensor_parallel_size": 4,
    "engine.engines.glm.settings.enable_expert_parallel": True,
    "engine.engines.glm.settings.kv_cache_dtype": "fp8",
    "engine.engines.glm.settings.max_num_seqs": 32,
    "engine.engines.glm.settings.gpu_memory_utilization": 0.90,
    "engine.engines.glm.settings.extra_flags": (),  # data parallelism of one is vLLM's default
    "engine.engines.glm.gpus": (0, 1, 2, 3),
    # seed 3: a context of 1,048,576 tokens
    "engine.engines.glm.settings.max_model_len": 1_048_576,
    # seed 3, "Softwarestand auf SM120"
    "hardware.gpus.compute_capability": "12.0",
    "hardware.architecture": "x86_64",
    "engine.engines.glm.image.tag": "v0.31.0",
    # seed 3, "Strom, Arbeitsspeicher und Datenträger"
    "hardware.gpus.count": 4,
    "hardware.gpus.power_limit_watts": 600,
    "nvidia.power_limit_watts": 600,
    "hardware.memory": 768 * 1024**3,
    "engine.engines.glm.qualification": "experimental",
    # seed 2's restart policy
    "engine.engines.glm.restart.delay": 60,
    "engine.engines.glm.restart.burst": 3,
    "engine.engines.glm.restart.interval": 3600,
}

GOLDEN |= {
    "rtx-pro-6000-x4": {
        **SERVER_EDITION,
        "models.items.glm.repo": "nvidia/GLM-5.3-Flash-NVFP4",  # seed 3
        "models.items.glm.size": int(190.4 * 1024**3),  # seed 3
        "models.items.glm.licence": "MIT",  # seed 3
        "engine.engines.glm.settings.speculative": None,  # MTP off
    },
    "rtx-pro-6000-x4-mtp": {
        **SERVER_EDITION,
        "models.items.glm.repo": "RedHatAI/GLM-5.3-Flash-NVFP4",  # seed 2: the one that loads with MTP
        "engine.engines.glm.settings.speculative": {"method": "mtp", "num_speculative_tokens": 1},
    },
}


# seed 2's restart policy, as every shipped engine has it
RESTART = {"restart.delay": 60, "restart.burst": 3, "restart.interval": 3600}


def of_engine(name, values):
    return {f"engine.engines.{name}.{path}": value for path, value in values.items()}


# seed 1, "Where we left it" and "The configuration that actually served"; where it uses words and no flags, the flags of the
# node file are our reading of "FP8 KV, FlashInfer sparse MLA, Triton linear attention, CUTLASS MoE"
SGLANG = {
    **RESTART,
    "settings.kind": "sglang",
    "settings.tp_size": 4,
    "settings.ep_size": 4,
    "settings.context_length": 262_144,
    "settings.max_running_requests": 4,
    "settings.mem_fraction_static": 0.90,
    "settings.kv_cache_dtype": "fp8_e4m3",
    "settings.moe_runner_backend": "cutlass",
    "settings.cuda_graph_max_bs": 4,  # "raise the scheduler and graph batch together from four to eight"
    "settings.disable_cuda_graph": False,
    "settings.extra_flags": (
        "--dsa-prefill-backend=flashinfer_sparse_mla",
        "--dsa-decode-backend=flashinfer_sparse_mla",
        "--linear-attn-backend=triton",
    ),  # and no speculative one: "MTP stays off in the checked-in recipe"
    "min_free_memory": 49 * 1024**3,  # "The container used 48.88 GiB of host RAM"
    "qualification": "experimental",
    "numa_nodes": "auto",
}

GOLDEN["rtx-pro-6000-x8"] = {
    "models.items.glm.repo": "LibertAIDAI/GLM-5.3-Flash-NVFP4",  # seed 1, "The checkpoint that fit"
    "models.items.glm.size": int(181.3 * 1024**3),
    "models.workers": 4,  # "four ordinary HTTP workers"
    "hardware.memory": 128 * 1024**3,  # "the node's 128 GB RAM"
    "hardware.gpus.count": 8,
    "hardware.gpus.compute_capability": "12.0",  # "Our GPUs report compute capability SM120"
    "hardware.gpus.power_limit_watts": None,  # no limit is named
    **of_engine("glm-b", SGLANG),
    **of_engine("glm-a", SGLANG),
    "engine.engines.glm-b.gpus": (4, 5, 6, 7),  # "one TP4/EP4 engine on GPUs 4-7"
    "engine.engines.glm-a.gpus": (0, 1, 2, 3),
    "engine.engines.glm-b.after": (),
    "engine.engines.glm-a.after": ("glm-b",),  # "Our two-engine plan starts them sequentially"
    "gateway.aliases.0.prefix": "/glm-5.3-flash",
}

# seed 3, "Das Modell und seine zwei Checkpoints": Z.ai's FP8 checkpoint; seed 1: 305.8 GiB
FP8 = {
    **of_engine("glm", RESTART),
    "models.items.glm.repo": "zai-org/GLM-5.3-Flash",
    "models.items.glm.size": int(305.8 * 1024**3),
    "models.items.glm.licence": "MIT",
    "engine.engines.glm.settings.kind": "vllm",
    "engine.engines.glm.settings.max_model_len": 1_048_576,
    "engine.engines.glm.settings.gpu_memory_utilization": 0.90,  # the 90 per cent of seed 3's rule
    "engine.engines.glm.settings.kv_cache_dtype": "bfloat16",  # both are calculated with a 16-bit cache
    "engine.engines.glm.settings.enable_expert_parallel": False,  # no seed says it of these two
    "engine.engines.glm.settings.extra_flags": (),
    "engine.engines.glm.qualification": "experimental",
}
GOLDEN |= {
    "rtx-pro-6000-x8-fp8": {
        **FP8,
        "engine.engines.glm.settings.tensor_parallel_size": 8,  # seed 3: "FP8 mit TP=8"
        "engine.engines.glm.gpus": tuple(range(8)),
        "engine.engines.glm.settings.speculative": None,
        "engine.engines.glm.image.tag": "v0.31.0",  # seed 3, "Softwarestand auf SM120"
        "hardware.gpus.count": 8,
        "hardware.gpus.compute_capability": "12.0",
    },
    "h200-nvl-x4": {
        **FP8,
        # seed 2, "Against a four-GPU H200 server": FP8 weights, tensor parallel 4 and multi-token prediction
        "engine.engines.glm.settings.tensor_parallel_size": 4,
        "engine.engines.glm.settings.speculative": {"method": "mtp", "num_speculative_tokens": 1},
        "engine.engines.glm.gpus": (0, 1, 2, 3),
        "engine.engines.glm.image.tag": "v0.32.0",  # seed 3: the release with a path for SM90
        "hardware.gpus.count": 4,
        "hardware.gpus.model": "NVIDIA H200 NVL",
        "hardware.gpus.compute_capability": "9.0",  # seed 3: "SM90, der Generation der H200"
        "hardware.gpus.power_limit_watts": 600,  # seed 3, "Vier H200 NVL bei 600 W"
        "hardware.memory": None,  # no seed says it
    },
}


def value_at(part, path):
    for name in path.split("."):
        if isinstance(part, dict):
            part = part[name]
        elif isinstance(part, tuple):
            part = part[int(name)]
        else:
            part = getattr(part, name)
    return part


@pytest.mark.parametrize("node", GOLDEN)
def test_values_are_the_field_reports(node, shipped):
    spec = shipped.specs[node]
    assert {path: value_at(spec, path) for path in GOLDEN[node]} == GOLDEN[node]


@pytest.mark.parametrize("node", ["dgx-station-gb300", "dgx-station-gb300-redhatai"])
def test_io_keeps_to_the_nodes_with_cpus(node, shipped):
    """Seed 2, "Fix part 2": numactl --membind=0."""
    spec = shipped.specs[node]
    assert numa.io_nodes(spec.models.numa_nodes, spec.hardware) == "0"


def test_the_less_accurate_variant_says_so(shipped):
    spec = shipped.specs["dgx-station-gb300-redhatai"]
    assert "less accurate" in spec.summary
    assert "less accurate" in spec.engine.engines["glm"].qualification_reason


def test_what_is_missing_of_the_router_and_the_runtime_is_said(shipped):
    head = (REPOSITORY / "inventory/nodes/rtx-pro-6000-x8.yaml").read_text().partition("gpuwright: 1")[0]
    for words in ("Missing here", "ramjet", "without a licence", "ran ONE of them"):
        assert words in head
    assert "experimental" in shipped.specs["rtx-pro-6000-x8"].summary


@pytest.mark.parametrize("node", [name for name in NODES if not name.startswith("lab")])
def test_machines_say_what_they_ask_of_kernel_and_bus(node, shipped):
    """Nothing is rebooted by surprise, and no shipped machine turns its IOMMU off."""
    spec = shipped.specs[node]
    assert spec.kernel.reboot == "never"
    assert (spec.memory is not None) == bool(spec.hardware.hbm_numa_nodes)
    if spec.hardware.gpus.count > 1:
        assert (spec.pcie.iommu, spec.pcie.acs_redirect) == ("pt", "cleared")


@pytest.mark.parametrize("node", [name for name in NODES if not name.startswith("lab")])
def test_a_driver_that_no_seed_names_is_only_checked(node, shipped):
    assert shipped.specs[node].nvidia.source == "vendor"
    assert shipped.specs[node].nvidia.version is None


@pytest.mark.parametrize(("watts", "accepted"), [(450, True), (300, True), (250, False), (610, False)])
def test_four_cards_on_a_16_amp_feed(watts, accepted, tmp_path):
    """Seed 3: 2.7 kW with 450 W a card, under the 2.94 kW that it plans for such a feed."""
    (tmp_path / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
    inventory = tmp_path / "site.py"
    inventory.write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        f"hosts = _fleet({{'gpu-01': {{'node': 'rtx-pro-6000-x4', 'set': {{'nvidia.power_limit_watts': {watts}}}}}}}, __file__)\n"
    )
    faults = [fault for fault in fleet.collect(inventory).faults if not fault.unfinished]
    assert (faults == []) is accepted
    assert all("300 to 600 W" in fault.sentence for fault in faults)


def test_the_simulated_engine_says_so(shipped):
    spec = shipped.specs["lab"]
    assert "simulated" in spec.summary
    assert "simulated" in spec.engine.engines["main"].qualification_reason


@pytest.mark.parametrize(
    ("node", "left"),
    # seed 3: 35.4 GiB per card by its rule of 83.04 GiB; this rule is memory x utilisation, so a little more is left
    [
        ("rtx-pro-6000-x4", 35.4),
        ("rtx-pro-6000-x8", 35.4),  # seed 3, of nvidia's larger checkpoint: two TP4 copies leave 35.4 GiB each
        ("rtx-pro-6000-x8-fp8", 83.04 - 305.8 / 8),
        ("h200-nvl-x4", 46.9),
    ],
)
def test_weights_leave_room(node, left, shipped):
    spec = shipped.specs[node]
    for engine in spec.engine.engines.values():
        settings = engine.settings
        share = getattr(settings, "gpu_memory_utilization", None) or settings.mem_fraction_static
        weights = spec.models.items[engine.model].size / len(engine.gpus)
        assert left - 1 < (spec.hardware.gpus.memory * share - weights) / 1024**3 < left + 8
