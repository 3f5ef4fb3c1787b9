"""Settings of role `base`: what the other roles need from the operating system."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpuwright.spec.base import Reason, Seconds, Size, Strict


def _package(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]*", value):
        raise ValueError("a package name has only a-z, 0-9, '+', '-' and '.' (Debian policy 5.6.1), and no version")
    return value


def _time_server(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9:][A-Za-z0-9.:-]*", value):
        raise ValueError("a time server is one host name or address, as in ntp.example.org")
    return value


def _origin(value: str) -> str:
    if not re.fullmatch(r"\w+=[^\s,\"';{}]+(,\w+=[^\s,\"';{}]+)*", value):
        raise ValueError(
            "an origin is a pattern of unattended-upgrades without blanks, as in origin=Docker,archive=stable"
        )
    return value


Origin = Annotated[str, AfterValidator(_origin)]
"""Which archive packages come from, as unattended-upgrades matches it."""
PackageName = Annotated[str, AfterValidator(_package)]
"""The name of a distribution package, or the beginning of one."""
TimeServer = Annotated[str, AfterValidator(_time_server)]
Weekday = Literal["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


STACK = (
    *("nvidia", "libnvidia", "libcuda", "libnvcuvid", "libnvoptix", "libnvsdm", "firmware-nvidia", "cuda", "nvlsm"),
    *("libegl-nvidia", "libgles-nvidia", "libglx-nvidia", "xserver-xorg-video-nvidia"),
    *("docker", "docker-ce", "containerd", "runc"),
    *("linux-image", "linux-headers", "linux-modules", "linux-objects", "linux-signatures", "linux-generic"),
)
"""How the names of packages begin whose upgrade stops engines: driver, Docker, kernel (gpu-node.md 4.1, security.md 3.2)."""


class BaseSpec(Strict):
    """The lock-out guard, packages, time, journal and updates."""

    guard: Seconds = Field(
        default=120,
        ge=20,
        description="how long a change of who may reach the node (roles access and firewall) may wait for a new connection "
        "to prove it; after that the old state comes back",
    )

    extra_packages: tuple[PackageName, ...] = Field(default=(), description="distribution packages to add")
    time_sync: bool = Field(default=True, description="systemd-timesyncd; false where the site runs its own")
    time_servers: tuple[TimeServer, ...] = Field(
        default=(), description="for sites that do not reach the distribution's servers"
    )
    journal_max_use: Size = Field(default=2 * 1024**3, description="cap of the persistent journal")
    unattended_upgrades: bool = Field(
        default=True,
        description="security updates only, with the block list; false: none, also where the image came with them on",
    )
    upgrade_blocklist: tuple[PackageName, ...] = Field(
        default=(),
        description="beginnings of further package names that unattended upgrades never touch; driver, Docker and kernel are "
        f"blocked without being named ({', '.join(STACK)})",
    )
    upgrade_days: tuple[Weekday, ...] = Field(
        default=(),
        description="days on which unattended upgrades come; left out: every day. A fleet in stages: some nodes on tuesday, the "
        "others on thursday",
    )
    upgrade_origins: dict[Origin, Reason] = Field(
        default={},
        description="further origins that unattended upgrades take, each with its reason; the audit lists them as waived",
    )
    deviations: dict[Literal["apparmor", "audit", "core-dumps"], Reason] = Field(
        default={},
        description="what the node's hardening profile sets in this role and this node is left without, each with its reason; the "
        "audit lists it as waived",
    )

    @property
    def blocked_upgrades(self) -> tuple[str, ...]:
        """Beginnings of the names of packages that unattended upgrades never touch."""
        return (*STACK, *(name for name in self.upgrade_blocklist if name not in STACK))
