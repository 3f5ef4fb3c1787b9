"""Memory nodes on machines that have some: the page-cache trap and its cures, and engines next to their GPUs.

Machines are virtual; kernel, memory nodes, page cache, systemd, Docker, pyinfra and SSH are real. STAND-INS: memory without CPUs
for a GPU's, the simulated engine, the hub, and on the machine with two sockets nvidia-smi, whose GPUs are the machine's
stand-in accelerators.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import lab
from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect
from lab import hub, images, paths
from lab.hub import server, weights

pytestmark = pytest.mark.machine

BIG = "lab/big"
SIZE = 2_400_000_000  # bytes; more than the memory of the CPUs' nodes has room for
SHARDS = 10
LIMIT = 256  # MiB of file pages on HBM
UNIT = "gpuwright-engine-main.service"
GREEN = (Outcome.PASS, Outcome.NOT_APPLICABLE)


@dataclass
class Node:
    """One machine, its node file and the repository's own deploy."""

    machine: Any
    directory: Path
    document: dict[str, Any] = field(default_factory=dict)

    def sh(self, script: str, timeout: float = 600) -> str:
        """What a script that must succeed prints."""
        done = self.machine.run(f"set -e\n{script}", check=False, timeout=timeout)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def file_pages(self, node: int) -> int:
        """MiB."""
        meminfo = f"/sys/devices/system/node/node{node}/meminfo"
        return int(self.sh(f"awk '$3 == \"FilePages:\" {{print $4}}' {meminfo}")) // 1024

    def deploy(self) -> str:
        """`pyinfra -y`, which must succeed; everything it said."""
        (self.directory / "nodes").mkdir(exist_ok=True)
        (self.directory / "nodes/memory.yaml").write_text(yaml.safe_dump(self.document))
        host = {
            "node": "memory",
            "ssh_hostname": self.machine.address,
            "ssh_port": self.machine.port,
            "ssh_user": "root",
            "ssh_key": str(self.machine.ssh_key),
            "ssh_known_hosts_file": str(self.machine.known_hosts),
        }
        self.inventory.write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({{{self.machine.name!r}: {host!r}}}, __file__, pins={lab.pins.read()!r})\n"
        )
        done = subprocess.run(
            [Path(sys.executable).with_name("pyinfra"), "-y", str(self.inventory), "deploy.py"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    @property
    def inventory(self) -> Path:
        return self.directory / "inventory.py"

    def judge(self) -> dict[str, Any]:
        """Control id to its result, of one exchange."""
        collected = collect(self.inventory)
        assert not collected.faults, collected.faults
        name = self.machine.name
        asked = controls.of_node(collected.specs[name])
        snapshot = connection.read(connection.connect(name, collected.hosts[name]), asked)
        return {result.control.id: result for result in judge_all(asked, snapshot, collected.specs[name])}

    def news(self, since: str) -> str:
        return self.sh(f"journalctl --quiet --output=cat --unit={UNIT} --since=@{since}")

    def clock(self) -> str:
        return self.sh("date +%s").strip()

    def is_ready(self) -> bool:
        return self.machine.run("test -e /run/gpuwright/ready/main", check=False).returncode == 0


def document(**changes: Any) -> dict[str, Any]:
    """A node file with one simulated engine."""
    engine = {
        "image": "registry.lab:5000/sim:lab",
        "model": "tiny",
        "served_name": "lab",
        "port": 18001,
        "settings": {"kind": "vllm", "max_model_len": 4096},
        "shm_size": "64 MiB",
        "tmp_size": "64 MiB",
        "drain": "5 s",
        "stop_timeout": "20 s",
        "readiness": {"deadline": "5 min", "conditions_limit": "2 min"},
        "restart": {"delay": "5 s", "burst": 3, "interval": "1 h"},
        **changes.pop("main", {}),
    }
    base: dict[str, Any] = {
        "gpuwright": 1,
        "summary": "a lab machine; its engine is simulated",
        "base": {"unattended_upgrades": False},
        "containers": {"registries": [{"host": lab.registry.host(), "ca": str(lab.ca_file())}]},
        "models": {
            "hub": "https://hub.lab",
            "hub_ca": str(lab.ca_file()),
            "reserve": "256 MiB",
            "items": {"tiny": {"repo": "lab/tiny", "revision": "main"}},
        },
        "engine": {"evidence_max": "16 MiB", "file_pages_limit": f"{LIMIT} MiB", "engines": {"main": engine}},
    }
    for part, settings in changes.items():
        base[part] = {**base.get(part, {}), **settings}
    return base


def boot(name: str, kind: str, directory: Path) -> Node:
    images.build("sim")
    hub.serve()
    [machine] = lab.up_machines([name], kind, blank=True)
    return Node(machine, directory)


# --- the trap ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big() -> tuple[str, list[str]]:
    """A model of the hub's, larger than the memory of the CPUs' nodes: its commit and its large files."""
    root = paths.state() / "models"
    weights.make(root, BIG, size=SIZE, shards=SHARDS)
    found = server.Models(root).commit(BIG, "main")
    assert found is not None
    return found[0], [f"model-{number:05d}-of-{SHARDS:05d}.safetensors" for number in range(1, SHARDS + 1)]


@pytest.fixture(scope="module")
def hbm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    node = boot("mem-hbm", "hbm", tmp_path_factory.mktemp("hbm"))
    yield node
    node.machine.destroy()


def hbm_node(node: Node) -> int:
    """The number of the memory node without CPUs, as the machine says it."""
    script = 'for n in /sys/devices/system/node/node[0-9]*; do [ -n "$(cat $n/cpulist)" ] || echo ${n##*node}; done'
    [number] = node.sh(script).split()
    return int(number)


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Any]]:
    """What was measured, for whoever reads the run."""
    found: dict[str, Any] = {}
    yield found
    print(json.dumps(found, indent=1))


