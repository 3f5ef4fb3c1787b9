"""The lab's segment: a bridge on this machine, with an address of either kind and no way out; every host hangs on it by a veth pair."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.command import LabError, run
from lab.paths import locked, state, write_json

_LABS = 32  # numbers a lab on this machine can have; each has its own bridge and range
_NEIGHBOUR = 250  # last octet


@dataclass(frozen=True)
class Segment:
    """One lab's bridge and addresses: ``gpwlab<number>``, 10.83.<number>.0/24 and fd67:7077:<number>::/64."""

    number: int

    @property
    def bridge(self) -> str:
        return f"gpwlab{self.number}"

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"10.83.{self.number}.0/24")

    @property
    def gateway(self) -> str:
        """The bridge's own address, where the lab's proxy, registry and hub listen."""
        return str(self.network[1])

    def address(self, octet: int) -> str:
        return str(self.network[octet])

    def address6(self, octet: int) -> str:
        """The same place in the segment's unique local range (RFC 4193)."""
        return str(ipaddress.IPv6Address(f"fd67:7077:{self.number:x}::{octet:x}"))

    def namespace(self, name: str) -> str:
        """Name of a host's network namespace."""
        return f"gpuwright-lab{self.number or ''}-{name}"

    def veth(self, octet: int) -> str:
        return f"gpw{self.number}v{octet}"

    def mac(self, octet: int) -> str:
        # Locally administered (second bit of the first octet); stays the same over reboots, as a network card's does.
        return f"02:67:70:77:{self.number:02x}:{octet:02x}"


def recorded() -> Segment | None:
    """The segment this lab was given, whether its bridge is there or not.

    None when another lab has taken the number since: after a `down` it is free, and what hangs on it is not ours.
    """
    try:
        mine = Segment(json.loads((state() / "lab.json").read_text())["number"])
    except FileNotFoundError:
        return None
    return mine if _owner(mine) in ("", str(state())) else None


def _owner(of: Segment) -> str:
    """The state directory of the lab whose bridge this is; "" while there is none."""
    try:
        return Path(f"/sys/class/net/{of.bridge}/ifalias").read_text().strip()
    except OSError:
        return ""


def segment() -> Segment:
    """The lab's segment, made if it is not there. Raises LabError when no range is free."""
    with locked(Path("/run/gpuwright-lab.lock")):
        mine = recorded()
        if mine is None:
            mine = next((candidate for candidate in map(Segment, range(_LABS)) if _free(candidate)), None)
            if mine is None:
                raise LabError(f"10.83.0.0/24 to 10.83.{_LABS - 1}.0/24 are all in use on this machine (ip addr)")
            write_json(state() / "lab.json", {"number": mine.number})
        if mine.bridge not in _links():
            if not _free(mine):
                raise LabError(
                    f"{mine.network} is in use on this machine (ip addr), and {mine.bridge} of the lab needs it"
                )
            run(["ip", "link", "add", mine.bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0"])
            run(["ip", "link", "set", mine.bridge, "alias", str(state())])
        run(["ip", "addr", "replace", f"{mine.gateway}/24", "dev", mine.bridge])
        # nodad: addresses are given out here and nowhere else, and a bridge without a carrier would wait for ever.
        run(["ip", "addr", "replace", f"{mine.address6(1)}/64", "dev", mine.bridge, "nodad"])
        run(["ip", "link", "set", mine.bridge, "up"])
    return mine


def remove(of: Segment) -> None:
    """Take the bridge and whatever still hangs on it away."""
    for link in _links():
        if link.startswith(f"gpw{of.number}v"):
            run(["ip", "link", "del", link], check=False)
    for namespace in namespaces(of):
        run(["ip", "netns", "del", namespace], check=False)
    if of.bridge in _links():
        run(["ip", "link", "del", of.bridge])


def namespaces(of: Segment) -> list[str]:
    """Network namespaces that belong to this lab."""
    names = [line.split()[0] for line in run(["ip", "netns", "list"]).stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(of.namespace(""))]


@dataclass(frozen=True)
class Neighbour:
    """Somebody else's machine on the same segment: this machine's programs, in a network namespace of their own."""

    namespace: str
    address: str
    address6: str

    def run(self, *argv: str, check: bool = False, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a program (curl, ip) as that neighbour."""
        return run(["ip", "netns", "exec", self.namespace, *argv], check=check, timeout=timeout)


def neighbour() -> Neighbour:
    """The segment's neighbour, made if it is not there."""
    on = segment()
    namespace, address, address6 = on.namespace("neighbour"), on.address(_NEIGHBOUR), on.address6(_NEIGHBOUR)
    with locked(state() / "neighbour.lock"):
        if namespace not in namespaces(on):
            run(["ip", "link", "del", on.veth(_NEIGHBOUR)], check=False)
            run(["ip", "netns", "add", namespace])
            run(["ip", "link", "add", on.veth(_NEIGHBOUR), "type", "veth", "peer", "name", "eth0", "netns", namespace])
            run(["ip", "link", "set", on.veth(_NEIGHBOUR), "master", on.bridge, "up"])
            run(["ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0"])
            run(["ip", "-n", namespace, "link", "set", "eth0", "up"])
            run(["ip", "-n", namespace, "link", "set", "lo", "up"])
        run(["ip", "-n", namespace, "addr", "replace", f"{address6}/64", "dev", "eth0", "nodad"])
    return Neighbour(namespace, address, address6)


def _links() -> list[str]:
    return [link["ifname"] for link in json.loads(run(["ip", "-j", "link"]).stdout)]


def _free(wanted: Segment) -> bool:
    if wanted.bridge in _links():
        return False
    taken = [
        ipaddress.ip_network(f"{entry['local']}/{entry['prefixlen']}", strict=False)
        for link in json.loads(run(["ip", "-j", "-4", "addr"]).stdout)
        for entry in link.get("addr_info", [])
    ]
    routes = [route["dst"] for route in json.loads(run(["ip", "-j", "-4", "route"]).stdout)]
    taken += [ipaddress.ip_network(route) for route in routes if route != "default"]
    return not any(wanted.network.overlaps(network) for network in taken)
