"""What role `kernel` itself asks of the kernel: its baseline, and what the node file adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwright.boot import BlockedModule, ModuleOption, Sysctl, Wishes, Word, parse_word
from roles.kernel.spec import UNUSED_MODULES, KernelSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts
    from gpuwright.spec.node import Hardware

ROLE = "kernel"

# nova is the kernel's new driver for NVIDIA cards: Ubuntu 26.04's kernel 7.0 ships nova_core, which binds cards first
# (gpu-node.md 4.1).
OTHER_GPU_DRIVERS = ("nouveau", "nova", "nova_core", "nova_drm")

_POINTERS = "kernel addresses help whoever attacks the kernel"
_LINKS = "links and files in world-writable directories cannot be turned against root"
_REDIRECTS = "a neighbour cannot redirect the node's traffic"
_ROUTING = "the sender of a packet does not choose its way"

# Safe on a serving node (security.md 3.2 and 3.3). Left out on purpose: net.ipv4.ip_forward (Docker's bridges need 1),
# kernel.modules_disabled, vm.overcommit_memory=2 (CUDA reserves address space), ptrace_scope 2 (debuggers).
BASELINE: tuple[tuple[str, str, str], ...] = (
    ("fs.protected_fifos", "2", _LINKS),
    ("fs.protected_hardlinks", "1", _LINKS),
    ("fs.protected_regular", "2", _LINKS),
    ("fs.protected_symlinks", "1", _LINKS),
    ("fs.suid_dumpable", "0", "memory of privileged programs is not dumped"),
    ("kernel.dmesg_restrict", "1", _POINTERS),
    ("kernel.kptr_restrict", "1", _POINTERS),
    ("kernel.randomize_va_space", "2", "address space layout randomisation"),
    ("kernel.yama.ptrace_scope", "1", "a process does not read its siblings' memory"),
    ("net.ipv4.conf.all.accept_redirects", "0", _REDIRECTS),
    ("net.ipv4.conf.all.accept_source_route", "0", _ROUTING),
    # 2, not 1: a node with several networks (RDMA, storage) answers on another way than it was asked
    ("net.ipv4.conf.all.rp_filter", "2", "packets with a forged sender are dropped"),
    ("net.ipv4.conf.all.secure_redirects", "0", _REDIRECTS),
    ("net.ipv4.conf.all.send_redirects", "0", "the node is no router"),
    ("net.ipv4.conf.default.accept_redirects", "0", _REDIRECTS),
    ("net.ipv4.conf.default.accept_source_route", "0", _ROUTING),
    ("net.ipv4.conf.default.rp_filter", "2", "packets with a forged sender are dropped"),
    ("net.ipv4.conf.default.secure_redirects", "0", _REDIRECTS),
    ("net.ipv4.conf.default.send_redirects", "0", "the node is no router"),
    ("net.ipv4.icmp_echo_ignore_broadcasts", "1", "the node does not amplify floods"),
    ("net.ipv4.icmp_ignore_bogus_error_responses", "1", "forged errors do not fill the log"),
    ("net.ipv4.tcp_syncookies", "1", "a flood of half-open connections leaves room for users"),
    ("net.ipv6.conf.all.accept_redirects", "0", _REDIRECTS),
    ("net.ipv6.conf.all.accept_source_route", "0", _ROUTING),
    ("net.ipv6.conf.default.accept_redirects", "0", _REDIRECTS),
    ("net.ipv6.conf.default.accept_source_route", "0", _ROUTING),
)


def wishes(spec: KernelSpec, hardware: Hardware) -> Wishes:
    """The role's own wishes. What the node file says stands in place of the baseline's value for the same key."""
    named = {extra.name for extra in spec.sysctls}
    baseline = [row for row in BASELINE if spec.baseline_sysctls and row[0] not in named]
    drivers = OTHER_GPU_DRIVERS if spec.block_other_gpu_drivers and hardware.gpus.count else ()
    return Wishes(
        words=tuple(Word(*parse_word(extra.word), ROLE, extra.reason) for extra in spec.words),
        sysctls=(
            *(Sysctl(key, value, ROLE, reason) for key, value, reason in baseline),
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
                BlockedModule(module, ROLE, UNUSED_MODULES.get(module, "kernel.unused_modules"), spared_when_used=True)
                for module in spec.unused_modules
            ),
        ),
    )
