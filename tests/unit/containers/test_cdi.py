"""CDI specifications against the driver and its cards: each thing that does not fit is one finding. Answers in the script's form."""

import base64
import json
import os
import shutil
import subprocess

import pytest
from pydantic import ValidationError

from roles.containers.gpus import cdi, facts, seen_inside
from roles.containers.gpus.spec import ToolkitSpec
from roles.containers.gpus.toolkit import toolkit_files

UUIDS = [f"GPU-0000000{number}-0000-0000-0000-000000000000" for number in range(3)]
MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)\nGCC version:\n"
KEPT = "/run/cdi/nvidia.yaml"


def file(path=KEPT, uuids=UUIDS[:2], driver="580.95.05", kind="nvidia.com/gpu"):
    lines = [path, f"K kind: {kind}", "N - name: 0", *(f'N - name: "{uuid}' for uuid in uuids), "N - name: all"]
    return "\n".join([*lines, f"L .so.{driver}"])


def units(service="enabled", path="active", loaded="loaded"):
    blocks = [(facts.SERVICE, "inactive"), (facts.PATH, path)]
    return "\n\n".join(
        f"Id={name}\nLoadState={loaded}\nUnitFileState={service}\nActiveState={state}\nResult=success"
        for name, state in blocks
    )


def node(*files, module=MODULE, cards=UUIDS[:2], toolkit="1.18.2", **said):
    values = [
        *([("module", module)] if module else []),
        ("cards", "\n".join(cards)),
        *([("toolkit", f"NVIDIA Container Toolkit CLI version {toolkit}\n")] if toolkit else []),
        *[("cdi", text) for text in files],
        ("units", said.get("units", units())),
        ("reloaded", "12345\n"),
    ]
    return facts.parse("\n".join(f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in values))


def kinds(*files, **said):
    return [finding.kind for finding in cdi.findings(node(*files, **said))]


def test_a_node_as_it_should_be_has_no_finding():
    seen = node(file())
    assert (seen.module, seen.cards, seen.toolkit, seen.reloaded) == ("580.95.05", tuple(UUIDS[:2]), "1.18.2", "12345")
    assert seen.specifications[0].uuids == tuple(UUIDS[:2])
    assert cdi.findings(seen) == []
    assert not cdi.needs_refresh(seen)


@pytest.mark.parametrize(
    ("files", "said", "found", "refresh"),
    [
        ([], {}, ["specification-missing"], True),
        ([file(driver="570.10.10")], {}, ["specification-stale"], True),
        ([file(uuids=UUIDS)], {}, ["specification-stale"], True),
        ([file(uuids=UUIDS[:1])], {}, ["card-unnamed"], True),
        ([file(), file("/etc/cdi/nvidia.yaml")], {}, ["specification-twice"], False),
        # one by hand alone: nobody renews it, and the kept one is not there
        ([file("/etc/cdi/nvidia.yaml")], {}, ["specification-twice"], True),
        (
            [file(), file("/run/cdi/old.json", driver="570.10.10")],
            {},
            ["specification-twice", "specification-stale"],
            False,
        ),
        ([file(), file("/etc/cdi/other.yaml", kind="vendor.com/net")], {}, [], False),
        ([file()], {"units": units(path="inactive")}, ["refresh-off"], False),
        ([file()], {"units": units(service="disabled")}, ["refresh-off", "refresh-off"], False),
        ([file()], {"units": units(loaded="not-found"), "toolkit": "1.17.8"}, ["refresh-missing"], False),
        ([], {"toolkit": ""}, ["toolkit-missing", "specification-missing"], True),
        # no driver: nothing can be made, and nothing says that it is wrong
        ([], {"module": "", "cards": []}, [], False),
        ([file()], {"module": "", "cards": []}, [], False),
        # a driver that does not say which cards there are: its release is compared, and no more
        ([file(uuids=UUIDS)], {"cards": []}, [], False),
    ],
)
def test_each_inequality_is_one_finding(files, said, found, refresh):
    assert kinds(*files, **said) == found
    assert cdi.needs_refresh(node(*files, **said)) is refresh


def test_a_finding_says_what_was_seen_what_is_expected_and_what_to_do():
    (finding,) = cdi.findings(node(file(), file("/etc/cdi/nvidia.yaml")))
    assert str(finding) == (
        "/etc/cdi/nvidia.yaml defines devices that /run/cdi/nvidia.yaml has, too; expected: one specification of 2 GPUs, "
        "/run/cdi/nvidia.yaml, which nvidia-cdi-refresh.service renews; do: move /etc/cdi/nvidia.yaml away, then systemctl "
        "restart nvidia-cdi-refresh.service"
    )


def test_a_card_that_was_never_opened_has_no_uuid_yet():
    assert node(file(), cards=["GPU-????????-????-????-????-????????????"]).cards == ()


@pytest.mark.parametrize(
    "content",
    [
        'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n'
        "- name: UUID\ncontainerEdits:\n  hooks:\n  - hookName: createContainer\n    path: /usr/bin/nvidia-cdi-hook\n"
        "  mounts:\n  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\n",
        '{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{}},{"name":"UUID"}],'
        '"containerEdits":{"hooks":[{"hookName":"createContainer"}],"mounts":[{"hostPath":"/x/libcuda.so.580.95.05"}]}}',
        "kind: 'nvidia.com/gpu'\ndevices: [{name: '0'}, {name: 'UUID', containerEdits: {}}]\n# libcuda.so.580.95.05",
    ],
)
def test_the_script_finds_devices_and_driver_in_yaml_and_json(tmp_path, content):
    """The script itself, in a folder that stands for the root of a node."""
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/a.yaml").write_text(content.replace("UUID", UUIDS[0]))
    script = facts.GPUS.script.replace("cd /\n", f"cd {tmp_path}\n")
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert facts.parse(said).specifications == (
        facts.Specification("/etc/cdi/a.yaml", ("0", UUIDS[0]), ("580.95.05",)),
    )


