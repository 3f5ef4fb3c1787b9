"""What role `firewall` promises: nothing is reached that the node file does not name, whatever Docker publishes."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Verdict, judged, not_applicable, without
from gpuwright.ingress import ingress
from gpuwright.nftables import Table, differences, parse
from gpuwright.snapshot import UNITS, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.firewall import UNIT
from roles.firewall.facts import SITE
from roles.firewall.table import PATH, TABLE, rules

# --- observations ---------------------------------------------------------------------------------------------------

# As the kernel has it, whoever loaded it.
LIVE = Section("audit-firewall-table", f"nft list tables >/dev/null || exit 1\nnft -j list table {TABLE} || :", parse)

# What the node's own nft makes of the file, in a network namespace that is gone with the question: every version of it
# prints rules in a form of its own.
FILE = Section(
    "audit-firewall-file",
    f"""
[ -e {PATH} ] || exit 0
sha256sum {PATH} | cut -d' ' -f1
unshare --net sh -c 'nft -f {PATH} && nft -j list table {TABLE}'
""",
    lambda text: (text.partition("\n")[0], parse(text.partition("\n")[2])),
)

# "ufw WHY", "firewalld WHY", "nftables Start COMMAND" (Reload, Stop) of nftables.service.
OTHERS = Section(
    "audit-firewall-others",
    r"""
! grep -qs '^ENABLED=yes' /etc/ufw/ufw.conf || echo 'ufw is enabled in /etc/ufw/ufw.conf'
! nft list chains | grep -q 'chain ufw-user-input ' || echo 'ufw has its chains loaded'
! systemctl is-active -q firewalld.service || echo 'firewalld is active'
! systemctl is-enabled -q firewalld.service 2>/dev/null || echo 'firewalld is enabled'
systemctl show --property=ExecStart,ExecReload,ExecStop nftables.service |
  sed -n 's/^Exec\(Start\|Reload\|Stop\)=.*argv\[\]=\(.*\) ; ignore_errors=.*/nftables \1 \2/p'
