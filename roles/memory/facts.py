"""What the driver and the kernel say about GPU memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpuwright.snapshot import Section, register


@dataclass(frozen=True)
class Coherence:
    """How the loaded driver was told to show coherent GPU memory, and whether nodes reclaim their own file pages first."""

    driver: bool = False
    """NVIDIA's kernel module is loaded."""
    mode: str | None = None
    """What it was told; "" is its own default, None is a driver without this option."""
    zone_reclaim: int | None = None
    """vm.zone_reclaim_mode; None is a kernel without NUMA."""


def _parse(text: str) -> Coherence:
    lines = "\n".join(text.splitlines())
    found = re.fullmatch(r'driver=(yes|no)\nmode=(?:none|"(\w*)")\nzone_reclaim=(?:none|(\d+))\nEND', lines, re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is not what the driver and the kernel say")
    return Coherence(found[1] == "yes", found[2], int(found[3]) if found[3] else None)


# The parameter's file in sysfs reads empty even when it is set (gpu-node.md 2.3). Every line is there on every node, and END is
# the last: what is missing was lost on the way.
COHERENCE = register(
    Section(
        "memory",
        r"""
params=/proc/driver/nvidia/params
mode=none reclaim=none
if [ -e "$params" ]; then
  echo driver=yes
  mode=$(awk '/^CoherentGPUMemoryMode:/ {sub(/^[^:]*: */, ""); mode = $0} END {print mode == "" ? "none" : mode}' "$params") || exit 1
else
  echo driver=no
fi
[ ! -e /proc/sys/vm/zone_reclaim_mode ] || reclaim=$(cat /proc/sys/vm/zone_reclaim_mode) || exit 1
printf 'mode=%s\nzone_reclaim=%s\nEND\n' "$mode" "$reclaim"
""",
        _parse,
    )
)