# --- what a container sees -------------------------------------------------------------------------------------------


def container(answer="", status=0, driver="cdi", engine="main", ids=UUIDS[:2]):
    requests = [{"driver": driver, "ids": [f"nvidia.com/gpu={uuid}" for uuid in ids]}]
    [one] = seen_inside.parse(
        json.dumps({"name": "c", "engine": engine, "status": status, "answer": answer, "requests": requests})
    )
    return one


LISTED = "\n".join(f"GPU {number}: NVIDIA H200 (UUID: {uuid})" for number, uuid in enumerate(UUIDS[:2]))


@pytest.mark.parametrize(
    ("answer", "status", "driver", "fault"),
    [
        (LISTED, 0, "cdi", ""),
        (LISTED.splitlines()[0], 0, "cdi", f"it does not see {UUIDS[1]}; restart it (systemctl restart gpuwright-engine-main)"),
        (
            "Failed to initialize NVML: Unknown Error",
            255,
            "",
            "its GPUs are gone (Failed to initialize NVML: Unknown Error); restart it (systemctl restart gpuwright-engine-main) "
            "with CDI devices (--device nvidia.com/gpu=UUID) instead of --gpus",
        ),
        ("No devices were found", 6, "cdi", "its GPUs are gone (No devices were found); restart it (systemctl restart gpuwright-engine-main)"),
        ("", 124, "cdi", "nvidia-smi does not answer in it within 60 s; look at journalctl -k | grep -i xid"),
        ("exec: nvidia-smi: not found", 127, "cdi", ""),
    ],
)  # fmt: skip
def test_what_a_container_lost(answer, status, driver, fault):
    assert container(answer, status, driver).fault == fault


def test_a_line_of_another_shape_is_no_answer():
    with pytest.raises(ValueError):
        seen_inside.parse("Cannot connect to the Docker daemon")


# --- settings and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "nvidia"}, "source nvidia needs version"),
        ({"source": "nvidia", "version": "1.18.2"}, "source nvidia needs repository_key"),
        ({"source": "local"}, "source local needs version"),
        ({"version": "1.18.2"}, "source vendor never touches the toolkit"),
        ({"source": "local", "version": "1.17.8"}, "does not renew the CDI specification"),
        ({"source": "local", "version": "1.18.2-1"}, "three numbers"),
        ({"source": "nvidia", "version": "1.18.2", "repository_key": "k", "repository_fingerprint": "ABCD"}, "40 hexadecimal digits"),
        ({"source": "nvidia", "version": "1.18.2", "repository_key": "k", "repository": "nvidia.github.io"}, "starts with https://"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_load(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ToolkitSpec.model_validate(settings)


def test_all_four_packages_are_pinned_at_one_version():
    [pin] = toolkit_files(ToolkitSpec(source="local", version="1.18.2"), None)
    assert pin.path == "/etc/apt/preferences.d/gpuwright-toolkit"
    assert pin.data.decode().splitlines()[-3:] == [
        "Package: nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1",
        "Pin: version 1.18.2-1",
        "Pin-Priority: 1001",
    ]


def test_a_vendors_toolkit_gets_no_file():
    assert toolkit_files(ToolkitSpec(), None) == ()


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_script_asks_every_container_with_gpus_and_no_other(tmp_path):
    """The script itself, with a FAKE docker: one engine, one container of --gpus that lost its card, one without GPUs."""

    def listed(number, name, requests, engine=""):
        labels = {"gpuwright.engine": engine} if engine else {}
        return {
            "Id": str(number),
            "Name": f"/{name}",
            "Config": {"Labels": labels},
            "HostConfig": {"DeviceRequests": requests},
        }

    found = [
        listed(1, "gpuwright-main", [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={UUIDS[0]}"]}], "main"),
        listed(2, "theirs", [{"Driver": "", "Count": -1, "DeviceIDs": None}]),
        listed(3, "web", None),
    ]
    (tmp_path / "found.json").write_text(json.dumps(found))
    docker = tmp_path / "docker"
    docker.write_text(
        f"""#!/bin/sh
case "$1 $2" in
  "container ls") printf '1\\n2\\n3\\n' ;;
  "container inspect") cat {tmp_path}/found.json ;;
  "exec 1") printf 'GPU 0: NVIDIA H200 (UUID: %s)\\n' {UUIDS[0]} ;;
  "exec 2") echo 'Failed to initialize NVML: Unknown Error'; exit 255 ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
    )
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(
        ["sh", "-c", seen_inside.SCRIPT], env=environment, capture_output=True, text=True, check=True
    ).stdout
    ours, theirs = seen_inside.parse(said)
    assert (ours.name, ours.engine, ours.given, ours.seen, ours.fault) == (
        "gpuwright-main",
        "main",
        (UUIDS[0],),
        (UUIDS[0],),
        "",
    )
    assert (theirs.name, theirs.by_flag) == ("theirs", True)
    assert theirs.fault.startswith("its GPUs are gone (Failed to initialize NVML: Unknown Error)")
