"""Stand-ins for NVIDIA's container toolkit.

Names and `=` between them: NVIDIA/nvidia-container-toolkit, packaging/debian/control. The refresh units are there from 1.18.0,
tried again after a failure from 1.18.2 (nvidia-container-toolkit#1611).
"""

from __future__ import annotations

from lab.repository.package import File, Package, multiarch, script

VERSIONS = ("1.17.8", "1.18.0", "1.18.2", "1.20.0")
_UNITS = ("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path")


def packages(version: str) -> list[Package]:
    """Every package of one release."""
    number = tuple(map(int, version.split(".")))
    exact = f"= {version}-1"
    files = {"usr/bin/nvidia-ctk": File(script("nvidia-ctk", version=version, multiarch=multiarch()), 0o755)}
    scripts = {}
    if number >= (1, 18):
        retry = "Restart=on-failure\nRestartSec=1s\n" if number >= (1, 18, 2) else ""
        for unit in _UNITS:
            files[f"usr/lib/systemd/system/{unit}"] = File(script(unit, retry=retry))
        files["etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"] = File(b"# stand-in of gpuwright's lab\n")
        on = " ".join(_UNITS)
        scripts = {
            "postinst": (
                '#!/bin/sh\nset -e\n[ "$1" = configure ] && [ -d /run/systemd/system ] || exit 0\nsystemctl daemon-reload\n'
                f'[ -n "$2" ] || systemctl enable -q {on}\n'
                "systemctl restart nvidia-cdi-refresh.path\nsystemctl start --no-block nvidia-cdi-refresh.service\n"
            ),
            "prerm": (
                '#!/bin/sh\nset -e\n[ "$1" = remove ] && [ -d /run/systemd/system ] || exit 0\n'
                f"systemctl disable --now -q {on} || true\n"
            ),
        }

    def made(name: str, summary: str, depends: str = "") -> Package:
        relations = {"Depends": depends} if depends else {}
        return Package(name, f"{version}-1", summary, section="utils", relations=relations)

    return [
        made(
            "nvidia-container-toolkit",
            "NVIDIA Container Toolkit",
            f"nvidia-container-toolkit-base ({exact}), libnvidia-container-tools ({exact}), libnvidia-container-tools (<< 2.0.0)",
        ),
        Package(
            "nvidia-container-toolkit-base",
            f"{version}-1",
            "NVIDIA Container Toolkit Base",
            section="utils",
            files=files,
            scripts=scripts,
            conffiles=tuple(path for path in files if path.startswith("etc/")),
        ),
        made("libnvidia-container-tools", "NVIDIA container runtime tools", f"libnvidia-container1 (>= {version}-1)"),
        made("libnvidia-container1", "NVIDIA container runtime library"),
    ]
