"""What role `nvidia` asks of the kernel: options of its modules, and a driver that is exchanged between drain and reboot."""

from __future__ import annotations

from functools import partial

from gpuwright.boot import Change, ModuleOption, Wishes
from roles.nvidia import judgement
from roles.nvidia.spec import NvidiaSpec

ROLE = "nvidia"
SCRIPT = "/usr/local/lib/gpuwright/driver-change"


def wishes(spec: NvidiaSpec) -> Wishes:
    """Its wishes. A driver of the vendor's, or one that is frozen, is never exchanged."""
    options = []
    if spec.registry:
        value = judgement.registry(spec)
        options.append(ModuleOption("nvidia", "NVreg_RegistryDwords", value, ROLE, "nvidia.registry"))
    if spec.uvm_hmm == "off":
        reason = "hosts with several of these cards locked up without it (gpu-node.md 2.3)"
        options.append(ModuleOption("nvidia_uvm", "uvm_disable_hmm", "1", ROLE, reason))
    change = Change(ROLE, "nvidia.version", "the driver", partial(judgement.pending, spec), SCRIPT)
    return Wishes(options=tuple(options), changes=(change,) if spec.ours else ())
