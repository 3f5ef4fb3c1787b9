"""The section's script against made-up files and programs, and its parser: what is there, what is missing, what is odd."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import pytest

from gpuwright.snapshot import CouldNotLook, Snapshot
from roles.nvidia import equality, facts
from roles.nvidia.facts import NVIDIA, Nvidia

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)\nGCC version:  gcc 14\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Mon Jan  1 00:00:00 UTC 2024\n"
UUIDS = ("GPU-0a0a0a0a-1111-2222-3333-444444444444", "GPU-0b0b0b0b-1111-2222-3333-444444444444")
ROWS = "\n".join(
    f"{index}, {uuid}, 00000000:{index + 1}1:00.0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0, "
    f"{power}, 600.00, 300.00, 600.00, Enabled, Disabled, Disabled, Enabled"
    for index, (uuid, power) in enumerate(zip(UUIDS, ("450.00", "600.00"), strict=True))
)
SPECIFICATION = f"""---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- name: {UUIDS[0]}
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  hooks:
  - hookName: createContainer
    args: [nvidia-cdi-hook, create-symlinks]
  mounts:
  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
"""


class Root:
    """A file system of a node's, and the programs on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "bin").mkdir()
        (path / "sys/bus/pci/devices").mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def program(self, name: str, script: str) -> None:
        self.write(f"bin/{name}", f"#!/bin/sh\n{script}\n")
        (self.path / "bin" / name).chmod(0o755)

    def device(self, address: str, vendor: str, kind: str, driver: str = "") -> None:
        folder = f"sys/bus/pci/devices/{address}"
        self.write(f"{folder}/vendor", f"{vendor}\n")
        self.write(f"{folder}/class", f"{kind}\n")
        if driver:
            (self.path / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")

    def answer(self) -> str:
        script = facts._SCRIPT.replace("cd /\n", f"cd {self.path}\n")
        # dpkg, systemctl and the like of the machine that runs the tests are not the node's.
        tools = self.path / "tools"
        tools.mkdir(exist_ok=True)
        for name in ("base64", "cat", "readlink", "timeout", "head", "grep", "tr", "uname", "sh", "od", "sed"):
            (tools / name).unlink(missing_ok=True)
            found = next(Path(folder) / name for folder in ("/usr/bin", "/bin") if (Path(folder) / name).exists())
            (tools / name).symlink_to(found)
        environment = {**os.environ, "PATH": f"{self.path}/bin:{tools}"}
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=environment).stdout

    def seen(self) -> Nvidia:
        return Snapshot({"nvidia": (0, self.answer())}).read(NVIDIA)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def say(**parts: str) -> str:
    """An answer of the script with these parts."""
    return "".join(
        f"{name.replace('_', '.')} {base64.b64encode(text.encode()).decode()}\n" for name, text in parts.items()
    )


def test_a_node_with_nothing_of_it(root: Root):
    seen = root.seen()
    assert (seen.module, seen.smi, seen.cards, seen.smi_failed, seen.packages) == (None, False, (), None, {})
    assert (seen.units, seen.secure_boot, seen.specifications, seen.nvswitches) == (None, None, (), 0)


