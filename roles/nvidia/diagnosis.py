"""Lines that the driver and what runs beside it leave in logs, by what they mean and what to do about them.

Two that look alike can want the opposite: a fabric manager of another version is put right, one without a switch is removed
(gpu-node.md section 7, reports 8 to 13 and 20). Pure: text in, diagnoses out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """A kind of fault: how its lines look, what they mean, what to do."""

    kind: str
    pattern: str
    meaning: str
    remedy: str
    source: str


DIAGNOSES = (
    Diagnosis(
        "fabric-manager-version",
        r"interface version (?P<one>[\d.]*\d) don't match with driver version (?P<other>[\d.]*\d)",
        "fabric manager {one} refuses driver {other}; no GPU behind a switch computes",
        "install nvidia-fabricmanager {other} and restart it",
        "gpu-operator#544",
    ),
    Diagnosis(
        "fabric-manager-unwanted",
        r"NV_WARN_NOTHING_TO_DO",
        "a fabric manager runs where no NVSwitch is; the GPUs are well",
        "remove nvidia-fabricmanager",
        "gpu-operator#610",
    ),
    Diagnosis(
        "taken-by-another-driver",
        r"GPU (?P<one>[0-9a-f:.]+) is already bound to (?P<other>\w+)",
        "{other} had {one} before NVIDIA's module came",
        "block nouveau, nova, nova_core and nova_drm, rebuild the initramfs, reboot",
        "Olares#3963",
    ),
    Diagnosis(
        "off-the-bus",
        r"GPU at PCI:(?P<one>[0-9a-f:.]+)?.*(has )?fallen off the bus|Xid \(PCI:(?P<other>[0-9a-f:.]+)\): 79\b",
        "card {one}{other} fell off the bus; nothing reaches it any more",
        "drain the node and power cycle it; where it comes again, look at power, riser and slot",
        "NVIDIA's Xid catalogue, 79",
    ),
    Diagnosis(
        "unknown-words",
        r'Unknown kernel command line parameters "(?P<one>[^"]+)"(?P<other>)',
        "the kernel does not know {one}: it has no effect",
        "take it out of the boot loader's settings, or write it as the kernel has it",
        "gpu-node.md 2.1",
    ),
    Diagnosis(
        "no-device",
        r"NVRM: No NVIDIA devices? probed",
        "the module found no card it could take",
        "look for another driver's hold of the cards, for a card that the module does not support, and for BARs without space",
        "Olares#3963",
    ),
    Diagnosis(
        "bar-space",
        r"(?P<one>[0-9a-f]{4}:[0-9a-f:.]+): BAR (?P<other>\d+).*(can't assign|no space)",
        "the firmware left no room for BAR {other} of {one}",
        "switch on Above 4G Decoding and Resizable BAR in the firmware; pci=realloc where it cannot",
        "aikitoria/open-gpu-kernel-modules#9",
    ),
    Diagnosis(
        "cdi-before-driver",
        r"failed to generate CDI spec: .*Driver Not Loaded",
        "the CDI specification was to be made before the driver was loaded",
        "systemctl restart nvidia-cdi-refresh once nvidia-smi answers; container toolkit 1.18.2 and later try again by themselves",
        "nvidia-container-toolkit#1611",
    ),
    Diagnosis(
        "version-mismatch",
        r"Driver/library version mismatch|API mismatch: the client has the version",
        "user space and the loaded module are of different releases; what runs goes on, nothing new starts",
        "see which package moved (apt history), make all of one release, drain the node and reboot it",
        "shine-cluster#30",
    ),
    Diagnosis(
        "lost-in-container",
        r"Failed to initialize NVML: Unknown Error",
        "a container lost its GPUs at a daemon-reload: it was started with --gpus",
        "start it with CDI devices (--device nvidia.com/gpu=UUID)",
        "nvidia-container-toolkit#48",
    ),
    Diagnosis(
        "docker-without-toolkit",
        r'could not select device driver "(?P<one>\w*)"',
        'Docker has no driver "{one}": the toolkit is missing, Docker was not restarted since, CDI is off, or Docker is a snap',
        "use CDI (features.cdi in daemon.json) with Docker from packages",
        "nvidia-container-toolkit#854, nvidia-docker#1642",
    ),
    Diagnosis(
        "driver-memory",
        r"Out of memory \[NV_ERR_NO_MEMORY\]",
        "the driver could not allocate memory of the host or of a memory node of a GPU",
        "look at free memory per NUMA node and at the page cache on nodes of GPUs",
        "gpu-node.md section 3",
    ),
    Diagnosis(
        "key-rejected",
        r"(Loading of module with unavailable key is rejected|module verification failed: signature|Key was rejected by service)",
        "Secure Boot refuses the module: the key it is signed with is not one that the kernel trusts",
        "enrol the key (mokutil --import, at the console), or use the distribution's signed modules",
        "deepin kernel#2144",
    ),
)


@dataclass(frozen=True)
class Found:
    """One diagnosis of one line."""

    kind: str
    meaning: str
    remedy: str
    line: str


def diagnoses(lines: Iterable[str]) -> list[Found]:
    """What is known of these log lines, in their order; a line that says nothing known is passed over."""
    found = []
    for line in lines:
        for diagnosis in DIAGNOSES:
            if match := re.search(diagnosis.pattern, line):
                words = {name: value or "" for name, value in match.groupdict().items()}
                found.append(
                    Found(
                        diagnosis.kind,
                        diagnosis.meaning.format(**words),
                        diagnosis.remedy.format(**words),
                        line.strip(),
                    )
                )
    return found


@dataclass(frozen=True)
class Move:
    """A package that changed its version."""

    when: str  # as apt writes it
    by: str  # the command line, "" unknown
    package: str
    before: str
    after: str

    @property
    def unattended(self) -> bool:
        return "unattended-upgrade" in self.by


MOVED = (
    "hold the driver's packages (apt-mark hold) and block them for unattended upgrades, then bring all of them to one release "
    "with the node drained, and reboot it"
)
"""What to do when a package of the driver moved alone (homelab#4110)."""


def moves(history: str, pattern: str = r"nvidia|cuda|libnv") -> list[Move]:
    """What /var/log/apt/history.log says of packages whose name matches: upgrades and downgrades, oldest first."""
    found = []
    for stanza in re.split(r"\n\s*\n", history.strip()):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        for kind in ("Upgrade", "Downgrade"):
            for name, before, after in re.findall(r"(\S+?)(?::\w+)? \(([^,()]+), ([^,()]+)\)", fields.get(kind, "")):
                if re.search(pattern, name):
                    found.append(Move(fields.get("Start-Date", ""), fields.get("Commandline", ""), name, before, after))
    return found
