"""How each control of role `nvidia` is turned red on purpose, on a lab host whose cards and driver are STAND-INS.

`also` names what turns with it and why; of those some cannot be told any more ("error"), as nvidia-smi refuses.
"""

from __future__ import annotations

import shlex

from sabotage import Sabotage

_FIXTURE = "/etc/gpuwright-lab/gpus"
_KERNEL = "/usr/local/lib/gpuwright-lab/kernel"
_VERSION = "/proc/driver/nvidia/version"
_CHANGE = "/var/lib/gpuwright/nvidia/change"
_HISTORY = "/var/log/apt/history.log"
_BLIND = "nvidia-smi refuses a library that is not the module's"
_SETTINGS = "systemctl restart gpuwright-gpu-settings.service"
_STANZA = (
    "\\nStart-Date: 2026-11-01  06:50:54\\nCommandline: /usr/bin/unattended-upgrade\\n"
    "Upgrade: libnvidia-ml1:amd64 (580.65.06-1, 580.95.05-1)\\nEnd-Date: 2026-11-01  06:50:55\\n"
)


def _library(version: str) -> str:
    """One package alone, as dpkg takes it; a package that dpkg is given by hand is no longer on hold."""
    name = "libnvidia-cfg1"
    return (
        f"cd /tmp; apt-get -qq download {name}={version}-1; dpkg --force-depends --force-downgrade -i {name}_{version}*.deb "
        f">/dev/null 2>&1; rm -f {name}_*.deb"
    )


_TOLD = "/usr/local/bin"


def secure_boot(trusted: str) -> str:
    """STAND-INS for firmware and keyrings, which a container has not: Secure Boot is on, and the kernel trusts this key."""
    mokutil, keyctl = "echo SecureBoot enabled", f"echo '1 key in keyring: 1: ---lswrv 0 0 asymmetric: {trusted}'"
    return "".join(
        f"printf '#!/bin/sh\\n%s\\n' {shlex.quote(says)} >{_TOLD}/{name}; chmod 755 {_TOLD}/{name}; "
        for name, says in (("mokutil", mokutil), ("keyctl", keyctl))
    )


NO_SECURE_BOOT = f"rm -f {_TOLD}/mokutil {_TOLD}/keyctl"


def _fault(text: str) -> Sabotage:
    """A line in the log of a unit of the driver's."""
    folder = "/etc/systemd/system/nvidia-persistenced.service.d"
    again = "systemctl daemon-reload; systemctl restart nvidia-persistenced.service; sleep 1"
    return Sabotage(
        f"mkdir -p {folder}; printf '[Service]\\nExecStartPost=/bin/echo {text}\\n' >{folder}/zz-sabotage.conf; {again}",
        f"rm -r {folder}; {again}",
    )


SABOTAGES: dict[str, Sabotage] = {
    "GPW-NVID-001": Sabotage(
        f"sed -i 's/580.95.05/580.65.06/' {_VERSION}",
        f"sed -i 's/580.65.06/580.95.05/' {_VERSION}",
        also={
            "GPW-NVID-002": "the packages are another release then",
            "GPW-NVID-006": _BLIND,
            "GPW-NVID-007": "the fabric manager is of another release then",
            "GPW-NVID-008": _BLIND,
            "GPW-NVID-009": _BLIND,
            "GPW-NVID-010": _BLIND,
        },
    ),
    "GPW-NVID-002": Sabotage(
        _library("595.58.03"),
        f"{_library('580.95.05')}; apt-mark hold -q libnvidia-cfg1",
        also={"GPW-NVID-005": "dpkg lifts the hold of what it is given by hand"},
        heals=True,
    ),
    "GPW-NVID-003": Sabotage(
        "mkdir -p /lib/modules/9.9.9-sabotage; touch /lib/modules/9.9.9-sabotage/modules.order",
        "rm -r /lib/modules/9.9.9-sabotage",
    ),
    "GPW-NVID-004": Sabotage(
        f"sed -i 's/Open Kernel Module for x86_64/x86_64 Kernel Module/' {_VERSION}",
        f"sed -i 's/x86_64 Kernel Module/Open Kernel Module for x86_64/' {_VERSION}",
    ),
    "GPW-NVID-005": Sabotage("apt-mark unhold -q libcuda1", "apt-mark hold -q libcuda1", heals=True),
    "GPW-NVID-006": Sabotage(
        f"cp {_FIXTURE} /run/kept.gpus; sed -i '0,/hidden=0/s//hidden=1/' {_FIXTURE}; {_KERNEL} sync",
        f"cp /run/kept.gpus {_FIXTURE}; {_KERNEL} sync",
    ),
    "GPW-NVID-007": Sabotage(
        "systemctl stop nvidia-fabricmanager.service", "systemctl start nvidia-fabricmanager.service; sleep 1"
    ),
    "GPW-NVID-008": Sabotage(
        "systemctl stop nvidia-persistenced.service",
        "systemctl start nvidia-persistenced.service; sleep 1",
        heals=True,
    ),
    "GPW-NVID-009": Sabotage("nvidia-smi -i 1 -pl 500", _SETTINGS, heals=True),
    "GPW-NVID-010": Sabotage("nvidia-smi -i 2 -mig 1", _SETTINGS, heals=True),
    "GPW-NVID-011": Sabotage(
        "echo N >/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
        "echo Y >/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    ),
    "GPW-NVID-013": Sabotage(
        f"mkdir -p {_CHANGE}; echo 580.95.05 >{_CHANGE}/from; echo 595.58.03 >{_CHANGE}/to", f"rm -r {_CHANGE}"
    ),
    "GPW-NVID-014": _fault("NVRM: GPU 0000:21:00.0 is already bound to NovaCore."),
    "GPW-NVID-015": Sabotage(
        f"cp -a {_HISTORY} /run/kept.history; printf {shlex.quote(_STANZA)} >>{_HISTORY}",
        f"cp -a /run/kept.history {_HISTORY}",
    ),
}
