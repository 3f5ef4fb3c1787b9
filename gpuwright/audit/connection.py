"""A testinfra host for a host of an inventory: the same address, key and host key check as a deploy has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import paramiko
import testinfra
from testinfra.backend.paramiko import ParamikoBackend
from testinfra.host import Host

from gpuwright import snapshot
from gpuwright.audit import privileged
from gpuwright.audit.control import Control
from gpuwright.audit.controls import sections
from gpuwright.connect import without_delay
from gpuwright.spec.node import NodeSpec
from roles.access import AUDIT_SCRIPT


class _Strict(ParamikoBackend):  # type: ignore[misc]  # testinfra has no types
    """testinfra's paramiko connection, with the inventory's known_hosts: an unknown host key ends it, not a warning."""

    NAME = "paramiko"

    def __init__(self, settings: dict[str, Any]) -> None:
        user, address = settings.get("ssh_user") or "root", settings["ssh_hostname"]
        super().__init__(f"{user}@{address}:{settings.get('ssh_port', 22)}", sudo=bool(settings.get("_sudo")))
        self.settings = settings

    @functools.cached_property
    def client(self) -> paramiko.SSHClient:
        settings = self.settings
        client = paramiko.SSHClient()
        known = Path(settings["ssh_known_hosts_file"]).expanduser()
        if known.exists():
            client.load_host_keys(str(known))
        client.set_missing_host_key_policy(
            paramiko.AutoAddPolicy()
            if settings.get("ssh_strict_host_key_checking") == "accept-new"
            else paramiko.RejectPolicy()
        )
        key = settings.get("ssh_key")
        client.connect(
            self.host.name,
            port=int(self.host.port or 22),
            username=self.host.user,
            key_filename=str(Path(key).expanduser()) if key else None,
            allow_agent=settings.get("ssh_allow_agent", key is None),
            look_for_keys=settings.get("ssh_look_for_keys", key is None),
            timeout=self.timeout,
        )
        without_delay(client.get_transport())
        return client


def connect(name: str, data: dict[str, Any]) -> Host:
    """The host `name` with its data from an inventory, as testinfra has it. Connects at its first command."""
    if name == "@local":
        return testinfra.get_host("local://")
    return Host(_Strict({"ssh_hostname": name, **data}))


def read(host: Host, controls: tuple[Control, ...]) -> snapshot.Snapshot:
    """Everything that `controls` look at, in one exchange. Raises CouldNotLook when the node cannot be reached."""
    try:
        answer = host.run(snapshot.script(sections(controls)))
    except (OSError, paramiko.SSHException) as fault:
        raise snapshot.CouldNotLook(f"no connection to {host.backend.get_pytest_id()}: {fault}") from fault
    return snapshot.parse(answer.stdout)


def read_as_auditor(host: Host, spec: NodeSpec) -> snapshot.Snapshot:
    """The same through the one script that an account with ``sudo: audit`` may run. Raises CouldNotLook.

    Its hash is compared first: what another script says is no observation.
    """
    try:
        found = host.run(f"sha256sum {AUDIT_SCRIPT}").stdout.partition(" ")[0]
        if found != privileged.digest(spec):
            seen = f"has sha256 {found}" if found else "is not there"
            raise snapshot.CouldNotLook(f"{AUDIT_SCRIPT} {seen}, and this audit needs another one: deploy first")
        answer = host.run(f"sudo -n {AUDIT_SCRIPT}")
    except (OSError, paramiko.SSHException) as fault:
        raise snapshot.CouldNotLook(f"no connection to {host.backend.get_pytest_id()}: {fault}") from fault
    if answer.rc != 0:
        raise snapshot.CouldNotLook(f"sudo {AUDIT_SCRIPT} ended with status {answer.rc}: {answer.stderr.strip()}")
    return snapshot.parse(answer.stdout)
