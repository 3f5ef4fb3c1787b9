"""NVIDIA's kernel module package with a module that is REAL, small, and drives nothing: a STAND-IN to be built by Debian's own dkms.

The packages of lab.repository.driver bring a dkms of their own that copies instead of compiling, because a lab host has neither a
kernel nor modules. Where there are (a machine, or a host that only builds), this one is compiled against the headers of each
kernel, signed with dkms' key, and loaded. It stands alone: no user space, no firmware.
"""

from __future__ import annotations

import os

from lab.repository import driver
from lab.repository.package import File, Package, script

VERSIONS = ("580.95.05", "595.58.03")
FAULTS = driver.FAULTS
_DKMS = """\
# A STAND-IN of gpuwright's lab.
PACKAGE_NAME="nvidia"
PACKAGE_VERSION="{version}"
BUILT_MODULE_NAME[0]="nvidia"
DEST_MODULE_LOCATION[0]="/updates/dkms"
AUTOINSTALL="yes"
"""
# As dh_dkms writes them: dkms' own script builds for the kernels that have headers, and its status is the package's.
_POSTINST = """\
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
exec /usr/lib/dkms/common.postinst nvidia {version} "" "" "$2"
"""
_PRERM = """\
#!/bin/sh
set -e
case $1 in remove | upgrade | deconfigure) dkms remove -m nvidia -v {version} --all || true ;; esac
"""


def package(version: str, fault: str = "") -> Package:
    """nvidia-kernel-open-dkms of one release, for Debian's dkms. ``fault``: it does not compile, or finds no card when it is loaded."""
    source = f"usr/src/nvidia-{version}"
    flags = f"ccflags-y := -DGPUWRIGHT_LAB_FAULT_{fault.upper()}\n" if fault else ""
    return Package(
        "nvidia-kernel-open-dkms",
        f"{version}-1",
        "NVIDIA kernel module source, a tiny one",
        driver.SOURCE,
        section="non-free/kernel",
        all=True,
        relations={
            "Depends": "dkms (>= 3.0)",
            "Provides": f"nvidia-kernel-{version}",
            "Conflicts": "nvidia-kernel-dkms",
            "Replaces": "nvidia-kernel-dkms",
        },
        files={
            f"{source}/dkms.conf": File(_DKMS.format(version=version).encode()),
            f"{source}/Makefile": File(f"obj-m := nvidia.o\n{flags}".encode()),
            f"{source}/nvidia.c": File(script("nvidia.c", version=version, machine=os.uname().machine)),
        },
        scripts={"postinst": _POSTINST.format(version=version), "prerm": _PRERM.format(version=version)},
    )
