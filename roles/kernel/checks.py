"""What role `kernel` promises: the kernel runs as the node file says, and the next one will."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuwright import boot, wishes
from gpuwright.audit import references as ref
from gpuwright.audit.control import Control, Predicate, Verdict, judged, manual, not_applicable, waived, without
from gpuwright.boot import BOOT, BlockedModule, Boot
from gpuwright.snapshot import SYSTEM, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.kernel import hardening, operations
from roles.kernel.facts import covers, of_each, same
from roles.kernel.files import in_use, modprobe_file
from roles.kernel.weakening import PRETENDED_ISOLATION, WHAT_IT_PRETENDS, weakens

# --- observations ---------------------------------------------------------------------------------------------------

# All of them: what our own file names says nothing once somebody took it away. Interfaces of containers come and go; of theirs
# there is what a profile asks of every interface.
VALUES = Section(
    "audit-kernel-sysctl",
    r"""
command -v sysctl >/dev/null || exit 1
sysctl -a 2>/dev/null | sed -E '/^net\.ipv[46]\.conf\..*_(redirects|source_route) =/b
/^net\.ipv[46]\.(conf|neigh)\.(veth|br-|docker)/d'
""",
    lambda text: {key: same(value) for key, _, value in (line.partition(" = ") for line in text.splitlines())},
)

# As modprobe itself reads all of its files.
MODPROBE = Section(
    "audit-kernel-modprobe", "modprobe --showconfig 2>/dev/null | grep -E '^(install|blacklist) '", str.splitlines
)


def _here(seen: Snapshot) -> Boot | Verdict:
    """How the node booted, or that the question does not arise."""
    system = seen.read(SYSTEM)
    if system.is_container:
        return not_applicable(f"this is a container ({system.virtualization}); its kernel is its machine's")
    return seen.read(BOOT)


# --- predicates -----------------------------------------------------------------------------------------------------


def _words_run(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    wanted = wishes.gathered(spec)
    faults = boot.words_pending(now, wanted)
    texts = " ".join(word.text for word in wanted.words) or "nothing is asked for"
    return without(faults, f"on the running command line: {texts}", texts)


def _words_are_known(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    if now.unknown is None:
        return manual("the kernel's first messages are gone from ring buffer and journal; look after the next boot")
    faults = [
        f"the kernel says that it does not know {word}" for word in operations.unknown_words(now, wishes.gathered(spec))
    ]
    others = operations.unknown_to_it(now, wishes.gathered(spec))
    also = f"; of the site's own it names {', '.join(others)}" if others else ""
    return without(faults, "the kernel knows every word that is asked for", f"it names none of them as unknown{also}")


def _protection_is_on(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    # The last of a key counts: a site may leave mitigations=off where it is and ask for mitigations=auto after it.
    last = {boot.plain_key(key): (key, value) for key, value in now.line}
    faults = [
        f"the kernel runs with {boot.Word(key, value, '', '').text}"
        for key, value in last.values()
        if weakens(key, value)
    ]
    # Of it any counts: one that the kernel took is not taken back by another.
    faults += [
        f"the kernel runs with {boot.Word(key, value, '', '').text}, which {WHAT_IT_PRETENDS}"
        for key, value in now.line
        if boot.same_key(key, PRETENDED_ISOLATION)
    ]
    return without(faults, "no word takes a protection of the kernel away", f"{len(now.line)} words, none of them does")


def _next_boot_has_them(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    if now.loader == "none":
        return manual("there is no boot loader that gpuwright knows; look at this machine's own means")
    wanted = wishes.gathered(spec)
    stale = operations.menu_is_stale(now, wanted)
    texts = " ".join(word.text for word in wanted.words) or "nothing of ours"
    kernels = ", ".join(sorted({entry.kernel for entry in now.menu})) or "none"
    actual = f"{now.loader} starts kernels {kernels} {'not ' if stale else ''}with all of: {texts}"
    return judged(not stale, f"every kernel of the boot menu starts with: {texts}", actual)


def _next_kernel_is_this_one(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    if not now.default:
        return manual("which kernel the boot loader starts next cannot be told from its settings; look at its menu")
    return judged(
        now.default == now.kernel, f"{now.kernel} (the running one) starts next", f"{now.default} starts next"
    )


def _no_reboot_is_needed(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    return without(boot.pending(seen, wishes.gathered(spec)), "nothing waits for a reboot", "nothing does")


def _hold(seen: Snapshot, spec: NodeSpec, which: str) -> Verdict:
    """Values whose keys `which` matches are as asked; one that stands in place of the profile's is a waiver."""
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    asked = [one for one in wishes.gathered(spec).sysctls if re.match(which, one.key)]
    reasons = list(_deviations(spec, which))
    if not asked and not reasons:
        return not_applicable("the node file asks for none of these")
    values = seen.read(VALUES)
    if not any(key.startswith("net.ipv6.") for key in values):  # IPv6 is off: there is nothing to redirect
        asked = [one for one in asked if not one.key.startswith("net.ipv6.")]
    asked = [one for one in of_each(asked, values) if one.key in values or not one.may_lack]
    faults = [
        f"{one.key} is {values.get(one.key, 'unknown to this kernel')} instead of {one.value} ({one.role}: {one.reason})"
        for one in asked
        if values.get(one.key) != same(one.value)
    ]
    found = ", ".join(f"{one.key}={one.value}" for one in asked)
    return waived(without(faults, f"{len(asked)} values as asked", found), reasons)


