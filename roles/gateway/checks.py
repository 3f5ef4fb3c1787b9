"""What role `gateway` promises: the pinned Caddy, shut in, running exactly the configuration and the keys of the repository."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwright import render
from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, waived, without
from gpuwright.audit.processes import unfiltered
from gpuwright.audit.systemd import seconds
from gpuwright.snapshot import OWNED, CouldNotLook, Section, Snapshot
from gpuwright.snapshot import UNITS as ALL_UNITS
from gpuwright.spec.node import NodeSpec
from gpuwright.upstreams import upstreams
from roles.gateway import engine_guard, keys, operations
from roles.gateway.caddyfile import configuration
from roles.gateway.facts import GATEWAY, GatewayState
from roles.gateway.spec import GatewaySpec, TlsInternal, TlsOff, TlsOwn

# CAP_NET_BIND_SERVICE is capability 10 (linux/capability.h).
_BIND_SERVICE = 1 << 10

# --- observations ---------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """The gateway's process, as the kernel has it."""

    status: dict[str, str] = field(default_factory=dict)
    root: str = ""  # mount options of its root file system
    sees: list[str] = field(default_factory=list)  # places that it shares with everybody
    core: str = ""


def _parse_process(text: str) -> Process:
    found = Process()
    for line in text.splitlines():
        tag, _, rest = line.partition(" ")
        if tag == "status":
            key, _, value = rest.partition(":")
            found.status[key] = value.strip()
        elif tag == "root":
            found.root = rest
        elif tag == "sees":
            found.sees.append(rest)
        elif tag == "core":
            found.core = rest
    return found


PROCESS = Section(
    "audit-gateway-process",
    r"""
pid=$(systemctl show --property=MainPID --value gpuwright-gateway.service)
[ "${pid:-0}" -gt 0 ] || exit 1
awk '/^(Uid|Gid|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp|Seccomp_filters):/ {print "status " $0}' "/proc/$pid/status" || exit 1
sed -n 's/^Seccomp_filters:[[:space:]]*/status Init_filters: /p' /proc/1/status
awk '$5 == "/" {print "root " $6}' "/proc/$pid/mountinfo"
# Through the process's own root: what it sees in these places, and whether that is what everybody sees there.
for path in /home /root /tmp /dev; do
  [ "$(stat -L -c %d:%i "/proc/$pid/root$path")" != "$(stat -L -c %d:%i "$path")" ] || echo "sees $path"
done
awk '/^Max core file size/ {print "core " $5 " " $6}' "/proc/$pid/limits"
systemctl show --property=User gpuwright-gateway.service | sed -n 's/^User=/status Wanted:/p'
exit 0
""",
    _parse_process,
)

# Which keys the running process accepts, from itself; which the file has, for the next reload. Ids and the kind of their
# hash, never the hash.
KEYS = Section(
    "audit-gateway-keys",
    r"""
running=$(curl --silent --fail --max-time 5 --unix-socket /run/gpuwright-gateway/admin.sock http://127.0.0.1/config/) || exit 1
printf '%s' "$running" | jq -r '[.. | objects | select(has("accounts")) | .accounts[]] | unique | .[] |
    "running \(.username) \(.password | if startswith("$") then . else @base64d end | .[0:7])"' || exit 1
sed -n 's/^\([^ #]*\) \(.\{7\}\).*/file \1 \2/p' /etc/gpuwright/gateway/keys.caddy
""",
    str.splitlines,
)


@dataclass
class Site:
    """What one site answered when asked on the node without a key."""

    status: str
    expires: datetime.datetime | None


def _parse_sites(text: str) -> dict[str, Site]:
    found = {}
    for line in text.splitlines():
        site, status, expires = line.split("|")
        moment = None
        if expires:
            moment = datetime.datetime.strptime(expires, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=datetime.UTC)
        found[site] = Site(status, moment)
    return found