def test_without_the_role_a_download_fills_hbm_and_the_engine_is_refused(
    hbm: Node, big: tuple[str, list[str]], figures: dict[str, Any]
) -> None:
    """The node file knows nothing of HBM: nothing is bound, nothing is dropped. The download is curl's, as people do it."""
    commit, files = big
    gpu = hbm_node(hbm)
    hbm.document = document(engine={"page_cache_drop": "off", "page_cache_drop_off_reason": "to show the trap"})
    hbm.deploy()
    assert hbm.is_ready()
    figures["HBM before the download, MiB"] = hbm.file_pages(gpu)
    began = time.monotonic()
    for file in files:
        hbm.sh(
            "curl --silent --show-error --fail --location --cacert /etc/gpuwright/models/hub-ca.pem "
            f"-o /srv/{file} https://hub.lab/{BIG}/resolve/{commit}/{file}"
        )
    figures["download by hand, s"] = round(time.monotonic() - began)
    spilled = figures["HBM after it, MiB"] = hbm.file_pages(gpu)
    assert spilled > LIMIT, figures
    cursor = hbm.clock()
    hbm.machine.run(f"systemctl restart {UNIT}", check=False, timeout=400)
    [refusal] = [line for line in hbm.news(cursor).splitlines() if line.startswith("start refused")]
    figures["refusal"] = refusal
    assert f"FilePages of HBM node{gpu} is " in refusal
    assert f"expected: at most {LIMIT} MiB" in refusal
    assert "do: set engine.page_cache_drop to auto, or drop it by hand" in refusal
    assert hbm.sh(f"systemctl show --value --property=ExecMainStatus {UNIT}").strip() == "78"
    assert not hbm.is_ready()
    hbm.sh("rm -f /srv/model-*; sync; echo 1 >/proc/sys/vm/drop_caches")


def test_with_the_role_the_same_download_leaves_hbm_empty_and_the_engine_starts(
    hbm: Node, big: tuple[str, list[str]], figures: dict[str, Any]
) -> None:
    """The same files, by the role's job."""
    gpu = hbm_node(hbm)
    hbm.document = document(
        hardware={"cpu_numa_nodes": sorted({0, 1, 2} - {gpu}), "hbm_numa_nodes": [gpu]},
        # The rest of role kernel is other tests'.
        kernel={"deviations": {"sysctls": "other tests have them", "modules": "other tests have them"}},
        memory={"regime": "numa"},
    )
    hbm.document["models"]["items"]["big"] = {"repo": BIG, "revision": big[0]}
    began = time.monotonic()
    hbm.deploy()
    figures["converge with the download by the job, s"] = round(time.monotonic() - began)
    kept = figures["HBM after the download by the job, MiB"] = hbm.file_pages(gpu)
    assert kept < 64, figures
    assert hbm.sh("sysctl -n vm.zone_reclaim_mode").strip() == "1"
    assert hbm.is_ready()


