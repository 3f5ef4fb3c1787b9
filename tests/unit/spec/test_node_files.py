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
    }
    assert set(shipped.specs) == set(NODES)
    assert [fault for fault in shipped.faults if not fault.unfinished] == []


def test_no_digest_or_commit_is_invented(shipped):
    """The seeds print none, so every image and model waits for `gpuwright pin`."""
    for name, spec in shipped.specs.items():
        assert [engine.image.digest for engine in spec.engine.engines.values()] == [None], name
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


def test_the_simulated_engine_says_so(shipped):
    spec = shipped.specs["lab"]
    assert "simulated" in spec.summary
    assert "simulated" in spec.engine.engines["main"].qualification_reason


@pytest.mark.parametrize(
    ("node", "left"),
    # seed 3: 35.4 GiB per card by its rule of 83.04 GiB; this rule is memory x utilisation, so a little more is left
    [("rtx-pro-6000-x4", 97887 * 1024**2 * 0.90 - int(190.4 * 1024**3) / 4)],
)
def test_weights_leave_room(node, left, shipped):
    assert left / 1024**3 == pytest.approx(38.4, abs=0.1)
    assert left > 35.4 * 1024**3