# Whom the certificate is from is for the test from outside; here only that it is in time. No key is sent.
SITES = Section(
    "audit-gateway-sites",
    r"""
pid=$(systemctl show --property=MainPID --value gpuwright-gateway.service)
[ "${pid:-0}" -gt 0 ] || exit 1
listens=$(ss -Hltnp | sed -n "s/^LISTEN *[0-9]* *[0-9]* *\([^ ]*\) .*pid=$pid,.*/\1/p" | sort -u)
for site in $(sed -n '/^https\{0,1\}:\/\/[^: ][^ ]*:[0-9]/s/[, ].*//p' /etc/gpuwright/gateway/Caddyfile); do
  case $site in *gateway-health* | *gateway-identity*) continue ;; esac
  port=${site##*:}
  address=$(printf '%s\n' "$listens" | sed -n "s/:$port\$//p" | head -n 1)
  case $address in 0.0.0.0 | '*' | '[::]' | '') address=127.0.0.1 ;; esac
  said=$(curl --insecure --verbose --silent --max-time 8 --connect-to "::$address:$port" --output /dev/null \
    --write-out '\nstatus %{http_code}\n' "$site/v1/models" 2>&1)
  printf '%s|%s|%s\n' "$site" "$(printf '%s\n' "$said" | sed -n 's/^status //p')" \
    "$(printf '%s\n' "$said" | sed -n 's/.*expire date: *//p' | tr -s ' ' | head -n 1)"
done
exit 0
""",
    _parse_sites,
)

# Of the log only counts: how many lines, how many of them JSON, with a key's name, with anything like a key.
LOG = Section(
    "audit-gateway-log",
    r"""
log=/var/log/gpuwright-gateway/access.log
[ -e "$log" ] || { echo '{}'; exit 0; }
lines=$(tail -n 2000 "$log")
printf '%s\n' "$lines" | jq -R -s -c --arg mode "$(stat -c '%a %U' "$log")" '
  split("\n") | map(select(. != "")) | {
    mode: $mode,
    lines: length,
    json: map(fromjson? | objects) | length,
    named: map(fromjson? | objects | select(has("user_id"))) | length,
    key_like: map(select(test("sk-[A-Za-z0-9]{20}|[Bb]earer |\"[Aa]uthorization\""))) | length}'
""",
    json.loads,
)

FILES = Section(
    "audit-gateway-files",
    r"""
find /var/lib/gpuwright-gateway /etc/gpuwright/gateway -name '*.key' -printf '%m %u %p\n' 2>/dev/null
exit 0
""",
    str.splitlines,
)

# --- predicates -----------------------------------------------------------------------------------------------------


def _spec(spec: NodeSpec) -> GatewaySpec:
    assert spec.gateway
    return spec.gateway


def _running(seen: Snapshot) -> GatewayState:
    state = seen.read(GATEWAY)
    if state.pid is None:
        raise CouldNotLook("the gateway does not run")
    return state


def _unit_up(seen: Snapshot, spec: NodeSpec) -> Verdict:
    unit = seen.read(ALL_UNITS).get(operations.UNIT, {})
    has = f"{unit.get('ActiveState', 'absent')}, {unit.get('UnitFileState', 'absent')}"
    return judged(has == "active, enabled", f"{operations.UNIT} active, enabled", has)


def _binary(seen: Snapshot, spec: NodeSpec) -> Verdict:
    caddy, state = _spec(spec).caddy, _running(seen)
    wanted = caddy.sha256
    if wanted is None and caddy.file is not None:
        with Path(caddy.file).open("rb") as file:
            wanted = hashlib.file_digest(file, "sha256").hexdigest()
    has = state.exe_sha256
    if state.exe_is_on_disk:
        has = next((f.sha256 for f in seen.read(OWNED) if f.name == operations.CADDY), None)
    return judged(
        wanted is not None and has == wanted,
        f"Caddy {caddy.version}, sha256 {wanted or 'not pinned'}",
        f"the process runs {state.exe}, sha256 {has or 'unknown'}",
    )


def _user(seen: Snapshot, spec: NodeSpec) -> Verdict:
    status = seen.read(PROCESS).status
    right = status.get("Wanted") == operations.USER and "0" not in status["Uid"].split()
    return judged(
        right, f"user {operations.USER}, not uid 0", f"user {status.get('Wanted') or 'root'}, uids {status['Uid']}"
    )


