"""Stand-ins for NVIDIA's driver packages, as its repository for Debian 13 names and ties them.

Sources. Names and the two ways to install: NVIDIA's driver installation guide, Debian (compute only: `nvidia-driver-cuda
nvidia-kernel-open-dkms`; everything: `nvidia-open`). Versions, which are `<driver>-1` and carry no branch in the names, and the
branch package that only asks for "this or later": forums.developer.nvidia.com 353805. `nvidia-driver-cuda` brings nvidia-smi,
provides and conflicts with Debian's package of that name, and `libcuda1` recommends the kernel module: several public
installers. `=` between driver, libraries and firmware: NVIDIA/debian-packaging-nvidia-driver, debian/control. Pinning packages,
their file and their form: public notes on nvidia-driver-pinning-595.71.05. Fabric manager without a branch in its name from 580
on, and the branch as a virtual package: the same. Not known and left out: nvidia-alternative, which branches before 580 have.
"""

from __future__ import annotations

import struct

from lab.repository.package import File, Package, architecture, multiarch, script

SOURCE = "nvidia-graphics-drivers"
# Point releases that exist, by branch; the CUDA version that nvidia-smi prints with them.
BRANCHES = {
    "580": ("13.0", ("580.65.06", "580.95.05", "580.105.08", "580.126.09")),
    "595": ("13.2", ("595.45.04", "595.58.03", "595.71.05")),
}
# What can be wrong with a driver that installs: its module does not compile, or compiles and finds no card.
FAULTS = ("build", "probe")
SIGNER = "gpuwright lab, a stand-in for the key of DKMS"
"""Whom a module of these packages names as its signer; it has no signature."""
# Sources of their own. It matters: since apt 3 (Debian 13) whatever is installed of one source is upgraded together
# (APT::Get::Upgrade-By-Source-Package), so of the driver proper no package moves alone, and these do.
_APART = (
    "nvidia-fabricmanager",
    "libnvidia-nscq",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-settings",
    "nvidia-xconfig",
)
_LIBRARIES = {
    "libcuda1": "libcuda.so",
    "libnvidia-ml1": "libnvidia-ml.so",
    "libnvidia-cfg1": "libnvidia-cfg.so",
    "libnvidia-nvvm4": "libnvidia-nvvm.so",
    "libnvidia-ptxjitcompiler1": "libnvidia-ptxjitcompiler.so",
}


