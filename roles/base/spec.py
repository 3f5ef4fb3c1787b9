"""Settings of role `base`: what the other roles need from the operating system."""

from __future__ import annotations

from pydantic import Field

from gpuwright.spec.base import Size, Strict


class BaseSpec(Strict):
    """Packages, time, journal and updates."""

    extra_packages: tuple[str, ...] = Field(default=(), description="distribution packages to add")
    time_sync: bool = Field(default=True, description="systemd-timesyncd; false where the site runs its own")
    journal_max_use: Size = Field(default=2 * 1024**3, description="cap of the persistent journal")
    unattended_upgrades: bool = Field(default=True, description="security updates only, with the block list")
    upgrade_blocklist: tuple[str, ...] = Field(
        default=("nvidia", "libnvidia", "cuda", "docker", "docker-ce", "containerd", "linux-image", "linux-headers"),
        description="package name prefixes that unattended upgrades never touch (gpu-node.md 4.1, security.md 3.2)",
    )
