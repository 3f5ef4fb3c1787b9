"""What all roles of a node ask of its kernel, put together from its description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwright.boot import Barrier, Wishes, together
from gpuwright.snapshot import NUMA, Section
from roles.base import wishes as base
from roles.kernel import wishes as kernel
from roles.memory import wishes as memory
from roles.memory.facts import COHERENCE
from roles.nvidia import wishes as nvidia
from roles.nvidia.facts import NVIDIA
from roles.pcie import wishes as pcie

if TYPE_CHECKING:
    from gpuwright.spec.node import NodeSpec

# Where wishes look for themselves whether a reboot is pending; what an audit of it has to name.
OBSERVED: tuple[Section[Any], ...] = (COHERENCE, NUMA, NVIDIA)


def of_roles(spec: NodeSpec) -> list[Wishes]:
    """The wishes of every role that has some, in the order of the roles."""
    parts = []
    if spec.kernel is not None:  # without it nobody could bring these
        parts.append(base.wishes(spec.base, spec.hardening))
        parts.append(kernel.wishes(spec.kernel, spec.hardware, spec.hardening))
    if spec.pcie is not None:
        parts.append(pcie.wishes(spec.pcie, spec.hardware))
    if spec.memory is not None:
        parts.append(memory.wishes(spec.memory, spec.hardware))
    if spec.nvidia is not None:
        parts.append(nvidia.wishes(spec.nvidia))
    return parts


def gathered(spec: NodeSpec) -> Wishes:
    """Everything the node's kernel is asked for. What two roles disagree about was refused at load."""
    return together(of_roles(spec))


def other_gpu_drivers(wanted: Wishes) -> Wishes:
    """Of everything asked, the drivers that may not bind a GPU. While one of them is loaded NVIDIA's may find no card to load for,
    and only a reboot changes that."""
    return Wishes(blocked=tuple(block for block in wanted.blocked if block.module in kernel.OTHER_GPU_DRIVERS))


def barrier(spec: NodeSpec) -> Barrier:
    """What engines of the node wait for, and whether a run may bring it."""
    return Barrier(gathered(spec), reboots=spec.kernel is not None and spec.kernel.reboot == "when-needed")
