"""What role models puts on a node, and when it thinks that something is left to do."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuwright import units
from gpuwright.numa import io_nodes
from gpuwright.spec.node import Gpus, Hardware
from roles.models import HUB_TOKEN, files, job, wanted
from roles.models.facts import MODELS
from roles.models.operations import Job
from roles.models.spec import Model, ModelsSpec

COMMIT = "a" * 40


def spec(**settings: object) -> ModelsSpec:
    return ModelsSpec.model_validate({"items": {"llm": {"repo": "lab/tiny", "revision": COMMIT}}} | settings)


def unit(**settings: object) -> str:
    [one] = wanted(spec(**settings), Hardware())
    return one.unit_file.data.decode()


def test_settings_are_what_the_script_reads() -> None:
    [one] = wanted(spec(hub_ca="ca.pem", stall_timeout="90 s", reserve="1 GiB"), Hardware())
    said = dict(line.split("=", 1) for line in one.settings.data.decode().splitlines() if line[0] != "#")
    assert said == {
        "name": "llm",
        "repo": "lab/tiny",
        "commit": COMMIT,
        "store": "/srv/models",
        "hub": "https://huggingface.co",
        "ca": "/etc/gpuwright/models/hub-ca.pem",
        "workers": "4",
        "stall_timeout": "90",
        "attempts": "10",
        "reserve": str(1024**3),
    }


def test_a_source_replaces_the_hub_and_needs_neither_network_nor_token() -> None:
    items = {"llm": {"repo": "lab/tiny", "revision": COMMIT, "source": "/mnt/usb/tiny"}}
    [one] = wanted(spec(items=items, token={"env": "X"}), Hardware())
    assert "hub=" not in one.settings.data.decode()
    text = one.unit_file.data.decode()
    assert "PrivateNetwork=yes" in text
    assert "LoadCredential" not in text
    assert "RequiresMountsFor=/srv/models /mnt/usb/tiny" in text


def test_the_token_is_a_credential_and_its_file_is_for_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "hf_SEKRET")
    assert "LoadCredential=hub-token:/etc/gpuwright/models/hub-token\n" in unit(token={"env": "X"})
    assert "LoadCredential" not in unit()
    everything = files(spec(token={"env": "X"}), Hardware())
    [secret] = [file for file in everything if file.path == HUB_TOKEN]
    assert (secret.mode, secret.user) == ("0600", "root")
    assert "SEKRET" not in repr(everything)


def test_what_somebody_must_look_at_is_not_started_again() -> None:
    script = Path("files/models/usr/local/lib/gpuwright/model-fetch").read_text()
    begin = script.index("readonly BAD_SETTINGS")
    declared = script[begin : script.index("\n\n", begin)].replace("\\\n", " ").split()[1:]
    codes = {name: int(value) for name, value in (word.split("=") for word in declared)}
    assert codes.pop("TRY_AGAIN") == 75
    [line] = [line for line in unit().splitlines() if line.startswith("RestartPreventExitStatus=")]
    assert {int(code) for code in line.partition("=")[2].split()} == set(codes.values())


def test_units_pass_the_lint_and_systemds_own_check(tmp_path: Path) -> None:
    made = [*files(spec(), Hardware()), *(one.unit_file for one in wanted(spec(numa_nodes="0"), Hardware()))]
    for file in made:
        if file.path.endswith(".service"):
            assert units.lint(file.path, file.data.decode()) == []
            (tmp_path / Path(file.path).name).write_bytes(file.data)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "gpuwright-model-llm.service")],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "gpuwright-model" in line and "not executable" not in line]
    assert said == []


@pytest.mark.parametrize(
    ("setting", "hardware", "bound_to"),
    [
        (None, Hardware(), None),
        (None, Hardware(hbm_numa_nodes=(1,)), "0"),
        (None, Hardware(cpu_numa_nodes=(0, 1), hbm_numa_nodes=(2, 10, 18, 26), gpus=Gpus(count=4)), "0-1"),
        ("0", Hardware(), "0"),
        ("0", Hardware(cpu_numa_nodes=(0, 1), hbm_numa_nodes=(2,)), "0"),
    ],
)
def test_downloads_are_bound_to_nodes_with_cpus(setting: str | None, hardware: Hardware, bound_to: str | None) -> None:
    described = spec(numa_nodes=setting)
    assert io_nodes(described.numa_nodes, hardware) == bound_to
    [one] = wanted(described, hardware)
    text = one.unit_file.data.decode()
    if bound_to is None:
        assert "NUMA" not in text
    else:
        assert f"NUMAPolicy=bind\nNUMAMask={bound_to}\n" in text


def test_a_model_without_a_commit_is_never_fetched() -> None:
    with pytest.raises(ValueError, match="gpuwright pin"):
        job("llm", Model(repo="lab/tiny", revision="main"), spec(), None)


def observed(one: Job, **changes: object) -> str:
    status = {"state": "verified", "sentence": "", "settings": one.fingerprint}
    found = {"name": "llm", "repo": "lab/tiny", "commit": COMMIT, "settings": one.fingerprint, "manifest": True,
             "files": 3, "bytes": 9, "suspect": [], "status": status}  # fmt: skip
    units = changes.pop("unit", "active exited")
    found["status"] = {**status, **changes.pop("status", {})} if found["status"] else None  # type: ignore[dict-item]
    return f"user\nmodel {json.dumps(found | changes)}\nstore 755 gpuwright-models /srv/models\nunit llm {units}"


@pytest.mark.parametrize(
    ("changes", "complete", "on_the_way"),
    [
        ({}, True, False),
        ({"manifest": False}, False, False),
        ({"suspect": ["config.json: missing"]}, False, False),
        ({"unit": "failed failed"}, False, False),
        ({"unit": "inactive dead"}, False, False),
        ({"status": {"settings": "of another commit"}}, False, False),
        ({"status": {"state": "fetching"}, "unit": "activating start", "manifest": False}, False, True),
        ({"status": {"state": "waiting"}, "unit": "activating auto-restart", "manifest": False}, False, False),
        ({"status": {"settings": "old"}, "unit": "activating start", "manifest": False}, False, False),
    ],
)
def test_what_is_left_to_do(changes: dict[str, object], complete: bool, on_the_way: bool) -> None:
    [one] = wanted(spec(), Hardware())
    seen = MODELS.parse(observed(one, **changes))
    assert seen.user
    assert seen.stores == {"/srv/models": "755 gpuwright-models"}
    found = seen.by_name["llm"]
    assert (found.complete(one.fingerprint), found.on_the_way(one.fingerprint)) == (complete, on_the_way)


def test_a_node_that_was_never_touched() -> None:
    seen = MODELS.parse("")
    assert (seen.user, seen.stores, seen.by_name) == (False, {}, {})