exit 0
""",
    str.splitlines,
)


# --- predicates -----------------------------------------------------------------------------------------------------


def _base_chain(table: Table | None, name: str) -> str:
    """``hook policy`` of a base chain; says so when there is none."""
    if table is None:
        return f"table {TABLE} is not loaded"
    chain = table.get(name, [{}])[0].get("chain", {})
    return f"{chain['hook']}, policy {chain['policy']}" if "hook" in chain else f"no base chain {name}"


def _default_deny(chain: str) -> Any:
    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        found = _base_chain(seen.read(LIVE), chain)
        return judged(found == f"{chain}, policy drop", f"{TABLE}: {chain}, policy drop", found)

    return predicate


def _as_in_the_node_file(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.firewall
    digest, wanted = seen.read(FILE)
    faults = differences(TABLE, seen.read(LIVE), wanted)
    if digest != hashlib.sha256(rules(spec.firewall, ingress(spec))).hexdigest():
        faults.insert(0, f"{PATH} is not what the node file makes")
    return without(
        faults, f"{TABLE} as the node file makes it", f"{sum(map(len, (wanted or {}).values()))} entries, all alike"
    )


def _at_boot(seen: Snapshot, spec: NodeSpec) -> Verdict:
    unit = seen.read(UNITS).get(UNIT, {})
    found = f"{unit.get('ActiveState')}, {unit.get('UnitFileState')}"
    return judged(found == "active, enabled", f"{UNIT} active, enabled", found)


def _survives_a_reload(seen: Snapshot, spec: NodeSpec) -> Verdict:
    commands = [line.removeprefix("nftables ") for line in seen.read(OTHERS) if line.startswith("nftables ")]
    # What nft loads from another file than ours may flush, today or after an edit.
    faults = [
        f"nftables.service, Exec{kind}=: {command}"
        for kind, _, command in (entry.partition(" ") for entry in commands)
        if "flush ruleset" in command or any(file != PATH for file in re.findall(r"/nft .*-f (\S+)", command))
    ]
    faults += [f"/etc/nftables.conf: {why}" for why in seen.read(SITE)]
    return without(
        faults,
        "nothing that nftables.service runs flushes all rules, and it loads the site's",
        "; ".join(commands) or "no such unit",
    )


def _no_other(seen: Snapshot, spec: NodeSpec) -> Verdict:
    found = [line for line in seen.read(OTHERS) if line.startswith(("ufw ", "firewalld "))]
    return without(found, "neither ufw nor firewalld", "neither")


def _egress(seen: Snapshot, spec: NodeSpec) -> Verdict:
    assert spec.firewall
    if spec.firewall.container_egress == "any":
        return not_applicable("firewall.container_egress is any: containers may open connections")
    table = seen.read(LIVE) or {}
    chain = table.get("from_containers", [{}])[1:]
    # The only accepts are those that name the interface which a packet leaves by: other containers.
    open_ = [rule for rule in chain if "accept" in _words(rule) and not _matches(rule, "oifname")]
    ends = bool(chain) and "drop" in _words(chain[-1]) and not any("match" in part for part in chain[-1]["expr"])
    faults = [f"accepted: {json.dumps(rule['expr'])}" for rule in open_] + (
        [] if ends else ["it does not end in a drop"]
    )
    return without(
        faults, "what containers open is dropped unless it goes to a container", f"{len(chain)} rules, the last drops"
    )


def _ssh_from_somewhere(seen: Snapshot, spec: NodeSpec) -> Verdict:
    ports = set(ingress(spec).ssh)
    table = seen.read(LIVE)
    if table is None:
        return judged(False, "ssh from named networks only", f"table {TABLE} is not loaded")
    faults = [
        f"from everywhere: {json.dumps(rule['expr'])}"
        for rule in table.get("input", [{}])[1:]
        if "accept" in _words(rule) and ports & _ports(rule) and not _matches(rule, "saddr")
    ]
    return without(faults, "every rule that opens ssh names its networks", f"port {', '.join(map(str, sorted(ports)))}")


def _words(rule: dict[str, Any]) -> set[str]:
    return {word for part in rule["expr"] for word in part}


def _matches(rule: dict[str, Any], field: str) -> bool:
    return any(f'"{field}"' in json.dumps(part["match"]["left"]) for part in rule["expr"] if "match" in part)


def _ports(rule: dict[str, Any]) -> set[int]:
    """Destination ports a rule names."""
    found: set[int] = set()
    for part in rule["expr"]:
        if "match" in part and '"dport"' in json.dumps(part["match"]["left"]):
            right = part["match"]["right"]
            for value in right["set"] if isinstance(right, dict) and "set" in right else [right]:
                if isinstance(value, int):
                    found.add(value)
                elif isinstance(value, dict) and "range" in value:
                    found |= set(range(value["range"][0], value["range"][1] + 1))
    return found


# --- the list -------------------------------------------------------------------------------------------------------

_CONVERGE = "pyinfra INVENTORY deploy.py"

CONTROLS = (
    Control(
        id="GPW-FIRE-001",
        title="What the node file does not name is refused on its way in.",
        reason="A program that starts to listen tomorrow is not on the network by that.",
        severity="critical",
        observed=(LIVE,),
        predicate=_default_deny("input"),
        remedy=_CONVERGE,
        risk="whoever reached a port that the node file does not name loses it",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-002",
        title="What the node file does not name does not get through to containers.",
        reason="A published port never passes the input chain: Docker rewrites it before (moby issue 4737).",
        severity="critical",
        observed=(LIVE,),
        predicate=_default_deny("forward"),
        remedy=_CONVERGE,
        risk="ports that containers publish, and anything else that this machine forwards, need an entry in firewall.ports",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-003",
        title="The rules in the kernel are those of the node file.",
        reason="A rule added by hand for an hour stays for years.",
        severity="high",
        observed=(LIVE, FILE),
        predicate=_as_in_the_node_file,
        remedy=f"{_CONVERGE}; a port that is wanted goes into firewall.ports",
        risk="what the extra rules let in is refused",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-004",
        title="The rules are loaded at every boot, before the network is up.",
        reason="Between the first address and the first rule everything is open.",
        severity="high",
        observed=(UNITS,),
        predicate=_at_boot,
        remedy=_CONVERGE,
        risk="none",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-005",
        title="A reload of the site's own nftables rules leaves ours in force.",
        reason="Debian's file and unit flush every rule, Docker's and ours included (docker/for-linux issue 1472).",
        severity="high",
        observed=(OTHERS, SITE),
        predicate=_survives_a_reload,
        remedy=f"{_CONVERGE}; rules of the site in a table of Docker's or ours go into one with a name of their own",
        risk="none: the site's rules are loaded as before, without the flush",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-006",
        title="No other firewall owns this machine.",
        reason="ufw and firewalld rewrite rules at moments of their own, and nobody reads two sets of them at three in the morning.",
        severity="medium",
        observed=(OTHERS,),
        predicate=_no_other,
        remedy="ufw disable; systemctl disable --now firewalld.service",
        risk="what only that firewall refused or allowed changes; compare the two first",
        references=ref.PACKET_FILTER,
    ),
    Control(
        id="GPW-FIRE-007",
        title="Containers open no connection out of the node, nor to the node itself.",
        reason="An engine whose weights are local needs none, and one that was taken over wants them (security.md 2.4).",
        severity="high",
        observed=(LIVE,),
        predicate=_egress,
        remedy=f"{_CONVERGE} (firewall.container_egress)",
        risk="a container of the site's own that calls out is cut off; firewall.container_egress: any lets all of them",
        references=ref.EGRESS,
    ),
    Control(
        id="GPW-FIRE-008",
        title="ssh is reached from named networks only.",
        reason="A door that the whole internet can knock at is one key or one bug away from open.",
        severity="medium",
        observed=(LIVE,),
        predicate=_ssh_from_somewhere,
        remedy=f"name the networks of operators and controllers in firewall.ssh, then {_CONVERGE}",
        risk="whoever connects from elsewhere is shut out; the lock-out guard sees to it that the deploy itself is not",
        references=ref.PACKET_FILTER,
    ),
)
