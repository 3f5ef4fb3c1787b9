"""What role `containers` promises: Docker that survives its own restarts, publishes nothing by accident, and is nobody's way to root."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.audit.docker import CONTAINERS, Container
from gpuwright.snapshot import UNITS, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.containers import daemon
from roles.containers.gpus import checks as gpu_half

# --- observations ---------------------------------------------------------------------------------------------------

DAEMON = Section(
    "audit-docker-daemon",
    r"""
info=$(docker info --format '{{json .}}') || exit 1
printf '%s' "$info" | jq -c '{version: .ServerVersion, live_restore: .LiveRestoreEnabled, log: .LoggingDriver, root: .DockerRootDir}'
""",
    json.loads,
)

# The bridge's own option is where `"ip"` of daemon.json ends up.
BRIDGE = Section(
    "audit-docker-bridge",
    r"""docker network inspect bridge --format '{{index .Options "com.docker.network.bridge.host_binding_ipv4"}}'""",
    str.strip,
)

# "listens ADDRESS PROCESS", "proxy COMMAND", "member NAME", "socket MODE USER GROUP", "file MODE USER GROUP", "held NAME",
# "installed NAME"
ACCESS = Section(
    "audit-docker-access",
    r"""
ss -Hltnp | awk '{print "listens " $4 " " $6}'
for pid in $(pgrep -x docker-proxy); do tr '\0' ' ' <"/proc/$pid/cmdline" | sed 's/^/proxy /'; echo; done
gid=$(getent group docker | cut -d: -f3)
getent group docker | cut -d: -f4 | tr ',' '\n' | sed -n 's/./member &/p'
[ -z "$gid" ] || getent passwd | awk -F: -v gid="$gid" '$4 == gid {print "member " $1}'
stat -L -c 'socket %a %U %G' /run/docker.sock || exit 1
[ ! -e /etc/docker/daemon.json ] || stat -L -c 'file %a %U %G' /etc/docker/daemon.json
for name in docker.io docker-cli docker-ce docker-ce-cli containerd containerd.io; do
  dpkg-query -W -f '${db:Status-Want} ${db:Status-Status} ${Package}\n' "$name" 2>/dev/null
done | awk '$2 == "installed" {print "installed " $3; if ($1 == "hold") print "held " $3}'
exit 0
""",
    str.splitlines,
)

# As the kernel has them, whoever loaded them.
DROPS = Section(
    "audit-docker-drops",
    r"""
