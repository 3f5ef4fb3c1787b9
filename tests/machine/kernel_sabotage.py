"""How each control of role `kernel` is turned red on a machine, and how the machine is put right again.

As tests/lab/sabotage.py for lab hosts: `do` and `undo` run as root, `also` names other controls that turn red with it, `heals`
says that the next deploy puts it right by itself. The node asks for ``iommu=pt``, ``vm.swappiness`` 10 and, of a loaded module, an
option.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from sabotage import Sabotage

_MENU = "/boot/grub/grub.cfg"
_KEPT = "/run/kept.cfg"


def _line(sed: str, also: dict[str, str] | None = None) -> Sabotage:
    """Another command line than the one that was booted: the kernel's own word for it, laid over."""
    return Sabotage(
        f"sed '{sed}' /proc/cmdline >/run/cmdline; mount --bind /run/cmdline /proc/cmdline",
        "umount /proc/cmdline",
        also or {},
    )


def _menu(sed: str) -> Sabotage:
    return Sabotage(
        f"cp -a {_MENU} {_KEPT}; sed -i '{sed}' {_MENU}; ! cmp -s {_MENU} {_KEPT}",
        f"cp -a {_KEPT} {_MENU}",
        heals=True,
    )


def _value(key: str, value: str) -> Sabotage:
    return Sabotage(f"sysctl -qw {key}={value}", "sysctl -q --system", heals=True)


_WAITS = {"GPW-KERN-006": "what does not run waits for a reboot"}

SABOTAGES: dict[str, Sabotage] = {
    "GPW-KERN-001": _line("s/ iommu=pt//", _WAITS),
    "GPW-KERN-002": Sabotage(
        "echo 'Unknown kernel command line parameters \"iommu=pt\", will be passed to user space.' >/dev/kmsg",
        "dmesg --clear; journalctl --rotate; journalctl --vacuum-time=1s",
    ),
    "GPW-KERN-003": _line("s/$/ mitigations=off/"),
    "GPW-KERN-004": _menu("s/ iommu=pt//"),
    "GPW-KERN-005": Sabotage(
        f"cp -a {_MENU} {_KEPT}; sed -i '0,/vmlinuz-/s/vmlinuz-/vmlinuz-9./' {_MENU}", f"cp -a {_KEPT} {_MENU}"
    ),
    "GPW-KERN-006": _line("s/ iommu=pt/ iommu=nopt/", {"GPW-KERN-001": "the same word"}),
    "GPW-KERN-007": _value("kernel.yama.ptrace_scope", "0"),
    "GPW-KERN-008": _value("kernel.kptr_restrict", "0"),
    # On the card it is reached by, which was there before the role was: `all` and `default` still say 0.
    "GPW-KERN-009": Sabotage(
        "for one in /proc/sys/net/ipv6/conf/e*/accept_redirects; do echo 1 >$one; done",
        "sysctl -q --system",
        heals=True,
    ),
    "GPW-KERN-010": _value("vm.swappiness", "99"),
    "GPW-KERN-011": Sabotage(
        "cp -a /etc/modprobe.d/gpuwright.conf /run/kept.conf; sed -i /nouveau/d /etc/modprobe.d/gpuwright.conf",
        "cp -a /run/kept.conf /etc/modprobe.d/gpuwright.conf",
        heals=True,
    ),
    "GPW-KERN-012": Sabotage("modprobe --ignore-install udf", "modprobe -r udf", heals=True),
    "GPW-KERN-013": Sabotage(
        "echo N >/sys/module/efi_pstore/parameters/pstore_disable",
        "echo Y >/sys/module/efi_pstore/parameters/pstore_disable",
        _WAITS,
    ),
    "GPW-KERN-014": Sabotage(
        "image=/boot/initrd.img-$(uname -r); touch -r $image /run/kept.time; touch $image",
        "touch -r /run/kept.time /boot/initrd.img-$(uname -r)",
        heals=True,
    ),
}