def packages(version: str, fault: str = "") -> list[Package]:
    """Every package of one point release."""
    branch = version.partition(".")[0]
    exact, later = f"= {version}-1", f">= {version}"
    cuda = BRANCHES[branch][0]
    program = {"version": version, "cuda": cuda, "multiarch": multiarch()}

    def made(name: str, summary: str, files: dict[str, File] | None = None, **relations: str) -> Package:
        scripts = {}
        for path in files or {}:
            if path.endswith(".service"):
                scripts = _service(path.rpartition("/")[2], start="fabricmanager" not in path)
        return Package(
            name,
            f"{version}-1",
            summary,
            "" if name in _APART else SOURCE,
            relations={key.replace("_", "-"): value for key, value in relations.items()},
            files=files or {},
            scripts=scripts,
        )

    def meta(name: str, module: str) -> Package:
        parts = ("nvidia-driver", "nvidia-driver-cuda", module, "nvidia-settings", "nvidia-xconfig")
        return made(name, "NVIDIA driver, everything", Depends=", ".join(f"{part} ({later})" for part in parts))

    def library(name: str, summary: str, **relations: str) -> Package:
        soname = f"{_LIBRARIES[name]}.{name[-1]}"
        real = f"{_LIBRARIES[name]}.{version}"
        folder = f"usr/lib/{multiarch()}"
        content = f"A STAND-IN of gpuwright's lab: no library, only its name. {real}\n".encode()
        files = {f"{folder}/{real}": File(content), f"{folder}/{soname}": File(link=real)}
        return made(name, summary, files, **relations)

    def module(name: str, license: str, other: str) -> Package:
        info = {"version": version, "license": license, "description": "STAND-IN of gpuwright's lab", "signer": SIGNER}
        source = f"usr/src/nvidia-{version}"
        conf = f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\nAUTOINSTALL="yes"\n'
        files = {f"{source}/dkms.conf": File(conf.encode())}
        if fault != "build":
            extra = {"gpuwright_lab_fault": fault} if fault else {}
            files[f"{source}/nvidia.ko"] = File(kernel_object({**info, **extra}))
        dkms = f"dkms add -m nvidia -v {version}\ndkms build --force -m nvidia -v {version}\n"
        return Package(
            name,
            f"{version}-1",
            "NVIDIA kernel module source",
            SOURCE,
            section="non-free/kernel",
            relations={
                "Depends": f"dkms (>= 3.1.8), firmware-nvidia-gsp ({exact}), nvidia-kernel-support ({exact})",
                "Provides": f"nvidia-kernel-{version}",
                "Conflicts": other,
                "Replaces": other,
            },
            files=files,
            scripts={
                "postinst": f'#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n{dkms}',
                "prerm": f"#!/bin/sh\nset -e\ndkms remove -m nvidia -v {version} --all\n",
            },
        )

    either = f"nvidia-kernel-dkms ({exact}) | nvidia-kernel-open-dkms ({exact})"
    binaries = {
        "nvidia-smi": "nvidia-driver-cuda",
        "nvidia-modprobe": "nvidia-modprobe",
        "nvidia-persistenced": "nvidia-persistenced",
        "nv-fabricmanager": "nvidia-fabricmanager",
    }
    programs = {
        package: {f"usr/bin/{name}": File(script(name, **program), 0o755)} for name, package in binaries.items()
    }

    def unit(name: str) -> dict[str, File]:
        return {f"usr/lib/systemd/system/{name}.service": File(script(f"{name}.service"))}

    found = [
        meta("nvidia-open", "nvidia-kernel-open-dkms"),
        meta("cuda-drivers", "nvidia-kernel-dkms"),
        made(
            "nvidia-driver",
            "NVIDIA driver, display part",
            Depends=f"nvidia-driver-libs ({exact}), nvidia-driver-bin ({exact}), {either}",
        ),
        made("nvidia-driver-libs", "NVIDIA driver, display libraries", Recommends=f"libnvidia-cfg1 ({exact})"),
        made("nvidia-driver-bin", "NVIDIA driver, display programs"),
        made(
            "nvidia-driver-cuda",
            "NVIDIA driver, compute part",
            programs["nvidia-driver-cuda"],
            Depends=f"libcuda1 ({exact}), libnvidia-ml1 ({exact})",
            Recommends=f"nvidia-persistenced ({later})",
            Provides="nvidia-smi",
            Conflicts="nvidia-smi",
            Replaces="nvidia-smi",
        ),
        module("nvidia-kernel-open-dkms", "Dual MIT/GPL", "nvidia-kernel-dkms"),
        module("nvidia-kernel-dkms", "NVIDIA", "nvidia-kernel-open-dkms"),
        made(
            "nvidia-kernel-support",
            "NVIDIA kernel module settings",
            {"usr/lib/modprobe.d/nvidia.conf": File(b"# stand-in of gpuwright's lab\nblacklist nouveau\n")},
            Depends=f"nvidia-modprobe ({later})",
        ),
        made("firmware-nvidia-gsp", "NVIDIA GSP firmware"),
        made("nvidia-modprobe", "NVIDIA device nodes", programs["nvidia-modprobe"]),
        made(
            "nvidia-persistenced",
            "NVIDIA persistence daemon",
            {**programs["nvidia-persistenced"], **unit("nvidia-persistenced")},
            Depends=f"libnvidia-cfg1 ({later})",
        ),
        made("nvidia-settings", "NVIDIA settings"),
        made("nvidia-xconfig", "NVIDIA X configuration"),
        library(
            "libcuda1",
            "NVIDIA CUDA driver library",
            Depends=f"libnvidia-ptxjitcompiler1 ({exact}), libnvidia-nvvm4 ({exact})",
            Recommends=f"{either}, libnvidia-cfg1 ({exact}), nvidia-persistenced",
            Provides=f"libcuda.so.1 (= {version})",
        ),
        library("libnvidia-ml1", "NVIDIA management library", Provides=f"libnvidia-ml.so.1 (= {version})"),
        library("libnvidia-cfg1", "NVIDIA configuration library"),
        library("libnvidia-nvvm4", "NVIDIA NVVM compiler library"),
        library("libnvidia-ptxjitcompiler1", "NVIDIA PTX compiler library"),
        made(
            "nvidia-fabricmanager",
            "NVIDIA fabric manager",
            {
                **programs["nvidia-fabricmanager"],
                **unit("nvidia-fabricmanager"),
                "usr/share/nvidia/nvswitch/fabricmanager.cfg": File(b"# stand-in of gpuwright's lab\nDAEMONIZE=0\n"),
            },
            Provides=f"nvidia-fabricmanager-{branch}",
        ),
        made("libnvidia-nscq", "NVSwitch query library", Provides=f"libnvidia-nscq-{branch}"),
        _pinning(version, version),
    ]
    if int(branch) < 590:
        # From 590 on there is no package of a branch; and this one does not stop at its own.
        found += [meta(f"nvidia-open-{branch}", "nvidia-kernel-open-dkms")]
    return found


