"""What the GPU half of role `containers` promises: GPUs come through CDI, as they are now, and stay."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.audit.docker import CONTAINERS
from gpuwright.snapshot import Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.containers.facts import parse_version
from roles.containers.gpus import cdi
from roles.containers.gpus.facts import GPUS, PACKAGES, SPECIFICATION
from roles.containers.gpus.seen_inside import INSIDE

# Before 28.3 the folders are listed only where CDI is on (docs.docker.com, CDI).
DOCKER = Section(
    "audit-docker-gpus",
    r"""
info=$(docker info --format '{{json .}}') || exit 1
printf '%s' "$info" | jq -c '{version: .ServerVersion, folders: (.CDISpecDirs // []), runtime: .DefaultRuntime}'
""",
    json.loads,
)


def _none(spec: NodeSpec) -> Verdict | None:
    return None if spec.hardware.gpus.count else not_applicable("the node file gives this machine no GPUs")


def _toolkit_version(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.containers
    if none := _none(spec):
        return none
    found = seen.read(GPUS)
    wanted = spec.containers.toolkit.version
    if wanted is None:
        versions = sorted({package.version for package in found.packages.values() if package.installed})
        said = f"toolkit {found.toolkit or 'none'}, packages of {', '.join(versions) or 'no version'}"
        return judged(bool(found.toolkit) and len(versions) <= 1, "a container toolkit, all of it of one version", said)
    versions = {name: found.packages[name].version if name in found.packages else "absent" for name in PACKAGES}
    faults = [f"{name} is {version}" for name, version in versions.items() if version != f"{wanted}-1"]
    faults += [f"{name} is half installed" for name, package in found.packages.items() if not package.installed]
    return without(faults, f"all four packages of {wanted}-1", f"four packages of {wanted}-1")


def _toolkit_held(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.containers
    if none := _none(spec):
        return none
    if spec.containers.toolkit.source == "vendor":
        return not_applicable("containers.toolkit.source is vendor: its packages are the vendor's")
    found = seen.read(GPUS).packages
    faults = [f"not held: {name}" for name in PACKAGES if name not in found or not found[name].held]
    return without(faults, "all four packages held", "all four held")


def _cdi_on(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if none := _none(spec):
        return none
    said = seen.read(DOCKER)
    version = parse_version(said["version"])
    right = version is not None and version >= (25, 0) and "/var/run/cdi" in said["folders"]
    return judged(
        right,
        "Docker 25 or later that reads /var/run/cdi",
        f"Docker {said['version']}, CDI folders: {', '.join(said['folders']) or 'none'}",
    )


def _of_kinds(seen: Snapshot, spec: NodeSpec, kinds: Sequence[cdi.Kind], expected: str, fine: str) -> Verdict:
    if none := _none(spec):
        return none
    faults = [finding.seen for finding in cdi.findings(seen.read(GPUS)) if finding.kind in kinds]
    return without(faults, expected, fine)


def _one_specification(seen: Snapshot, spec: NodeSpec) -> Verdict:
    return _of_kinds(
        seen, spec, ["specification-twice"], f"no other file for the GPUs than {SPECIFICATION}", "no other file"
    )


def _current(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if none := _none(spec):
        return none
    kinds: list[cdi.Kind] = ["specification-missing", "specification-stale", "card-unnamed"]
    found = seen.read(GPUS)
    fine = f"driver {found.module}, {len(found.cards)} cards" if found.module else "no driver is loaded"
    return _of_kinds(seen, spec, kinds, "the loaded driver's files, and every card by its UUID", fine)


def _renewed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    kinds: list[cdi.Kind] = ["toolkit-missing", "refresh-missing", "refresh-off"]
    return _of_kinds(seen, spec, kinds, "the toolkit's refresh units, enabled and watching", "enabled, and watching")


def _by_uuid(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if none := _none(spec):
        return none
    faults, count = [], 0
    for container in seen.read(CONTAINERS):
        if not container.running or not container.device_requests:
            continue
        count += 1
        ids = [entry for request in container.device_requests for entry in request["ids"]]
        if any(request["driver"] != "cdi" for request in container.device_requests):
            faults.append(f"{container.name} has GPUs by --gpus")
        elif other := [entry for entry in ids if not entry.startswith(("nvidia.com/gpu=GPU-", "nvidia.com/gpu=MIG-"))]:
            faults.append(f"{container.name} has {', '.join(other)}")
    return without(faults, "GPUs by UUID through CDI", f"{count} containers with GPUs")


def _still_seen(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if none := _none(spec):
        return none
    found = seen.read(INSIDE)
    faults = [f"{one.name}: {one.fault}" for one in found if one.fault]
    return without(
        faults, "every container sees the GPUs it was given", f"asked: {', '.join(one.name for one in found) or 'none'}"
    )


def _runtime(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if none := _none(spec):
        return none
    runtime = seen.read(DOCKER)["runtime"]
    return judged(runtime != "nvidia", "another default runtime than nvidia", f"default runtime: {runtime}")


_CONVERGE = "pyinfra INVENTORY deploy.py"
_ENGINES_KEEP = "none: what runs keeps what it was given"

CONTROLS = (
    Control(
        id="GPW-CONT-019",
        title="All packages of the container toolkit are of the version of the node file.",
        reason="One of the four alone of another version makes a specification that the others do not know how to apply.",
        severity="medium",
        observed=(GPUS,),
        predicate=_toolkit_version,
        remedy=f"{_CONVERGE} (containers.toolkit.version)",
        risk=_ENGINES_KEEP,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-CONT-020",
        title="The packages of the container toolkit are held.",
        reason="An upgrade in passing renews the specification under engines that are about to start (gpu-node.md 4.2).",
        severity="medium",
        observed=(GPUS,),
        predicate=_toolkit_held,
        remedy=_CONVERGE,
        risk="held packages get no fixes by themselves: upgrade them in a window",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-CONT-021",
        title="Docker gives GPUs to containers through CDI.",
        reason="The other way, --gpus, loses them when systemd reads its units again (nvidia-container-toolkit#48).",
        severity="high",
        observed=(DOCKER,),
        predicate=_cdi_on,
        remedy=f"{_CONVERGE} (features.cdi in daemon.json)",
        risk="a restart of Docker; running containers go on",
    ),
    Control(
        id="GPW-CONT-022",
        title="One CDI specification describes the GPUs.",
        reason="A second one is renewed by nobody: it goes stale, and Docker refuses a device that two files of a folder have.",
        severity="high",
        observed=(GPUS,),
        predicate=_one_specification,
        remedy=f"{_CONVERGE}, which moves it to /var/lib/gpuwright/containers/cdi",
        risk=_ENGINES_KEEP,
    ),
    Control(
        id="GPW-CONT-023",
        title="The CDI specification is of the loaded driver and names every card.",
        reason="Another driver's libraries in a container are the mismatch that stops CUDA (gpu-node.md 4.2).",
        severity="high",
        observed=(GPUS,),
        predicate=_current,
        remedy="systemctl restart nvidia-cdi-refresh.service",
        risk=_ENGINES_KEEP,
    ),
    Control(
        id="GPW-CONT-024",
        title="The CDI specification is renewed at boot and when the driver changes.",
        reason="Nobody remembers to make it by hand after a driver's upgrade.",
        severity="medium",
        observed=(GPUS,),
        predicate=_renewed,
        remedy=f"{_CONVERGE}, or systemctl enable --now nvidia-cdi-refresh.path",
        risk="none",
    ),
    Control(
        id="GPW-CONT-025",
        title="Containers are given GPUs by UUID through CDI.",
        reason="An index moves when a card fails, and --gpus loses cards when systemd reads its units again.",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_by_uuid,
        remedy="stop the container and start it again with --device nvidia.com/gpu=UUID",
        risk="what it serves is away for that time",
        references=ref.CONTAINER_DEVICES,
    ),
    Control(
        id="GPW-CONT-026",
        title="Every running container sees the GPUs it was given.",
        reason="A loss shows nowhere else: the container goes on running, and its next allocation fails.",
        severity="high",
        observed=(INSIDE,),
        predicate=_still_seen,
        remedy="restart the engine that is named (systemctl restart gpuwright-engine-NAME)",
        risk="what it serves is away for that time",
    ),
    Control(
        id="GPW-CONT-027",
        title="No container gets GPUs unless it is given some.",
        reason="With nvidia as the default runtime an image's own NVIDIA_VISIBLE_DEVICES=all takes every card.",
        severity="high",
        observed=(DOCKER,),
        predicate=_runtime,
        remedy='remove "default-runtime" from /etc/docker/daemon.json, then restart Docker',
        risk="a restart of Docker; containers that got GPUs that way no longer do at their next start",
        references=ref.CONTAINER_DEVICES,
    ),
)
