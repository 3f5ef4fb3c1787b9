"""What role `engine` promises: a contained, offline, pinned engine that restarts within bounds and is published only when ready."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, manual, not_applicable, without
from gpuwright.audit.docker import CONTAINERS, IMAGES, Container
from gpuwright.audit.processes import unfiltered
from gpuwright.audit.systemd import blocks, seconds
from gpuwright.peers import VERDICTS, peer_groups
from gpuwright.snapshot import NUMA, CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.engine import container as wanted_container
from roles.engine import model_directory
from roles.engine.spec import Engine

USER = str(wanted_container.USER)

# --- observations ---------------------------------------------------------------------------------------------------

UNITS = Section(
    "audit-engine-units",
    "systemctl show --property=Id,LoadState,ActiveState,UnitFileState,Restart,RestartUSec,StartLimitIntervalUSec,"
    "StartLimitBurst,TimeoutStartUSec,TimeoutStopUSec,Requires,BindsTo,RestartPreventExitStatus,NUMAPolicy 'gpuwright-engine-*'",
    blocks,
)


@dataclass
class Process:
    """One process of a container, as the kernel has it."""

    pid: str
    status: dict[str, str] = field(default_factory=dict)
    policies: list[str] = field(default_factory=list)
    core: str = ""


@dataclass
class Inside:
    """What goes on in one container."""

    processes: dict[str, Process] = field(default_factory=dict)
    mounts: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # point to options, type, options of the fs
    environment: dict[str, str] = field(default_factory=dict)  # of the engine; values only of public settings


def _parse_inside(text: str) -> dict[str, Inside]:
    found: dict[str, Inside] = {}
    for line in text.splitlines():
        tag, name, rest = line.split(" ", 2)
        inside = found.setdefault(name, Inside())
        if tag == "mount":
            left, _, right = rest.partition(" - ")
            inside.mounts[left.split()[4]] = (left.split()[5], right.split()[0], right.split()[2])
        elif tag == "env":
            key, _, value = rest.partition("=")
            inside.environment[key] = value
        else:
            pid, _, value = rest.partition(" ")
            process = inside.processes.setdefault(pid, Process(pid))
            if tag == "status":
                key, _, words = value.partition(":")
                process.status[key] = words.strip()
            elif tag == "policy":
                process.policies.append(value)
            elif tag == "core":
                process.core = value
    return found


# Every process of the container's pid namespace: workers too, and what `docker exec` brought in. numa_maps is read at
# its beginning only: walking the page tables of an engine that maps terabytes takes seconds and holds its lock (proc(5)).
# Of the environment only the names leave the node, and the values of switches that are public.
INSIDE = Section(
    "audit-engine-inside",
    r"""