def pinning_of_branch(branch: str, version: str) -> Package:
    """nvidia-driver-pinning-<branch>; its own version is that of the branch's newest driver."""
    return _pinning(branch, version)


def keyring(public_key: bytes, address: str) -> Package:
    """cuda-keyring: the repository's key and source, in the places NVIDIA's has them."""
    source = f"deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] {address} /\n"
    return Package(
        "cuda-keyring",
        "1.1-1",
        "GPG keyring of the CUDA repository",
        section="misc",
        all=True,
        files={
            "usr/share/keyrings/cuda-archive-keyring.gpg": File(public_key),
            "etc/apt/sources.list.d/cuda-debian13-x86_64.list": File(source.encode()),
        },
        conffiles=("etc/apt/sources.list.d/cuda-debian13-x86_64.list",),
    )


def dkms() -> Package:
    """dkms, which NVIDIA's repository has too, newer than Debian's."""
    hook = '#!/bin/sh\n# stand-in of gpuwright\'s lab\n[ -n "$1" ] && exec dkms autoinstall --kernelver "$1"\n'
    return Package(
        "dkms",
        "1:3.2.2-1",
        "Dynamic Kernel Module System",
        section="kernel",
        all=True,
        relations={"Depends": "kmod"},
        files={
            "usr/sbin/dkms": File(script("dkms"), 0o755),
            "etc/kernel/postinst.d/dkms": File(hook.encode(), 0o755),
            "etc/kernel/header_postinst.d/dkms": File(hook.encode(), 0o755),
        },
    )


def kernel_object(info: dict[str, str]) -> bytes:
    """An ELF file that modinfo and depmod read as a module and no kernel takes: tables and a .modinfo section, no code (elf(5))."""
    modinfo = b"".join(f"{key}={value}".encode() + b"\0" for key, value in {**info, "name": "nvidia"}.items())
    names = b"\0.modinfo\0.shstrtab\0.symtab\0.strtab\0"
    # name, type, flags, content, link, info, size of an entry
    sections = [
        (b".modinfo", 1, 2, modinfo, 0, 0, 0),
        (b".shstrtab", 3, 0, names, 0, 0, 0),
        (b".symtab", 2, 0, b"\0" * 24, 4, 1, 24),
        (b".strtab", 3, 0, b"\0", 0, 0, 0),
    ]
    body, headers = b"", b"\0" * 64
    for name, kind, flags, content, link, extra, entry in sections:
        at = 64 + len(body)
        headers += struct.pack(
            "<IIQQQQIIQQ", names.index(name), kind, flags, 0, at, len(content), link, extra, 1, entry
        )
        body += content
    body += b"\0" * (-len(body) % 8)
    machine = {"amd64": 62, "arm64": 183}[architecture()]
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 1, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(sections) + 1, 2)
    return head + body + headers


def _pinning(what: str, version: str) -> Package:
    names = f"cuda-drivers* nvidia-open* {' '.join(_APART)} src:{SOURCE}:any"
    stanza = f"Package: {names}\nPin: version {what}.*\nPin-Priority: 1000\n"
    if what == version:
        stanza = f"Package: {names}\nPin: version {what}-*\nPin-Priority: 1000\n"
    return Package(
        f"nvidia-driver-pinning-{what}",
        f"{version}-1",
        f"keeps the driver at {what}",
        section="misc",
        all=True,
        relations={
            "Provides": "nvidia-driver-pinning",
            "Conflicts": "nvidia-driver-pinning",
            "Replaces": "nvidia-driver-pinning",
        },
        files={"etc/apt/preferences.d/nvidia-driver-pin": File(stanza.encode())},
    )


def _service(unit: str, start: bool) -> dict[str, str]:
    """Maintainer scripts as debhelper's: enabled when installed, restarted when upgraded, stopped when removed."""
    begin = f"systemctl restart {unit} || true\n" if start else ""
    return {
        "postinst": (
            '#!/bin/sh\nset -e\n[ "$1" = configure ] && [ -d /run/systemd/system ] || exit 0\n'
            f'systemctl daemon-reload\n[ -n "$2" ] || systemctl enable -q {unit}\n{begin}'
        ),
        "prerm": (
            '#!/bin/sh\nset -e\n[ "$1" = remove ] && [ -d /run/systemd/system ] || exit 0\n'
            f"systemctl disable --now -q {unit} || true\n"
        ),
    }
