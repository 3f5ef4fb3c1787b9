"""A node's directories below a temporary folder, with FAKE nvidia-smi, docker, systemctl and setpci; the scripts are real."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpuwright.peers import PeerGroup
from gpuwright.render import REPOSITORY
from roles.engine.container import Separation
from roles.pcie import p2p
from roles.pcie.p2p_spec import P2pSpec

SCRIPTS = REPOSITORY / "files/pcie/usr/local/lib/gpuwright"
RECORDED = Path(__file__).parent / "p2p"
DIGEST = "sha256:" + "b" * 64
IMAGE = f"registry.test/engine@{DIGEST}"
STORED = "var/lib/gpuwright/pcie/p2p/main.json"
BRIDGES = ("0000:40:01.0", "0000:41:00.0")


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def recorded(name: str) -> dict[str, Any]:
    """A document of the probe."""
    document: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return document


class Node:
    """Four GPUs in pairs below two bridges each, engine "main" on the first `gpus` of them."""

    def __init__(self, root: Path, gpus: int = 2) -> None:
        self.root = root
        self.fake = root / "fake"
        self.fake.mkdir(parents=True)
        (root / "bin").mkdir()
        self.configure(tuple(range(gpus)))
        self.write(
            "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  580.10.01  Release Build\n"
        )
        self.write("proc/driver/nvidia/params", 'RegistryDwords: ""\n')
        for index in range(4):
            self.gpu(index)
        self.links("NODE")
        self.write("fake/acs", "0011\n")
        self.program("setpci", 'cat "$FAKE/acs"')
        self.program("systemctl", 'cat "$FAKE/unit" 2>/dev/null || printf "inactive\\ndead\\n"')
        self.program(
            "nvidia-smi",
            """[ ! -e "$FAKE/smi-fails" ] || { echo "NVML: Driver/library version mismatch"; exit 9; }
            case "$*" in
              *index,uuid*) cat "$FAKE/gpus" ;;
              "topo -m") cat "$FAKE/links" ;;
              *compute-apps*) cat "$FAKE/apps" 2>/dev/null || true ;;
              *) exit 2 ;;
            esac""",
        )
        self.program(
            "docker",
            """echo "$*" >>"$FAKE/calls"
            case $1 in
              version) [ ! -e "$FAKE/away" ] || { echo "Cannot connect to the Docker daemon" >&2; exit 1; } ;;
              image) [ -e "$FAKE/image" ] ;;
              run)
                echo "copies between GPUs" >&2
                cat "$FAKE/said" >&2 2>/dev/null
                cat "$FAKE/document"
                [ ! -e "$FAKE/sleep" ] || exec sleep 30
                exit "$(cat "$FAKE/status")" ;;
            esac""",
        )
        self.write("fake/image", "")
        self.answers(recorded("good-2") if gpus == 2 else recorded("good-4"))

    def configure(self, gpus: tuple[int, ...], environment: dict[str, str] | None = None, **spec: object) -> None:
        apart = Separation({"NCCL_P2P_DISABLE": "1"}, {"ENGINE_P2P": "0"}, ("--no-p2p",))
        self.group = PeerGroup("main", IMAGE, DIGEST, gpus, 4, environment or {}, apart)
        for file in p2p.files(P2pSpec(**spec), (self.group,)):  # type: ignore[arg-type]
            if not file.path.startswith("/usr/local"):
                self.write(file.path, file.data.decode())

    def gpu(self, index: int) -> None:
        """One GPU below two bridges that it shares with a neighbour."""
        top = 0x40 + 0x10 * (index // 2)
        one, two = f"0000:{top:02x}:01.0", f"0000:{top + 1:02x}:00.0"
        address = f"0000:{top + 2:02x}:00.{index % 2}"
        path = f"sys/devices/pci0000:{top:02x}/{one}/{two}/{address}"
        for device in (path.rpartition("/")[0].rpartition("/")[0], path.rpartition("/")[0], path):
            self.write(f"{device}/class", "0x030200\n" if device == path else "0x060400\n")
            link = self.root / "sys/bus/pci/devices" / device.rpartition("/")[2]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(self.root / device)
        self.write(f"sys/kernel/iommu_groups/{index}/type", "identity\n")
        (self.root / path / "iommu_group").symlink_to(self.root / f"sys/kernel/iommu_groups/{index}")
        with (self.fake / "gpus").open("a") as listed:
            listed.write(f"{index}, {uuid(index)}, 0000{address.upper()}\n")

    def links(self, link: str) -> None:
        """The matrix as nvidia-smi colours it, with a network card and affinities."""
        head = "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        rows = [
            f"GPU{i}\t" + "\t".join(" X " if i == j else link for j in range(4)) + "\tNODE\t0-63\t0\t\tN/A\n"
            for i in range(4)
        ]
        self.write(
            "fake/links", head + "".join(rows) + "NIC0\tNODE\tNODE\tNODE\tNODE\t X \n\nLegend:\n\n  X    = Self\n"
        )

    def answers(self, document: dict[str, Any] | str, status: int = 0) -> None:
        """What the probe's container prints and ends with."""
        self.write("fake/document", document if isinstance(document, str) else json.dumps(document) + "\n")
        self.write("fake/status", f"{status}\n")

    def program(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def stored(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.root / STORED).read_text())
        return document

    @property
    def runs(self) -> list[str]:
        """The probes that were started."""
        calls = self.fake / "calls"
        return [line for line in calls.read_text().splitlines() if line.startswith("run ")] if calls.exists() else []

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "GPUWRIGHT_ROOT": str(self.root),
            "FAKE": str(self.fake),
        }

    def run(self, script: str, *arguments: str) -> str:
        done = subprocess.run(
            [SCRIPTS / script, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def begin(self, script: str) -> subprocess.Popen[str]:
        """A script that is still running; read its output line by line."""
        return subprocess.Popen(
            [SCRIPTS / script], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def verdict(self) -> tuple[str, str]:
        """Word and sentence as the engine's start gets them."""
        engine, word, sentence = self.run("p2p-verdict", "main").rstrip("\n").split("\t")
        assert engine == "main"
        return word, sentence
