"""What has to be done to a driver: nothing, in place, or an exchange with a reboot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_nvidia_checks import RIGHT, SPEC, VERSION

from gpuwright.snapshot import System
from roles.nvidia import judgement
from roles.nvidia.facts import Exchange, Kernel, Package
from roles.nvidia.packages import Unsupported, address, packages
from roles.nvidia.spec import NVIDIA_REPOSITORY, NvidiaSpec

DEBIAN = System("debian", "13", "trixie", "x86_64", "6.12", "none", False)
UBUNTU = System("ubuntu", "24.04", "noble", "aarch64", "6.8", "none", False)


def spec(version: str = VERSION, source: str = "nvidia", **changes) -> NvidiaSpec:
    key = {"repository_key": "key.asc"} if source in ("nvidia", "local") else {}
    if source == "local":
        key |= {"repository": "file:///srv/driver", "repository_fingerprint": "0" * 40}
    return NvidiaSpec.model_validate({"source": source, "version": version, **key, **changes})


def node(**changes):
    names = (*packages(spec(), DEBIAN).driver, "libcuda1", "libnvidia-ml1")
    installed = {name: Package(name, f"{VERSION}-1", True, "installed") for name in names}
    fabric = {"nvidia-fabricmanager": Package("nvidia-fabricmanager", f"{VERSION}-1", True, "installed")}
    return replace(RIGHT, packages={**installed, **fabric}, **changes)


def moved(name: str, version: str):
    seen = node()
    return replace(seen, packages={**seen.packages, name: Package(name, f"{version}-1", True, "installed")})


def test_a_node_that_is_right_needs_nothing():
    assert judgement.wrong(spec(), node(), DEBIAN) == []
    assert not judgement.must_exchange(spec(), node())
    assert judgement.unheld(node()) == []


def test_a_blank_node_is_installed_in_place():
    blank = replace(RIGHT, module=None, packages={}, nvswitches=0, kernels=(Kernel("6.12", False, "", "", True),))
    assert judgement.wrong(spec(), blank, DEBIAN) == [
        "nvidia-driver-cuda is not installed",
        "nvidia-kernel-open-dkms is not installed",
        "nvidia-persistenced is not installed",
        "kernel 6.12 has no module instead of 580.95.05",
    ]
    assert not judgement.must_exchange(spec(), blank)


@pytest.mark.parametrize("name", ["libcuda1", "nvidia-kernel-open-dkms", "nvidia-fabricmanager"])
def test_one_package_of_another_release_is_put_right_in_place(name):
    seen = moved(name, "595.58.03")
    assert judgement.wrong(spec(), seen, DEBIAN) == [f"{name} is 595.58.03 instead of {VERSION}"]
    assert not judgement.must_exchange(spec(), seen)


def test_another_release_is_an_exchange():
    assert judgement.must_exchange(spec("595.58.03"), node())


def test_other_modules_are_an_exchange():
    assert judgement.must_exchange(spec(open_modules=False), node())


def test_headers_that_nobody_has_are_no_run_s_work():
    seen = node(kernels=(*RIGHT.kernels, Kernel("6.11", False, "", "")))
    assert judgement.wrong(spec(), seen, DEBIAN) == []
    offered = node(kernels=(*RIGHT.kernels, Kernel("6.11", False, "", "", True)))
    assert judgement.wrong(spec(), offered, DEBIAN) == ["kernel 6.11 has no module instead of 580.95.05"]


def test_a_fabric_manager_goes_with_the_switches():
    without = node(nvswitches=0)
    assert judgement.wrong(spec(), without, DEBIAN) == ["nvidia-fabricmanager is installed and there is no NVSwitch"]
    assert judgement.wrong(spec(fabric_manager="kept"), without, DEBIAN) == []


def test_a_release_that_failed_here_is_not_tried_again():
    failed = node(exchange=Exchange(rejected=("595.58.03 2026-11-30T05:00Z no card answers",)))
    assert judgement.rejected(spec("595.58.03"), failed) == "2026-11-30T05:00Z no card answers"
    assert judgement.rejected(spec("595.71.05"), failed) is None


def test_a_hidden_card_is_told_by_its_uuid():
    seen = node(cards=(replace(RIGHT.cards[1], index=0),))
    assert judgement.cards(SPEC.nvidia, SPEC.hardware, seen) == [
        f"card 0 ({RIGHT.cards[0].uuid} at 00000000:01:00.0) does not answer any more; indices after it have moved"
    ]


def test_cards_that_were_never_complete_are_counted():
    seen = node(cards=RIGHT.cards[:1], known=())
    assert judgement.cards(SPEC.nvidia, SPEC.hardware, seen) == ["1 cards answer; expected 2 (hardware.gpus.count)"]


@pytest.mark.parametrize(
    ("version", "source", "system", "module", "fabric"),
    [
        ("580.95.05", "nvidia", DEBIAN, "nvidia-kernel-open-dkms", "nvidia-fabricmanager"),
        ("570.172.08", "local", DEBIAN, "nvidia-kernel-open-dkms", "nvidia-fabricmanager-570"),
        ("580.95.05", "nvidia", UBUNTU, "nvidia-dkms-580-open", "nvidia-fabricmanager"),
        ("595.58.03", "nvidia", UBUNTU, "nvidia-dkms-open", "nvidia-fabricmanager"),
        (
            "580.95.05",
            "distribution",
            UBUNTU,
            "linux-modules-nvidia-580-server-open-generic",
            "nvidia-fabricmanager-580",
        ),
        ("580.95.05", "distribution", DEBIAN, "nvidia-open-kernel-dkms", "nvidia-fabricmanager"),
    ],
)
def test_names_by_source_and_distribution(version, source, system, module, fabric):
    names = packages(spec(version, source), system)
    assert (names.module, names.fabric_manager) == (module, fabric)
    assert module in names.driver
    assert names.built is ("linux-modules" not in module)


def test_addresses():
    assert address(spec(), DEBIAN) == f"{NVIDIA_REPOSITORY}/debian13/x86_64/"
    assert address(spec(), UBUNTU) == f"{NVIDIA_REPOSITORY}/ubuntu2404/sbsa/"
    assert address(spec(source="local"), DEBIAN) == "file:///srv/driver/"


def test_another_distribution_is_refused():
    with pytest.raises(Unsupported, match="the host runs fedora 44"):
        packages(spec(), replace(DEBIAN, id="fedora", version_id="44"))
