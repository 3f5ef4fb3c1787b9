"""What role `memory` promises: GPU memory as the node file says, and nothing in it, on it or around it that stops an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwright import numa
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.audit.systemd import blocks, mask
from gpuwright.snapshot import NUMA, SYSTEM, CouldNotLook, MemoryNode, Section, Snapshot, hbm_nodes
from gpuwright.spec.node import NodeSpec
from roles.engine.spec import Engine
from roles.memory import regime
from roles.memory.facts import COHERENCE

# --- observations ---------------------------------------------------------------------------------------------------

# Jobs that read and write files: systemd forgets units that do nothing, so they are asked for by name.
JOBS = Section(
    "audit-memory-jobs",
    r"""
cd /etc/systemd/system || exit 1
set --
for unit in gpuwright-image-*.service; do
  [ ! -e "$unit" ] || set -- "$@" "$unit"
done
for settings in /etc/gpuwright/models/*.conf; do
  [ ! -e "$settings" ] || { name=${settings##*/}; set -- "$@" "gpuwright-model-verify@${name%.conf}.service"; }
done
[ $# = 0 ] || systemctl show --property=Id,LoadState,NUMAPolicy,NUMAMask "$@"
""",
    blocks,
)

# What containers descend from or live under: processes inherit a memory policy, control groups a cpuset.
ABOVE = Section(
    "audit-memory-above",
    "systemctl show --property=Id,NUMAPolicy,AllowedMemoryNodes,AllowedCPUs,CPUAffinity -- "
    "-.slice system.slice docker.service containerd.service 'gpuwright-engine-*.service'",
    blocks,
)


@dataclass
class Placed:
    """Where engines may run, and where their GPUs hang."""

    engines: dict[str, dict[str, frozenset[int]]] = field(default_factory=dict)
    """Container to "Cpus" and "Mems" that the kernel allows its first process."""
    gpus: dict[int, int] = field(default_factory=dict)
    """GPU by nvidia-smi's index to its NUMA node; -1 is one that the firmware does not tell."""


def _parse_placed(text: str) -> Placed:
    placed = Placed()
    for line in text.splitlines():
        tag, name, *rest = line.split(" ")
        if tag == "engine":
            key, numbers = rest
            placed.engines.setdefault(name, {})[key.removesuffix("_allowed_list:")] = numa.indices(numbers)
        elif tag == "gpu":
            placed.gpus[int(name)] = int(rest[0])
        else:
            raise ValueError(line)
    return placed


PLACED = Section(
    "audit-memory-engines",
    r"""
names=$(docker container ls --filter label=gpuwright.engine --format '{{.Names}}') || exit 1
[ -z "$names" ] || docker container inspect --format '{{.Name}} {{.State.Pid}}' $names | while read -r name pid; do
  awk -v head="engine ${name#/}" '/^(Cpus|Mems)_allowed_list:/ {print head " " $1 " " $2}' "/proc/$pid/status"
done
command -v nvidia-smi >/dev/null || exit 0
list=$(nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader) || exit 1
printf '%s\n' "$list" | tr 'A-F' 'a-f' | while IFS=', ' read -r index address; do
  # eight digits of domain; the kernel writes four, or more where it has to
  case $address in 0000????:*) address=${address#0000} ;; esac
  echo "gpu $index $(cat "/sys/bus/pci/devices/$address/numa_node" 2>/dev/null || echo -1)"
done
exit 0
""",
    _parse_placed,
)

# --- predicates -----------------------------------------------------------------------------------------------------


def _container(seen: Snapshot) -> Verdict | None:
    system = seen.read(SYSTEM)
    if system.is_container:
        return not_applicable(f"this is a container ({system.virtualization}); memory nodes are its machine's")
    return None


def _regime(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.memory
    if verdict := _container(seen):
        return verdict
    driver, nodes = seen.read(COHERENCE), seen.read(NUMA)
    found = regime.faults(spec.memory, spec.hardware, driver, nodes)
    if not found and not spec.hardware.hbm_numa_nodes:
        return not_applicable("the node file names no HBM node, and no memory node is without CPUs")
    return without(found, f"regime {spec.memory.regime}", regime.running(driver, nodes)[1])


def _zone_reclaim(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.memory
    if verdict := _container(seen):
        return verdict
    if not spec.hardware.hbm_numa_nodes or spec.memory.zone_reclaim == "off":
        return not_applicable(
            "the node file names no HBM node" if spec.memory.zone_reclaim == "auto" else "zone_reclaim: off"
        )
    has = seen.read(COHERENCE).zone_reclaim
    # Bit 0 is reclaim; the others say whether dirty and mapped pages count too (Documentation/admin-guide/sysctl/vm.rst).
    return judged(bool((has or 0) & 1), "vm.zone_reclaim_mode with bit 0", f"vm.zone_reclaim_mode={has}")


def _jobs_bound(seen: Snapshot, spec: NodeSpec) -> Verdict:
    wanted = numa.io_nodes(spec.models.numa_nodes if spec.models else None, spec.hardware)
    if wanted is None:
        return not_applicable("file jobs are not bound here: the node file names no HBM node")
    if not (spec.models or spec.engine):
        return not_applicable("the node file asks for no model and no engine, so nothing fetches weights or images")
    units = seen.read(JOBS)
    if not units:
        raise CouldNotLook("no image job and no verification of a model on this node")
    faults = [
        f"{name}: NUMAPolicy={unit.get('NUMAPolicy')} NUMAMask={unit.get('NUMAMask')}"
        for name, unit in units.items()
        if (unit.get("NUMAPolicy"), mask(unit.get("NUMAMask", ""))) != ("bind", numa.indices(wanted))
    ]
    return without(faults, f"every file job bound to memory nodes {wanted}", f"jobs: {', '.join(units)}")


def _nothing_above(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if verdict := _container(seen):
        return verdict
    if not spec.hardware.hbm_numa_nodes:
        return not_applicable("the node file names no HBM node")
    units = seen.read(ABOVE)
    if "docker.service" not in units:
        raise CouldNotLook("systemd says nothing of docker.service")
    faults = [
        f"{name}: {key}={unit[key]}"
        for name, unit in units.items()
        for key in ("NUMAPolicy", "AllowedMemoryNodes", "AllowedCPUs", "CPUAffinity")
        if unit.get(key, "") not in ("", "n/a", "default")
    ]
    return without(faults, "none of them confined or bound", f"units: {', '.join(units)}")


def _place(engine: Engine, placed: Placed, nodes: dict[int, MemoryNode]) -> tuple[frozenset[int] | None, str]:
    """(the nodes an engine has to be confined to, why); None is everything."""
    with_memory = frozenset(index for index, node in nodes.items() if node.mem_total_kib)
    if hbm_nodes(nodes):
        return None, "HBM is a memory node"
    if engine.numa_nodes == "off":
        return None, "numa_nodes: off"
    if engine.numa_nodes != "auto":
        wanted = numa.indices(engine.numa_nodes)
    elif not engine.gpus:
        return None, "it has no GPU"
    else:
        if missing := [index for index in engine.gpus if index not in placed.gpus]:
            raise CouldNotLook(f"nvidia-smi lists no GPU {', '.join(map(str, missing))}")
        found = [placed.gpus[index] for index in engine.gpus]
        if not set(found) <= with_memory:
            return None, "the firmware does not tell where its GPUs hang"
        wanted = frozenset(found)
    return (None, "its GPUs hang on every memory node") if wanted == with_memory else (wanted, "its GPUs hang there")


def _engines_placed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if verdict := _container(seen):
        return verdict
    if spec.engine is None:
        return not_applicable("the node has no engines")
    nodes, placed = seen.read(NUMA), seen.read(PLACED)
    memory = {index for index, node in nodes.items() if node.mem_total_kib}
    if len(memory) < 2:
        return not_applicable("this machine has one memory node")
    online = frozenset().union(*(numa.indices(node.cpus) for node in nodes.values()))
    faults, fine = [], []
    for name, engine in spec.engine.engines.items():
        allowed = placed.engines.get(f"gpuwright-{name}")
        if allowed is None:
            faults.append(f"{name}: no running container gpuwright-{name}")
            continue
        place, why = _place(engine, placed, nodes)
        wanted = frozenset(memory if place is None else place)
        cpus = online if place is None else frozenset().union(*(numa.indices(nodes[node].cpus) for node in place))
        # The kernel may list nodes and CPUs that are not there.
        has = (allowed["Mems"] & memory, allowed["Cpus"] & online)
        seen_as = f"memory nodes {numa.listed(has[0])}, CPUs {numa.listed(has[1])}"
        if has != (wanted, cpus):
            faults.append(f"{name}: {seen_as}; expected: nodes {numa.listed(wanted)}, CPUs {numa.listed(cpus)} ({why})")
        else:
            fine.append(f"{name}: {seen_as} ({why})")
    return without(faults, "every engine where its GPUs are, and nowhere confined where HBM is a node", "; ".join(fine))


_CONVERGE = "pyinfra INVENTORY deploy.py"

CONTROLS = (
    Control(
        id="GPW-MEMO-001",
        title="GPU memory is in the regime of the node file, and driver and kernel agree on it.",
        reason="In regime numa file pages can take the GPU's memory (seed 2); what a reboot still has to bring is not there.",
        severity="high",
        observed=(SYSTEM, COHERENCE, NUMA),
        predicate=_regime,
        remedy=f"{_CONVERGE}, then reboot",
        risk="a reboot is an outage",
    ),
    Control(
        id="GPW-MEMO-002",
        title="A node's own clean file pages are taken back before memory of others is taken.",
        reason="What fills the CPUs' memory with files goes on in the GPU's sooner without it (gpu-node.md 3.2).",
        severity="medium",
        observed=(SYSTEM, COHERENCE),
        predicate=_zone_reclaim,
        remedy=_CONVERGE,
        risk="file reads that would have fitted into other nodes go to the disk more often",
    ),
    Control(
        id="GPW-MEMO-003",
        title="Jobs that fetch images and read weights again keep to the memory of CPU nodes.",
        reason="File pages on HBM count as used GPU memory and stop the next start (seed 2).",
        severity="high",
        observed=(JOBS,),
        predicate=_jobs_bound,
        remedy=_CONVERGE,
        risk="none",
    ),
    Control(
        id="GPW-MEMO-004",
        title="Nothing that an engine descends from is bound or confined where HBM is a memory node.",
        reason="Policies are inherited over fork and exec, cpusets over control groups; CUDA fails with error 802 (seed 2).",
        severity="high",
        observed=(SYSTEM, ABOVE),
        predicate=_nothing_above,
        remedy="systemctl revert UNIT, or take the drop-in away; daemon-reload, restart the unit, then the engines",
        risk="a restart of Docker is short, one of an engine takes minutes",
    ),
    Control(
        id="GPW-MEMO-005",
        title="Every engine runs next to its GPUs, or unconfined where HBM is a memory node.",
        reason="The other socket's memory is slower (3.9 % on an eight-card host, gpu-node.md 2.4); error 802 where HBM is a node.",
        severity="medium",
        observed=(SYSTEM, NUMA, PLACED),
        predicate=_engines_placed,
        remedy="systemctl restart gpuwright-engine-NAME",
        risk="the engine is away for minutes",
    ),
)
