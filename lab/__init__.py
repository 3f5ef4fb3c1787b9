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
from lab.hosts import Host, up
from lab.machines import Machine
from lab.machines import up as up_machines
from lab.network import Neighbour, neighbour
from lab.roster import down, find, known
from lab.server import Server

__all__ = [
    "Host",
    "LabError",
    "Machine",
    "Neighbour",
    "Server",
    "ca_file",
    "down",
    "find",
    "known",
    "neighbour",
    "pins",
    "registry",
    "up",
    "up_machines",
]
