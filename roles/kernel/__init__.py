"""Role `kernel`: command line, sysctls, modules and their options, and the one reboot that some of them need."""

from __future__ import annotations

from pyinfra import logger
from pyinfra.api import deploy
from pyinfra.context import ctx_host

from gpuwright import atomic, boot, ownership, render, snapshot
from roles.kernel.spec import KernelSpec

ROLE = "kernel"
SYSCTL = "/etc/sysctl.d/zz-gpuwright.conf"
MODPROBE = "/etc/modprobe.d/gpuwright.conf"


@deploy("Kernel")
def kernel(spec: KernelSpec, wishes: boot.Wishes) -> None:
    """Write what the roles ask of the kernel, and reboot once where that is needed and allowed.

    + spec: the role's settings
    + wishes: what all roles ask for, this one included
    """
    host = ctx_host.get()
    if snapshot.read(host).read(snapshot.SYSTEM).is_container:
        logger.info(f"{host.print_prefix}kernel: not applicable, the host is a container and has its machine's kernel")
        ownership.retire(ROLE, keep=())
        return
    wanted = files(wishes)
    atomic.files(name="Write sysctl values, blocked modules and module options", role=ROLE, files=wanted)
    ownership.retire(ROLE, keep=[file.owned for file in wanted])


@deploy("Kernel verified")
def kernel_verified(spec: KernelSpec, wishes: boot.Wishes) -> None:
    """Read back what the kernel became.

    + spec: the role's settings
    + wishes: what all roles ask for
    """


def files(wishes: boot.Wishes) -> list[atomic.File]:
    """The role's files for what is asked for."""
    found = []
    if wishes.sysctls:
        found.append(atomic.File(SYSCTL, render.template(f"kernel{SYSCTL}.j2", sysctls=wishes.sysctls)))
    if wishes.blocked or wishes.options:
        content = render.template(f"kernel{MODPROBE}.j2", blocked=wishes.blocked, options=wishes.options)
        found.append(atomic.File(MODPROBE, content))
    return found