def test_the_binding_alone_does_it(hbm: Node, figures: dict[str, Any]) -> None:
    """The job reads and writes around the page cache where it can, so its binding is shown with what does not."""
    gpu = hbm_node(hbm)
    cpus = ",".join(map(str, sorted({0, 1, 2} - {gpu})))
    before = hbm.file_pages(gpu)
    dd = "dd if=/dev/zero of=/srv/bound bs=4M count=572 status=none"
    hbm.sh(f"systemd-run --wait --quiet -p NUMAPolicy=bind -p NUMAMask={cpus} {dd}")
    figures["HBM after 2.4 GB bound to the CPUs' nodes, MiB more"] = more = hbm.file_pages(gpu) - before
    hbm.sh("rm /srv/bound")
    assert more < 16, figures


def test_pre_start_clears_what_a_stray_dd_left(hbm: Node, figures: dict[str, Any]) -> None:
    gpu = hbm_node(hbm)
    hbm.sh(f"numactl --membind={gpu} dd if=/dev/zero of=/srv/stray bs=1M count=600 status=none")
    left = figures["HBM after a stray dd, MiB"] = hbm.file_pages(gpu)
    assert left > LIMIT, figures
    cursor = hbm.clock()
    hbm.sh(f"systemctl restart {UNIT}")
    assert f"dropping the page cache: this machine has HBM as memory of node{gpu}" in hbm.news(cursor)
    cleared = figures["HBM after the next start, MiB"] = hbm.file_pages(gpu)
    assert cleared < LIMIT, figures
    assert hbm.is_ready()


def test_nothing_that_an_engine_descends_from_is_bound(hbm: Node) -> None:
    pid = hbm.sh("docker inspect --format '{{.State.Pid}}' gpuwright-main").strip()
    policies = hbm.sh(
        f"for p in $(cat /sys/fs/cgroup$(sed -n s/^0:://p /proc/{pid}/cgroup)/cgroup.procs); do "
        "head -n 200 /proc/$p/numa_maps; done | cut -d ' ' -f 2 | sort | uniq -c"
    )
    assert {line.split()[1] for line in policies.splitlines()} == {"default"}
    assert hbm.sh(f"sed -n 's/^Mems_allowed_list:[[:space:]]*//p' /proc/{pid}/status").strip() == "0-2"
    assert (
        hbm.sh("docker inspect --format '{{.HostConfig.CpusetCpus}}{{.HostConfig.CpusetMems}}' gpuwright-main").strip()
        == ""
    )


SABOTAGE = {
    "GPW-MEMO-001": (
        "mkdir /run/stand-in; printf 'CoherentGPUMemoryMode: \"driver\"\\n' >/run/stand-in/params; "
        "mkdir /run/driver; cp -a /run/stand-in /run/driver/nvidia; mount --bind /run/driver /proc/driver",
        "umount /proc/driver; rm -r /run/stand-in /run/driver",
    ),
    "GPW-MEMO-002": ("sysctl -q -w vm.zone_reclaim_mode=0", "sysctl -q -w vm.zone_reclaim_mode=1"),
    "GPW-MEMO-004": (
        f"systemctl set-property --runtime {UNIT} AllowedMemoryNodes=0",
        f"rm -r /run/systemd/system.control/{UNIT}.d; systemctl daemon-reload",
    ),
    "GPW-MEMO-005": (
        "docker update --cpuset-mems=0 gpuwright-main >/dev/null",
        f"systemctl reset-failed {UNIT}; systemctl restart {UNIT}",
    ),
    "GPW-ENGN-032": (
        'numactl --membind=$(for n in /sys/devices/system/node/node[0-9]*; do [ -n "$(cat $n/cpulist)" ] || '
        "echo ${n##*node}; done) dd if=/dev/zero of=/srv/stray bs=1M count=600 status=none",
        "rm /srv/stray; sync; echo 1 >/proc/sys/vm/drop_caches",
    ),
}


