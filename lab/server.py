"""What every server of the lab is, whether it is a container or a virtual machine: a name, keys, an ssh command line, a boot."""

from __future__ import annotations

import json
import re
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from lab import proxy, repository
from lab.command import LabError, run
from lab.debian import mirror
from lab.network import Segment
from lab.paths import locked, make_private, state, write_json

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class Server(ABC):
    """One throwaway server. Everything it does not remember here, it forgets at ``reset``."""

    kind: ClassVar[str]  # "host" or "machine"
    boot_limit: ClassVar[float]  # seconds
    patience: ClassVar[int]  # seconds until ssh gives up on a server that says nothing

    name: str
    release: str  # Debian's code name
    segment: Segment

    @property
    @abstractmethod
    def address(self) -> str:
        """Where ssh reaches it from this machine."""

    @property
    def port(self) -> int:
        """The port of its ssh there."""
        return 22

    @property
    def directory(self) -> Path:
        """Where it is kept."""
        return state() / f"{self.kind}s" / self.name

    @property
    def ssh_key(self) -> Path:
        return state() / "key"

    @property
    @abstractmethod
    def known_hosts(self) -> Path:
        """File with its host key, which the lab made."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether it is switched on: it is up, booting or rebooting, and comes back by itself."""

    @abstractmethod
    def reboot(self) -> None:
        """Reboot as ``systemctl reboot`` does, without needing its network; returns when it is up again, disk kept."""

    @abstractmethod
    def power_cycle(self) -> None:
        """Cut the power in the middle of everything and switch it on again: every process dies at once, the disk stays."""

    @abstractmethod
    def reset(self) -> None:
        """Make it blank again: everything on its disk is gone, name, address and host key stay."""

    @abstractmethod
    def destroy(self) -> None:
        """Take it away for good."""

    def ssh_argv(self, *options: str) -> list[str]:
        """The ssh command line that reaches it, host key checked."""
        settings = {
            "Port": self.port,
            "IdentityFile": self.ssh_key,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.known_hosts,
            "StrictHostKeyChecking": "yes",
            "ConnectTimeout": self.patience,
            "LogLevel": "ERROR",
        }
        flags = [flag for name, value in settings.items() for flag in ("-o", f"{name}={value}")]
        # -F none: what the user's own ssh configuration says is about other machines.
        return ["ssh", "-F", "none", *flags, *options, f"root@{self.address}"]

    def run(
        self, command: str, stdin: str | None = None, *, check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell command as root over ssh. Raises LabError when it fails (``check``) or exceeds ``timeout`` seconds."""
        result = run([*self.ssh_argv("-o", "BatchMode=yes"), command], stdin=stdin, check=False, timeout=timeout)
        if check and result.returncode != 0:
            said = (result.stderr.strip() or result.stdout.strip() or "it said nothing").splitlines()
            raise LabError(f"{self.name}: {command!r} ended with status {result.returncode}: {' | '.join(said[-4:])}")
        return result

    def boot_id(self) -> str:
        """The kernel's name for this boot, "" while nobody answers."""
        try:
            command = "cat /proc/sys/kernel/random/boot_id"
            return self.run(command, check=False, timeout=2 * self.patience).stdout.strip()
        except LabError:
            return ""

    def wait(self) -> None:
        """Wait until it has booted: ssh answers and systemd has started everything. Raises LabError with its console's end."""
        started = time.monotonic()
        while time.monotonic() - started < self.boot_limit:
            try:
                # "degraded" is up as well; which unit failed is for the caller to judge.
                answer = self.run("systemctl is-system-running --wait", check=False, timeout=self.boot_limit / 2).stdout
            except LabError:
                answer = ""
            if answer.strip() in ("running", "degraded"):
                return
            if not self._powered():
                break
            time.sleep(0.1)
        end = " | ".join(self.console().strip().splitlines()[-4:])
        waited = time.monotonic() - started
        raise LabError(f"{self.name} did not boot within {waited:.0f} s: {end or 'nothing on its console'}")

    def console(self) -> str:
        """What it has printed on its console since it was made."""
        path = self.directory / "console"
        return path.read_text(errors="replace") if path.exists() else ""

    @abstractmethod
    def _powered(self) -> bool:
        """Whether any of its processes is there."""

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps two runs from changing one server at the same time."""
        return locked(state() / "locks" / self.name)

    def _identity(self) -> dict[str, str]:
        """What makes its disk this one's and not another's: path below the root to content."""
        archive = mirror()
        return {
            "etc/hostname": f"{self.name}\n",
            "etc/machine-id": f"{uuid.uuid4().hex}\n",
            # There is no name server on the segment; what one would say is here.
            "etc/resolv.conf": "# The lab has no name server: names are in /etc/hosts.\n",
            "etc/apt/sources.list": archive.sources(self.release),
            "etc/apt/apt.conf.d/90lab": (
                f'Acquire::http::Proxy "{proxy.address(self.segment)}";\n'
                # What the lab's own repository offers changes from one moment to the next; nothing may cache it.
                f'Acquire::http::Proxy::{repository.NAME} "DIRECT";\n{archive.settings}'
            ),
            "root/.ssh/authorized_keys": public_key(self.ssh_key),
            "etc/ssh/ssh_host_ed25519_key": (self.directory / "host_key").read_text(),
            "etc/ssh/ssh_host_ed25519_key.pub": public_key(self.directory / "host_key"),
        }

    def _names(self, address: str) -> str:
        """Its /etc/hosts."""
        return (
            f"127.0.0.1 localhost\n{address} {self.name}\n{self.segment.gateway} registry.lab hub.lab repository.lab time.lab\n"
            "::1 localhost ip6-localhost ip6-loopback\n"
        )

    def _record(self) -> Path:
        return self.directory / f"{self.kind}.json"

    def _write_record(self) -> None:
        """Make its directory, its host key, and, last, the record by which it is known."""
        make_private(self.directory)
        make_key(self.directory / "host_key", self.name)
        record = asdict(self)
        del record["segment"]
        write_json(self._record(), record)

    def _host_key_line(self) -> str:
        """Its line of a known_hosts file. The lab makes its servers' keys, so it knows them beforehand."""
        where = self.address if self.port == 22 else f"[{self.address}]:{self.port}"
        return f"{where} {' '.join(public_key(self.directory / 'host_key').split()[:2])}\n"


def mode(path: str) -> int:
    """Permissions of a file of ``_identity``."""
    return 0o600 if path.endswith(("_key", "authorized_keys")) else 0o644


def check_names(names: Sequence[str], kind: str) -> None:
    """Raise LabError for a name that a server of this kind cannot have."""
    other = {"host": "machine", "machine": "host"}[kind]
    for name in names:
        if not _NAME.fullmatch(name) or name == "neighbour":
            raise LabError(
                f"{name!r} is no {kind} name for the lab; allowed: a letter, then letters, digits and hyphens, 31 in all"
            )
        if (state() / f"{other}s" / name / f"{other}.json").exists():
            raise LabError(f"{name} is a {other} of this lab; choose another name, or: gpuwright lab down {name}")
    if len(set(names)) != len(names):
        raise LabError(f"a {kind} is named twice: {', '.join(names)}")


def records(kind: str) -> list[dict[str, Any]]:
    """What was written about each server of a kind."""
    return [json.loads(path.read_text()) for path in (state() / f"{kind}s").glob(f"*/{kind}.json")]


def make_key(path: Path, comment: str) -> None:
    """Make an ssh key pair unless it is there."""
    if not path.with_suffix(".pub").exists():
        path.unlink(missing_ok=True)
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def public_key(path: Path) -> str:
    """The public half of a key."""
    return path.with_suffix(".pub").read_text()


def remove(path: Path) -> None:
    """Delete a tree that another run may be deleting, too; nothing is mounted below, and if it were it would stay."""
    run(["rm", "-rf", "--one-file-system", str(path)], timeout=300)
