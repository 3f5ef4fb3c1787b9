"""The whole description of one kind of machine, composed of the roles' own parts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gpuwright.spec.base import Profile, Size, Strict
from roles.access.spec import AccessSpec
from roles.base.spec import BaseSpec
from roles.containers.spec import ContainersSpec
from roles.engine.spec import EngineSpec
from roles.firewall.spec import FirewallSpec
from roles.gateway.spec import GatewaySpec
from roles.kernel.spec import KernelSpec
from roles.memory.spec import MemorySpec
from roles.models.spec import ModelsSpec
from roles.nvidia.spec import NvidiaSpec
from roles.pcie.spec import PcieSpec

PciWord = Annotated[str, Field(pattern=r"^[0-9a-f]{4}$")]
"""A PCI vendor id, or base class and subclass: four hexadecimal digits."""


class Gpus(Strict):
    """The accelerators of one machine; all alike."""

    count: int = Field(default=0, ge=0, le=32, description="how many nvidia-smi lists")
    model: str | None = Field(default=None, description="as nvidia-smi names it")
    memory: Size | None = Field(default=None, description="of one card")
    compute_capability: str | None = Field(default=None, pattern=r"^\d+\.\d$", description="12.0 is SM120")
    power_limit_watts: int | None = Field(
        default=None, description="of one card; what the site's feed was planned with"
    )
    power_range_watts: tuple[int, int] | None = Field(default=None, description="[lowest, highest] that the card takes")


class Accelerators(Strict):
    """How the accelerators are told from other PCI devices. A lab machine names its stand-in endpoints here."""

    vendor: PciWord = Field(default="10de", description="PCI vendor id; 10de is NVIDIA")
    classes: tuple[PciWord, ...] = Field(
        default=("0300", "0302"),
        min_length=1,
        description="base class and subclass; 0300 is a GPU with display outputs, 0302 one without",
    )
    count: int | None = Field(
        default=None, ge=0, le=64, description="how many there are; where it is left out, gpus.count"
    )


class Hardware(Strict):
    """What the machine is; facts for cross-checks and planning, never written to a host."""

    architecture: Literal["x86_64", "arm64"] = Field(default="x86_64", description="images and Caddy are pinned for it")
    memory: Size | None = Field(default=None, description="system memory, without HBM")
    gpus: Gpus = Gpus()
    accelerators: Accelerators = Accelerators()
    cpu_numa_nodes: tuple[int, ...] = Field(
        default=(0,), description="memory nodes with CPUs; downloads are kept there"
    )
    hbm_numa_nodes: tuple[int, ...] = Field(
        default=(), description="memory without CPUs, wherever they are numbered; as in regime numa"
    )


class NodeSpec(Strict):
    """A node file after validation, pins filled in. A role absent here is absent from the node."""

    version: Literal[1] = Field(alias="gpuwright", description="version of this format")
    summary: str = Field(description="one line: the machine and its job")
    os: Literal["debian-12", "debian-13", "ubuntu-22.04", "ubuntu-24.04", "ubuntu-26.04"] = Field(
        default="debian-13", description="for cross-checks: what its packages can do"
    )
    hardware: Hardware = Hardware()
    hardening: Profile = Field(
        default="baseline",
        description="how far the roles that harden the node go: baseline is safe on a live node, server-cis1 follows the "
        "CIS benchmarks' first level for servers, strict can need somebody at the console (security.md 3.3)",
    )
    console: bool = Field(
        default=False,
        description="true: somebody can reach this machine's console without its network (BMC, serial line); asked for by strict",
    )
    base: BaseSpec = BaseSpec()
    access: AccessSpec | None = None
    firewall: FirewallSpec | None = None
    kernel: KernelSpec | None = None
    pcie: PcieSpec | None = None
    memory: MemorySpec | None = None
    nvidia: NvidiaSpec | None = None
    containers: ContainersSpec | None = None
    models: ModelsSpec | None = None
    engine: EngineSpec | None = None
    gateway: GatewaySpec | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles this node has, in order."""
        optional = (
            "access",
            "firewall",
            "kernel",
            "pcie",
            "memory",
            "nvidia",
            "containers",
            "models",
            "engine",
            "gateway",
        )
        return ("base", *(role for role in optional if getattr(self, role) is not None))
