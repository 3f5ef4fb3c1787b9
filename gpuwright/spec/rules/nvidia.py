"""Cross-checks on the GPU driver and how its cards are set."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found
from roles.nvidia.packages import branch
from roles.nvidia.wishes import wishes

# The first driver with Blackwell's cards is of branch 570 (NVIDIA's release notes), and Debian 13 has 550.
_BLACKWELL_FROM = 570


def somebody_reboots_for_it(spec: NodeSpec) -> Iterator[Found]:
    if spec.nvidia is not None and spec.kernel is None and any(wishes(spec.nvidia).all()):
        sentence = (
            "needs the role kernel, which has the one reboot and the module options; add 'kernel:' to the node file"
        )
        yield Found(("nvidia",), sentence, show=False)


def power_limit_is_one_the_cards_take(spec: NodeSpec) -> Iterator[Found]:
    """Below a card's own minimum nvidia-smi refuses, at every boot (gpu-node.md 2.3)."""
    limit = spec.nvidia.power_limit_watts if spec.nvidia else None
    if limit is None:
        return
    path, gpus = ("nvidia", "power_limit_watts"), spec.hardware.gpus
    if gpus.power_range_watts is None:
        sentence = "needs hardware.gpus.power_range_watts, [lowest, highest] as `nvidia-smi -q -d POWER` shows them"
        yield Found(path, sentence)
        return
    low, high = gpus.power_range_watts
    if not low <= limit <= high:
        yield Found(path, f"is outside the card's range of {low} to {high} W")
    elif gpus.power_limit_watts is not None and limit > gpus.power_limit_watts:
        sentence = f"is above the {gpus.power_limit_watts} W that hardware.gpus.power_limit_watts plans for each card"
        yield Found(path, sentence)


def blackwell_has_open_modules(spec: NodeSpec) -> Iterator[Found]:
    capability = spec.hardware.gpus.compute_capability
    if spec.nvidia is None or capability is None or int(capability.partition(".")[0]) < 10:
        return
    if not spec.nvidia.open_modules:
        yield Found(("nvidia", "open_modules"), "must be true: Blackwell has no other kernel modules (gpu-node.md 4.1)")
    if spec.nvidia.version and branch(spec.nvidia.version) < _BLACKWELL_FROM:
        yield Found(("nvidia", "version"), f"does not know Blackwell; use branch {_BLACKWELL_FROM} or later")


RULES = (
    somebody_reboots_for_it,
    power_limit_is_one_the_cards_take,
    blackwell_has_open_modules,
)
