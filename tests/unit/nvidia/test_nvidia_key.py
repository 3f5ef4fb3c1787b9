"""A key that is not the repository's is refused when the node file is read."""

from pathlib import Path

from click.testing import CliRunner

from gpuwright.cli import main

KEY = (Path(__file__).parents[1] / "spec/broken/another-key.asc").read_text()
NODE = """\
gpuwright: 1
summary: a machine
kernel: {}
nvidia: {source: nvidia, version: 580.95.05, repository_key: key.asc%s}
"""


def faults(directory: Path, more: str = "") -> str:
    (directory / "key.asc").write_text(KEY)
    (directory / "node.yaml").write_text(NODE % more)
    (directory / "site.py").write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        'hosts = _fleet({"gpu-01": {"node": "node.yaml", "ssh_user": "root"}}, __file__)\n'
    )
    return CliRunner().invoke(main, ["check", str(directory / "site.py")]).output


def test_another_key(tmp_path):
    assert (
        "node.yaml:4  nvidia.repository_key  'key.asc'  holds the key D06A2A93304E61CACFE92E3EFEF4663A509F7239, and the node file "
        "names EB693B3035CD5710E231E123A4B469963BF863CC; one of the two is wrong"
    ) in faults(tmp_path)


def test_the_key_that_is_named(tmp_path):
    fine = faults(tmp_path, ", repository_fingerprint: d06a 2a93 304e 61ca cfe9 2e3e fef4 663a 509f 7239")
    assert "nvidia" not in fine


def test_the_keys_of_docker_and_of_the_toolkit(tmp_path):
    (tmp_path / "damaged.asc").write_text("no key at all")
    said = faults(
        tmp_path,
        "}\ncontainers: {source: docker, repository_key: damaged.asc, toolkit: {source: nvidia, version: 1.18.2, "
        "repository_key: key.asc, repository_fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC}",
    )
    assert "containers.repository_key  'damaged.asc'  is not an ASCII-armoured public key" in said
    assert (
        "containers.toolkit.repository_key  'key.asc'  holds the key D06A2A93304E61CACFE92E3EFEF4663A509F7239" in said
    )
