"""What each profile asks of the kernel, with the reason, and what none asks for: one table for files, controls and page."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.audit import references as ref
from gpuwright.audit.references import References
from gpuwright.boot import Sysctl
from gpuwright.hardening import LeftOut, Setting, everywhere, from_cis1, in_strict
from gpuwright.spec.base import Profile

ROLE = "kernel"

_POINTERS = "kernel addresses help whoever attacks the kernel"
_LINKS = "links and files in world-writable directories cannot be turned against root"
_REDIRECTS = "a neighbour cannot redirect the node's traffic"
_ROUTING = "the sender of a packet does not choose its way"
_MARTIANS = "packets that cannot come from where they say are seen"


def _sysctl(
    name: str,
    values: tuple[str | None, str | None, str | None],
    reason: str,
    may_break: str = "nothing",
    references: References = ref.NONE,
) -> Setting:
    return Setting(
        name,
        values,
        reason,
        may_break,
        "`kernel.sysctls` names it (of a `*`: one interface) with another value and a reason",
        references,
    )


# What `all` says settles it for some of these: accept_source_route of IPv4 is off where it is off there, rp_filter is the greater
# of both, log_martians is on where it is on there. The others an interface has for itself: redirects of IPv4 are on where either
# says so, and IPv6 asks the interface alone (Documentation/networking/ip-sysctl.rst). An interface that was there before `default`
# was set keeps what it had; `*` is every one of them.
_SETTLED = ("all", "default")
_OF_EACH = (*_SETTLED, "*")


def _network(
    name: str, which: tuple[str, ...], value: str, reason: str, *cis: str, may_break: str = "nothing"
) -> Iterator[Setting]:
    """The same for several interfaces; `cis` are the ids that ask for this value."""
    for one in which:
        yield _sysctl(name.replace("*", one), everywhere(value), reason, may_break, ref.KERNEL_NETWORK.only(*cis))


SYSCTLS: tuple[Setting, ...] = (
    _sysctl("fs.protected_fifos", everywhere("2"), _LINKS, references=ref.KERNEL_PROTECTION),
    _sysctl("fs.protected_hardlinks", everywhere("1"), _LINKS, references=ref.KERNEL_PROTECTION),
    _sysctl("fs.protected_regular", everywhere("2"), _LINKS, references=ref.KERNEL_PROTECTION),
    _sysctl("fs.protected_symlinks", everywhere("1"), _LINKS, references=ref.KERNEL_PROTECTION),
    _sysctl(
        "fs.suid_dumpable",
        everywhere("0"),
        "memory of privileged programs is not dumped",
        references=ref.KERNEL_MEMORY.only("1.5.3"),
    ),
    # A pipe is taken whatever the limit of the process says, and it says the same in a container. systemd-coredump's own
    # drop-in sorts before ours. On a node that keeps its core dumps: base.deviations.
    _sysctl(
        "kernel.core_pattern",
        from_cis1("|/bin/false"),
        "a dump of an engine holds prompts and weights, and a limit of a container can be lifted",
        "core dumps of every program, systemd-coredump's and apport's too",
        ref.CORE_DUMPS,
    ),
    _sysctl(
        "kernel.dmesg_restrict",
        everywhere("1"),
        _POINTERS,
        "users who are not root read the kernel's log from the journal (group adm), exporters of Xid too",
        ref.KERNEL_POINTERS,
    ),
    _sysctl(
        "kernel.kexec_load_disabled",
        in_strict("1"),
        "nobody starts another kernel past the boot loader and its checks",
        "kdump that is not loaded by then, and reboots by kexec; only a reboot takes it back",
        ref.KERNEL_PROTECTION,
    ),
    _sysctl("kernel.kptr_restrict", everywhere("1"), _POINTERS, "profilers of the kernel", ref.KERNEL_POINTERS),
    _sysctl("kernel.randomize_va_space", everywhere("2"), "address space layout randomisation", references=ref.ASLR),
    _sysctl(
        "kernel.unprivileged_bpf_disabled",
        from_cis1("1"),
        "users without privileges load no programs into the kernel",
        "only a reboot takes it back",
        ref.KERNEL_PROTECTION,
    ),
    # 1, not 2: with 2 py-spy and cuda-gdb do not attach (security.md 3.2)
    _sysctl(
        "kernel.yama.ptrace_scope",
        everywhere("1"),
        "a process does not read its siblings' memory",
        "a debugger that attaches to a process it has not started, without root",
        ref.PTRACE,
    ),
    _sysctl(
        "dev.tty.ldisc_autoload",
        in_strict("0"),
        "users do not load old line disciplines into the kernel",
        "serial protocols nobody speaks on a server",
        ref.KERNEL_PROTECTION,
    ),
    *_network("net.ipv4.conf.*.accept_redirects", _OF_EACH, "0", _REDIRECTS, "3.3.5"),
    *_network("net.ipv4.conf.*.accept_source_route", _SETTLED, "0", _ROUTING, "3.3.8"),
    *(
        _sysctl(
            f"net.ipv4.conf.{which}.log_martians",
            from_cis1("1"),
            _MARTIANS,
            "nothing; lines in the kernel's log, which it limits by itself",
            ref.KERNEL_MARTIANS,
        )
        for which in _SETTLED
    ),
    # 2, not 1 as CIS 3.3.7 has it, in every profile: a node with several networks (RDMA, storage) answers on another way
    # than it was asked (security.md 3.2).
    *_network(
        "net.ipv4.conf.*.rp_filter",
        _SETTLED,
        "2",
        "packets with a forged sender are dropped",
        may_break="nothing; 1 would break several networks",
    ),
    *_network("net.ipv4.conf.*.secure_redirects", _OF_EACH, "0", _REDIRECTS, "3.3.6"),
    *_network("net.ipv4.conf.*.send_redirects", _OF_EACH, "0", "the node is no router", "3.3.2"),
    _sysctl(
        "net.ipv4.icmp_echo_ignore_broadcasts",
        everywhere("1"),
        "the node does not amplify floods",
        references=ref.KERNEL_NETWORK.only("3.3.4"),
    ),
    _sysctl(
        "net.ipv4.icmp_ignore_bogus_error_responses",
        everywhere("1"),
        "forged errors do not fill the log",
        references=ref.KERNEL_NETWORK.only("3.3.3"),
    ),
    _sysctl(
        "net.ipv4.tcp_syncookies",
        everywhere("1"),
        "a flood of half-open connections leaves room for users",
        references=ref.KERNEL_NETWORK.only("3.3.10"),
    ),
    *_network("net.ipv6.conf.*.accept_redirects", _OF_EACH, "0", _REDIRECTS, "3.3.5"),
    *_network("net.ipv6.conf.*.accept_source_route", _OF_EACH, "0", _ROUTING, "3.3.8"),
)


def _cis(number: str) -> References:
    return ref.KERNEL_MODULES.only(number)


def _module(
    name: str,
    values: tuple[str | None, str | None, str | None],
    reason: str,
    may_break: str = "who uses it; in use now, it is left alone and named",
    references: References = ref.KERNEL_PROTECTION,
) -> Setting:
    return Setting(name, values, reason, may_break, "`kernel.kept_modules` names it with a reason", references)


_BLOCKED = "blocked"

# File systems, protocols and buses that no GPU node serves from. The CIS benchmarks of Debian 12 and Ubuntu 24.04 name those of
# every profile (1.1.1.1 to 1.1.1.9 and 3.2.1 to 3.2.4), that of Debian 13 firewire, atm and can too. Not among them: overlay,
# which Docker's storage is made of, squashfs, which snaps are mounted from, and vfat, which the EFI partition has.
MODULES: tuple[Setting, ...] = (
    _module("cramfs", everywhere(_BLOCKED), "file system of old embedded devices", references=_cis("1.1.1.1")),
    _module("freevxfs", everywhere(_BLOCKED), "file system of a Unix of the 1990s", references=_cis("1.1.1.2")),
    _module("hfs", everywhere(_BLOCKED), "file system of old Macs", references=_cis("1.1.1.3")),
    _module("hfsplus", everywhere(_BLOCKED), "file system of Macs", references=_cis("1.1.1.4")),
    _module("jffs2", everywhere(_BLOCKED), "file system of raw flash chips", references=_cis("1.1.1.5")),
    _module(
        "udf", everywhere(_BLOCKED), "file system of optical discs", "DVDs and their images", references=_cis("1.1.1.8")
    ),
    _module(
        "usb_storage",
        everywhere(_BLOCKED),
        "USB sticks and the virtual media of a BMC",
        "USB sticks and a BMC's virtual media are not seen",
        ref.KERNEL_USB,
    ),
    _module("dccp", everywhere(_BLOCKED), "network protocol that no service of a node uses", references=_cis("3.2.1")),
    _module("tipc", everywhere(_BLOCKED), "network protocol of telecommunication clusters", references=_cis("3.2.2")),
    _module(
        "rds",
        everywhere(_BLOCKED),
        "network protocol of database clusters",
        "RDMA software that speaks RDS",
        references=_cis("3.2.3"),
    ),
    _module("sctp", everywhere(_BLOCKED), "network protocol of telecommunication services", references=_cis("3.2.4")),
    _module("atm", from_cis1(_BLOCKED), "network of old telephone exchanges"),
    _module("can", from_cis1(_BLOCKED), "bus of vehicles and machines"),
    _module(
        "firewire_core",
        from_cis1(_BLOCKED),
        "a bus whose devices read memory",
        "FireWire devices",
    ),
    _module("bluetooth", in_strict(_BLOCKED), "a server has no radio", "keyboards by radio", ref.RADIO.only("3.1.3")),
)

LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("`net.ipv4.ip_forward=0` (CIS 3.3.1)", "Docker's bridges: no container is reached any more, often only at the next reload", "the firewall's forward chain drops by default"),
    LeftOut("`net.ipv4.conf.*.rp_filter=1` (CIS 3.3.7)", "nodes with several networks (RDMA, storage)", "2: a sender that no interface leads to is dropped"),
    LeftOut("`net.ipv6.conf.*.accept_ra=0` (CIS 3.3.11)", "the node's address and way out, where routers give them", "`kernel.sysctls`, where addresses are static"),
    LeftOut("IPv6 off by the command line", "what binds `::1`; `localhost` is that for some clients first", "the firewall filters IPv6 as it does IPv4"),
    LeftOut("`kernel.modules_disabled=1`", "the GPU driver and nvidia_uvm cannot be loaded any more", "modules are blocked by name"),
    LeftOut("`lockdown=integrity`, `module.sig_enforce`", "a DKMS driver without an enrolled key (Key was rejected by service)", "signed modules of the distribution, or an enrolled key, first"),
    LeftOut("`vm.overcommit_memory=2`", "CUDA reserves far more address space than it uses", "0, the kernel's own"),
    LeftOut("`kernel.yama.ptrace_scope=2`", "py-spy and cuda-gdb", "1"),
    LeftOut("`hidepid=2` on /proc", "the container hook cannot look at a process; systemd calls it unsupported", "`ProtectProc=` in our units"),
    LeftOut("modules overlay and squashfs (CIS 1.1.1.6, 1.1.1.7)", "Docker's storage, snaps", "they stay"),
    LeftOut("`/tmp` with noexec (CIS 1.1.2.1.4)", "compilers on the host that load what they made there", "containers have a /tmp of their own, which is not the host's"),
    LeftOut("`kernel.perf_event_paranoid`", "nothing, but Debian has 3 and Ubuntu 4 by itself, so one value of ours would lower it somewhere", "the distribution's own"),
    LeftOut("low limits on locked memory", "registration of RDMA memory", "the limit of the engine's own container"),
)  # fmt: skip
"""Security.md 3.3, what breaks a node that serves from GPUs."""


def sysctls(profile: Profile) -> tuple[Sysctl, ...]:
    """The profile's values. A key that a kernel does not have has no hole to close there either."""
    found = ((setting, setting.value(profile)) for setting in SYSCTLS)
    return tuple(
        Sysctl(setting.name, value, ROLE, setting.reason, may_lack=True)
        for setting, value in found
        if value is not None
    )


def unused_modules(profile: Profile) -> dict[str, str]:
    """Module to reason."""
    return {setting.name: setting.reason for setting in MODULES if setting.value(profile) is not None}
