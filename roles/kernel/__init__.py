"""Role `kernel`: command line, sysctls, modules and their options, and the one reboot that some of them need."""

from __future__ import annotations

from pyinfra import logger
from pyinfra.api import deploy
from pyinfra.context import ctx_host, ctx_state

from gpuwright import atomic, boot, ownership, snapshot
from gpuwright.ownership import Owned
from roles.kernel import barrier, files, operations
from roles.kernel.spec import KernelSpec

ROLE = files.ROLE


@deploy("Kernel")
def kernel(spec: KernelSpec, wishes: boot.Wishes) -> None:
    """Write what the roles ask of the kernel, and reboot once where that is needed and allowed.

    + spec: the role's settings
    + wishes: what all roles ask for, this one included
    """
    host = ctx_host.get()
    seen = snapshot.read(host).read(boot.BOOT)
    if seen.container:
        logger.info(f"{host.print_prefix}kernel: not applicable, the host is a container and has its machine's kernel")
        in_a_container(spec, wishes, bool(seen.serving))
        return
    say(seen, wishes)

    scripts, state = files.scripts(), Owned("directory", boot.STATE)
    chosen = [*scripts, *files.boot_files(seen, wishes), files.sysctl_file(wishes), files.modprobe_file(seen, wishes)]
    # First, so that the boot menu made below is free of what goes.
    ownership.retire(ROLE, keep=[state, *(file.owned for file in chosen if file)])
    atomic.files(name="Write the kernel role's scripts", role=ROLE, files=scripts, claims=[state])
    operations.sysctls(name="Set sysctl values", wanted=wishes)
    operations.modules(name="Block modules and set module options", wanted=wishes)
    operations.initramfs(name="Keep initramfs images as /etc/modprobe.d is", wanted=wishes)
    texts = " ".join(word.text for word in wishes.words) or "nothing of ours"
    operations.command_line(name=f"Put on the kernel's command line: {texts}", wanted=wishes)
    if spec.reboot == "when-needed":
        reboot(spec, wishes, bool(seen.serving))


def in_a_container(spec: KernelSpec, wishes: boot.Wishes, serving: bool) -> None:
    """What is exchanged between drain and reboot is exchanged there, too: a container reboots as a machine does."""
    scripts = [file for file in files.scripts() if file.path.endswith("/node-drain")] if wishes.changes else []
    state = [Owned("directory", boot.STATE)] if wishes.changes else []
    ownership.retire(ROLE, keep=[*state, *(file.owned for file in scripts)])
    if not wishes.changes:
        return
    atomic.files(name="Write the script that drains the node", role=ROLE, files=scripts, claims=state)
    if spec.reboot == "when-needed":
        reboot(spec, boot.Wishes(changes=wishes.changes), serving)


def reboot(spec: KernelSpec, wishes: boot.Wishes, serving: bool) -> None:
    """The barrier: nodes that serve nobody go together, nodes that serve go one after another in the inventory's order."""
    host = ctx_host.get()
    for turn in host.loop([other.name for other in ctx_state.get().inventory]):
        if turn == host.name and serving:
            barrier.reboot(
                name=f"Drain and reboot {turn}, where it needs it",
                wanted=wishes,
                timeout=spec.reboot_timeout,
                _serial=True,
            )
    if not serving:
        barrier.reboot(name="Reboot nodes that need it and serve nobody", wanted=wishes, timeout=spec.reboot_timeout)


def say(seen: boot.Boot, wishes: boot.Wishes) -> None:
    """What a person has to know before the first step."""
    host = ctx_host.get()
    sentences = [
        *operations.overridden(seen, wishes),
        *(
            f"module {block.module} is in use and is left alone ({block.reason}); to keep it for good, name it in "
            "kernel.kept_modules"
            for block in operations.spared(seen, wishes)
        ),
    ]
    for sentence in sentences:
        logger.warning(f"{host.print_prefix}kernel: {sentence}")
    operations.report_words(host, seen, wishes)


@deploy("Kernel verified")
def kernel_verified(spec: KernelSpec, wishes: boot.Wishes) -> None:
    """Read back what the kernel became.

    + spec: the role's settings
    + wishes: what all roles ask for
    """
    if not snapshot.read(ctx_host.get()).read(snapshot.SYSTEM).is_container:
        operations.verified(
            name="Read back command line, sysctls and modules", wanted=wishes, may_wait=spec.reboot == "never"
        )