def _deviations(spec: NodeSpec, which: str) -> Iterator[str]:
    """Values of the profile that the node file leaves out, or has others in their place, and its reasons."""
    of_profile = {one.key: one.value for one in hardening.sysctls(spec.hardening) if re.match(which, one.key)}
    if spec.kernel is None or not of_profile:
        return
    if why := spec.kernel.deviations.get("sysctls"):
        yield f"{len(of_profile)} values of the profile are left out: {why}"
    for extra in spec.kernel.sysctls:
        value = next((value for key, value in of_profile.items() if covers(key, extra.name)), None)
        if value is not None and same(str(extra.value)) != same(value):
            yield f"{extra.name}={extra.value} instead of {value}: {extra.reason}"


_MEMORY = r"fs\.(protected_|suid_dumpable)|kernel\.(randomize_va_space|yama\.)"
_POINTERS = r"kernel\.(kptr_restrict|dmesg_restrict)"
_NETWORK = r"net\."
_CORES = r"kernel\.core_pattern"
_REACH = r"kernel\.(kexec_load_disabled|unprivileged_bpf_disabled)|dev\.tty\."
_OTHERS = rf"(?!{'|'.join((_MEMORY, _POINTERS, _NETWORK, _CORES, _REACH))})"


def _values(which: str) -> Predicate:
    def predicate(seen: Snapshot, spec: NodeSpec) -> Verdict:
        return _hold(seen, spec, which)

    return predicate


def _kept_out(seen: Snapshot, blocked: list[BlockedModule]) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    if not blocked:
        return not_applicable("the node file asks for none of these")
    loaded = dict(now.modules)
    lines = [line.replace("-", "_").split() for line in seen.read(MODPROBE)]
    never = {
        line[1]
        for line in lines
        if line[0] == "install" and line[2:3] and line[2] in ("/bin/false", "/bin/true", "/usr/bin/false")
    }
    listed = {line[1] for line in lines if line[0] == "blacklist"}
    faults = []
    for block in blocked:
        if block.module in loaded:
            use = f"loaded, with {loaded[block.module]} users" if in_use(now, block.module) else "loaded"
            faults.append(f"{block.module} is {use}")
        elif in_use(now, block.module):
            faults.append(f"{block.module} stands in fstab")
        elif block.module not in never & listed:
            faults.append(f"modprobe may load {block.module}")
    return without(
        faults, f"neither loaded nor to be loaded: {', '.join(block.module for block in blocked)}", "none is"
    )


def _drivers(seen: Snapshot, spec: NodeSpec) -> Verdict:
    return _kept_out(seen, [block for block in wishes.gathered(spec).blocked if not block.spared_when_used])


def _unused(seen: Snapshot, spec: NodeSpec) -> Verdict:
    of_profile = hardening.unused_modules(spec.hardening)
    now = _here(seen)
    if not isinstance(now, Verdict) and spec.kernel and (why := spec.kernel.deviations.get("modules")):
        return waived(judged(True, f"{len(of_profile)} modules of the profile kept out", ""), [why])
    verdict = _kept_out(seen, [block for block in wishes.gathered(spec).blocked if block.spared_when_used])
    kept = spec.kernel.kept_modules if spec.kernel else {}
    return waived(verdict, [f"{module}: {why}" for module, why in kept.items() if module in of_profile])