def test_the_controls_can_fail(hbm: Node) -> None:
    before = hbm.judge()
    mine = [
        key for key in before if key.startswith("GPW-MEMO") or key in ("GPW-ENGN-010", "GPW-ENGN-032", "GPW-MODL-008")
    ]
    wrong = {key: before[key].verdict.actual for key in mine if before[key].outcome is not Outcome.PASS}
    assert wrong == {}
    for control, (do, undo) in SABOTAGE.items():
        hbm.sh(do)
        try:
            after = hbm.judge()
            red = {
                key: (r.outcome, r.verdict.actual) for key, r in after.items() if r.outcome is not before[key].outcome
            }
            # What role kernel owns for this one, its own controls see, too: the sysctl, and the reboot that is pending.
            mine = {
                key for key in red if control not in ("GPW-MEMO-001", "GPW-MEMO-002") or not key.startswith("GPW-KERN")
            }
            assert mine == {control}, red
            assert red[control][0] is Outcome.FAIL
        finally:
            hbm.sh(undo)
    assert {key: r.outcome for key, r in hbm.judge().items() if r.outcome is not before[key].outcome} == {}


# --- next to its GPUs -------------------------------------------------------------------------------------------------

NVIDIA_SMI = r"""#!/bin/bash
# A STAND-IN of the lab, not NVIDIA's: its GPUs are the machine's stand-in accelerators, by PCI address.
mapfile -t devices < <(grep -l 0x1af4 /sys/bus/pci/devices/*/vendor | xargs -n 1 dirname |
  while read -r d; do [ "$(cut -c 1-6 "$d/class")" != 0x00ff ] || basename "$d"; done | sort)
for i in "${!devices[@]}"; do
  uuid=GPU-00000000-1ab0-0000-0000-00000000000$i
  case $* in
    -L) echo "GPU $i: Lab stand-in (UUID: $uuid)" ;;
    --query-gpu=uuid,pci.bus_id*) echo "$uuid, 0000${devices[i]^^}" ;;
    --query-gpu=index,pci.bus_id*) echo "$i, 0000${devices[i]^^}" ;;
    --query-gpu=uuid,temperature*) echo "$uuid, 30" ;;
  esac
done
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    node = boot("mem-pairs", "pairs", tmp_path_factory.mktemp("pairs"))
    node.machine.run("cat >/usr/local/bin/nvidia-smi; chmod 755 /usr/local/bin/nvidia-smi", stdin=NVIDIA_SMI)
    devices = [
        {
            "name": f"GPU-00000000-1ab0-0000-0000-00000000000{index}",
            "containerEdits": {"env": [f"LAB_STAND_IN={index}"]},
        }
        for index in range(4)
    ]
    specification = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    node.machine.run("mkdir -p /etc/cdi; cat >/etc/cdi/lab-stand-in.yaml", stdin=yaml.safe_dump(specification))
    yield node
    node.machine.destroy()


def test_an_engine_sits_on_its_gpus_node(pairs: Node) -> None:
    """GPUs 2 and 3 hang on node 1; the machine says so, nobody else."""
    pairs.document = document(
        hardware={"cpu_numa_nodes": [0, 1], "gpus": {"count": 4, "memory": "1 GiB"}},
        memory={},
        main={"gpus": [2, 3], "settings": {"kind": "vllm", "max_model_len": 4096, "tensor_parallel_size": 2}},
    )
    since = pairs.clock()
    pairs.deploy()
    assert "placed on NUMA node 1, CPUs 2-3" in pairs.news(since)
    pid = pairs.sh("docker inspect --format '{{.State.Pid}}' gpuwright-main").strip()
    status = dict(line.split(":\t") for line in pairs.sh(f"grep _allowed_list /proc/{pid}/status").splitlines())
    assert status == {"Cpus_allowed_list": "2-3", "Mems_allowed_list": "1"}
    policies = pairs.sh(f"cut -d ' ' -f 2 /proc/{pid}/numa_maps | sort -u")
    assert policies.split() == ["default"]
    judged = pairs.judge()["GPW-MEMO-005"]
    assert judged.outcome is Outcome.PASS, judged.verdict.actual
    # A CPU goes offline, as with the IOMMU off on a large host: the next start leaves it out.
    pairs.sh("echo 0 >/sys/devices/system/cpu/cpu3/online")
    since = pairs.clock()
    pairs.sh(f"systemctl restart {UNIT}")
    assert "placed on NUMA node 1, CPUs 2\n" in pairs.news(since)
    assert pairs.judge()["GPW-MEMO-005"].outcome is Outcome.PASS
    pairs.sh("docker update --cpuset-cpus=0-1 --cpuset-mems=0 gpuwright-main >/dev/null")
    assert pairs.judge()["GPW-MEMO-005"].outcome is Outcome.FAIL
