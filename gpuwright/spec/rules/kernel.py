"""Cross-checks on what is asked of the kernel: of the node file's own words, and of all roles together."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwright import boot, wishes
from gpuwright.spec.fault import SettingPath
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found
from roles.kernel.hardening import MODULES
from roles.kernel.weakening import PRETENDED_ISOLATION, WHAT_IT_PRETENDS, inert, weakens

# Names here and in roles.kernel.weakening are as boot.plain_key has them: with '_' for '-'.

# What the node boots from and into; a wrong one and it does not come back.
OF_THE_BOOT_LOADER = frozenset(
    [
        "BOOT_IMAGE",
        "emergency",
        "init",
        "initrd",
        "rdinit",
        "rescue",
        "ro",
        "root",
        "rootflags",
        "rootfstype",
        "rw",
        "single",
    ]
)

# Every option that mainline reads within `pci=` (drivers/pci/pci.c, pci_setup; arch/x86/pci/common.c, pcibios_setup); those
# with '=' take a value. Anything else makes the kernel say "PCI: Unknown option" and has no effect.
PCI_OPTIONS = frozenset(
    [
        *("assign-busses", "bfsort", "big_root_window", "bios", "biosirq", "check_enable_amd_mmconf", "conf1", "conf2"),
        *("earlydump", "ioapicreroute", "no_e820", "noacpi", "noaer", "noari", "noats", "nobar", "nobfsort", "nobios"),
        *("nocrs", "nodomains", "noearly", "noioapicquirk", "noioapicreroute", "nommconf", "nomsi", "norom", "off"),
        *(
            "pcie_bus_peer2peer",
            "pcie_bus_perf",
            "pcie_bus_safe",
            "pcie_bus_tune_off",
            "pcie_scan_all",
            "realloc",
            "rom",
        ),
        *("routeirq", "skip_isa_align", "use_crs", "use_e820", "usepirqmask"),
        *(
            "cbiosize=",
            "cbmemsize=",
            "config_acs=",
            "disable_acs_redir=",
            "ecrc=",
            "hpbussize=",
            "hpiosize=",
            "hpmemsize=",
        ),
        *("hpmmioprefsize=", "hpmmiosize=", "irqmask=", "lastbus=", "pirqaddr=", "realloc=", "resource_alignment="),
    ]
)

# Of these the kernel keeps one pointer, so that a second one replaces the first (gpu-node.md 2.1).
PCI_ONCE = ("config_acs=", "disable_acs_redir=", "resource_alignment=")

# The kernel cuts a line off at 2048 characters without a word (COMMAND_LINE_SIZE); a site's own words need room too.
LONGEST = 1500

NEEDED_MODULES = {
    # what a node of this kind runs on
    "bridge": "Docker's networks are bridges",
    "br_netfilter": "Docker filters what crosses its bridges",
    "ext4": "the root file system of most nodes",
    "fuse": "container tools mount with it",
    "nf_tables": "the firewall and Docker need it",
    "nvidia": "the driver of the GPUs",
    "nvidia_drm": "part of the driver of the GPUs",
    "nvidia_modeset": "part of the driver of the GPUs",
    "nvidia_uvm": "CUDA needs it",
    "nvme": "the disks of most nodes",
    "overlay": "Docker keeps images in it",
    "veth": "the network of every container",
    "vfat": "the EFI partition",
    "xfs": "the root or model file system of many nodes",
}

SYSCTLS_REFUSED = {
    # key: the value that is refused, and why (security.md 3.3)
    "kernel.modules_disabled": ("1", "no driver could be loaded any more, the GPUs' included"),
    "kernel.randomize_va_space": ("0", "addresses of programs could be guessed"),
    "kernel.unprivileged_bpf_disabled": ("0", "every user could load programs into the kernel"),
}


def _words(spec: NodeSpec) -> Iterator[tuple[SettingPath, str, str | None]]:
    for index, word in enumerate(spec.kernel.words if spec.kernel else ()):
        key, value = boot.parse_word(word.word)
        yield ("kernel", "words", index, "word"), boot.plain_key(key), value


def words_leave_protection_on(spec: NodeSpec) -> Iterator[Found]:
    for path, key, value in _words(spec):
        if weakens(key, value):
            sentence = "is refused: it takes a protection of the kernel away, and what strangers send is processed on this kernel"
            yield Found(path, sentence)


def words_exist_in_mainline(spec: NodeSpec) -> Iterator[Found]:
    for path, key, value in _words(spec):
        if key == PRETENDED_ISOLATION:
            yield Found(path, f"is refused: it {WHAT_IT_PRETENDS}")
        for option in (value or "").split(",") if key == "pci" else ():
            name, equals, _ = option.partition("=")
            if name + equals not in PCI_OPTIONS:
                hint = "; pcie.acs_redirect clears redirection" if "acs" in name else ""
                yield Found(
                    path,
                    f"holds {option or 'an empty option'}, which mainline does not know within pci=: it has no effect{hint}",
                )
        if why := inert(key, value):
            yield Found(path, f"has no effect: it {why}")


def words_leave_the_boot_loader_its_own(spec: NodeSpec) -> Iterator[Found]:
    for path, key, value in _words(spec):
        if key in OF_THE_BOOT_LOADER or (key == "systemd.unit" and value != "multi-user.target"):
            yield Found(path, "is the boot loader's own: with a wrong one the node does not come back")


def pci_lists_are_given_once(spec: NodeSpec) -> Iterator[Found]:
    first: dict[str, boot.Word] = {}
    for word in wishes.gathered(spec).words:
        for option in (word.value or "").split(",") if word.key == "pci" else ():
            name = next((name for name in PCI_ONCE if option.startswith(name)), None)
            if name and (other := first.setdefault(name, word)) is not word:
                sentence = (
                    f"gives {name} a second time, after {other.text} (role {other.role}); the kernel keeps the last alone: "
                    "put both lists into one, with ';' between them"
                )
                yield Found(_path(spec, word), sentence, show=False)


def the_line_is_not_too_long(spec: NodeSpec) -> Iterator[Found]:
    length = sum(len(word.text) + 1 for word in wishes.gathered(spec).words)
    if spec.kernel is not None and length > LONGEST:
        sentence = (
            f"are {length} characters with those of the other roles; the kernel reads 2047 of a line, and {LONGEST} are "
            "left to us beside the site's own"
        )
        yield Found(("kernel", "words"), sentence)


def sysctls_keep_the_node_working(spec: NodeSpec) -> Iterator[Found]:
    for index, sysctl in enumerate(spec.kernel.sysctls if spec.kernel else ()):
        path, value = ("kernel", "sysctls", index, "value"), str(sysctl.value)
        refused, why = SYSCTLS_REFUSED.get(sysctl.name, ("", ""))
        forwarding = re.fullmatch(r"net\.ipv4\.(ip_forward|conf\.(all|default)\.forwarding)", sysctl.name)
        if value == refused:
            yield Found(path, f"is refused for {sysctl.name}: {why}")
        elif forwarding and value == "0" and spec.containers is not None:
            yield Found(
                path, f"is refused for {sysctl.name}: containers are reached through Docker's bridges, which forward"
            )
        elif sysctl.name == "vm.overcommit_memory" and value == "2" and spec.hardware.gpus.count:
            yield Found(path, f"is refused for {sysctl.name}: CUDA reserves far more address space than it uses")


def modules_a_node_needs_stay(spec: NodeSpec) -> Iterator[Found]:
    if spec.kernel is None:
        return
    for index, extra in enumerate(spec.kernel.blocked_modules):
        if extra.module in NEEDED_MODULES:
            yield Found(("kernel", "blocked_modules", index, "module"), f"is needed: {NEEDED_MODULES[extra.module]}")


def kept_modules_are_of_a_profile(spec: NodeSpec) -> Iterator[Found]:
    """Another name keeps nothing: most likely it is misspelt, and the module meant is blocked."""
    known = [setting.name for setting in MODULES]
    for module in spec.kernel.kept_modules if spec.kernel else ():
        if module not in known:
            sentence = (
                f"keeps nothing: no profile blocks a module of this name; those that one does are {', '.join(known)}"
            )
            yield Found(("kernel", "kept_modules", module), sentence, show=False)


def roles_agree(spec: NodeSpec) -> Iterator[Found]:
    for one, other in boot.clashes(boot.together(wishes.of_roles(spec))):
        blamed = one if one.role == "kernel" != other.role else other
        yield Found(_path(spec, blamed), f"clashes: {boot.clash(one, other)}", show=False)


def _path(spec: NodeSpec, wish: boot.Wish) -> SettingPath:
    """The setting a wish comes from; of another role than kernel the role's own part."""
    if wish.role != "kernel" or spec.kernel is None:
        return (wish.role,)
    own = spec.kernel
    places: list[tuple[str, list[boot.Wish]]] = [
        ("words", [boot.Word(*boot.parse_word(word.word), "kernel", word.reason) for word in own.words]),
        ("sysctls", [boot.Sysctl(one.name, str(one.value), "kernel", one.reason) for one in own.sysctls]),
        (
            "module_options",
            [
                boot.ModuleOption(one.module, one.option, str(one.value), "kernel", one.reason)
                for one in own.module_options
            ],
        ),
        ("blocked_modules", [boot.BlockedModule(one.module, "kernel", one.reason) for one in own.blocked_modules]),
    ]
    return next(
        (("kernel", name, candidates.index(wish)) for name, candidates in places if wish in candidates), ("kernel",)
    )


RULES = (
    words_leave_protection_on,
    words_exist_in_mainline,
    words_leave_the_boot_loader_its_own,
    pci_lists_are_given_once,
    the_line_is_not_too_long,
    sysctls_keep_the_node_working,
    modules_a_node_needs_stay,
    kept_modules_are_of_a_profile,
    roles_agree,
)
