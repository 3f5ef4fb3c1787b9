"""daemon.json files of others, in the shapes that are met: what each means for GPUs, and that the merge keeps what is theirs."""

import dataclasses
import json
import types

import pytest
from pyinfra.api import OperationError
from test_decisions import RUNNING

from roles.containers import daemon, operations
from roles.containers.diagnosis import diagnoses
from roles.containers.spec import ContainersSpec

HOST = types.SimpleNamespace(name="gpu-1", print_prefix="[gpu-1] ")

# A site's own: systemd's cgroups, a umask, a pool of addresses, data and logs where it wants them.
SITE = """
{
  "exec-opts": ["native.umask=0027", "native.cgroupdriver=systemd"],
  "log-driver": "json-file",
  "log-opts": {"max-size": "50m"},
  "data-root": "/srv/docker",
  "default-address-pools": [{"base": "10.210.0.0/16", "size": 24}]
}
"""
# What `nvidia-ctk runtime configure` leaves.
RUNTIME = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}}'


def kinds(text: str, version: daemon.Version | None = (26, 1)) -> list[str]:
    return [one.kind for one in diagnoses(json.loads(text), version)]


@pytest.mark.parametrize(
    ("text", "version", "found"),
    [
        ("{}", (26, 1), []),
        (SITE, (26, 1), ["systemd-cgroups"]),
        (RUNTIME, (26, 1), ["runtime-only"]),
        (RUNTIME, None, ["runtime-only"]),
        (RUNTIME, (28, 3), []),  # CDI is on by default
        ('{"runtimes": {"nvidia": {"path": "x"}}, "features": {"cdi": true}}', (26, 1), []),
        ('{"runtimes": {"nvidia": {"path": "x"}}, "features": {"cdi": false}}', (28, 3), ["runtime-only", "cdi-off"]),
        ('{"runtimes": {"crun": {"path": "/usr/bin/crun"}}}', (26, 1), []),
        ('{"default-runtime": "nvidia", "features": {"cdi": true}}', (26, 1), ["default-runtime"]),
        ('{"cdi-spec-dirs": ["/etc/cdi"]}', (26, 1), ["cdi-folders"]),
        ('{"cdi-spec-dirs": ["/etc/cdi", "/run/cdi"]}', (26, 1), []),
        # shapes that the merge refuses by itself
        ('{"exec-opts": "native.cgroupdriver=systemd", "features": [], "runtimes": "nvidia"}', (26, 1), []),
    ],
)
def test_each_setting_is_known_by_kind(text, version, found):
    assert kinds(text, version) == found


def test_two_that_look_alike_have_different_remedies():
    (systemd,) = diagnoses(json.loads(SITE), (26, 1))
    (runtime,) = diagnoses(json.loads(RUNTIME), (26, 1))
    assert not systemd.ours and "the setting may stay" in systemd.remedy
    assert runtime.ours and "features.cdi" in runtime.remedy and "snap" in runtime.remedy


def test_a_sites_file_keeps_everything_that_is_its_own():
    spec = ContainersSpec.model_validate({"data_root": "/srv/docker", "log_max_size": 50_000_000})
    merge = operations.plan(HOST, dataclasses.replace(RUNNING, live=SITE, info=None), spec, gpus=2)
    assert merge.result["exec-opts"] == ["native.umask=0027", "native.cgroupdriver=systemd"]
    assert merge.result["default-address-pools"] == [{"base": "10.210.0.0/16", "size": 24}]
    assert merge.result["log-opts"] == {"max-size": "50m", "max-file": "5"}
    assert merge.result["features"] == {"cdi": True}
    assert merge.drifted == merge.conflicts == merge.kept == ()


def test_a_size_in_dockers_words_is_told_in_those_of_the_node_file():
    with pytest.raises(OperationError) as refused:
        operations.plan(HOST, dataclasses.replace(RUNNING, live=SITE, info=None), ContainersSpec(), gpus=0)
    assert "put the host's value into the node file (containers.log_max_size: 50000000 B)" in str(refused.value)
    assert "put the host's value into the node file (containers.data_root)" in str(refused.value)


def test_a_runtime_of_the_toolkit_stays_and_cdi_comes():
    merge = operations.plan(HOST, dataclasses.replace(RUNNING, live=RUNTIME), ContainersSpec(), gpus=1)
    assert merge.result["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"
    assert merge.result["features"] == {"cdi": True}
    assert kinds(merge.text) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64_000_000), ("10MB", 10_000_000), ("1 g", 10**9), ("67108864", 67108864), ("", None), ("5 apples", None), ("-1", None)],
)  # fmt: skip
def test_sizes_as_docker_reads_them(text, size):
    assert daemon.size(text) == size