def _options(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    options = wishes.gathered(spec).options
    if not options:
        return not_applicable("the node file asks for no module option")
    faults = (*boot.options_pending(seen, wishes.gathered(spec)), *boot.options_unknown(seen, wishes.gathered(spec)))
    hidden = boot.options_hidden(now, wishes.gathered(spec))
    if hidden and not faults:
        texts = ", ".join(f"{one.module} {one.text}" for one in hidden)
        return manual(
            f"the kernel shows these parameters nowhere (permission 0), so nobody can tell whether they are in force: {texts}; "
            "a module that was loaded after /etc/modprobe.d/gpuwright.conf was written has them"
        )
    loaded = dict(now.modules)
    states = (f"{one.module} {one.text}" + ("" if one.module in loaded else " (not loaded)") for one in options)
    return without(faults, "every loaded module runs with its options", ", ".join(states))


def _initramfs(seen: Snapshot, spec: NodeSpec) -> Verdict:
    now = _here(seen)
    if isinstance(now, Verdict):
        return now
    if not now.initrds:
        return not_applicable("this machine boots without an initramfs in /boot")
    right = operations.modprobe_sum(modprobe_file(now, wishes.gathered(spec)))
    faults = [
        f"{image.kernel}: {'not looked into since it was made' if image.inside is None else 'holds another modprobe.d file'}"
        for image in now.initrds
        if image.inside != right
    ]
    return without(
        faults, "every initramfs holds the modprobe.d file as it is", ", ".join(image.kernel for image in now.initrds)
    )


# --- the list -------------------------------------------------------------------------------------------------------

_BOOTED = (SYSTEM, BOOT)
_AGAIN = "pyinfra INVENTORY deploy.py"
_REBOOT = "a reboot ends what the node serves"

CONTROLS = (
    Control(
        id="GPW-KERN-001",
        title="The kernel runs with every word that the node file asks for.",
        reason="A package or a person can reset the boot loader; the node then serves with another IOMMU mode than it was judged in.",
        severity="high",
        observed=_BOOTED,
        predicate=_words_run,
        remedy=f"{_AGAIN}, then reboot the node (or kernel.reboot: when-needed)",
        risk=_REBOOT,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-002",
        title="The kernel knows every word that it is asked for.",
        reason="A misspelt word is passed over with one line in the log, and everybody believes that it holds.",
        severity="medium",
        observed=_BOOTED,
        predicate=_words_are_known,
        remedy="take the word out of the node file, or write it as Documentation/admin-guide/kernel-parameters.txt has it",
        risk="none: the word had no effect",
    ),
    Control(
        id="GPW-KERN-003",
        title="No word takes a protection of the kernel away.",
        reason="mitigations=off and its kin are copied from pages about speed; what strangers send is processed on this kernel.",
        severity="high",
        observed=_BOOTED,
        predicate=_protection_is_on,
        remedy="take the word out of /etc/default/grub or its drop-in, update-grub, reboot",
        risk=_REBOOT,
        references=ref.KERNEL_PROTECTION,
    ),
    Control(
        id="GPW-KERN-004",
        title="The next boot starts with every word that the node file asks for.",
        reason="What runs now says nothing about what the boot menu holds for the next power cut.",
        severity="high",
        observed=_BOOTED,
        predicate=_next_boot_has_them,
        remedy=_AGAIN,
        risk="none before the next boot",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-005",
        title="The next boot starts the kernel that runs now.",
        reason="A package can pull in another kernel and make it the default; drivers may not have been built for it (gpu-node.md 4.1).",
        severity="low",
        observed=_BOOTED,
        predicate=_next_kernel_is_this_one,
        remedy="see that the driver is there for the new kernel, then plan the reboot",
        risk=_REBOOT,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-006",
        title="Nothing that the node file asks for waits for a reboot.",
        reason="Until then the node is not what was judged, and no engine is started or replaced.",
        severity="medium",
        observed=(*_BOOTED, *wishes.OBSERVED),
        predicate=_no_reboot_is_needed,
        remedy="drain the node and reboot it, or set kernel.reboot: when-needed and deploy",
        risk=_REBOOT,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-007",
        title="Memory of processes and privileged files are guarded by the kernel.",
        reason="Address randomisation, ptrace limits, no dumps of privileged programs, guarded links; dumps hold prompts and weights.",
        severity="medium",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_MEMORY),
        remedy=f"{_AGAIN} (kernel.sysctls, kernel.deviations)",
        risk="debuggers attach to their own children only, without root",
        references=ref.KERNEL_MEMORY,
    ),
    Control(
        id="GPW-KERN-008",
        title="Kernel addresses and messages are hidden from users.",
        reason="They help whoever attacks the kernel.",
        severity="low",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_POINTERS),
        remedy=f"{_AGAIN} (kernel.sysctls, kernel.deviations)",
        risk="Xid lines are read as root or through the journal's group",
        references=ref.KERNEL_POINTERS,
    ),
    Control(
        id="GPW-KERN-009",
        title="The network stack refuses redirects, source routes and forged senders.",
        reason="A neighbour could lead the node's traffic over itself.",
        severity="medium",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_NETWORK),
        remedy=f"{_AGAIN} (kernel.sysctls, kernel.deviations)",
        risk="answers that come in on a way nobody routes to are dropped",
        references=ref.KERNEL_NETWORK,
    ),
    Control(
        id="GPW-KERN-010",
        title="Every other kernel setting of the node file holds.",
        reason="Somebody's tuning by hand, or a drop-in read later, replaces what a role relies on.",
        severity="medium",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_OTHERS),
        remedy=_AGAIN,
        risk="none",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-011",
        title="No other driver can bind the GPUs.",
        reason="nouveau or nova bind a card first, and NVIDIA's driver finds it taken (gpu-node.md 4.1).",
        severity="high",
        observed=(*_BOOTED, MODPROBE),
        predicate=_drivers,
        remedy=f"{_AGAIN}, then reboot the node",
        risk="a screen on such a card stays dark until NVIDIA's driver is there",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-012",
        title="File systems and protocols that nobody uses cannot be loaded.",
        reason="Each is code of the kernel that a stick, an image or a packet can reach.",
        severity="low",
        observed=(*_BOOTED, MODPROBE),
        predicate=_unused,
        remedy=f"{_AGAIN}; one in use: name it in kernel.kept_modules, or stop its use",
        risk="USB storage and the virtual media of a BMC are not seen; kernel.kept_modules keeps them",
        references=ref.KERNEL_MODULES,
    ),
    Control(
        id="GPW-KERN-013",
        title="Loaded modules run with the options of the node file.",
        reason="An option takes effect when its module is loaded next; until then the file says something that is not so.",
        severity="high",
        observed=(*_BOOTED, *wishes.OBSERVED),
        predicate=_options,
        remedy=f"{_AGAIN}, then reboot the node",
        risk=_REBOOT,
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-014",
        title="Every initramfs holds the module settings as they are.",
        reason="Modules in it are loaded before the root is mounted, with the settings of the day it was made.",
        severity="medium",
        observed=_BOOTED,
        predicate=_initramfs,
        remedy=_AGAIN,
        risk="none before the next boot",
        references=ref.BASELINE,
    ),
    Control(
        id="GPW-KERN-015",
        title="A program that crashes leaves no core file anywhere.",
        reason="A dump of an engine holds prompts and weights, and a limit inside a container can be lifted.",
        severity="medium",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_CORES),
        remedy=f"{_AGAIN} (hardening, kernel.sysctls)",
        risk="nobody can look into what crashed",
        references=ref.CORE_DUMPS,
    ),
    Control(
        id="GPW-KERN-016",
        title="Users have no way to code of the kernel that a server does not need.",
        reason="Programs for the kernel, old line disciplines and another kernel past the boot loader are ways into it.",
        severity="low",
        observed=(*_BOOTED, VALUES),
        predicate=_values(_REACH),
        remedy=f"{_AGAIN} (hardening, kernel.sysctls)",
        risk="kexec and kdump that were not set up before",
        references=ref.KERNEL_PROTECTION,
    ),
)
