"""The lab's stand-in packages and cards as data: how versions hang together, and that each of them says what it is."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from lab import gpus
from lab.command import LabError
from lab.repository import ARCHIVES, driver, known, module, toolkit
from lab.repository.docker import Repacked
from lab.repository.package import Package

RELEASES = [version for _, versions in driver.BRANCHES.values() for version in versions]

pytestmark = pytest.mark.skipif(shutil.which("dpkg") is None, reason="packages are made with dpkg")


@pytest.fixture
def found() -> dict[str, Package]:
    return {package.name: package for package in driver.packages("580.95.05")}


@pytest.mark.parametrize("version", RELEASES)
def test_every_package_of_a_driver_has_its_version_and_says_that_it_is_a_stand_in(version):
    packages = driver.packages(version)
    assert {package.version for package in packages} == {f"{version}-1"}
    assert all("STAND-IN" in package.control() for package in packages)
    assert len({package.name for package in packages}) == len(packages)


@pytest.mark.parametrize("version", RELEASES)
def test_whatever_a_package_depends_on_is_there(version):
    packages = [*driver.packages(version), *toolkit.packages("1.18.2"), driver.dkms()]
    names = {package.name for package in packages}
    for package in packages:
        for alternatives in package.relations.get("Depends", "").split(", "):
            wanted = {re.sub(r"\s*\(.*", "", one) for one in alternatives.split(" | ")}
            assert wanted & {*names, "kmod", ""}, f"{package.name} depends on {alternatives}"


def test_libraries_and_firmware_are_tied_to_their_driver_and_metas_are_not(found):
    assert found["nvidia-driver-cuda"].relations["Depends"] == "libcuda1 (= 580.95.05-1), libnvidia-ml1 (= 580.95.05-1)"
    assert "firmware-nvidia-gsp (= 580.95.05-1)" in found["nvidia-kernel-open-dkms"].relations["Depends"]
    assert "nvidia-driver-cuda (>= 580.95.05)" in found["nvidia-open-580"].relations["Depends"]
    assert "nvidia-open-595" not in {package.name for package in driver.packages("595.58.03")}


def test_pins_are_of_a_branch_or_of_one_release(found):
    path = "etc/apt/preferences.d/nvidia-driver-pin"
    exact = found["nvidia-driver-pinning-580.95.05"].files[path].content
    assert b"\nPin: version 580.95.05-*\nPin-Priority: 1000\n" in exact
    branch = driver.pinning_of_branch("580", "580.126.09")
    assert (branch.version, b"\nPin: version 580.*\n" in branch.files[path].content) == ("580.126.09-1", True)


def test_a_fault_changes_the_module_and_nothing_else():
    whole, broken, blind = (driver.packages("595.71.05", fault) for fault in ("", *driver.FAULTS))
    changed = {one.name for one, other in zip(whole, broken, strict=True) if one.recipe() != other.recipe()}
    assert changed == {"nvidia-kernel-open-dkms", "nvidia-kernel-dkms"}
    assert {one.name for one, other in zip(whole, blind, strict=True) if one.recipe() != other.recipe()} == changed


def test_the_refresh_units_came_with_1_18_and_try_again_since_1_18_2():
    def service(version: str) -> bytes | None:
        base = next(package for package in toolkit.packages(version) if package.name == "nvidia-container-toolkit-base")
        file = base.files.get("usr/lib/systemd/system/nvidia-cdi-refresh.service")
        return file.content if file else None

    assert service("1.17.8") is None
    assert b"Restart=" not in (service("1.18.0") or b"")
    assert b"Restart=on-failure" in (service("1.18.2") or b"")


@pytest.mark.parametrize("fault", ["", *module.FAULTS])
def test_the_module_that_is_really_built_says_that_it_is_a_stand_in_and_how_it_fails(fault):
    made = module.package("580.95.05", fault)
    source = made.files["usr/src/nvidia-580.95.05/nvidia.c"].content.decode()
    assert "STAND-IN" in made.control() and "STAND-IN" in source and "@" not in source.replace("@param", "")
    assert 'MODULE_VERSION("580.95.05");' in source
    flags = made.files["usr/src/nvidia-580.95.05/Makefile"].content.decode()
    assert f"-DGPUWRIGHT_LAB_FAULT_{fault.upper()}" in flags if fault else flags == "obj-m := nvidia.o\n"
    assert not fault or f"#ifdef GPUWRIGHT_LAB_FAULT_{fault.upper()}\n" in source


@pytest.mark.skipif(shutil.which("modinfo") is None, reason="kmod is not installed")
def test_the_module_is_one_that_kmod_reads(tmp_path):
    path = tmp_path / "nvidia.ko"
    path.write_bytes(driver.kernel_object({"version": "580.95.05", "license": "Dual MIT/GPL"}))
    read = subprocess.run(["modinfo", "-F", "version", path], capture_output=True, text=True, check=True).stdout
    assert read == "580.95.05\n"


def test_the_distributions_docker_under_dockers_names(tmp_path, monkeypatch):
    control = (
        "Package: docker.io\nSource: docker.io\nVersion: 26.1.5\nArchitecture: amd64\nMaintainer: somebody\n"
        "Depends: iptables, docker-cli, containerd (>= 1.7~), tini\nBreaks: docker-ce\nDescription: containers\n more\n"
    )
    monkeypatch.setattr(
        "lab.repository.docker.run", lambda *_: subprocess.CompletedProcess([], 0, stdout=control, stderr="")
    )
    made = Repacked("docker-ce", "5:28.5.1-1~debian.13~trixie", tmp_path / "docker.io.deb").control()
    fields = dict(line.split(": ", 1) for line in made.splitlines() if ": " in line and line[0] != " ")
    assert fields["Package"] == "docker-ce"
    assert fields["Version"] == "5:28.5.1-1~debian.13~trixie"
    assert fields["Depends"] == "iptables, docker-ce-cli, containerd.io, tini"
    assert (fields["Conflicts"], "Breaks" in fields, "Source" in fields) == ("docker.io", False, False)
    assert "STAND-IN" in made


def test_sources_as_deb822():
    flat = ARCHIVES["nvidia"].source("http://repository.lab", "/key")
    assert "Suites: /\n" in flat and "Components" not in flat and "Signed-By: /key\n" in flat
    assert "Suites: trixie\nComponents: stable\n" in ARCHIVES["docker"].source("http://repository.lab", "/key")


def test_releases_that_are_known():
    assert {"driver-580.95.05", "driver-595.58.03", "toolkit-1.20.0", "docker-28.5.1", "kernel-newer"} <= set(known())


# --- cards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 8])
def test_cards_are_all_different_and_the_same_every_time(count):
    cards = gpus.cards("node", count)
    assert len({card.uuid for card in cards}) == len({card.bus for card in cards}) == count
    assert cards == gpus.cards("node", count)
    assert all(re.fullmatch(r"GPU-00001ab0-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", c.uuid) for c in cards)
    assert [card.numa for card in cards] == ([0, 0, 0, 0, 1, 1, 1, 1] if count == 8 else [0] * count)


def test_a_card_nobody_made_is_refused():
    with pytest.raises(LabError, match="has no GPU 'b200'; it has: rtx-pro-6000, "):
        gpus.cards("node", 1, "b200")


def test_the_fixture_has_a_line_for_each_thing():
    text = gpus.fixture(gpus.cards("node", 2, "h200"), module="550.90.07", nvswitches=4)
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["module", "gpu", "gpu", *["nvswitch"] * 4]
    assert "power_max=700" in lines[1] and "hidden=0" in lines[1]
