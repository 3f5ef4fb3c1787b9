"""The files this role owns, from what is asked for and what the node boots with."""

from __future__ import annotations

from gpuwright import atomic, boot, render
from gpuwright.boot import Boot, Wishes
from roles.kernel.facts import SYSCTL

ROLE = "kernel"
SCRIPTS = "/usr/local/lib/gpuwright"
CHOSEN = "/etc/gpuwright/kernel/words"
PLUG_IN = "/etc/kernel/install.d/91-gpuwright.install"


def scripts() -> list[atomic.File]:
    """What the role runs on the node."""
    return [
        atomic.File(f"{SCRIPTS}/{name}", render.static(f"kernel{SCRIPTS}/{name}"), mode="0755")
        for name in ("boot-menu", "initramfs-modprobe", "node-drain")
    ]


def boot_files(seen: Boot, wanted: Wishes) -> list[atomic.File]:
    """The boot loader's drop-in and the record of our words; none where there is no boot loader that we know."""
    texts = [word.text for word in wanted.words]
    recorded = sorted({*seen.recorded, *texts})
    if seen.loader == "none" or not recorded:
        return []
    found = [atomic.File(boot.WORDS, "".join(f"{text}\n" for text in recorded).encode())]
    if seen.loader == "grub" and texts:
        content = render.template(
            f"kernel{boot.GRUB_DROP_IN}.j2",
            words=wanted.words,
            texts=[boot.grub_text(word) for word in wanted.words],
            in_the_way=boot.in_the_way(wanted),
        )
        found.append(atomic.File(boot.GRUB_DROP_IN, content))
    if seen.loader == "systemd-boot":
        content = render.template(f"kernel{CHOSEN}.j2", words=wanted.words)
        found.append(atomic.File(CHOSEN, content))
        found.append(atomic.File(PLUG_IN, render.static(f"kernel{PLUG_IN}"), mode="0755"))
    return found


def sysctl_file(wanted: Wishes) -> atomic.File | None:
    """The sysctl drop-in; None where nothing is asked for."""
    if not wanted.sysctls:
        return None
    return atomic.File(SYSCTL, render.template(f"kernel{SYSCTL}.j2", sysctls=wanted.sysctls))


# What lsmod calls a file system, where mount has another name for it.
_FILESYSTEM = {"freevxfs": "vxfs"}


def in_use(seen: Boot, module: str) -> bool:
    """Whether the node would miss the module: it has users, or its file system is mounted or stands in fstab."""
    return dict(seen.modules).get(module, 0) > 0 or _FILESYSTEM.get(module, module) in seen.filesystems


def modprobe_file(seen: Boot, wanted: Wishes) -> atomic.File | None:
    """The modprobe.d file, without what the node uses now; None where nothing is asked for."""
    blocked = [block for block in wanted.blocked if not (block.spared_when_used and in_use(seen, block.module))]
    if not blocked and not wanted.options:
        return None
    content = render.template(f"kernel{boot.MODPROBE}.j2", blocked=blocked, options=wanted.options)
    return atomic.File(boot.MODPROBE, content)
