"""The power fails in the middle of a run: the machine boots again, and the next run makes of it what was asked.

QEMU is killed, so what the kernel had not yet written to the disk is gone. One machine, blank again before every cut; the roles that
change how it boots. Each point is an operation and the seconds into it: before, within and after the steps that could break a boot.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fleet
import pytest

from gpuwright.render import REPOSITORY
from lab.machines import Machine

pytestmark = pytest.mark.machine

POINTS = [
    ("Write the drop-ins of journal", 1.0),
    ("Write the kernel role's scripts", 0.5),
    ("Set sysctl values", 0.5),
    ("Block modules and set module options", 1.0),
    ("Keep initramfs images", 3.0),
    ("Keep initramfs images", 12.0),
    ("Put on the kernel's command line", 2.0),
    ("Put on the kernel's command line", 8.0),
    ("eboot", 4.0),  # going down
    ("eboot", 25.0),  # on its way up
]


@pytest.fixture(scope="module")
def site(machine, tmp_path_factory):
    site = fleet.Fleet([machine], tmp_path_factory.mktemp("cut"))
    for role in ("containers", "models", "engine", "gateway"):
        site.set(machine.name, **{role: None})
    yield site
    machine.reset()


def cut(site: fleet.Fleet, machine: Machine, operation: str, seconds: float) -> str:
    """Start a run and cut the machine's power `seconds` after it began the operation. Returns where the run was then: the last of
    its lines that begin a step; an operation, or whatever it says at its end."""
    site.write()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("pyinfra"), "-y", str(site.inventory), "deploy.py"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    steps = ["nothing"]
    begun = threading.Event()

    def read() -> None:
        for line in process.stderr:
            if "--> " in line:
                steps.append(line.strip())
            if re.search(r"Starting (serial )?operation", line) and operation in line:
                begun.set()
        steps.append(f"its end, after {steps[-1]}")
        begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert begun.wait(1800), f"{operation!r} did not begin within 1800 s; the run is at {steps[-1]!r}"
        time.sleep(seconds)
        at = steps[-1]
        machine.power_off()
        return at
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()
        process.stderr.close()


@pytest.mark.parametrize("operation, seconds", POINTS, ids=[f"{name} +{seconds:g} s" for name, seconds in POINTS])
def test_it_boots_and_the_next_run_converges(site, operation, seconds):
    [machine] = site.hosts
    machine.reset()
    at = cut(site, machine, operation, seconds)
    assert re.search(r"Starting (serial )?operation", at) and operation in at, f"the power went at {at!r}"
    machine.switch_on()
    machine.wait()

    site.deploy(timeout=1800)
    assert {"iommu=pt", "intel_iommu=on"} <= set(machine.run("cat /proc/cmdline").stdout.split())
    assert machine.run("cat /proc/sys/vm/zone_reclaim_mode").stdout == "1\n"
    assert machine.run("find /etc /usr/local/lib/gpuwright -name '*.gpuwright.*.tmp'").stdout == ""
    # What unpacks images, and images and menus that were half written (update-initramfs, grub-mkconfig, boot-menu).
    assert machine.run("find /var/tmp -name '*initramfs*' -o -name 'dracut.*'").stdout == ""
    assert machine.run("find /boot -name '*.new' -o -name '*.dpkg-bak' -o -name '*.gpuwright'").stdout == ""
    assert site.audit() == []
    assert site.deploy().all_changed == []
