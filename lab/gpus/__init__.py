"""GPUs that a lab host pretends to have. STAND-INS: nothing computes, and every place that shows one says so.

One file on the host, /etc/gpuwright-lab/gpus, says which cards there are and which kernel module is loaded; what the kernel
would show of them is made from it at every boot by lab/gpus/kernel. What user space brings (nvidia-smi, CDI) comes with the
packages of lab.repository and reads the same file.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.command import LabError
from lab.hosts import Host

FIXTURE = "/etc/gpuwright-lab/gpus"
KERNEL = "/usr/local/lib/gpuwright-lab/kernel"
_UNIT = """\
# A STAND-IN of gpuwright's lab: loads a module that is none.
[Unit]
Description=GPUs of the gpuwright lab (a stand-in)
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup-dev.service
Before=sysinit.target systemd-udevd.service systemd-networkd.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/gpuwright-lab/kernel boot

[Install]
WantedBy=sysinit.target
"""


@dataclass(frozen=True)
class Gpu:
    """One card, as the fixture has it. Power in watts, memory in MiB."""

    name: str  # as nvidia-smi names it
    architecture: str
    compute_capability: str
    memory: int
    bar1: int
    power_min: int
    power_max: int
    power_default: int
    numa: int = 0
    mig: str = "Disabled"
    hidden: bool = False  # in its slot, but it does not answer: the ones after it get smaller numbers
    uuid: str = ""
    bus: str = ""


_BLACKWELL = Gpu(
    name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
    architecture="Blackwell",
    compute_capability="12.0",
    memory=97887,
    bar1=131072,
    power_min=300,
    power_max=600,
    power_default=600,
)
_HOPPER = Gpu(
    name="NVIDIA H200",
    architecture="Hopper",
    compute_capability="9.0",
    memory=143771,
    bar1=262144,
    power_min=200,
    power_max=700,
    power_default=700,
)
# Figures: gpu-node.md 2.3 (Server 300 to 600 W, Max-Q 250 to 325 W, BAR1) and an H200's own answers.
MODELS = {
    "rtx-pro-6000": _BLACKWELL,
    "rtx-pro-6000-max-q": replace(
        _BLACKWELL,
        name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        power_min=250,
        power_max=325,
        power_default=300,
    ),
    "h200": _HOPPER,
    "h200-nvl": replace(_HOPPER, name="NVIDIA H200 NVL", power_max=600, power_default=600),
}


def cards(host: str, count: int, model: str = "rtx-pro-6000") -> list[Gpu]:
    """`count` cards of a model, half of them at each of two NUMA nodes where there are more than four. Raises LabError for an unknown model."""
    if model not in MODELS:
        raise LabError(f"the lab has no GPU {model!r}; it has: {', '.join(MODELS)}")
    return [
        replace(
            MODELS[model],
            uuid=f"GPU-00001ab0-{str(uuid.uuid5(uuid.NAMESPACE_DNS, f'{host}/{number}'))[9:]}",
            bus=f"00000000:{0x11 + 0x10 * number:02X}:00.0",
            numa=number * 2 // count if count > 4 else 0,
        )
        for number in range(count)
    ]


def fixture(gpus: Sequence[Gpu], module: str = "auto", nvswitches: int = 0) -> str:
    """The text of the host's fixture."""
    lines = [
        "# A STAND-IN of gpuwright's lab: cards that do not exist. Edit, then: /usr/local/lib/gpuwright-lab/kernel sync",
        f"module\t{module}",
    ]
    for gpu in gpus:
        fields = {**vars(gpu), "hidden": int(gpu.hidden)}
        lines.append("\t".join(["gpu", *(f"{name}={value}" for name, value in fields.items())]))
    lines += [f"nvswitch\tbus=0000:{0xE1 + number:02x}:00.0" for number in range(nvswitches)]
    return "\n".join(lines) + "\n"


def plug(host: Host, gpus: Sequence[Gpu], *, module: str = "auto", nvswitches: int = 0) -> None:
    """Give a host these cards and no others, now and at every boot.

    ``module``: ``auto`` is the one the host has installed, as after a reboot; ``none``; or a version, as if an old module had
    stayed in the kernel. The module that is loaded already stays loaded when it is ``auto``, as it does when packages change.
    """
    script = (Path(__file__).with_name("kernel")).read_text()
    host.run("mkdir -p /etc/gpuwright-lab /usr/local/lib/gpuwright-lab")
    host.run(f"cat >{KERNEL} && chmod 755 {KERNEL}", stdin=script)
    host.run(f"cat >{FIXTURE}", stdin=fixture(gpus, module, nvswitches))
    host.run("cat >/etc/systemd/system/gpuwright-lab-gpus.service", stdin=_UNIT)
    host.run("systemctl daemon-reload; systemctl enable -q gpuwright-lab-gpus.service")
    reload = f"{KERNEL} unload; " if module != "auto" else ""
    host.run(f"{reload}{KERNEL} boot; {KERNEL} sync")