def test_a_node_that_works(root: Root):
    root.write("proc/driver/nvidia/version", OPEN)
    root.write(
        "proc/driver/nvidia/params",
        'EnableMSI: 1\nCoherentGPUMemoryMode: "driver"\nRegistryDwords: "ForceP2P=0x11;A=1"\n',
    )
    root.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n")
    root.write("cards", ROWS)
    root.program(
        "nvidia-smi",
        f'[ "$1" = --version ] && echo "NVML version        : 580.95" || cat {root.path}/cards',
    )
    root.program("nvidia-ctk", 'echo "NVIDIA Container Toolkit CLI version 1.18.2"')
    root.program("mokutil", 'echo "SecureBoot enabled"')
    root.program(
        "modinfo", 'case "$*" in *version*) echo 580.95.05 ;; *signer*) echo "DKMS module signing key" ;; esac'
    )
    root.program(
        "dpkg-query",
        r"printf 'hold installed nvidia-driver-cuda 580.95.05-1\ninstall half-configured nvidia-kernel-open-dkms 580.95.05-1\n"
        r"deinstall config-files libnvidia-ml1 575.1.2-1\nunknown not-installed cuda-x\n'",
    )
    root.write("lib/modules/6.12.1-amd64/build/Makefile", "")
    for kernel in ("6.12.1-amd64", "6.12.9-amd64"):
        root.write(f"lib/modules/{kernel}/modules.order", "")
    root.write("lib/modules/6.11.0-gone/updates/dkms/nvidia.ko", "what a removed kernel leaves behind")
    root.device("0000:11:00.0", "0x10de", "0x030200", "nvidia")
    root.device("0000:11:00.1", "0x10de", "0x040300", "snd_hda_intel")
    root.device("0000:00:00.0", "0x8086", "0x060000")
    root.write("run/cdi/nvidia.yaml", SPECIFICATION)
    root.write("etc/cdi/other.yaml", "cdiVersion: 0.5.0\nkind: example.com/net\n")

    seen = root.seen()
    assert seen.module is not None
    assert (seen.module.version, seen.module.open, seen.module.hmm_disabled) == ("580.95.05", True, True)
    assert seen.module.params == {
        "EnableMSI": "1",
        "CoherentGPUMemoryMode": "driver",
        "RegistryDwords": "ForceP2P=0x11;A=1",
    }
    first, second = seen.cards
    assert (first.uuid, first.power, first.power_min, first.power_max, first.memory) == (
        UUIDS[0],
        450.0,
        300.0,
        600.0,
        97887,
    )
    assert (second.index, second.persistence, second.mig, second.ecc) == (1, True, False, True)
    assert (seen.library, seen.smi_failed, seen.toolkit, seen.secure_boot) == ("580.95", None, "1.18.2", True)
    assert seen.packages["nvidia-driver-cuda"].held
    assert seen.packages["nvidia-driver-cuda"].driver == "580.95.05"
    assert seen.packages["nvidia-kernel-open-dkms"].status == "half-configured"
    assert {kernel.release: kernel.headers for kernel in seen.kernels} == {"6.12.1-amd64": True, "6.12.9-amd64": False}
    assert seen.kernels[0].signer == "DKMS module signing key"
    assert [(device.address, device.gpu, device.driver) for device in seen.devices] == [
        ("0000:11:00.0", True, "nvidia"),
        ("0000:11:00.1", False, "snd_hda_intel"),
    ]
    [specification] = seen.specifications
    assert (specification.path, specification.driver) == ("/run/cdi/nvidia.yaml", "580.95.05")
    assert (specification.devices, specification.uuids) == (("0", UUIDS[0], "all"), (UUIDS[0],))


def test_module_and_library_that_differ(root: Root):
    root.write("proc/driver/nvidia/version", CLOSED)
    root.program(
        "nvidia-smi",
        'echo "Failed to initialize NVML: Driver/library version mismatch"; echo "NVML library version: 550.107"; exit 18',
    )
    seen = root.seen()
    assert seen.module is not None and (seen.module.version, seen.module.open) == ("550.90.07", False)
    assert seen.smi_failed == "Failed to initialize NVML: Driver/library version mismatch"
    assert (seen.cards, seen.library) == ((), "550.107")


def test_nvidia_smi_is_not_asked_where_no_module_is_loaded(root: Root):
    """As root it would load one."""
    root.program("nvidia-smi", f"touch {root.path}/asked")
    seen = root.seen()
    assert (seen.smi, seen.cards, seen.smi_failed) == (True, (), None)
    assert not (root.path / "asked").exists()


