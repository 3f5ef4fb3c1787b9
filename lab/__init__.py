"""Throwaway hosts to try and test everything on: real systemd, sshd, apt and Docker, booted in seconds (DESIGN section 6).

>>> import lab
>>> [host] = lab.up(["lab-1"], release="trixie")
>>> host.run("systemctl is-system-running").stdout
'running\n'
"""

from __future__ import annotations

from lab import pins, registry
from lab.authority import ca_file
from lab.command import LabError
from lab.hosts import Host, down, find, known, up
from lab.network import Neighbour, neighbour

__all__ = ["Host", "LabError", "Neighbour", "ca_file", "down", "find", "known", "neighbour", "pins", "registry", "up"]