rules=$(nft -j list ruleset) || exit 1
printf '%s' "$rules" | jq -c '[.nftables[] | (.chain // empty | {chain: {family, table, name, hook, policy}}),
                              (.rule // empty | {rule: {family, table, chain, expr}})]'
""",
    json.loads,
)

POLICIES = Section(
    "audit-docker-policy",
    "systemctl show --property=Id,NUMAPolicy docker.service containerd.service",
    lambda text: [dict(line.split("=", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")],
)


def _after(word: str, lines: list[str]) -> list[str]:
    return [line.removeprefix(f"{word} ").strip() for line in lines if line.startswith(f"{word} ")]


def _version(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a version")
    return int(match[1]), int(match[2])


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.strip("[]").partition("%")[0]).is_loopback


# --- predicates -----------------------------------------------------------------------------------------------------


def _runs_at_boot(seen: Snapshot, spec: NodeSpec) -> Verdict:
    unit = seen.read(UNITS)["docker.service"]
    right = unit["ActiveState"] == "active" and unit["UnitFileState"] == "enabled"
    return judged(right, "docker.service active and enabled", f"{unit['ActiveState']}, {unit['UnitFileState']}")


def _live_restore(seen: Snapshot, spec: NodeSpec) -> Verdict:
    on = seen.read(DAEMON)["live_restore"]
    return judged(on is True, "live restore on in the running daemon", f"docker info: LiveRestoreEnabled={on}")


def _data_root(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.containers
    root = seen.read(DAEMON)["root"]
    return judged(root == spec.containers.data_root, f"data in {spec.containers.data_root}", f"data in {root}")


def _default_address(seen: Snapshot, spec: NodeSpec) -> Verdict:
    address = seen.read(BRIDGE)
    return judged(
        address == "127.0.0.1", "ports without an address are published on 127.0.0.1", f"on {address or 'all'}"
    )


def _no_tcp_api(seen: Snapshot, spec: NodeSpec) -> Verdict:
    # Without a proxy process dockerd itself keeps a published port taken; nothing answers on that socket.
    taken = {f"{p['address']}:{p['host_port']}" for c in _running(seen) for p in c.published}
    sockets = {entry.split(" ")[0] for entry in _after("listens", seen.read(ACCESS)) if '"dockerd"' in entry}
    faults = [f"dockerd listens on {address}" for address in sorted(sockets - taken)]
    return without(
        faults, "dockerd has no TCP socket but for published ports", f"published: {', '.join(taken) or 'none'}"
    )


def _socket(seen: Snapshot, spec: NodeSpec) -> Verdict:
    mode, user, group = _after("socket", seen.read(ACCESS))[0].split()
    right = mode in ("660", "600") and user == "root" and group in ("docker", "root")
    return judged(right, "/run/docker.sock 660 root docker", f"{mode} {user} {group}")


def _group_empty(seen: Snapshot, spec: NodeSpec) -> Verdict:
    members = sorted(set(_after("member", seen.read(ACCESS))))
    return without([f"in group docker: {name}" for name in members], "nobody in group docker", "nobody")


def _daemon_json(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _after("file", seen.read(ACCESS))
    if not found:
        return judged(False, "/etc/docker/daemon.json", "there is none: the daemon runs with its defaults")
    mode, user, group = found[0].split()
    right = user == "root" and group == "root" and not int(mode, 8) & 0o022
    return judged(right, "/etc/docker/daemon.json writable by root alone", f"{mode} {user} {group}")


def _no_proxy(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _after("proxy", seen.read(ACCESS))
    return without([f"runs: {command}" for command in found], "no docker-proxy process", "none")


def _held(seen: Snapshot, spec: NodeSpec) -> Verdict:
    lines = seen.read(ACCESS)
    installed, held = _after("installed", lines), _after("held", lines)
    missing = [name for name in installed if name not in held]
    return without([f"not held: {name}" for name in missing], "every Docker package held", f"held: {', '.join(held)}")


def _guarded(seen: Snapshot, spec: NodeSpec) -> Verdict:
    version = seen.read(DAEMON)["version"]
    if _version(version) >= (28, 0):
        return not_applicable(f"Docker {version} keeps neighbours away itself (since 28)")
    loopback, forwarded = _drops(seen.read(DROPS))
    faults = [
        *([] if loopback else ["no rule drops packets from outside to 127.0.0.0/8 before Docker rewrites them"]),
        *([] if forwarded else ["no rule drops packets from outside to container addresses"]),
    ]
    return without(
        faults,
        "packets from neighbours to loopback ports and to containers are dropped",
        f"Docker {version}, both dropped",
    )


def _drops(entries: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Whether prerouting drops what comes from outside for 127.0.0.0/8, and whether forwarding to a bridge ends in a drop."""
    chains = [entry["chain"] for entry in entries if "chain" in entry]
    hooks = {(c["family"], c["table"], c["name"]): c["hook"] for c in chains}
    rules: dict[tuple[str, str, str], list[list[dict[str, Any]]]] = {}
    for rule in (entry.get("rule") for entry in entries):
        if rule:
            rules.setdefault((rule["family"], rule["table"], rule["chain"]), []).append(rule["expr"])

    def drops_loopback(expr: list[dict[str, Any]]) -> bool:
        text = json.dumps(expr)
        return "drop" in _words(expr) and '"daddr"' in text and '"127.0.0.0"' in text

    def ends_in_drop(chain: tuple[str, str, str]) -> bool:
        return any("drop" in _words(expr) and len(_matches(expr)) == 0 for expr in rules.get(chain, []))

    loopback = any(
        hook == "prerouting" and any(drops_loopback(expr) for expr in rules.get(chain, []))
        for chain, hook in hooks.items()
    )
    # A table for both families whose policy is to drop: role firewall's, which lets nothing through to a bridge.
    forwarded = any(c["family"] == "inet" and c["hook"] == "forward" and c["policy"] == "drop" for c in chains)
    for chain, hook in hooks.items():
        # Docker's own isolation chains live in tables of family ip; what they drop is between bridges.
        if hook != "forward" or chain[0] == "ip":
            continue
        for expr in rules.get(chain, []):
            targets = [part["jump"]["target"] for part in expr if "jump" in part]
            names_bridges = any('"oifname"' in json.dumps(part) and '"br-*"' in json.dumps(part) for part in expr)
            forwarded |= names_bridges and any(ends_in_drop((chain[0], chain[1], target)) for target in targets)
    return loopback, forwarded


def _words(expr: list[dict[str, Any]]) -> set[str]:
    return {word for part in expr for word in part}


def _matches(expr: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in expr if "match" in part]


def _running(seen: Snapshot) -> list[Container]:
    return [container for container in seen.read(CONTAINERS) if container.running]


def _looked_at(containers: list[Container]) -> str:
    return f"running: {', '.join(c.name for c in containers) or 'none'}"


def _no_privileged(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _running(seen)
    return without(
        [f"privileged: {c.name}" for c in found if c.privileged], "no privileged container", _looked_at(found)
    )


def _no_host_namespaces(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _running(seen)
    faults = [
        f"{c.name} has the host's {', '.join(shared)} namespace"
        for c in found
        if (shared := [name for name, mode in _namespaces(c).items() if mode == "host"])
    ]
    return without(faults, "no container in a namespace of the host", _looked_at(found))


def _namespaces(container: Container) -> dict[str, str]:
    return {
        "network": container.network,
        "pid": container.pid_mode,
        "ipc": container.ipc_mode,
        "uts": container.uts_mode,
        "user": container.userns_mode,
        "cgroup": container.cgroupns_mode,
    }


def _published_on_loopback(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _running(seen)
    faults = [
        f"{c.name} publishes {p['port']} on {p['address'] or 'all addresses'}:{p['host_port']}"
        for c in found
        for p in c.published
        if not _is_loopback(p["address"])
    ]
    return without(faults, "ports published on loopback only", _looked_at(found))


def _no_socket_inside(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _running(seen)
    faults = [
        f"{c.name} has {mount['source']} inside"
        for c in found
        for mount in c.mounts
        if mount["source"]
        in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run", "/")
    ]
    return without(faults, "no container holds Docker's socket", _looked_at(found))


def _filters_on(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = _running(seen)
    faults = [
        f"{c.name}: {option}"
        for c in found
        for option in c.security
        if option.replace(":", "=").endswith("=unconfined")
    ]
    return without(faults, "no container without seccomp or AppArmor", _looked_at(found))


def _logs_capped(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.containers
    found = _running(seen)
    allowed = spec.containers.log_max_size * spec.containers.log_max_files
    faults = []
    for c in found:
        driver, options = c.log["Type"], c.log.get("Config") or {}
        if driver in ("none", "journald"):
            continue
        size, files = options.get("max-size", ""), int(options.get("max-file", "1"))
        value = daemon.size(size)
        if not value or value * files > allowed:
            faults.append(f"{c.name}: {driver}, max-size {size or 'none'}, {files} files")
    return without(faults, f"at most {allowed} bytes of log per container", _looked_at(found))


def _no_memory_policy(seen: Snapshot, spec: NodeSpec) -> Verdict:
    # Memory policy is inherited over fork and exec (set_mempolicy(2)): it would reach every container.
    units = seen.read(POLICIES)
    faults = [
        f"{u['Id']}: NUMAPolicy={u['NUMAPolicy']}"
        for u in units
        if u.get("NUMAPolicy", "n/a") not in ("n/a", "default")
    ]
    return without(faults, "docker.service and containerd.service without NUMAPolicy", "none")


# --- the list -------------------------------------------------------------------------------------------------------

_CONVERGE = "pyinfra INVENTORY deploy.py"
_FOREIGN = "stop the container and start it again without it; gpuwright's own never have it"

CONTROLS = (
    Control(
        id="GPW-CONT-001",
        title="Docker runs and starts at boot.",
        reason="Without it no engine comes back after a power cut.",
        severity="high",
        observed=(UNITS,),
        predicate=_runs_at_boot,
        remedy=_CONVERGE,
        risk="none",
    ),
    Control(
        id="GPW-CONT-002",
        title="Containers outlive a restart of Docker.",
        reason="An upgrade or a crash of the daemon would otherwise end every engine (security.md 3.3).",
        severity="high",
        observed=(DAEMON,),
        predicate=_live_restore,
        remedy=f"{_CONVERGE} (live-restore in daemon.json)",
        risk="none: it is taken over by a reload",
        references=ref.DAEMON,
    ),
    Control(
        id="GPW-CONT-003",
        title="Docker keeps its data where the node file says.",
        reason="Images of tens of GiB on the wrong file system fill /.",
        severity="medium",
        observed=(DAEMON,),
        predicate=_data_root,
        remedy=f"move the data, then {_CONVERGE} (containers.data_root)",
        risk="a restart of Docker with another data root starts without any image or container",
    ),
    Control(
        id="GPW-CONT-004",
        title="A port published without an address is published on loopback.",
        reason="Published ports bypass the input chain of every firewall (moby issue 4737).",
        severity="high",
        observed=(BRIDGE,),
        predicate=_default_address,
        remedy=f'{_CONVERGE} ("ip" in daemon.json)',
        risk="a restart of Docker; containers that relied on the old default are no longer reached from outside",
        references=ref.LISTENERS,
    ),
    Control(
        id="GPW-CONT-005",
        title="Docker's API is not on the network.",
        reason="Whoever reaches it is root on the node.",
        severity="critical",
        observed=(ACCESS, CONTAINERS),
        predicate=_no_tcp_api,
        remedy='remove "hosts" from daemon.json and -H tcp:// from the unit, then restart Docker',
        risk="remote clients of the API lose it",
        references=ref.ADMIN_CLOSED,
    ),
    Control(
        id="GPW-CONT-006",
        title="Docker's socket is closed to everybody but root and group docker.",
        reason="Whoever can write to it is root on the node.",
        severity="critical",
        observed=(ACCESS,),
        predicate=_socket,
        remedy="systemctl restart docker.socket docker.service",
        risk="a restart of Docker; containers go on",
        references=ref.DOCKER_ACCESS,
    ),
    Control(
        id="GPW-CONT-007",
        title="Nobody is in group docker.",
        reason="The group is root without a password and without a log.",
        severity="critical",
        observed=(ACCESS,),
        predicate=_group_empty,
        remedy="gpasswd --delete NAME docker",
        risk="that person's docker commands need sudo",
        references=ref.DOCKER_ACCESS,
    ),
    Control(
        id="GPW-CONT-008",
        title="Only root can change Docker's settings.",
        reason="A runtime or a registry named in daemon.json runs as root.",
        severity="high",
        observed=(ACCESS,),
        predicate=_daemon_json,
        remedy=_CONVERGE,
        risk="none",
        references=ref.DAEMON_FILES,
    ),
    Control(
        id="GPW-CONT-009",
        title="No proxy process carries published ports.",
        reason="docker-proxy dies with the daemon and cuts every stream; the kernel forwards without it.",
        severity="medium",
        observed=(ACCESS,),
        predicate=_no_proxy,
        remedy=f"{_CONVERGE} (userland-proxy in daemon.json)",
        risk="a restart of Docker; running containers keep their proxy until they are started again",
        references=ref.DAEMON,
    ),
    Control(
        id="GPW-CONT-010",
        title="Docker's packages are held.",
        reason="An upgrade in passing stops the daemon, and old ones take the containers along (docker/for-linux 813).",
        severity="medium",
        observed=(ACCESS,),
        predicate=_held,
        remedy=_CONVERGE,
        risk="held packages get no fixes by themselves: upgrade them in a window",
        references=ref.UPDATES,
    ),
    Control(
        id="GPW-CONT-011",
        title="Machines on the same network segment reach no loopback port and no container.",
        reason="Docker before 28 lets them (Docker Engine 28 hardening notes; moby issue 45610).",
        severity="high",
        observed=(DAEMON, DROPS),
        predicate=_guarded,
        remedy="systemctl restart gpuwright-neighbour-guard.service",
        risk="clients that talk to container addresses directly no longer can",
        references=ref.LISTENERS,
    ),
    Control(
        id="GPW-CONT-012",
        title="No container is privileged.",
        reason="A privileged container is root on the node.",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_no_privileged,
        remedy=_FOREIGN,
        risk="what it did with the node it can no longer do",
        references=ref.CONTAINER_PRIVILEGE,
    ),
    Control(
        id="GPW-CONT-013",
        title="No container shares a namespace of the host.",
        reason="With the host's network torch.distributed listens on all addresses (security.md 2.3).",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_no_host_namespaces,
        remedy=_FOREIGN,
        risk="ports it opened on the host have to be published",
        references=ref.CONTAINER_NETWORK,
    ),
    Control(
        id="GPW-CONT-014",
        title="No container publishes a port beyond loopback.",
        reason="It would go past the gateway's keys and past the firewall (moby issue 4737).",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_published_on_loopback,
        remedy="publish on 127.0.0.1 and let the gateway answer",
        risk="clients that used the port directly lose it",
        references=ref.LISTENERS,
    ),
    Control(
        id="GPW-CONT-015",
        title="No container holds Docker's socket.",
        reason="It could start a privileged container.",
        severity="critical",
        observed=(CONTAINERS,),
        predicate=_no_socket_inside,
        remedy=_FOREIGN,
        risk="tools that watch Docker from a container stop working",
        references=ref.DOCKER_ACCESS,
    ),
    Control(
        id="GPW-CONT-016",
        title="Every container keeps its system call filter and its AppArmor profile.",
        reason="They stand between a hole in the kernel and code in the container.",
        severity="high",
        observed=(CONTAINERS,),
        predicate=_filters_on,
        remedy=_FOREIGN,
        risk="debuggers and profilers inside it stop working",
        references=ref.CONTAINER_FILTERS,
    ),
    Control(
        id="GPW-CONT-017",
        title="The log of every container has a cap.",
        reason="An engine that logs in a loop fills the disk that its evidence needs.",
        severity="medium",
        observed=(CONTAINERS,),
        predicate=_logs_capped,
        remedy=f"{_CONVERGE}, then start the container again: a cap is fixed when a container is created",
        risk="the oldest lines go",
        references=ref.CONTAINER_LOGS,
    ),
    Control(
        id="GPW-CONT-018",
        title="Docker and containerd have no memory policy.",
        reason="It is inherited over fork and exec, so every engine would be bound (set_mempolicy(2)).",
        severity="high",
        observed=(POLICIES,),
        predicate=_no_memory_policy,
        remedy="remove NUMAPolicy= from both units, daemon-reload, restart both, then the engines",
        risk="the restart of the engines",
    ),
    *gpu_half.CONTROLS,
)