def test_a_card_taken_by_another_driver_and_a_switch(root: Root):
    root.device("0000:01:00.0", "0x10de", "0x030000", "NovaCore")
    root.device("0000:02:00.0", "0x10de", "0x030000")
    root.device("0000:e1:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
    root.write("proc/driver/nvidia-nvswitch/devices/0000:e1:00.0/information", "")
    seen = root.seen()
    assert [device.driver for device in seen.devices if device.gpu] == ["NovaCore", None]
    assert seen.nvswitches == 1


def test_a_specification_written_by_hand_beside_the_generated_one(root: Root):
    root.write("run/cdi/nvidia.yaml", SPECIFICATION.replace("580.95.05", "595.58.03"))
    root.write(
        "etc/cdi/nvidia.json",
        '{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [\n{"name": "0", "containerEdits": {}}],\n'
        '"containerEdits": {"mounts": [{"hostPath": "/usr/lib/libcuda.so.570.1.02"}]}}',
    )
    assert [(found.path, found.driver) for found in root.seen().specifications] == [
        ("/etc/cdi/nvidia.json", "570.1.02"),
        ("/run/cdi/nvidia.yaml", "595.58.03"),
    ]


def test_units():
    text = (
        "Id=nvidia-persistenced.service\nLoadState=loaded\nUnitFileState=enabled\nActiveState=active\nResult=success\n\n"
        "Id=nvidia-fabricmanager.service\nLoadState=loaded\nUnitFileState=enabled\nActiveState=failed\nResult=exit-code\n\n"
        "Id=nvidia-cdi-refresh.path\nLoadState=not-found\nUnitFileState=\nActiveState=inactive\n"
    )
    units = facts.parse(say(units=text)).units
    assert units is not None
    assert (units["nvidia-persistenced"].active, units["nvidia-persistenced"].enabled) == ("active", True)
    assert (units["nvidia-fabricmanager"].active, units["nvidia-fabricmanager"].result) == ("failed", "exit-code")
    assert not units["nvidia-cdi-refresh.path"].loaded


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("580.95.05-1", "580.95.05"),
        ("580.159.03-0ubuntu0.24.04.1", "580.159.03"),
        ("590.44-1", "590.44"),
        ("1.18.2-1", ""),
        ("13.0.2-1", ""),
        ("1:3.2.2-1", ""),
    ],
)
def test_the_driver_release_in_a_packages_version(version, release):
    assert facts.Package("any", version, False, "installed").driver == release


def test_a_card_that_does_not_say_everything():
    row = (
        ROWS.splitlines()[0]
        .replace("450.00, 600.00, 300.00, 600.00", "[N/A], [N/A], [N/A], [N/A]")
        .replace("Disabled", "[N/A]")
    )
    [card] = facts.parse(say(module_version=OPEN, smi_cards=f"0\n{row}\n")).cards
    assert (card.power, card.power_min, card.mig, card.mig_pending, card.persistence) == (None, None, None, None, True)


@pytest.mark.parametrize(
    "answer",
    [
        say(module_version="something else\n"),
        say(module_version=OPEN, smi_cards="0\n0, GPU-1, short\n"),
        say(pci="0000:01:00.0 0x030000\n"),
        "nvidia not-base64!\n",
    ],
)
def test_an_answer_of_another_shape_is_could_not_look(answer):
    with pytest.raises(CouldNotLook):
        Snapshot({"nvidia": (0, answer)}).read(NVIDIA)


def test_a_call_that_hung_is_a_sentence():
    assert (
        facts.parse(say(module_version=OPEN, smi_cards="124\n")).smi_failed == "nvidia-smi did not answer within 12 s"
    )


@pytest.mark.parametrize("byte, state", [(1, True), (0, False)])
def test_secure_boot_is_the_firmwares_own_variable_where_mokutil_is_missing(root: Root, byte: int, state: bool):
    root.write("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\6\0\0\0" + chr(byte))
    assert root.seen().secure_boot is state


def test_what_a_borrowed_h200_said():
    """Read on a machine with one H200, driver 580.159.04, without systemd, packages of the driver and UEFI; its UUID is zeroed."""
    said = json.loads((Path(__file__).parent / "fixtures/h200.json").read_text())
    seen = facts.parse(
        "".join(
            f"{name} {base64.b64encode(content.encode()).decode()}\n" for name, all in said.items() for content in all
        )
    )
    assert seen.module is not None
    assert (seen.module.version, seen.module.open, seen.module.hmm_disabled) == ("580.159.04", True, False)
    [card] = seen.cards
    assert (card.name, card.memory, card.compute_capability) == ("NVIDIA H200", 143771, "9.0")
    assert (card.power, card.power_min, card.power_max, card.persistence) == (700.0, 200.0, 700.0, True)
    # The library tells its release without the last part; cuda-compat is the toolkit's, not the driver's.
    assert seen.library == "580.159"
    assert equality.every_driver_package(seen) == []
    assert (seen.nvswitches, seen.secure_boot, seen.units, seen.kernels) == (0, None, None, ())
    assert equality.findings(seen) == []
