"""Writes an Ansible playbook that asks of a converged node what our own run asks: the same packages, files, units and containers.

It is generated from the node's own record, so neither tool does work that the other is spared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuwright import snapshot


def playbook(seen: snapshot.Snapshot, packages: list[str], contents: Path, target: Path) -> int:
    """Write `target`; returns the number of tasks.

    `contents` holds the bytes of every owned file under its full path; `packages` is what the roles ask for.
    """
    tasks: list[dict[str, Any]] = [
        {"name": "Packages", "ansible.builtin.apt": {"name": packages, "state": "present"}},
        {"name": "Store", "ansible.builtin.stat": {"path": "/srv/models"}},
    ]
    units = ["docker.service"]
    for found in seen.read(snapshot.OWNED):
        path = f"/etc/systemd/system/{found.name}" if found.kind == "unit" else found.name
        source = contents / path.lstrip("/")
        if found.kind in ("file", "unit") and source.is_file():
            wanted = {"src": str(source), "dest": path, "mode": found.mode, "owner": found.user, "group": found.group}
            tasks.append({"name": f"File {path}", "ansible.builtin.copy": wanted, "no_log": True, "diff": False})
        if found.kind == "unit":
            units.append(found.name)
    for unit in units:
        tasks.append(
            {
                "name": f"Unit {unit}",
                "ansible.builtin.command": f"systemctl is-enabled {unit}",
                "changed_when": False,
                "failed_when": False,
            }
        )
    tasks += [
        {"name": name, "ansible.builtin.command": command, "changed_when": False}
        for name, command in (
            ("Images", "docker image ls --digests"),
            ("Engine", "docker inspect gpuwright-main"),
            ("Gateway", "systemctl show gpuwright-gateway.service"),
            ("Manifest", "find /srv/models -name *.manifest.json"),
        )
    ]
    target.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}], indent=1))  # JSON is YAML
    return len(tasks)
