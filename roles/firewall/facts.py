"""What this role reads from a node: its table as the kernel has it, other firewalls and interfaces, where this run comes from."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuwright.nftables import Table, parse
from gpuwright.render import static
from gpuwright.snapshot import Section, register
from roles.firewall.table import PATH, TABLE

# One line per observation, "name base64".
#
# What the table must look like in the kernel is asked of the node's own nft, in a network namespace that exists for
# this question only: every version prints rules in a form of its own. UFW and firewalld are looked for where they
# start from and where they are: a unit of ufw is active even while ufw is off. sudo drops SSH_CONNECTION, so it is
# looked for in the processes above.
#
# Of every interface that is a bridge: the ports of it that are no veth. A container has a veth and nothing else; by a
# card, a bond, a VLAN or a tunnel come others.
_SCRIPT = rf"""
put() {{ printf '%s ' "$1"; base64 -w0; echo; }}
[ -w /etc ] || echo /etc | put read-only
command -v nft >/dev/null || exit 0
if table=$(nft -j list table {TABLE} 2>/dev/null); then printf '%s' "$table" | put live; fi
if [ -e {PATH} ]; then
  unshare --net sh -c 'nft -f {PATH} && nft -j list table {TABLE}' 2>/dev/null | put wanted
fi
if grep -qs '^ENABLED=yes' /etc/ufw/ufw.conf || nft list chains 2>/dev/null | grep -q 'chain ufw-user-input '; then echo ufw | put other; fi
if systemctl is-active -q firewalld.service || systemctl is-enabled -q firewalld.service 2>/dev/null; then echo firewalld | put other; fi
pid=$$
while [ "${{pid:-0}}" -gt 1 ]; do
  found=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^SSH_CONNECTION=//p')
  if [ -n "$found" ]; then printf '%s' "$found" | put connection; break; fi
  pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status")
done
ip -o route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | put uplinks
ip -o -6 route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | put uplinks
veths=$(ip -o link show type veth | sed 's/^[0-9]*: \([^:@]*\).*/\1/')
for path in /sys/class/net/*; do
  if [ ! -d "$path/bridge" ]; then echo "${{path##*/}} -"; continue; fi
  ports=
  for port in "$path"/brif/*; do
    port=${{port##*/}}
    [ "$port" = '*' ] || printf '%s\n' "$veths" | grep -qxF "$port" || ports="$ports $port"
  done
  echo "${{path##*/}}$ports"
done | put interfaces
if [ -n "${{found:-}}" ]; then ip -o route get "${{found%% *}}" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' | put uplinks; fi
exit 0
"""


@dataclass(frozen=True)
class Firewall:
    """Everything may be missing: a blank host has not even nft."""

    live: Table | None  # as the kernel has it
    wanted: Table | None  # as the kernel would have it from the file on the node
    others: tuple[str, ...]  # firewalls that own the whole machine: "ufw", "firewalld"
    client: str | None  # address that this run's connection comes from, as the node sees it
    ssh_port: int | None  # port that this run's connection came in by
    uplinks: tuple[str, ...]  # interfaces that lead away from the node
    read_only: tuple[str, ...] = ()  # directories that this role writes to and cannot
    bridges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # to the ports that are no container's
    others_than_bridges: tuple[str, ...] = ()  # the other interfaces


def read(text: str) -> Firewall:
    """What the script prints, typed. Raises ValueError for an answer of another shape."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, encoded = line.partition(" ")
        said.setdefault(name, []).append(base64.b64decode(encoded, validate=True).decode(errors="replace").strip())
    connection = said.get("connection", [""])[0].split()
    client = ipaddress.ip_address(connection[0].partition("%")[0]) if len(connection) == 4 else None
    if isinstance(client, ipaddress.IPv6Address) and client.ipv4_mapped:
        client = client.ipv4_mapped
    interfaces = [line.split() for answer in said.get("interfaces", []) for line in answer.splitlines()]
    return Firewall(
        live=parse(said.get("live", [""])[0]),
        wanted=parse(said.get("wanted", [""])[0]),
        others=tuple(said.get("other", [])),
        client=str(client) if client else None,
        ssh_port=int(connection[3]) if client else None,
        read_only=tuple(said.get("read-only", [])),
        uplinks=tuple(dict.fromkeys(name for answer in said.get("uplinks", []) for name in answer.split())),
        bridges={name: tuple(ports) for name, *ports in interfaces if ports != ["-"]},
        others_than_bridges=tuple(name for name, *ports in interfaces if ports == ["-"]),
    )


FIREWALL = register(Section("firewall", _SCRIPT, read))

# Why the site's own rules cannot be loaded beside Docker's and ours, a line each; asked of the script that would load
# them, as this role brings it.
SITE = register(
    Section(
        "firewall-site",
        "sh -s check <<'SCRIPT'\n" + static("firewall/usr/local/lib/gpuwright/nftables-conf").decode() + "SCRIPT\n",
        str.splitlines,
    )
)
