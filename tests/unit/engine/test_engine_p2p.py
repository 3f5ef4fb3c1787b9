"""One verdict on P2P, every flag: what is rendered, what a start adds, and when a deploy replaces an engine for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_node import MODELS, REFERENCE, SCRIPTS, Node, until

from gpuwright.peers import VERDICTS, PeerVerdict, Word, peer_groups
from gpuwright.spec.node import NodeSpec
from roles.engine import container, flags, operations, wanted
from roles.engine.facts import EngineState
from roles.engine.spec import EngineSpec

NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "1"}


def spec(kind: str = "vllm", size: int = 2, **engine: object) -> EngineSpec:
    flag = "tensor_parallel_size" if kind == "vllm" else "tp_size"
    one = {"image": REFERENCE, "model": "tiny", "served_name": "lab", "port": 18001, "gpus": list(range(size))}
    return EngineSpec.model_validate({"engines": {"main": {**one, "settings": {"kind": kind, flag: size}, **engine}}})


def test_one_verdict_turns_off_every_way_that_uses_p2p() -> None:
    """gpu-node.md 7.5: with NCCL alone turned off, vLLM's own all-reduce hung (vllm#51513)."""
    for size in (2, 4):
        apart = container.separation(spec(size=size).engines["main"])
        assert apart.nccl == NCCL
        assert apart.arguments == ("--disable-custom-all-reduce",)
        assert apart.all_environment == NCCL | {
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
            "VLLM_USE_NCCL_SYMM_MEM": "0",
        }


@pytest.mark.parametrize(
    ("engine", "fusion"),
    [
        ({}, False),
        ({"versions": {"sglang": "0.5.22"}}, False),
        ({"versions": {"sglang": "0.5.23"}}, True),
        ({"versions": {"sglang": "0.6.0"}}, True),
        (
            {"image": {"repository": "registry.test/sim", "tag": "v0.5.23-cu130", "digest": REFERENCE.split("@")[1]}},
            True,
        ),
    ],
)
def test_sglang_is_given_flags_that_it_knows(engine: dict[str, object], fusion: bool) -> None:
    apart = container.separation(spec("sglang", **engine).engines["main"])
    assert apart.all_environment == NCCL
    flag = "--enforce-disable-flashinfer-allreduce-fusion"
    assert apart.arguments == ("--disable-custom-all-reduce", *([flag] if fusion else []))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_engines_know_the_flags(kind: str) -> None:
    one = spec(kind, versions={kind: "0.5.23"} if kind == "sglang" else {}).engines["main"]
    assert flags.unknown_flags(kind, container.separation(one).arguments) == []  # type: ignore[arg-type]


def test_p2p_is_never_set_to_0() -> None:
    assert "0" not in container.separation(spec().engines["main"]).nccl.values()


def test_unjudged_engines_are_as_they_were() -> None:
    both = [wanted("main", spec().engines["main"], spec(), MODELS, judged=judged) for judged in (False, True)]
    unit, judged_unit = (w.files[1].data.decode() for w in both)
    assert "p2p" not in unit
    assert "p2p=" not in both[0].files[0].data.decode()
    assert "Wants=gpuwright-p2p.service\nAfter=gpuwright-p2p.service\n" in judged_unit
    # The same container: that P2P is judged changes nothing while it is good.
    assert both[0].config == both[1].config


def node_spec(pcie: dict[str, object] | None, size: int = 2) -> NodeSpec:
    return NodeSpec.model_validate(
        {
            "gpuwright": 1,
            "summary": "x",
            "kernel": {},
            "pcie": pcie,
            "engine": spec(size=size, environment={"NCCL_P2P_LEVEL": "SYS", "OTHER": "1"}).model_dump(),
        }
    )


def test_groups_are_engines_of_several_gpus_where_the_role_judges() -> None:
    (group,) = peer_groups(node_spec({}))
    assert (group.engine, group.image, group.gpus) == ("main", REFERENCE, (0, 1))
    assert group.environment == {"NCCL_P2P_LEVEL": "SYS"}
    assert peer_groups(node_spec(None)) == ()
    assert peer_groups(node_spec({}, size=1)) == ()
    assert peer_groups(node_spec({"p2p": {"mode": "off", "off_reason": "one card of each pair is broken"}})) == ()


