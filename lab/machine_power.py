"""A lab machine's power supply: starts QEMU, starts it afresh whenever the machine reboots, ends when the machine is switched off.

A reboot is a new QEMU, never a warm reset: after one, the emulated firmware often span for minutes in a delay loop of the
processor's timer. Usage, in the machine's directory: ``python -m lab.machine_power FILE``, FILE holding a JSON object with
``argv``, QEMU's command line, and ``first``, what only the first start has besides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from lab.command import LabError
from lab.qmp import Qmp

# QEMU says why it stopped and waits to be ended: an event that it sends while it ends may be lost.
OPTIONS = ("-action", "reboot=shutdown,shutdown=pause", "-qmp", "unix:power,server=on,wait=off")


def main(plan: Path) -> int:
    """Returns 0 when the machine switched itself off, else QEMU's own status."""
    said = json.loads(plan.read_text())
    argv = [*said["argv"], *said["first"]]
    while True:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
        reason = _stopped(process)
        if reason is None:
            return process.wait()
        process.kill()
        process.wait()
        if "reset" not in reason:  # guest-reset, host-qmp-system-reset (QEMU's ShutdownCause)
            return 0
        argv = said["argv"]


def _stopped(process: subprocess.Popen[bytes]) -> str | None:
    """Wait for the machine to stop; returns why, None when QEMU ended by itself or was killed."""
    while process.poll() is None:
        try:
            with Qmp(Path("power"), timeout=None) as qmp:
                return str(qmp.wait_for("SHUTDOWN")["reason"])
        except LabError:  # not there yet, or gone
            time.sleep(0.05)
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
