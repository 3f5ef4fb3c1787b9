"""Writes an Ansible playbook that asks of a converged node what our own run asks: the same packages, files and units.

The playbook is generated from the node's own record, so neither tool does work that the other is spared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpuwright import snapshot


def playbook(seen: snapshot.Snapshot, contents: dict[str, str], packages: list[str], target: Path) -> int:
    """Write `target`; returns the number of tasks.

    `contents` maps a path to a file on the controller that holds its bytes; `packages` is what the roles ask for.
    """
    tasks: list[dict[str, Any]] = [
        {"name": f"Packages {package}", "ansible.builtin.apt": {"name": package, "state": "present"}}
        for package in packages
    ]
    for found in seen.read(snapshot.OWNED):
        path = f"/etc/systemd/system/{found.name}" if found.kind == "unit" else found.name
        if path in contents:
            tasks.append(
                {
                    "name": f"File {path}",
                    "ansible.builtin.copy": {
                        "src": contents[path],
                        "dest": path,
                        "mode": found.mode,
                        "owner": found.user,
                        "group": found.group,
                    },
                    "no_log": True,
                }
            )
        if found.kind == "unit" and found.name.endswith(".service"):
            tasks.append(
                {"name": f"Unit {found.name}", "ansible.builtin.systemd_service": {"name": found.name, "enabled": True}}
            )
    for unit in ("docker.service",):
        tasks.append({"name": f"Unit {unit}", "ansible.builtin.systemd_service": {"name": unit, "state": "started"}})
    document = [{"hosts": "all", "gather_facts": False, "tasks": tasks}]
    target.write_text(json.dumps(document, indent=1))  # JSON is YAML
    return len(tasks)
