"""Parts of a driver that are not of one release: each kind alone, with what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roles.nvidia import equality
from roles.nvidia.facts import Card, Kernel, Module, Nvidia, Package, Specification

UUID = "GPU-0a0a0a0a-1111-2222-3333-444444444444"
NAMES = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1", "libnvidia-cfg1")


def package(name: str, version: str = "580.95.05-1", status: str = "installed") -> Package:
    return Package(name, version, held=True, status=status)


HEALTHY = Nvidia(
    module=Module("580.95.05", open=True, params={}, hmm_disabled=None),
    smi=True,
    cards=(Card(0, UUID, "00000000:11:00.0", "a card", 1024, "12.0", 600, 600, 300, 600, True, False, False, True),),
    smi_failed=None,
    library="580.95",
    devices=(),
    nvswitches=0,
    packages={
        **{name: package(name) for name in NAMES},
        "nvidia-driver-pinning-580": package("nvidia-driver-pinning-580", "580.126.09-1"),
        "nvidia-container-toolkit": package("nvidia-container-toolkit", "1.18.2-1"),
        "cuda-compat-13-0": package("cuda-compat-13-0", "575.1.02-1ubuntu1"),
        "libnvidia-common-575": package("libnvidia-common-575", "575.1.02-1", "config-files"),
    },
    kernels=(Kernel("6.12.1-amd64", headers=True, module="580.95.05", signer=""),),
    running_kernel="6.12.1-amd64",
    secure_boot=False,
    specifications=(Specification("/run/cdi/nvidia.yaml", ("0", UUID, "all"), "580.95.05"),),
    units={},
    fabric_manager="",
    toolkit="1.18.2",
)


def kinds(seen: Nvidia) -> list[str]:
    return [finding.kind for finding in equality.findings(seen)]


def test_nothing_to_say_of_a_node_whose_parts_fit():
    assert equality.findings(HEALTHY) == []
    assert equality.release(HEALTHY) == "580.95.05"


def test_nothing_to_say_of_a_node_without_a_driver():
    empty = replace(HEALTHY, module=None, cards=(), library="", packages={}, specifications=())
    assert equality.findings(replace(empty, kernels=(Kernel("6.12.1-amd64", False, "", ""),))) == []


def test_debians_own_tools_have_releases_of_their_own():
    tools = {"nvidia-modprobe": package("nvidia-modprobe", "570.133.07-1")}
    theirs = {**HEALTHY.packages, "nvidia-smi": package("nvidia-smi"), **tools}
    assert kinds(replace(HEALTHY, packages=theirs)) == []
    assert kinds(replace(HEALTHY, packages={**HEALTHY.packages, **tools})) == ["package"], "NVIDIA's are of the release"


def test_a_driver_that_no_package_brought():
    """As on a machine whose image has it: version and library are there, packages and module files are not."""
    image = {"cuda-compat-13-0": package("cuda-compat-13-0", "575.1.02-1ubuntu1")}
    seen = replace(HEALTHY, packages=image, kernels=(), specifications=(), units=None)
    assert (equality.release(seen), equality.findings(seen)) == ("", [])


def test_one_library_that_was_upgraded_alone():
    """What unattended-upgrades did to a node whose driver was held by halves (gpu-node.md section 7, report 9)."""
    moved = HEALTHY.packages | {"libnvidia-cfg1": package("libnvidia-cfg1", "580.126.09-1")}
    [finding] = equality.findings(replace(HEALTHY, packages=moved))
    assert (finding.kind, finding.subject) == ("package", "libnvidia-cfg1")
    assert finding.seen == "libnvidia-cfg1 is 580.126.09"
    assert finding.expected == "580.95.05, as the other driver packages"


def test_the_library_that_nvidia_smi_talks_through_was_upgraded_alone():
    moved = HEALTHY.packages | {"libnvidia-ml1": package("libnvidia-ml1", "595.58.03-1")}
    broken = replace(HEALTHY, packages=moved, library="595.58", cards=(), smi_failed="Driver/library version mismatch")
    assert kinds(broken) == ["package", "library"]


def upgraded() -> Nvidia:
    """Everything at 595.58.03, and no reboot yet."""
    return replace(
        HEALTHY,
        packages={name: package(name, "595.58.03-1") for name in NAMES},
        kernels=(replace(HEALTHY.kernels[0], module="595.58.03"),),
        library="595.58",
        cards=(),
    )


def test_an_upgrade_without_a_reboot_is_one_finding():
    [finding] = equality.findings(upgraded())
    assert (finding.kind, finding.remedy) == ("reboot", "drain the node and reboot it")
    assert finding.seen == "module 580.95.05 is loaded and 595.58.03 is installed"


def test_after_the_reboot_the_specification_may_be_stale():
    rebooted = replace(upgraded(), module=Module("595.58.03", True, {}, None))
    [finding] = equality.findings(rebooted)
    assert (finding.kind, finding.subject) == ("specification-stale", "/run/cdi/nvidia.yaml")
    assert finding.remedy == "systemctl restart nvidia-cdi-refresh"


@pytest.mark.parametrize(("headers", "why"), [(False, "its headers are missing"), (True, "it was not built")])
def test_a_kernel_without_a_module(headers, why):
    newer = (*HEALTHY.kernels, Kernel("6.12.9-amd64", headers, "", ""))
    [finding] = equality.findings(replace(HEALTHY, kernels=newer))
    assert (finding.kind, finding.subject) == ("module-missing", "6.12.9-amd64")
    assert why in finding.seen


def test_a_package_that_dpkg_did_not_finish():
    half = HEALTHY.packages | {"nvidia-kernel-open-dkms": package("nvidia-kernel-open-dkms", status="half-configured")}
    [finding] = equality.findings(replace(HEALTHY, packages=half))
    assert (finding.kind, finding.subject) == ("half-installed", "nvidia-kernel-open-dkms")


@pytest.mark.parametrize(
    ("switches", "version", "expected"),
    [
        (0, "580.95.05", ["fabric-manager-unwanted"]),
        (4, "580.95.05", []),
        (4, "580.126.09", ["fabric-manager"]),
    ],
)
def test_the_fabric_manager(switches, version, expected):
    """Opposite remedies for what looks alike, a failed unit (gpu-node.md section 7, report 10)."""
    assert kinds(replace(HEALTHY, nvswitches=switches, fabric_manager=version)) == expected


def test_a_specification_made_by_hand_beside_the_generated_one():
    by_hand = Specification("/etc/cdi/nvidia.yaml", ("0", UUID), "580.65.06")
    found = equality.findings(replace(HEALTHY, specifications=(by_hand, *HEALTHY.specifications)))
    assert [finding.kind for finding in found] == ["specification-stale", "specification-twice"]
    assert all("move /etc/cdi/nvidia.yaml away" in finding.remedy for finding in found)


def test_a_specification_with_a_card_that_is_gone():
    other = Specification("/run/cdi/nvidia.yaml", (UUID, "GPU-gone"), "580.95.05")
    [finding] = equality.findings(replace(HEALTHY, specifications=(other,)))
    assert (finding.kind, finding.seen) == ("specification-stale", "/run/cdi/nvidia.yaml names GPU-gone")