def _capabilities(seen: Snapshot, spec: NodeSpec) -> Verdict:
    status = seen.read(PROCESS).status
    allowed = _BIND_SERVICE if any(listen.port < 1024 for listen in _spec(spec).listen) else 0
    faults = [
        f"{name} {status[name]}"
        for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")
        if int(status[name], 16) & ~allowed
    ]
    return without(faults, "at most CAP_NET_BIND_SERVICE", f"CapEff {status['CapEff']}, CapBnd {status['CapBnd']}")


def _no_new_privileges(seen: Snapshot, spec: NodeSpec) -> Verdict:
    value = seen.read(PROCESS).status["NoNewPrivs"]
    return judged(value == "1", "NoNewPrivs 1", f"NoNewPrivs {value}")


def _filtered(seen: Snapshot, spec: NodeSpec) -> Verdict:
    status = seen.read(PROCESS).status
    said = unfiltered(status)
    return judged(not said, "a seccomp filter of its own", said or f"{status.get('Seccomp_filters', '1')} filters")


def _shut_in(seen: Snapshot, spec: NodeSpec) -> Verdict:
    process = seen.read(PROCESS)
    faults = [
        *(
            []
            if "ro" in process.root.split(",")
            else [f"its root file system is mounted {process.root or 'as everybody has it'}"]
        ),
        *(f"it sees {path} as everybody does" for path in process.sees),
    ]
    return without(faults, "a read-only root, and /home, /root, /tmp and /dev of its own or none", "so it is")


_SANDBOX = {
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "MemoryDenyWriteExecute": "yes",
    "UMask": "0077",
}


def _sandbox(seen: Snapshot, spec: NodeSpec) -> Verdict:
    unit = seen.read(GATEWAY).unit
    faults = [f"{key}={unit.get(key, 'absent')}" for key, value in _SANDBOX.items() if unit.get(key) != value]
    if unit.get("RestrictNamespaces") != "yes" and unit.get("RestrictNamespaces") != "":
        faults.append(f"RestrictNamespaces={unit.get('RestrictNamespaces')}")
    wanted = ", ".join(f"{key}={value}" for key, value in _SANDBOX.items())
    return without(faults, f"{wanted}, no namespaces", "so systemd runs it")


def _no_core(seen: Snapshot, spec: NodeSpec) -> Verdict:
    limit = seen.read(PROCESS).core
    return judged(limit == "0 0", "core file size 0", f"core file size {limit}")


def _drains(seen: Snapshot, spec: NodeSpec) -> Verdict:
    has = seconds(seen.read(GATEWAY).unit["TimeoutStopUSec"])
    return judged(has == _spec(spec).drain, f"a stop waits {_spec(spec).drain} s for streams", f"it waits {has:g} s")


def _mode(path: str, wanted: str) -> Any:
    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        has = seen.read(GATEWAY).modes.get(path, "absent")
        return judged(has == wanted, f"{path} {wanted}", has)

    return predicate


def _accepted(gateway: GatewaySpec) -> tuple[keys.ApiKey, ...]:
    """The keys of the repository that are valid on this node, as the role takes them."""
    return keys.accepted(keys.load(render.REPOSITORY / gateway.keys_file), gateway.keys)


def _keys_right(seen: Snapshot, spec: NodeSpec) -> Verdict:
    wanted = {key.id for key in _accepted(_spec(spec))}
    faults = []
    for place, words in (("running", "the process accepts"), ("file", "keys.caddy has")):
        has = {line.split(" ")[1] for line in seen.read(KEYS) if line.startswith(place)}
        faults += [f"{words} {key}, which is not a valid key of the repository" for key in sorted(has - wanted)]
        faults += [f"{words} no {key}" for key in sorted(wanted - has)]
    return without(
        faults,
        f"the {len(wanted)} valid keys of {Path(_spec(spec).keys_file).name}",
        f"keys: {', '.join(sorted(wanted)) or 'none'}",
    )


