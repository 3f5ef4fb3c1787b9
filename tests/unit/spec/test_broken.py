"""Every broken node file and inventory in broken/, against the sentences that broken/expected.yaml wants a user to see.

A node file is read through an inventory with one host; INVENTORY in the table stands for that inventory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gpuwright.cli import main
from gpuwright.render import REPOSITORY

BROKEN = Path(__file__).parent / "broken"
EXPECTED = yaml.safe_load((BROKEN / "expected.yaml").read_text())
JARGON = re.compile(
    r"Traceback|pydantic|Input should|\bstr\b|\bint\b|\bdict\b|NoneType|union|literal_error|loc=|\[type="
)


@pytest.fixture(autouse=True)
def in_broken(monkeypatch):
    monkeypatch.chdir(BROKEN)


def inventory_of(name: str, tmp_path: Path) -> Path:
    if name.endswith(".py"):
        return Path(name)
    inventory = tmp_path / "site.py"
    inventory.write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        f'gpu_nodes = _fleet({{"gpu-01": {{"node": {str(BROKEN / name)!r}}}}}, __file__)\n'
    )
    return inventory


def check(name: str, tmp_path: Path):
    inventory = inventory_of(name, tmp_path)
    done = CliRunner().invoke(main, ["check", str(inventory)])
    return done.exit_code, done.output.replace(str(inventory), "INVENTORY") if name.endswith(".yaml") else done.output


def report(lines: list[str]) -> str:
    return "\n".join([f"{len(lines)} fault{'s' if len(lines) > 1 else ''}; no host was contacted:", *lines, ""])


def test_the_table_and_the_folder_name_the_same_files():
    files = {file.name for file in BROKEN.iterdir() if file.suffix in (".yaml", ".py")}
    assert files - {"expected.yaml", "good.yaml"} == set(EXPECTED)
    assert len(EXPECTED) >= 40


def test_the_file_they_all_differ_from_is_accepted(tmp_path):
    assert check("good.yaml", tmp_path) == (0, GOOD)


GOOD = """\
gpu-01  good.yaml  engines: first (vllm), second (vllm)  models: maker/small  pins: 0 of 0
1 host described without a fault; no host was contacted.
No host key is recorded for gpu-01; before the first deploy run: gpuwright trust INVENTORY
"""


@pytest.mark.parametrize("name", EXPECTED)
def test_says_exactly_what_is_wrong(name, tmp_path):
    status, output = check(name, tmp_path)
    assert output == report(EXPECTED[name])
    assert status == 1
    assert not JARGON.search(output)


# Through pyinfra itself: its words are its own, the report is ours, nothing is connected.
@pytest.mark.parametrize(
    "name",
    [
        "no-hosts.py",
        "faults-in-two-groups.py",
        "unknown-ssh-setting.py",
        "gpu-used-twice.yaml",
        "model-not-pinned.yaml",
    ],
)
def test_pyinfra_ends_with_the_same_report(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", str(inventory_of(name, tmp_path)), str(REPOSITORY / "deploy.py"), "--dry"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(report(EXPECTED[name]).replace("INVENTORY", str(inventory_of(name, tmp_path))))
    assert "Traceback" not in done.stdout + done.stderr
    assert "Connect" not in done.stdout + done.stderr


def test_a_file_of_10_mb(tmp_path):
    large = tmp_path / "large.yaml"
    large.write_bytes(b"# " + b"x" * 10_000_000)
    status, output = check(str(large), tmp_path)
    assert (status, output) == (
        1,
        report([f"{large}  is larger than 1 MiB (10000002 bytes); a node file is a few KiB"]),
    )


def test_a_folder_instead_of_a_node_file(tmp_path):
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    assert check(str(folder), tmp_path) == (1, report([f"{folder}  is not a file"]))


def test_no_inventory(tmp_path):
    done = CliRunner().invoke(main, ["check", "prod.yml"])
    assert (done.exit_code, done.output) == (
        1,
        report(["prod.yml  is not a file; name one such as inventory/prod.py"]),
    )


def test_a_secret_is_never_shown(tmp_path):
    for name in EXPECTED:
        _, output = check(name, tmp_path)
        assert not re.search("hf_abc|hunter2|sk-abc", output), name
