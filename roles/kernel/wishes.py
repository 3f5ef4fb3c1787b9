"""What role `kernel` itself asks of the kernel: what the profile sets, and what the node file adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwright.boot import BlockedModule, ModuleOption, Sysctl, Wishes, Word, parse_word
from gpuwright.spec.base import Profile
from roles.kernel import hardening
from roles.kernel.spec import KernelSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware

ROLE = "kernel"

# nova is the kernel's new driver for NVIDIA cards: Ubuntu 26.04's kernel 7.0 ships nova_core, which binds cards first
# (gpu-node.md 4.1).
OTHER_GPU_DRIVERS = ("nouveau", "nova", "nova_core", "nova_drm")


def unused_modules(spec: KernelSpec, profile: Profile) -> dict[str, str]:
    """The profile's file systems, protocols and buses to keep out, each with its reason, without what the node file keeps."""
    of_profile = {} if "modules" in spec.deviations else hardening.unused_modules(profile)
    return {module: reason for module, reason in of_profile.items() if module not in spec.kept_modules}


def wishes(spec: KernelSpec, hardware: Hardware, profile: Profile) -> Wishes:
    """The role's own wishes. What the node file says stands in place of the profile's value for the same key."""
    named = {extra.name for extra in spec.sysctls}
    of_profile = () if "sysctls" in spec.deviations else hardening.sysctls(profile)
    drivers = OTHER_GPU_DRIVERS if spec.block_other_gpu_drivers and hardware.gpus.count else ()
    return Wishes(
        words=tuple(Word(*parse_word(extra.word), ROLE, extra.reason) for extra in spec.words),
        sysctls=(
            *(sysctl for sysctl in of_profile if sysctl.key not in named),
            *(Sysctl(extra.name, str(extra.value), ROLE, extra.reason) for extra in spec.sysctls),
        ),
        options=tuple(
            ModuleOption(extra.module, extra.option, str(extra.value), ROLE, extra.reason)
            for extra in spec.module_options
        ),
        blocked=(
            *(BlockedModule(module, ROLE, "only NVIDIA's own driver may bind the GPUs") for module in drivers),
            *(BlockedModule(extra.module, ROLE, extra.reason) for extra in spec.blocked_modules),
            *(
                BlockedModule(module, ROLE, reason, spared_when_used=True)
                for module, reason in unused_modules(spec, profile).items()
            ),
        ),
    )