def _keys_cheap(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = [line.split(" ") for line in seen.read(KEYS)]
    cost = f"${keys.BCRYPT_COST:02d}$"
    faults = [
        f"{key} ({place}): {kind}" for place, key, kind in found if not (kind.startswith("$2") and kind[3:7] == cost)
    ]
    return without(faults, f"bcrypt, cost {keys.BCRYPT_COST}", f"{len(found)} hashes")


def _admin(seen: Snapshot, spec: NodeSpec) -> Verdict:
    state = seen.read(GATEWAY)
    # Whose user that must be is a control of its own.
    user = state.unit.get("User", "")
    faults = [
        f"{path} is {state.modes.get(path, 'absent')}"
        for path in ("/run/gpuwright-gateway/admin.sock", "/run/gpuwright-gateway/identity.sock")
        if state.modes.get(path, "").split(" ")[:2] != ["0600", user]
    ]
    return without(faults, f"both sockets 0600 {user}", "both are")


def _listeners(seen: Snapshot, spec: NodeSpec) -> Verdict:
    gateway = _spec(spec)
    has = {(entry.address, entry.port) for entry in _running(seen).listeners if entry.port != gateway.health_port}
    wanted = {(str(ipaddress.ip_address(listen.address)), listen.port) for listen in gateway.listen}
    faults = [f"listens on {address}:{port}, not declared" for address, port in sorted(has - wanted)]
    faults += [f"does not listen on {address}:{port}" for address, port in sorted(wanted - has)]
    words = ", ".join(f"{address}:{port}" for address, port in sorted(wanted))
    return without(faults, f"TCP {words} and its health port", words)


def _health_private(seen: Snapshot, spec: NodeSpec) -> Verdict:
    port = _spec(spec).health_port
    has = sorted(entry.address for entry in _running(seen).listeners if entry.port == port)
    return judged(has == ["127.0.0.1"], f"127.0.0.1:{port}", f"{', '.join(has) or 'nothing'} on port {port}")


def _identity(seen: Snapshot, spec: NodeSpec) -> Verdict:
    gateway, state = _spec(spec), _running(seen)
    runs = state.identity_running or "none"
    if isinstance(gateway.tls, TlsOwn):
        # The key of the certificate is part of the identity, and no audit asks for it.
        on_disk = state.identity_on_disk or "none"
        return judged(runs == on_disk, f"configuration {on_disk[:12]}, the one on disk", f"configuration {runs[:12]}")
    wanted = configuration(gateway, upstreams(spec.engine), _accepted(gateway), _fingerprint(gateway)).identity
    return judged(
        runs == wanted,
        f"configuration {wanted[:12]}, what the node file and the keys say",
        f"configuration {runs[:12]}",
    )


def _fingerprint(gateway: GatewaySpec) -> bytes:
    ca = getattr(gateway.tls, "ca", None)
    return hashlib.sha256(Path(ca).read_bytes() if ca else b"").digest()


# A public certificate is renewed a month ahead and one of a site by hand: a week left is an alarm. Caddy's own authority
# signs for 12 hours and renews with a third left (caddyserver.com/docs/automatic-https): under one hour it has failed to.
_LEFT = datetime.timedelta(days=7)
_LEFT_INTERNAL = datetime.timedelta(hours=1)


def _certificate(seen: Snapshot, spec: NodeSpec) -> Verdict:
    gateway = _spec(spec)
    if isinstance(gateway.tls, TlsOff):
        return not_applicable("tls is off: the gateway listens on loopback only")
    least = _LEFT_INTERNAL if isinstance(gateway.tls, TlsInternal) else _LEFT
    now = datetime.datetime.now(datetime.UTC)
    faults, fine = [], []
    for site, answer in _sites(seen).items():
        if not site.startswith("https:"):
            continue
        if answer.expires is None:
            faults.append(f"{site}: no certificate")
        elif answer.expires - now < least:
            faults.append(f"{site}: until {answer.expires:%Y-%m-%d %H:%M} UTC")
        else:
            fine.append(f"{site}: until {answer.expires:%Y-%m-%d %H:%M} UTC")
    return without(faults, f"valid for at least another {least}", "; ".join(fine))


def _sites(seen: Snapshot) -> dict[str, Site]:
    sites = seen.read(SITES)
    if not sites:
        raise CouldNotLook("the gateway's Caddyfile has no site")
    return sites


def _closed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    sites = _sites(seen)
    faults = [
        f"{site}/v1/models answers {answer.status} without a key"
        for site, answer in sites.items()
        if answer.status != "401"
    ]
    return without(faults, "401 without a key", f"401 at {', '.join(sites)}")


def _log_counts(seen: Snapshot) -> dict[str, Any]:
    counts: dict[str, Any] = seen.read(LOG)
    return counts


def _log_kept(seen: Snapshot, spec: NodeSpec) -> Verdict:
    log = _log_counts(seen)
    if not log:
        return judged(False, "an access log", "/var/log/gpuwright-gateway/access.log is absent")
    right = log["lines"] > 0 and log["json"] == log["lines"]
    return judged(
        right, "an access log with one JSON object per line", f"{log['json']} of the last {log['lines']} lines"
    )


def _log_clean(seen: Snapshot, spec: NodeSpec) -> Verdict:
    log = _log_counts(seen)
    found = log.get("key_like", 0)
    return judged(
        found == 0, "no line with a key or an Authorization header", f"{found} of the last {log.get('lines', 0)} lines"
    )


def _log_private(seen: Snapshot, spec: NodeSpec) -> Verdict:
    mode, user = str(_log_counts(seen).get("mode", "600 -")).split()
    return judged(not int(mode, 8) & 0o037, "the access log closed to others", f"{mode} {user}")


def _private_keys(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = [line.split(" ", 2) for line in seen.read(FILES)]
    if not found:
        return not_applicable("the node has no private key of the gateway")
    faults = [f"{path} is {mode} {user}" for mode, user, path in found if int(mode, 8) & 0o007]
    return without(faults, "private keys closed to others", f"{len(found)} keys")


def _only_way_in(seen: Snapshot, spec: NodeSpec) -> Verdict:
    engines, named = upstreams(spec.engine), _spec(spec).local_clients
    why = [
        f"{'everybody' if name == engine_guard.EVERYBODY else name}: {reason}" for name, reason in (named or {}).items()
    ]
    if not engines:
        return not_applicable("the node has no engine")
    if not engine_guard.wanted(named, spec.hardening):
        said = judged(True, "accounts of the node are kept from its engines", "they are not")
        return (
            waived(said, why)
            if why
            else not_applicable("the profile lets local accounts ask engines (gateway.local_clients)")
        )
    found, unit = seen.read(engine_guard.TABLES), seen.read(ALL_UNITS).get(engine_guard.UNIT, {})
    faults = found.differences
    if found.sha256 != hashlib.sha256(engine_guard.rules(engines)).hexdigest():
        faults.insert(0, f"{engine_guard.PATH} is not what the node file makes")
    clients = engine_guard.clients(named, operations.USER)
    if found.clients != clients:
        faults.insert(0, f"{engine_guard.CLIENTS} lets in {', '.join(found.clients) or 'nobody'}")
    state = f"{unit.get('ActiveState', 'absent')}, {unit.get('UnitFileState', 'absent')}"
    if state != "active, enabled":
        faults.append(f"{engine_guard.UNIT} is {state}")
    expected = f"{engine_guard.TABLE} as the node file makes it, now and at every boot"
    return waived(without(faults, expected, f"root and {', '.join(clients)} alone"), why)


# --- the list -------------------------------------------------------------------------------------------------------

_CONVERGE = "pyinfra INVENTORY deploy.py"
_UNIT = f"remove drop-ins of {operations.UNIT} (systemctl revert {operations.UNIT}), then {_CONVERGE}"
_RESTART = "a restart of the gateway, which waits for streams as long as gateway.drain"

CONTROLS = (
    Control(
        id="GPW-GATE-001",
        title="The gateway runs and starts at boot.",
        reason="Engines without it are reached by nobody.",
        severity="high",
        observed=(ALL_UNITS,),
        predicate=_unit_up,
        remedy=f"systemctl status {operations.UNIT}; then {_CONVERGE}",
        risk="none",
    ),
    Control(
        id="GPW-GATE-002",
        title="The running gateway is the pinned Caddy.",
        reason="Read from the process: a file replaced under it is not what answers (security.md 1.1).",
        severity="critical",
        observed=(GATEWAY, OWNED),
        predicate=_binary,
        remedy=_CONVERGE,
        risk=_RESTART,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-GATE-003",
        title="The gateway runs as a user of its own.",
        reason="It parses what the internet sends.",
        severity="critical",
        observed=(PROCESS,),
        predicate=_user,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_USER,
    ),
    Control(
        id="GPW-GATE-004",
        title="The gateway has no capability but to bind low ports.",
        reason="Each other one is a way from the gateway to root.",
        severity="high",
        observed=(PROCESS,),
        predicate=_capabilities,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_PRIVILEGE,
    ),
    Control(
        id="GPW-GATE-005",
        title="The gateway cannot gain privileges.",
        reason="Without no_new_privs a set-uid program undoes its small set of capabilities.",
        severity="high",
        observed=(PROCESS,),
        predicate=_no_new_privileges,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_PRIVILEGE,
    ),
    Control(
        id="GPW-GATE-006",
        title="A system call filter is on the gateway.",
        reason="It closes most of the kernel to code that got in.",
        severity="high",
        observed=(PROCESS,),
        predicate=_filtered,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_FILTERS,
    ),
    Control(
        id="GPW-GATE-007",
        title="The gateway sees a read-only system without homes, devices and others' files.",
        reason="What broke in finds nothing to read and nowhere to stay.",
        severity="high",
        observed=(PROCESS,),
        predicate=_shut_in,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_ROOT,
    ),
    Control(
        id="GPW-GATE-008",
        title="systemd keeps the gateway from kernel settings, modules, namespaces and writable code.",
        reason="Each is a step from a hole in the gateway to the node.",
        severity="medium",
        observed=(GATEWAY,),
        predicate=_sandbox,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CONTAINER_FILTERS,
    ),
    Control(
        id="GPW-GATE-009",
        title="A gateway that crashes leaves no core file.",
        reason="It would hold private keys and prompts.",
        severity="medium",
        observed=(PROCESS,),
        predicate=_no_core,
        remedy=_UNIT,
        risk=_RESTART,
        references=ref.CORE_DUMPS,
    ),
    Control(
        id="GPW-GATE-010",
        title="A stop of the gateway waits for streams as long as the node file says.",
        reason="Shorter cuts answers, longer holds a reboot.",
        severity="low",
        observed=(GATEWAY,),
        predicate=_drains,
        remedy=_UNIT,
        risk="none: it holds from the next stop",
        references=ref.MAINTENANCE,
    ),
    Control(
        id="GPW-GATE-011",
        title="Only root and the gateway read the file of keys.",
        reason="Hashes of 250 random bits are no keys, but whose keys there are is nobody's business.",
        severity="high",
        observed=(GATEWAY,),
        predicate=_mode("/etc/gpuwright/gateway/keys.caddy", f"0640 root {operations.USER}"),
        remedy=_CONVERGE,
        risk="none",
        references=ref.KEYS_HASHED,
    ),
    Control(
        id="GPW-GATE-012",
        title="The gateway accepts the keys of the repository and no others.",
        reason="A key added by hand is one that nobody revokes; one that is missing locks a client out.",
        severity="critical",
        observed=(KEYS,),
        predicate=_keys_right,
        remedy=f"gpuwright key list; then {_CONVERGE}",
        risk="a client with a key that only this node knew is locked out",
        references=ref.KEYS_AUTHENTICATE,
    ),
    Control(
        id="GPW-GATE-013",
        title="Every key is kept as a bcrypt hash of cost 4.",
        reason="In clear text it could be stolen; at a higher cost each request takes seconds of CPU (security.md 1.2).",
        severity="high",
        observed=(KEYS,),
        predicate=_keys_cheap,
        remedy="gpuwright key rotate NAME, then deploy",
        risk="the client needs its new key before the old one is revoked",
        references=ref.KEYS_HASHED,
    ),
    Control(
        id="GPW-GATE-014",
        title="The gateway's admin interface is a socket that only the gateway's user opens.",
        reason="Whoever opens it reads the hashes and replaces the configuration.",
        severity="critical",
        observed=(GATEWAY,),
        predicate=_admin,
        remedy=f"systemctl restart {operations.UNIT}",
        risk=_RESTART,
        references=ref.ADMIN_CLOSED,
    ),
    Control(
        id="GPW-GATE-015",
        title="The gateway listens where the node file says and nowhere else.",
        reason="An IP in a site's address is only a matcher: without bind Caddy listens everywhere (security.md 1.4).",
        severity="critical",
        observed=(GATEWAY,),
        predicate=_listeners,
        remedy=_CONVERGE,
        risk="clients of an undeclared address lose it",
        references=ref.LISTENERS,
    ),
    Control(
        id="GPW-GATE-016",
        title="The health site is reached from the node alone.",
        reason="It proxies to engines without a key.",
        severity="critical",
        observed=(GATEWAY,),
        predicate=_health_private,
        remedy=_CONVERGE,
        risk="none",
        references=ref.API_PATHS,
    ),
    Control(
        id="GPW-GATE-017",
        title="The gateway runs the configuration that the node file and the keys come to.",
        reason="What was changed by hand, or changed and never loaded, is found here.",
        severity="high",
        observed=(GATEWAY,),
        predicate=_identity,
        remedy=_CONVERGE,
        risk="a reload; streams go on",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-GATE-018",
        title="The certificate is valid for long enough to act.",
        reason="An expired one is an outage for every client at once.",
        severity="high",
        observed=(SITES,),
        predicate=_certificate,
        remedy=f"own: replace the files, then {_CONVERGE}; acme, internal: journalctl -u {operations.UNIT}",
        risk="none",
        references=ref.TLS_KEYS,
    ),
    Control(
        id="GPW-GATE-019",
        title="Without a key the gateway answers 401.",
        reason="Everything else rests on it.",
        severity="critical",
        observed=(SITES,),
        predicate=_closed,
        remedy=_CONVERGE,
        risk="clients without a key are locked out",
        references=ref.KEYS_AUTHENTICATE,
    ),
    Control(
        id="GPW-GATE-020",
        title="There is an access log of JSON lines.",
        reason="Who asked, when, and with which key is evidence only if a program can read it.",
        severity="medium",
        observed=(LOG,),
        predicate=_log_kept,
        remedy=_CONVERGE,
        risk="none",
        references=ref.ACCESS_LOG,
    ),
    Control(
        id="GPW-GATE-021",
        title="No key is in the access log.",
        reason="Logs are copied to where keys must not be.",
        severity="critical",
        observed=(LOG,),
        predicate=_log_clean,
        remedy=f"{_CONVERGE}; rotate the key that was seen, and remove the lines",
        risk="the client needs its new key",
        references=ref.ACCESS_LOG,
    ),
    Control(
        id="GPW-GATE-022",
        title="The access log is closed to other users.",
        reason="It says who uses the service, and when.",
        severity="medium",
        observed=(LOG,),
        predicate=_log_private,
        remedy="chmod 0600 /var/log/gpuwright-gateway/access.log",
        risk="none",
        references=ref.ACCESS_LOG,
    ),
    Control(
        id="GPW-GATE-023",
        title="Private keys of certificates are closed to other users.",
        reason="Whoever reads one can be the gateway.",
        severity="critical",
        observed=(FILES,),
        predicate=_private_keys,
        remedy="chmod o= FILE, and replace the certificate: the key may have been read",
        risk="clients that trust the internal authority need its new root",
        references=ref.TLS_KEYS,
    ),
    Control(
        id="GPW-GATE-024",
        title="Accounts of the node reach its engines by the gateway only.",
        reason="An engine asks nobody for a key: whoever runs a program on the node is past keys, path list and access log.",
        severity="medium",
        observed=(engine_guard.TABLES, ALL_UNITS),
        predicate=_only_way_in,
        remedy=f"{_CONVERGE} (gateway.local_clients)",
        risk="programs of the site that ask engines on loopback, a metrics agent for one, are refused; they come by the gateway with a "
        "key, or gateway.local_clients names their accounts",
        references=ref.KEYS_AUTHENTICATE,
    ),
)
