"""Log lines by their kind; what apt's history says of a driver that moved by night."""

from __future__ import annotations

import pytest

from roles.nvidia.diagnosis import DIAGNOSES, diagnoses, moves


@pytest.mark.parametrize(
    ("line", "kind", "remedy"),
    [
        (
            "nv-fabricmanager[11]: fabric manager NVIDIA GPU driver interface version 580.1.02 don't match with driver version 580.3.04. Please",
            "fabric-manager-version",
            "install nvidia-fabricmanager 580.3.04 and restart it",
        ),
        (
            "nv-fabricmanager[12]: request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]",
            "fabric-manager-unwanted",
            "remove nvidia-fabricmanager",
        ),
        (
            "kernel: NVRM: GPU 0000:21:00.0 is already bound to NovaCore.",
            "taken-by-another-driver",
            "block nouveau, nova",
        ),
        ("kernel: NVRM: No NVIDIA devices probed.", "no-device", "look for another driver's hold"),
        (
            "kernel: nvidia 0000:c1:00.0: BAR 1 [mem size 0x2000000000 64bit pref]: can't assign; no space",
            "bar-space",
            "Above 4G Decoding",
        ),
        (
            "nvidia-ctk[9]: failed to generate CDI spec: failed to create device CDI specs: failed to initialize NVML: Driver Not Loaded",
            "cdi-before-driver",
            "nvidia-cdi-refresh",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", "version-mismatch", "reboot"),
        ("Failed to initialize NVML: Unknown Error", "lost-in-container", "CDI devices"),
        (
            'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            "docker-without-toolkit",
            "features.cdi",
        ),
        (
            "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] returned from someAlloc(p) @ mem.c:1",
            "driver-memory",
            "NUMA node",
        ),
        (
            "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "off-the-bus",
            "power cycle",
        ),
        (
            'Unknown kernel command line parameters "spec_store=off", will be passed to user space.',
            "unknown-words",
            "take it out",
        ),
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "key-rejected", "enrol the key"),
    ],
)
def test_a_line_is_known_by_its_kind(line, kind, remedy):
    [found] = diagnoses([line])
    assert found.kind == kind
    assert remedy in found.remedy
    assert "{" not in found.meaning + found.remedy


def test_every_kind_is_tested_and_has_a_source():
    [mark] = test_a_line_is_known_by_its_kind.pytestmark
    lines = mark.args[1]
    assert {diagnosis.kind for diagnosis in DIAGNOSES} == {kind for _, kind, _ in lines}
    assert all(diagnosis.source for diagnosis in DIAGNOSES)


def test_lines_that_say_nothing_known_are_passed_over():
    assert diagnoses(["systemd[1]: Started Docker Application Container Engine.", "", "NVRM: loading"]) == []


HISTORY = """
Start-Date: 2026-03-01  06:12:01
Commandline: /usr/bin/unattended-upgrade
Upgrade: libnvidia-cfg1:amd64 (580.1.02-1, 580.3.04-1), tzdata:amd64 (2026a-1, 2026b-1)
End-Date: 2026-03-01  06:12:09

Start-Date: 2026-03-02  10:00:00
Commandline: apt-get install --allow-downgrades libnvidia-cfg1=580.1.02-1
Downgrade: libnvidia-cfg1:amd64 (580.3.04-1, 580.1.02-1)
End-Date: 2026-03-02  10:00:02
"""


def test_a_package_that_moved_by_night_and_back():
    first, second = moves(HISTORY)
    assert (first.package, first.before, first.after) == ("libnvidia-cfg1", "580.1.02-1", "580.3.04-1")
    assert (first.unattended, first.when) == (True, "2026-03-01  06:12:01")
    assert (second.unattended, second.after) == (False, "580.1.02-1")


def test_no_history_no_moves():
    assert moves("") == []
