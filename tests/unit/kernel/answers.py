"""A machine's answers as the scripts print them, with values of our own; parts of them can be put in place of others."""

from __future__ import annotations

import base64
import subprocess

from gpuwright.boot import state
from gpuwright.snapshot import Snapshot

GRUB_CFG = """\
set default="0"
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
else
   set default="%(default)s"
fi
### BEGIN /etc/grub.d/10_linux ###
menuentry 'Debian GNU/Linux' --class debian $menuentry_id_option 'gnulinux-simple-1' {
\tlinux\t/boot/vmlinuz-6.12.57+deb13-amd64 root=UUID=1 ro quiet %(words)s
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1' {
\tmenuentry 'Debian GNU/Linux, with Linux 6.12.57' $menuentry_id_option 'gnulinux-6.12.57+deb13-amd64-advanced-1' {
\t\tlinux\t/boot/vmlinuz-6.12.57+deb13-amd64 root=UUID=1 ro quiet %(words)s
\t}
\tmenuentry 'Debian GNU/Linux, with Linux 6.12.57 (recovery mode)' $menuentry_id_option 'gnulinux-6.12.57+deb13-amd64-recovery-1' {
\t\tlinux\t/boot/vmlinuz-6.12.57+deb13-amd64 root=UUID=1 ro single
\t}
\tmenuentry 'Debian GNU/Linux, with Linux 6.12.48' $menuentry_id_option 'gnulinux-6.12.48+deb13-amd64-advanced-1' {
\t\tlinux\t/boot/vmlinuz-6.12.48+deb13-amd64 root=UUID=1 ro quiet %(words)s
\t}
}
### END /etc/grub.d/10_linux ###
### BEGIN /etc/grub.d/20_memtest86+ ###
menuentry 'Memory test' {
\tlinux /boot/memtest86+x64.bin
}
### END /etc/grub.d/20_memtest86+ ###
"""

IMAGE = "/boot/initrd.img-6.12.57+deb13-amd64"

EVERYWHERE = {"id": "aa-bb\n", "kernel": "6.12.57+deb13-amd64\n", "serving": "", "attempt": "", "container": "none\n"}
BOOT = EVERYWHERE | {
    "line": "BOOT_IMAGE=/boot/vmlinuz-6.12.57+deb13-amd64 root=UUID=1 ro quiet\n",
    "modules": "ext4 1\nnvidia 12\n",
    "filesystems": "ext4\nvfat\nproc\n",
    "kernels": "6.12.48+deb13-amd64\n6.12.57+deb13-amd64\n",
    "initrds": f"{IMAGE} 100.200.300\n",
    "initramfs": "",
    "recorded": "",
    "packages": "",
    "said": "Command line: x\n",
    "nvidia": "",
    "options": "",
    "loader": "grub\n",
    "environment": "",
    "sourced": "yes\n",
    "site": "net.ifnames=0 quiet",
    "later": "",
}


def menu(words: str = "", default: str = "0") -> str:
    """As the script's awk prints it."""
    [awk] = [part for part in state._SCRIPT.split("awk '") if "10_linux" in part]
    program = awk.partition("' /boot/grub/grub.cfg")[0]
    text = GRUB_CFG % {"words": words, "default": default}
    return subprocess.run(["awk", program], input=text, capture_output=True, text=True, check=True).stdout


def boot_answer(**said: str) -> str:
    return printed(BOOT | {"menu": menu()} | said)


def container_answer() -> str:
    return printed(EVERYWHERE | {"container": "systemd-nspawn\n"})


def printed(given: dict[str, str]) -> str:
    lines = [f"{name} {base64.b64encode(text.encode()).decode()} .\n" for name, text in given.items()]
    return "".join([*lines, "END\n"])


def system(virtualization: str = "none", reboot: str = "no") -> str:
    return f"ID=debian\nARCHITECTURE=x86_64\nKERNEL=6.12\nVIRTUALIZATION={virtualization}\nREBOOT={reboot}"


def snapshot(answers: dict[str, str]) -> Snapshot:
    return Snapshot({name: (0, text) for name, text in answers.items()})