# --- a start -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path: Path) -> Iterator[Node]:
    """A node with an engine of two GPUs whose P2P is judged; nvidia-smi and p2p-verdict are FAKES."""
    node = Node(tmp_path / "node", gpus=[0, 1], settings={"kind": "vllm", "tensor_parallel_size": 2})
    one = spec(port=node.port, environment={"VLLM_ALLREDUCE_USE_SYMM_MEM": "1"})
    for file in wanted("main", one.engines["main"], one, MODELS, judged=True).files:
        node.write(file.path, file.data.decode())
    uuids = [f"GPU-0000000{i}-0000-0000-0000-000000000000" for i in range(2)]
    node.write("etc/cdi/lab.yaml", "\n".join(uuids))
    listed = "\n".join(f"GPU {i}: FAKE (UUID: {uuid})" for i, uuid in enumerate(uuids))
    node.program("nvidia-smi", f"""case $1 in -L) echo '{listed}' ;; esac""")
    yield node
    node.close()


def scripts_with_verdict(node: Node, line: str | None) -> Path:
    """The real scripts, beside a FAKE p2p-verdict that prints `line`, or without one."""
    beside = node.root / "lib"
    beside.mkdir()
    for script in SCRIPTS.iterdir():
        (beside / script.name).symlink_to(script)
    if line is not None:
        (beside / "p2p-verdict").write_text(f"#!/bin/bash\n[ \"$1\" = main ] && printf '{line}\\n'\n")
        (beside / "p2p-verdict").chmod(0o755)
    return beside


@pytest.mark.parametrize(
    ("line", "used", "said"),
    [
        ("main\\tgood\\tall was right", True, "P2P between GPUs 0 1 is used: all was right"),
        ("main\\tbad\\tGPU 1 to GPU 0: zeros", False, "bad, GPU 1 to GPU 0: zeros"),
        ("main\\texpired\\tthe kernel was 1 and is 2", False, "expired, the kernel was 1 and is 2"),
        ("main\\tmissing\\tnever judged", False, "missing, never judged"),
        ("main\\tnone\\tthe image has no torch", False, "none, the image has no torch"),
        ("main\\tunknown\\tnvidia-smi fails", False, "unknown, nvidia-smi fails"),
        ("", False, "unknown, the verdict cannot be asked for"),
        (None, False, "unknown, the verdict cannot be asked for"),
    ],
)
def test_a_start_uses_p2p_only_when_the_verdict_is_good(
    judged: Node, monkeypatch: pytest.MonkeyPatch, line: str | None, used: bool, said: str
) -> None:
    monkeypatch.setattr("engine_node.SCRIPTS", scripts_with_verdict(judged, line))
    status, output = judged.run("engine-prestart")
    assert status == 0, output
    assert said in output
    assert not judged.exists("run/gpuwright/engines/main/refused"), output
    process = judged.begin("engine-run")
    until(lambda: judged.exists("fake/create"))
    process.terminate()
    process.wait(timeout=20)
    words = judged.read("fake/create").splitlines()
    off = {"--env=NCCL_P2P_DISABLE=1", "--env=NCCL_CUMEM_ENABLE=1", "--disable-custom-all-reduce"}
    labels = [word for word in words if word.startswith("--label=gpuwright.p2p=")]
    symmetric = [word for word in words if word.startswith("--env=VLLM_ALLREDUCE_USE_SYMM_MEM=")]
    if used:
        assert not off & set(words)
        assert labels == []
        assert symmetric == ["--env=VLLM_ALLREDUCE_USE_SYMM_MEM=1"]  # the engine's own setting
    else:
        assert off <= set(words)
        assert labels == [f"--label=gpuwright.p2p={container.separation(spec().engines['main']).label}"]
        # Once: of two values, programs take the first.
        assert symmetric == ["--env=VLLM_ALLREDUCE_USE_SYMM_MEM=0"]
        image = words.index(REFERENCE)
        assert words.index("--env=NCCL_P2P_DISABLE=1") < image < words.index("--disable-custom-all-reduce")


