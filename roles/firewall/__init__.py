"""One nftables table of our own: who may reach the node and its containers; everybody else is refused."""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Iterator, Sequence

from pyinfra.api import OperationError, deploy
from pyinfra.context import ctx_host

from gpuwright import guard, ownership, sandbox, snapshot
from gpuwright.atomic import File, Validate
from gpuwright.guard import Undo
from gpuwright.ingress import Ingress
from gpuwright.nftables import differences
from gpuwright.ownership import Owned
from gpuwright.render import static, template
from roles.firewall.facts import FIREWALL, SITE, Firewall
from roles.firewall.spec import FirewallSpec
from roles.firewall.table import PATH, TABLE, rules

ROLE = "firewall"
UNIT = "gpuwright-firewall.service"
_UNITS = "/etc/systemd/system"

# The table as it is loaded, by whomever and with whatever changed by hand: that is what comes back. Not the file, which
# may say something else.
_UNDO = Undo(
    paths=(f"{_UNITS}/sysinit.target.wants/{UNIT}",),
    keep=f"if nft list table {TABLE} >live 2>/dev/null; then :; else rm -f live; fi",
    after=f"""
if [ -e live ]; then
  {{ printf 'table {TABLE}\\ndelete table {TABLE}\\n'; cat live; }} | nft -f -
elif nft list table {TABLE} >/dev/null 2>&1; then
  nft delete table {TABLE}
fi
[ -e {_UNITS}/{UNIT} ] || systemctl stop {UNIT} 2>/dev/null || true
""",
)

# Without a rule that asks for it the kernel follows no connection, and those that exist would look new: a download whose
# packets only come in would be cut. They are followed for a moment before anything is refused.
_LOAD = f"""
set -eu
systemctl daemon-reload
systemctl enable -q {UNIT}
if ! nft list table {TABLE} >/dev/null 2>&1; then
  nft -f - <<'NFT'
table {TABLE} {{
	chain input {{
		type filter hook input priority 0; policy accept;
		ct state established accept
	}}
}}
NFT
  sleep 2
fi
systemctl reset-failed {UNIT} 2>/dev/null || true
if systemctl is-active -q {UNIT}; then systemctl reload {UNIT}; else systemctl start {UNIT}; fi
"""


@deploy("Firewall")
def firewall(spec: FirewallSpec, ports: Ingress, guarded: int) -> None:
    """Load the table, guarded: it stays only if a new connection gets through.

    + spec: the role's settings
    + ports: what the other roles of the node serve to others
    + guarded: seconds that a new connection has to prove the rules

    Raises OperationError before anything changes when the rules would shut this very run out, when another firewall
    owns the host, when an interface would pass for a bridge of containers, or when the site's own rules lie in tables of
    Docker's.
    """
    host = ctx_host.get()
    seen = snapshot.read(host)
    refuse(host.name, seen.read(FIREWALL), spec, ports, seen.read(SITE))
    wanted = files(spec, ports)
    keep = [*(file.owned for file in wanted), Owned("table", TABLE)]
    guard.change(
        name=f"Load the packet filter (table {TABLE})",
        role=ROLE,
        files=wanted,
        validate=[Validate(f"nft -c -f .{PATH}")],
        claims=[Owned("table", TABLE)],
        undo=_UNDO,
        apply=_LOAD,
        stale=stale,
        seconds=guarded,
    )
    ownership.retire(ROLE, keep=keep)


def files(spec: FirewallSpec, ports: Ingress) -> list[File]:
    """The role's files."""
    unit, drop_in = f"{_UNITS}/{UNIT}", f"{_UNITS}/nftables.service.d/gpuwright-firewall.conf"
    script = "/usr/local/lib/gpuwright/nftables-conf"
    return [
        File(PATH, rules(spec, ports)),
        File(unit, template(f"firewall{unit}.j2", sandbox=sandbox.firewall().lines())),
        File(script, static(f"firewall{script}"), "0755"),
        File(drop_in, static(f"firewall{drop_in}")),
    ]


def stale(seen: snapshot.Snapshot) -> list[str]:
    """Why what runs is not what the files say."""
    now = seen.read(FIREWALL)
    units = seen.read(snapshot.UNITS)
    own = units.get(UNIT, {})
    reasons = differences(TABLE, now.live, now.wanted)
    if own.get("ActiveState") != "active" or own.get("UnitFileState") != "enabled":
        reasons.append(f"{UNIT} is {own.get('ActiveState')}, {own.get('UnitFileState') or 'not enabled'}")
    reasons += [
        f"systemd has an older {unit}"
        for unit in (UNIT, "nftables.service")
        if units.get(unit, {}).get("NeedDaemonReload") == "yes"
    ]
    return reasons


def refuse(name: str, seen: Firewall, spec: FirewallSpec, ports: Ingress, site: Sequence[str] = ()) -> None:
    """Raise OperationError, one sentence per fault, for a host on which these rules must not be loaded.

    + site: why the site's own rules cannot be loaded beside them
    """
    faults = [
        f"{name}: {directory} is read-only, so rules would be gone with the next boot; make it writable (mount -o remount,rw /), or "
        "leave out 'firewall:'."
        for directory in seen.read_only
    ]
    for other in seen.others:
        off = {"ufw": "ufw disable", "firewalld": "systemctl disable --now firewalld.service"}[other]
        faults.append(
            f"{name}: {other} is active and owns the packet filter of this host; two firewalls are one too many. Put what it "
            f"allows into firewall.ports, run `{off}` and deploy again, or leave out 'firewall:'."
        )
    client = ipaddress.ip_address(seen.client) if seen.client else None
    # From loopback comes whoever a forwarder on the host lets in, and where that listens is not seen: the guard decides.
    if client and not client.is_loopback and not any(client in ipaddress.ip_network(n) for n in spec.ssh):
        faults.append(
            f"{name}: this run comes from {seen.client}, and firewall.ssh lets in {', '.join(spec.ssh)} only: it would shut "
            "itself out. Add that address or its network to firewall.ssh."
        )
    if seen.ssh_port and seen.ssh_port not in ports.ssh:
        faults.append(
            f"{name}: this run came in by port {seen.ssh_port}, and the firewall would open "
            f"{', '.join(map(str, ports.ssh))} for ssh: it would shut itself out. Set firewall.ssh_ports: [{seen.ssh_port}]."
        )
    for interface, what in _strangers(seen):
        for pattern in spec.container_interfaces:
            if fnmatch.fnmatchcase(interface, pattern):
                faults.append(
                    f"{name}: {interface} {what}, and firewall.container_interfaces takes {pattern} for a bridge of "
                    f"containers: whoever comes in by it would count as one. Rename {interface}, or set "
                    f"firewall.container_interfaces without {pattern} (docker0 and br-gpw-* are the default one and those "
                    "of engines; containers on bridges that are not named there are not reached and open nothing through this machine)."
                )
    faults += [
        f"{name}: nftables.service would not load the site's rules in /etc/nftables.conf beside Docker's and these: {why}."
        for why in site
    ]
    if faults:
        raise OperationError(" ".join([*faults, "Nothing was changed."]))


def _strangers(seen: Firewall) -> Iterator[tuple[str, str]]:
    """Interfaces by which others than containers come in, each with what it is."""
    for uplink in seen.uplinks:
        yield uplink, "leads out of this host"
    for interface in seen.others_than_bridges:
        if interface not in seen.uplinks:
            yield interface, "is no bridge"
    for bridge, ports in seen.bridges.items():
        if ports and bridge not in seen.uplinks:
            yield bridge, f"has {', '.join(ports)} as a port, which is no container's"