names=$(docker container ls --filter label=gpuwright.engine --format '{{.Names}}') || exit 1
[ -n "$names" ] || exit 0
spaces=$(find /proc/[0-9]*/ns/pid -printf '%l %h\n' 2>/dev/null)
docker container inspect --format '{{.Name}} {{.State.Pid}}' $names | while read -r name pid; do
  name=${name#/}
  space=$(readlink "/proc/$pid/ns/pid") || continue
  init=$(sed -n 's/^Seccomp_filters:[[:space:]]*/Init_filters: /p' /proc/1/status)
  for process in $(printf '%s\n' "$spaces" | awk -v space="$space" '$1 == space {split($2, part, "/"); print part[3]}'); do
    awk -v head="status $name $process" '/^(Name|Uid|Gid|Groups|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp|Seccomp_filters|PPid):/ {print head " " $0}' \
      "/proc/$process/status" 2>/dev/null
    echo "status $name $process ${init:-Init_filters: 0}"
    head -n 100 "/proc/$process/numa_maps" 2>/dev/null | awk -v head="policy $name $process" '{print head " " $2}' | sort -u
    awk -v head="core $name $process" '/^Max core file size/ {print head " " $5 " " $6}' "/proc/$process/limits" 2>/dev/null
  done
  awk -v head="mount $name" '$5 == "/" || $5 == "/model" || $5 == "/tmp" || $5 == "/dev/shm" {print head " " $0}' "/proc/$pid/mountinfo"
  tr '\0' '\n' <"/proc/$pid/environ" | awk -F= -v head="env $name" '
    /^(HF_|TRANSFORMERS_OFFLINE|VLLM_NO_USAGE_STATS|DO_NOT_TRACK|VLLM_SERVER_DEV_MODE)/ && !/(TOKEN|KEY|SECRET|PASS)/ {print head " " $0; next}
    /^[A-Za-z_][A-Za-z0-9_]*=/ {print head " " $1 "="}'
done
exit 0
""",
    _parse_inside,
)


CONTROLLERS = Section(
    "audit-engine-controllers",
    r"""
info=$(docker info --format '{{json .}}') || exit 1
printf '%s' "$info" | jq -c '{pids: .PidsLimit, memory: .MemoryLimit}'
""",
    json.loads,
)


@dataclass
class Served:
    """How one engine stands towards users, and what is kept of it."""

    ready: bool = False
    ready_config: str = ""
    health: str = ""
    evidence_mode: str = ""
    evidence_kib: int = 0
    loose: list[str] = field(default_factory=list)  # evidence others can read


def _parse_served(text: str) -> dict[str, Served]:
    found: dict[str, Served] = {}
    for line in text.splitlines():
        tag, name, rest = [*line.split(" ", 2), ""][:3]
        served = found.setdefault(name, Served())
        if tag == "ready":
            served.ready, served.ready_config = True, rest
        elif tag == "health":
            served.health = rest
        elif tag == "evidence":
            served.evidence_mode = rest
        elif tag == "kib":
            served.evidence_kib = int(rest)
        elif tag == "loose":
            served.loose.append(rest)
    return found


SERVED = Section(
    "audit-engine-served",
    r"""
for file in /etc/gpuwright/engines/*.conf; do
  [ -e "$file" ] || exit 0
  name=$(sed -n 's/^engine=//p' "$file") port=$(sed -n 's/^port=//p' "$file")
  [ ! -e "/run/gpuwright/ready/$name" ] || echo "ready $name $(cat "/run/gpuwright/ready/$name")"
  echo "health $name $(curl --silent --output /dev/null --max-time 8 --write-out '%{http_code}' "http://127.0.0.1:$port/health")"
  evidence=/var/lib/gpuwright/evidence/$name
  [ -e "$evidence" ] || continue
  stat -c "evidence $name %a %U %G" "$evidence"
  du -sk "$evidence" | sed "s/\t.*//; s/^/kib $name /"
  find "$evidence" -mindepth 1 \( -perm /077 -o ! -user root \) -printf "loose $name %m %u %p\n"
done
exit 0
""",
    _parse_served,
)

# --- predicates -----------------------------------------------------------------------------------------------------


def _engines(spec: NodeSpec) -> dict[str, Engine]:
    assert spec.engine
    return spec.engine.engines


def _containers(seen: Snapshot, spec: NodeSpec) -> Iterator[tuple[str, Engine, Container | None]]:
    """Every engine of the node file with its running container."""
    running = {c.name: c for c in seen.read(CONTAINERS) if c.running}
    for name, engine in _engines(spec).items():
        yield name, engine, running.get(f"gpuwright-{name}")


def _of_containers(
    seen: Snapshot, spec: NodeSpec, expected: str, fault: Callable[[str, Engine, Container], str]
) -> Verdict:
    """Judge each running container by `fault(name, engine, container)`, which returns a sentence or ""."""
    faults, fine = [], []
    for name, engine, container in _containers(seen, spec):
        if container is None:
            faults.append(f"{name}: no running container gpuwright-{name}")
        elif said := fault(name, engine, container):
            faults.append(f"{name}: {said}")
        else:
            fine.append(name)
    return without(faults, expected, f"engines: {', '.join(fine)}")


def _of_processes(seen: Snapshot, spec: NodeSpec, expected: str, fault: Callable[[Process], str]) -> Verdict:
    """Judge every process of every engine by `fault(process)`, which returns what is wrong or ""."""
    inside = seen.read(INSIDE)
    faults, count = [], 0
    for name in _engines(spec):
        processes = inside.get(f"gpuwright-{name}", Inside()).processes
        if not processes:
            faults.append(f"{name}: no process of container gpuwright-{name}")
        for process in processes.values():
            count += 1
            if said := fault(process):
                faults.append(f"{name}: process {process.pid} ({process.status.get('Name', '?')}): {said}")
    return without(faults, expected, f"{count} processes")


def _of_units(seen: Snapshot, spec: NodeSpec, expected: str, fault: Callable[[Engine, dict[str, str]], str]) -> Verdict:
    """Judge each engine's unit by `fault(engine, properties)`, which returns what is wrong or ""."""
    units = seen.read(UNITS)
    faults = []
    for name, engine in _engines(spec).items():
        unit = units.get(f"gpuwright-engine-{name}.service")
        if unit is None:
            faults.append(f"{name}: systemd has no unit gpuwright-engine-{name}.service loaded")
        elif said := fault(engine, unit):
            faults.append(f"{name}: {said}")
    return without(faults, expected, f"engines: {', '.join(_engines(spec))}")


def _unit_up(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        right = unit["ActiveState"] == "active" and unit["UnitFileState"] == "enabled"
        return "" if right else f"{unit['ActiveState']}, {unit['UnitFileState']}"

    return _of_units(seen, spec, "every engine's unit active and enabled", fault)


def _by_digest(seen: Snapshot, spec: NodeSpec) -> Verdict:
    digests = seen.read(IMAGES)

    def fault(name: str, engine: Engine, container: Container) -> str:
        digest = engine.image.digest or ""
        known = {container.image, *(entry.partition("@")[2] for entry in digests.get(container.image, []))}
        # An image from an archive has no registry's digest; its id is one (DESIGN section 3, air-gapped sites).
        return "" if digest in known else f"runs {', '.join(sorted(known))}, wanted {digest or 'no digest at all'}"

    return _of_containers(seen, spec, "the image of the node file's digest", fault)


def _as_wanted(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.models
    models = spec.models

    def fault(name: str, engine: Engine, container: Container) -> str:
        wanted = wanted_container.configuration(name, engine, model_directory(engine.model, models))
        has = container.labels.get("gpuwright.config", "none")
        return "" if has == wanted else f"runs configuration {has[:12]}, the node file says {wanted[:12]}"

    return _of_containers(seen, spec, "every container made of what the node file says", fault)


def _read_only(seen: Snapshot, spec: NodeSpec) -> Verdict:
    return _of_mounts(
        seen, spec, "/", "the root file system mounted read-only", lambda e, m: "" if "ro" in m[0] else ",".join(m[0])
    )


_Mount = tuple[list[str], str, list[str]]


def _of_mounts(
    seen: Snapshot, spec: NodeSpec, point: str, expected: str, fault: Callable[[Engine, _Mount], str]
) -> Verdict:
    """Judge one mount of every engine by `fault(engine, (options, type, options of the file system))`."""
    inside = seen.read(INSIDE)
    faults, fine = [], []
    for name, engine in _engines(spec).items():
        options, kind, super_options = inside.get(f"gpuwright-{name}", Inside()).mounts.get(point, ("", "", ""))
        split = (options.split(","), kind, super_options.split(","))
        if not options:
            faults.append(f"{name}: nothing is mounted on {point}, or no container runs")
        elif said := fault(engine, split):
            faults.append(f"{name}: {point}: {said}")
        else:
            fine.append(f"{name}: {point} {kind} {options}")
    return without(faults, expected, "; ".join(fine))


def _no_capabilities(seen: Snapshot, spec: NodeSpec) -> Verdict:
    sets = ("CapPrm", "CapEff", "CapBnd", "CapAmb")

    def fault(process: Process) -> str:
        return ", ".join(f"{name} {process.status[name]}" for name in sets if int(process.status[name], 16))

    return _of_processes(seen, spec, "empty capability sets in every process", fault)


def _no_new_privileges(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(process: Process) -> str:
        return "" if process.status["NoNewPrivs"] == "1" else f"NoNewPrivs {process.status['NoNewPrivs']}"

    return _of_processes(seen, spec, "no_new_privs set in every process", fault)


def _filtered(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(process: Process) -> str:
        return unfiltered(process.status)

    return _of_processes(seen, spec, "a seccomp filter of its own on every process", fault)


def _user(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(process: Process) -> str:
        ids = {*process.status["Uid"].split(), *process.status["Gid"].split(), *process.status["Groups"].split()}
        return (
            ""
            if ids == {USER}
            else f"uid {process.status['Uid']}, gid {process.status['Gid']}, groups {process.status['Groups']}"
        )

    return _of_processes(seen, spec, f"user and group {USER} in every process", fault)


def _no_core(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(process: Process) -> str:
        return "" if process.core == "0 0" else f"core limit {process.core}"

    return _of_processes(seen, spec, "core file size 0 in every process", fault)


def _policy(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if not any(process.policies for inside in seen.read(INSIDE).values() for process in inside.processes.values()):
        if seen.read(INSIDE):
            return not_applicable("this kernel has no numa_maps")
        return judged(False, "memory policy default", "no engine runs")

    def fault(process: Process) -> str:
        return ", ".join(policy for policy in process.policies if policy != "default")

    return _of_processes(seen, spec, "memory policy default in every process", fault)


def _no_docker_restart(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(name: str, engine: Engine, container: Container) -> str:
        return "" if container.restart in ("no", "") else f"restart policy {container.restart}"

    return _of_containers(seen, spec, "no restart policy of Docker's", fault)


def _own_network(seen: Snapshot, spec: NodeSpec) -> Verdict:
    others: dict[str, list[str]] = {}
    for container in seen.read(CONTAINERS):
        if container.running:
            for network in container.networks:
                others.setdefault(network, []).append(container.name)

    def fault(name: str, engine: Engine, container: Container) -> str:
        if container.networks != [f"gpuwright-{name}"]:
            return f"networks {', '.join(container.networks)}"
        company = [other for other in others[f"gpuwright-{name}"] if other != container.name]
        return f"shares its network with {', '.join(company)}" if company else ""

    return _of_containers(seen, spec, "a network of its own, with nobody else in it", fault)


def _port(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(name: str, engine: Engine, container: Container) -> str:
        wanted = [{"port": "8000/tcp", "address": "127.0.0.1", "host_port": str(engine.port)}]
        has = ", ".join(f"{p['address'] or '*'}:{p['host_port']}->{p['port']}" for p in container.published)
        # Beyond loopback is the containers' control; here: exactly this port, and no other.
        ports = [(p["port"], p["host_port"]) for p in container.published if p["address"] in ("127.0.0.1", "::1")]
        return "" if ports == [(p["port"], p["host_port"]) for p in wanted] else f"published: {has or 'nothing'}"

    return _of_containers(seen, spec, "the node file's port on loopback, and no other", fault)


_SECRET_NAME = re.compile(r"TOKEN(?!IZERS?_)|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY")


def _no_secrets(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(name: str, engine: Engine, container: Container) -> str:
        names = {
            *container.key_shaped,
            *(entry for entry in container.environment if _SECRET_NAME.search(entry.upper())),
        }
        return f"variables {', '.join(sorted(names))}" if names else ""

    return _of_containers(seen, spec, "no variable with the name or the shape of a secret", fault)


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")


def _offline(seen: Snapshot, spec: NodeSpec) -> Verdict:
    inside = seen.read(INSIDE)
    faults = []
    for name in _engines(spec):
        environment = inside.get(f"gpuwright-{name}", Inside()).environment
        if missing := [key for key in _OFFLINE if environment.get(key) != "1"]:
            faults.append(f"{name}: not 1: {', '.join(missing)}")
    return without(faults, f"in the process: {', '.join(f'{key}=1' for key in _OFFLINE)}", "all of them")


def _no_debug(seen: Snapshot, spec: NodeSpec) -> Verdict:
    inside = seen.read(INSIDE)
    faults = [
        f"{name}: VLLM_SERVER_DEV_MODE={value}"
        for name in _engines(spec)
        if (value := inside.get(f"gpuwright-{name}", Inside()).environment.get("VLLM_SERVER_DEV_MODE", "0")) != "0"
    ]
    return without(faults, "VLLM_SERVER_DEV_MODE unset", "unset")


_OPENS = ("--trust-remote-code", "--enable-custom-logit-processor", "--enable-prompt-embeds")


def _no_foreign_code(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(name: str, engine: Engine, container: Container) -> str:
        return ", ".join(flag for flag in container.arguments if flag in _OPENS)

    return _of_containers(seen, spec, f"none of {', '.join(_OPENS)}", fault)


def _restart(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        wanted = engine.restart
        has = (
            unit["Restart"],
            seconds(unit["RestartUSec"]),
            int(unit["StartLimitBurst"]),
            seconds(unit["StartLimitIntervalUSec"]),
        )
        right = has == ("on-failure", wanted.delay, wanted.burst, wanted.interval)
        return "" if right else "Restart={} after {:g} s, at most {} starts in {:g} s".format(*has)

    return _of_units(seen, spec, "restarts on failure, delayed and capped as the node file says", fault)


def _restart_counts(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        # systemd counts to the burst only if that many of the longest attempts fit into the interval (gpu-node.md 5).
        attempt = seconds(unit["RestartUSec"]) + engine.readiness.deadline + engine.stop_timeout
        needed, interval = int(unit["StartLimitBurst"]) * attempt, seconds(unit["StartLimitIntervalUSec"])
        return (
            ""
            if needed < interval
            else f"{unit['StartLimitBurst']} attempts take {needed:g} s, the interval is {interval:g} s"
        )

    return _of_units(seen, spec, "burst x (delay + deadline + stop) is less than the interval", fault)


def _timeouts(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        start, stop = seconds(unit["TimeoutStartUSec"]), seconds(unit["TimeoutStopUSec"])
        faults = [
            *(
                []
                if start > engine.readiness.deadline
                else [f"start timeout {start:g} s <= deadline {engine.readiness.deadline} s"]
            ),
            *(
                []
                if stop > engine.drain + engine.stop_timeout
                else [f"stop timeout {stop:g} s <= drain and docker stop, {engine.drain + engine.stop_timeout} s"]
            ),
        ]
        return ", ".join(faults)

    return _of_units(seen, spec, "systemd waits longer than our own deadlines", fault)


def _outlives_docker(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        bound = [
            f"{kind}={name}"
            for kind in ("Requires", "BindsTo")
            for name in unit.get(kind, "").split()
            if name in ("docker.service", "containerd.service")
        ]
        return ", ".join(bound)

    return _of_units(seen, spec, "no Requires= or BindsTo= on Docker", fault)


def _permanent_faults(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, unit: dict[str, str]) -> str:
        has = unit["RestartPreventExitStatus"].split()
        return "" if "78" in has else f"RestartPreventExitStatus={' '.join(has)}"

    return _of_units(seen, spec, "status 78 (a fault that no restart repairs) ends the restarts", fault)


def _ready_iff_healthy(seen: Snapshot, spec: NodeSpec) -> Verdict:
    served = seen.read(SERVED)
    faults, fine = [], []
    for name in _engines(spec):
        state = served.get(name, Served())
        if state.ready != (state.health == "200"):
            published = "published as ready" if state.ready else "not published"
            faults.append(f"{name}: {published}, /health answers {state.health or 'nothing'}")
        else:
            fine.append(f"{name}: {'ready' if state.ready else 'not ready'}, /health {state.health}")
    return without(faults, "published as ready exactly when /health answers 200", "; ".join(fine))


def _evidence_private(seen: Snapshot, spec: NodeSpec) -> Verdict:
    served = seen.read(SERVED)
    faults, kept = [], []
    for name in _engines(spec):
        state = served.get(name, Served())
        if not state.evidence_mode:
            kept.append(f"{name}: none kept yet")
            continue
        if state.evidence_mode != "700 root root":
            faults.append(f"{name}: folder is {state.evidence_mode}")
        faults += [f"{name}: {entry}" for entry in state.loose]
        kept.append(f"{name}: {state.evidence_mode}")
    return without(faults, "evidence for root alone", "; ".join(kept))


def _evidence_capped(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.engine
    cap = spec.engine.evidence_max // 1024
    sizes = {name: seen.read(SERVED).get(name, Served()).evidence_kib for name in _engines(spec)}
    faults = [f"{name}: {size} KiB" for name, size in sizes.items() if size > cap]
    return without(
        faults, f"at most {cap} KiB per engine", ", ".join(f"{name}: {size} KiB" for name, size in sizes.items())
    )


def _weights_read_only(seen: Snapshot, spec: NodeSpec) -> Verdict:
    return _of_mounts(
        seen, spec, "/model", "/model mounted read-only", lambda e, m: "" if "ro" in m[0] else ",".join(m[0])
    )


def _weights_of_commit(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.models
    models = spec.models

    def fault(name: str, engine: Engine, container: Container) -> str:
        sources = [mount["source"] for mount in container.mounts if mount["target"] == "/model"]
        wanted = model_directory(engine.model, models)
        return "" if sources == [wanted] else f"/model is {', '.join(sources) or 'not mounted'}, wanted {wanted}"

    return _of_containers(seen, spec, "/model is the commit of the node file", fault)


def _tmp(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, mount: _Mount) -> str:
        options, kind, _ = mount
        right = kind == "tmpfs" and "noexec" not in options and {"nosuid", "nodev"} <= set(options)
        return "" if right else f"{kind} {','.join(options)}"

    return _of_mounts(seen, spec, "/tmp", "/tmp a tmpfs with exec, nosuid, nodev", fault)


def _shm(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(engine: Engine, mount: _Mount) -> str:
        size = next((option for option in mount[2] if option.startswith("size=")), "no size")
        return "" if size == f"size={engine.shm_size // 1024}k" else f"{size}, wanted {engine.shm_size // 1024}k"

    return _of_mounts(seen, spec, "/dev/shm", "/dev/shm of the node file's size", fault)


def _processes_capped(seen: Snapshot, spec: NodeSpec) -> Verdict:
    controllers = seen.read(CONTROLLERS)

    def fault(name: str, engine: Engine, container: Container) -> str:
        faults = []
        if controllers["pids"] and container.pids_limit != engine.pids_limit:
            faults.append(f"at most {container.pids_limit or 'unlimited'} processes, wanted {engine.pids_limit}")
        if controllers["memory"] and container.memory != (engine.memory or 0):
            faults.append(f"memory {container.memory or 'unlimited'}, wanted {engine.memory or 'unlimited'}")
        return ", ".join(faults)

    if not controllers["pids"] and not controllers["memory"]:
        return not_applicable("the kernel gives Docker no pids and no memory controller (docker info)")
    return _of_containers(seen, spec, "the caps of the node file", fault)


def _devices(seen: Snapshot, spec: NodeSpec) -> Verdict:
    def fault(name: str, engine: Engine, container: Container) -> str:
        ids = [entry for request in container.device_requests for entry in request["ids"]]
        other = [request["driver"] for request in container.device_requests if request["driver"] != "cdi"]
        faults = [f"asked for by driver {driver or 'of --gpus'}" for driver in other]
        if len(ids) != len(engine.gpus) or len(set(ids)) != len(ids):
            faults.append(f"devices {', '.join(ids) or 'none'}, wanted {len(engine.gpus)} GPUs")
        faults += [
            f"device {entry} is not named by UUID" for entry in ids if not entry.startswith("nvidia.com/gpu=GPU-")
        ]
        faults += [f"host device {path}" for path in container.devices]
        return ", ".join(faults)

    return _of_containers(seen, spec, "the node file's GPUs by UUID through CDI, and no other device", fault)


def _hbm_clean(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.engine
    hbm = {index: node for index, node in seen.read(NUMA).items() if node.is_hbm}
    if not hbm:
        return not_applicable("this machine has no memory node without CPUs")
    limit = spec.engine.file_pages_limit // 1024
    faults = [
        f"node {i}: {n.file_pages_kib} KiB of file pages, {n.shmem_kib} KiB of them shared memory"
        for i, n in hbm.items()
        if n.file_pages_kib > limit
    ]
    return without(faults, f"at most {limit} KiB of file pages on each HBM node", f"{len(hbm)} HBM nodes")


def _p2p_as_judged(seen: Snapshot, spec: NodeSpec) -> Verdict:
    several = {name: engine for name, engine in _engines(spec).items() if len(engine.gpus) > 1}
    if not several:
        return not_applicable("every engine has at most one GPU")
    if not peer_groups(spec):
        why = f"pcie.p2p.mode is off: {spec.pcie.p2p.off_reason}" if spec.pcie else "the node file has no role pcie"
        return manual(
            f"P2P between the GPUs of {', '.join(several)} is not judged ({why}); compare bytes copied between every two "
            "GPUs and run an all-reduce of every group size yourself, or let role pcie do it"
        )
    verdicts = seen.read(VERDICTS)

    def fault(name: str, engine: Engine, container: Container) -> str:
        if len(engine.gpus) < 2:
            return ""
        verdict = verdicts[name]
        if verdict.word == "unknown":
            raise CouldNotLook(f"{name}: {verdict.sentence}")
        apart = wanted_container.separation(engine)
        label = container.labels.get("gpuwright.p2p", "")
        own = {*engine.environment, *(flag.partition("=")[0] for flag in engine.settings.extra_flags)}
        added = {*apart.all_environment, *apart.arguments} - own
        there = added & {*container.environment, *container.arguments}
        if verdict.word == "good":
            extra = ", ".join(sorted(there)) or (label and "its label gpuwright.p2p")
            return f"the verdict is good, and it runs with {extra}" if extra else ""
        if absent := added - there:
            return (
                f"the verdict is {verdict.word} ({verdict.sentence}), and it runs without {', '.join(sorted(absent))}"
            )
        return "" if label == apart.label else f"its label gpuwright.p2p is {label or 'absent'}, not {apart.label}"

    return _of_containers(seen, spec, "P2P exactly where the verdict that holds now is good", fault)


# --- the list -------------------------------------------------------------------------------------------------------

_CONVERGE = "pyinfra INVENTORY deploy.py, which replaces the engine when it differs"
_RESTART = "systemctl restart gpuwright-engine-NAME: the container is made anew from its configuration"
_OUTAGE = "the engine is drained and restarted"

CONTROLS = (
    Control(
        id="GPW-ENGN-001",
        title="Every engine's unit runs and starts at boot.",
        reason="What is not enabled is gone after the next power cut.",
        severity="high",
        observed=(UNITS,),
        predicate=_unit_up,
        remedy="systemctl status gpuwright-engine-NAME; the evidence of the last attempts: /var/lib/gpuwright/evidence/NAME",
        risk="none",
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-002",
        title="Every engine runs the image of the pinned digest.",
        reason="A tag that moved is another program with the same name.",
        severity="critical",
        observed=(CONTAINERS, IMAGES),
        predicate=_by_digest,
        remedy=_CONVERGE,
        risk=_OUTAGE,
        references=ref.IMAGE,
    ),
    Control(
        id="GPW-ENGN-003",
        title="Every container was made of what the node file says.",
        reason="A flag changed by hand at three in the morning is the one nobody finds.",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_as_wanted,
        remedy=_CONVERGE,
        risk=_OUTAGE,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-ENGN-004",
        title="An engine cannot write to its image.",
        reason="What broke in cannot stay in.",
        severity="high",
        observed=(INSIDE,),
        predicate=_read_only,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_ROOT,
    ),
    Control(
        id="GPW-ENGN-005",
        title="No process of an engine has a capability.",
        reason="CUDA needs none (security.md 2.4); each is a way out of the container.",
        severity="critical",
        observed=(INSIDE,),
        predicate=_no_capabilities,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_PRIVILEGE,
    ),
    Control(
        id="GPW-ENGN-006",
        title="No process of an engine can gain privileges.",
        reason="Without no_new_privs a set-uid program in the image undoes the empty capability sets.",
        severity="high",
        observed=(INSIDE,),
        predicate=_no_new_privileges,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_PRIVILEGE,
    ),
    Control(
        id="GPW-ENGN-007",
        title="A system call filter is on every process of an engine.",
        reason="It closes most of the kernel to code that got in.",
        severity="high",
        observed=(INSIDE,),
        predicate=_filtered,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_FILTERS,
    ),
    Control(
        id="GPW-ENGN-008",
        title="Engines run as their unprivileged user.",
        reason="Root in a container is root on the node but for what the container takes away.",
        severity="critical",
        observed=(INSIDE,),
        predicate=_user,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_USER,
    ),
    Control(
        id="GPW-ENGN-009",
        title="An engine that crashes leaves no core file.",
        reason="It would hold prompts and weights.",
        severity="medium",
        observed=(INSIDE,),
        predicate=_no_core,
        remedy=_RESTART,
        risk="a crash is analysed from its log alone",
        references=ref.CORE_DUMPS,
    ),
    Control(
        id="GPW-ENGN-010",
        title="Engines run with the default memory policy.",
        reason="An engine bound to the CPU nodes of a machine with HBM fails CUDA initialisation, error 802 (seed 2).",
        severity="high",
        observed=(INSIDE,),
        predicate=_policy,
        remedy="find who set it: NUMAPolicy= of docker.service and containerd.service, or numactl around them",
        risk=_OUTAGE,
    ),
    Control(
        id="GPW-ENGN-011",
        title="Docker restarts no engine.",
        reason="Its restarts go around pre-flight, evidence and the cap (seed 2).",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_no_docker_restart,
        remedy="docker update --restart=no gpuwright-NAME",
        risk="none",
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-012",
        title="Every engine has a network of its own.",
        reason="torch.distributed listens on every address of its namespace, without a key (security.md 2.3).",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_own_network,
        remedy="docker network disconnect gpuwright-NAME OTHER",
        risk="the other container loses its way to the engine",
        references=ref.CONTAINER_NETWORK,
    ),
    Control(
        id="GPW-ENGN-013",
        title="Every engine is published on its loopback port and on no other.",
        reason="An engine without a key must be reached through the gateway alone (security.md 2.1).",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_port,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.LISTENERS,
    ),
    Control(
        id="GPW-ENGN-014",
        title="No engine has a secret in its environment.",
        reason="docker inspect shows it, and so does every evidence folder.",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_no_secrets,
        remedy="take it out of engine.environment, deploy, and replace the secret: it has been seen",
        risk=_OUTAGE,
        references=ref.SECRETS,
    ),
    Control(
        id="GPW-ENGN-015",
        title="Engines ask nobody for anything and tell nobody of their use.",
        reason="Weights are verified on the node; a hub that answers differently today is another model.",
        severity="high",
        observed=(INSIDE,),
        predicate=_offline,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.HUB_TOKEN,
    ),
    Control(
        id="GPW-ENGN-016",
        title="No engine runs in developer mode.",
        reason="/collective_rpc runs a method by name in every worker (security.md 2.1).",
        severity="critical",
        observed=(INSIDE,),
        predicate=_no_debug,
        remedy="take VLLM_SERVER_DEV_MODE out of engine.environment and deploy",
        risk=_OUTAGE,
        references=ref.ADMIN_CLOSED,
    ),
    Control(
        id="GPW-ENGN-017",
        title="No engine runs code that a model or a request brings.",
        reason="Weights are data; code in them runs with every prompt in reach (CVE-2026-7304, CVE-2026-27893).",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_no_foreign_code,
        remedy="take the flag out of settings.extra_flags and deploy",
        risk="models that need their own code do not load",
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-ENGN-018",
        title="systemd restarts an engine as the node file says.",
        reason="On failure, apart, and at most so often: a crash loop must not run all night (seed 2).",
        severity="high",
        observed=(UNITS,),
        predicate=_restart,
        remedy=_CONVERGE,
        risk="none: it holds from the next start",
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-019",
        title="The cap on restarts can be reached.",
        reason="If so many of the longest attempts do not fit into the interval, systemd never counts to the cap.",
        severity="high",
        observed=(UNITS,),
        predicate=_restart_counts,
        remedy="raise engine.restart.interval in the node file and deploy",
        risk="none",
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-020",
        title="systemd gives an engine more time than our own deadlines do.",
        reason="The one deadline belongs to our script; systemd's timeout would kill without a sentence.",
        severity="medium",
        observed=(UNITS,),
        predicate=_timeouts,
        remedy=_CONVERGE,
        risk="none",
    ),
    Control(
        id="GPW-ENGN-021",
        title="A restart of Docker stops no engine's unit.",
        reason="With Requires= systemd would stop it, although live-restore keeps its container running.",
        severity="high",
        observed=(UNITS,),
        predicate=_outlives_docker,
        remedy=_CONVERGE,
        risk="none",
    ),
    Control(
        id="GPW-ENGN-022",
        title="A fault that no restart repairs ends the restarts.",
        reason="A missing image or a lost GPU is still missing a minute later.",
        severity="medium",
        observed=(UNITS,),
        predicate=_permanent_faults,
        remedy=_CONVERGE,
        risk="none",
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-023",
        title="An engine is published exactly while it is healthy.",
        reason="Users must not queue ahead of the gate (seed 1), and a healthy engine without users is an outage.",
        severity="high",
        observed=(SERVED,),
        predicate=_ready_iff_healthy,
        remedy="systemctl restart gpuwright-engine-NAME",
        risk=_OUTAGE,
        references=ref.CONTAINER_RESTARTS,
    ),
    Control(
        id="GPW-ENGN-024",
        title="Evidence of engines is for root alone.",
        reason="An engine's last words can hold prompts.",
        severity="high",
        observed=(SERVED,),
        predicate=_evidence_private,
        remedy="chmod -R go= /var/lib/gpuwright/evidence/NAME; chown -R root: /var/lib/gpuwright/evidence/NAME",
        risk="none",
        references=ref.EVIDENCE,
    ),
    Control(
        id="GPW-ENGN-025",
        title="Evidence of an engine stays under its cap.",
        reason="A crash loop must not fill the disk.",
        severity="medium",
        observed=(SERVED,),
        predicate=_evidence_capped,
        remedy="the next start removes the oldest; or remove folders by hand",
        risk="the oldest attempts are gone",
        references=ref.EVIDENCE,
    ),
    Control(
        id="GPW-ENGN-026",
        title="An engine cannot change its weights.",
        reason="Whoever gets into one engine must not own the model of the next.",
        severity="critical",
        observed=(INSIDE,),
        predicate=_weights_read_only,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.WEIGHTS_READ_ONLY,
    ),
    Control(
        id="GPW-ENGN-027",
        title="An engine serves the weights of the pinned commit.",
        reason="The served name says nothing about which weights answer.",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_weights_of_commit,
        remedy=_CONVERGE,
        risk=_OUTAGE,
        references=ref.WEIGHTS,
    ),
    Control(
        id="GPW-ENGN-028",
        title="An engine's /tmp is memory that can run compiled code.",
        reason="With noexec Triton and Inductor fail: failed to map segment from shared object (security.md 2.4).",
        severity="medium",
        observed=(INSIDE,),
        predicate=_tmp,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_ROOT,
    ),
    Control(
        id="GPW-ENGN-029",
        title="An engine has the shared memory of the node file.",
        reason="Docker's 64 MiB fails NCCL (vllm issue 6574).",
        severity="medium",
        observed=(INSIDE,),
        predicate=_shm,
        remedy=_RESTART,
        risk=_OUTAGE,
    ),
    Control(
        id="GPW-ENGN-030",
        title="An engine has the caps of the node file.",
        reason="A fork bomb or a leak in one engine must not take the node.",
        severity="medium",
        observed=(CONTAINERS, CONTROLLERS),
        predicate=_processes_capped,
        remedy=_RESTART,
        risk=_OUTAGE,
        references=ref.CONTAINER_CAPS,
    ),
    Control(
        id="GPW-ENGN-031",
        title="An engine reaches its own GPUs and no other device.",
        reason="By UUID through CDI: an index moves when a card fails, and --gpus loses cards at a daemon-reload.",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_devices,
        remedy=_CONVERGE,
        risk=_OUTAGE,
        references=ref.CONTAINER_DEVICES,
    ),
    Control(
        id="GPW-ENGN-032",
        title="HBM is free of file pages.",
        reason="They count as used GPU memory and stop the next start (seed 2).",
        severity="medium",
        observed=(NUMA,),
        predicate=_hbm_clean,
        remedy="find what reads files without NUMAPolicy=bind to the CPU nodes; the drop comes before every start",
        risk="dropping the page cache slows file reads for a while",
    ),
    Control(
        id="GPW-ENGN-033",
        title="An engine's GPUs use P2P exactly while the verdict on it is good.",
        reason="NCCL and the engine's own all-reduce use it each in its way; where it is bad they hang or return other "
        "bytes, and turning off one of them moves the fault to the other (vllm#51513).",
        severity="critical",
        observed=(CONTAINERS, VERDICTS),
        predicate=_p2p_as_judged,
        remedy=_CONVERGE,
        risk=f"{_OUTAGE}, and its GPUs are judged again",
    ),
)