LOCK = "run/gpuwright/p2p.lock"


def test_a_start_waits_for_a_probe_that_has_the_gpus(judged: Node, monkeypatch: pytest.MonkeyPatch, held) -> None:
    """A real lock, of another process, as a probe that somebody started by hand has it."""
    monkeypatch.setattr("engine_node.SCRIPTS", scripts_with_verdict(judged, "main\\tgood\\tall was right"))
    with held(judged.path(LOCK)):
        process = judged.begin("engine-prestart")
        until(lambda: "of at most" in judged.output("engine-prestart"))
        assert "s: the GPUs are being probed (gpuwright-p2p)" in judged.output("engine-prestart")
        assert process.poll() is None
        assert "P2P between GPUs" not in judged.output("engine-prestart")  # a verdict is asked for after the probe
    assert process.wait(timeout=30) == 0
    assert "pre-flight passed" in judged.output("engine-prestart")


def test_a_probe_that_does_not_end_is_waited_for_no_longer_than_other_conditions(judged: Node, held) -> None:
    conf = "etc/gpuwright/engines/main.conf"
    judged.write(conf, f"{judged.read(conf)}\nconditions_limit=1\n")
    with held(judged.path(LOCK)):
        status, output = judged.run("engine-prestart")
    assert status == 75  # a passing condition: systemd tries again
    assert "start given up for now: the GPUs are being probed (gpuwright-p2p)" in output


def test_an_engine_that_nobody_judges_waits_for_no_probe(tmp_path: Path, held) -> None:
    node = Node(tmp_path / "node")
    with held(node.path(LOCK)):
        status, output = node.run("engine-prestart")
    assert status == 0
    assert "being probed" not in output


# --- a deploy ----------------------------------------------------------------------------------------------------------

ONE = wanted("main", spec().engines["main"], spec(), MODELS, judged=True)
OFF = ONE.separation or ""


@pytest.mark.parametrize(
    ("word", "label", "replaced"),
    [
        ("good", "", False),
        ("good", OFF, True),
        ("bad", OFF, False),
        ("bad", "", True),
        ("bad", "off-of-an-older-release", True),
        # Tried as things are now, and not to be judged: another try would come to the same.
        ("none", OFF, False),
        ("none", "", True),
        # To be judged again, which needs the engine down, whatever it runs with.
        ("expired", "", True),
        ("expired", OFF, True),
        ("missing", "", True),
        ("missing", OFF, True),
        # Could not look: what runs stays.
        ("unknown", "", False),
        ("unknown", OFF, False),
    ],
)
def test_a_verdict_that_changed_replaces_a_serving_engine(word: Word, label: str, replaced: bool) -> None:
    state = EngineState("main", active="active", ready=True, config=ONE.config, separation=label)
    verdicts = {"main": PeerVerdict(word, "because")}
    assert bool(operations._to_replace({"main": state}, verdicts, [ONE])) is replaced
    assert operations._is_up(state, ONE, verdicts) is not replaced


def test_where_nothing_is_judged_a_label_is_left_over() -> None:
    plain = wanted("main", spec().engines["main"], spec(), MODELS)
    state = EngineState("main", active="active", ready=True, config=plain.config)
    assert operations._is_up(state, plain, {})
    left = EngineState("main", active="active", ready=True, config=plain.config, separation=OFF)
    assert operations._to_replace({"main": left}, {}, [plain]) == [plain]


def test_verdicts_are_read_as_printed() -> None:
    assert VERDICTS.parse("main\tgood\tall right\nother\texpired\tthe driver\twas\n") == {
        "main": PeerVerdict("good", "all right"),
        "other": PeerVerdict("expired", "the driver\twas"),
    }
    for damaged in ("main\tfine\tx", "main good x", "\n"):
        with pytest.raises(ValueError):
            VERDICTS.parse(damaged)
