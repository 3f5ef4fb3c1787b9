"""Settings of role `firewall`: who may reach what on a node."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpuwright.spec.base import Port, Strict


def _network(value: str) -> str:
    """``10.0.0.0/8``, ``2001:db8::/32`` or a single address, as it is written shortest."""
    try:
        return str(ipaddress.ip_network(value))
    except ValueError:
        pass
    try:
        meant = ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ValueError(
            'a network is an IPv4 or IPv6 address with a prefix length, as in "10.20.0.0/16" or "2001:db8::/32"'
        ) from None
    raise ValueError(f"is an address inside {meant}; write the network, or {value.partition('/')[0]} for it alone")


def _interface(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}\*?", value):
        raise ValueError('an interface is a name such as docker0, or the beginning of names as in "br-*"')
    return value


def _reason(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ,.:;()/+_-]{2,79}", value):
        raise ValueError("a reason is 3 to 80 letters, digits, spaces and , . : ; ( ) / + _ - (it goes into the rules)")
    return value


Network = Annotated[str, AfterValidator(_network)]
Interface = Annotated[str, AfterValidator(_interface)]


class OpenPort(Strict):
    """A further port that others may reach: of a program on the node, or published by a container."""

    port: Port = Field(description="as others connect to it")
    protocol: Literal["tcp", "udp"] = Field(default="tcp", description="one entry each where both are needed")
    networks: tuple[Network, ...] = Field(min_length=1, description="who may reach it")
    reason: Annotated[str, AfterValidator(_reason)] = Field(description="shown in the rules and in the audit")


class FirewallSpec(Strict):
    """One nftables table of our own, ``inet gpuwright``; whatever is not named here is refused."""

    ssh: tuple[Network, ...] = Field(
        min_length=1, description="networks that reach sshd; deploys and audits come from one of them"
    )
    ssh_ports: tuple[Port, ...] = Field(default=(22,), min_length=1, description="where sshd listens")
    gateway: tuple[Network, ...] = Field(default=(), description="networks that reach the ports of gateway.listen")
    ports: tuple[OpenPort, ...] = Field(default=(), description="whatever else must be reached, each with its reason")
    container_egress: Literal["established", "any"] = Field(
        default="established",
        description="established: containers answer and open no connection out of the node, nor to the node itself "
        "(weights are local and images are pulled by Docker, so an engine needs none; a hijacked one wants them); any: "
        "they may",
    )
    container_interfaces: tuple[Interface, ...] = Field(
        default=("docker0", "br-*"),
        min_length=1,
        description="bridges that containers hang on, by name or beginning of name; Docker's own names by default",
    )
