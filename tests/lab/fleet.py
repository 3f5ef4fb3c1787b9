"""Lab hosts under the repository's own deploy.py, with a key of their own; what a run came to, by operation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from outcome import NoDocument, operations

import lab
from gpuwright.render import REPOSITORY
from lab.inventory import NODES
from lab.server import Server

INVENTORY = """
import json as _json
from pathlib import Path as _Path

import lab as _lab
from gpuwright.spec.fleet import fleet as _fleet
from lab.inventory import describe as _describe

_settings = _json.loads((_Path(__file__).parent / "settings.json").read_text())
gpu_nodes = _fleet(
    {
        name: {**_describe(_lab.find(name), node=one["node"], **one["set"]), **one.get("connect", {})}
        for name, one in _settings.items()
    },
    __file__,
    pins=_lab.pins.read(),
)
"""


@dataclass
class Run:
    """Exit status, everything said on standard error, and operations by what became (or would become) of them, per host."""

    status: int
    said: str
    changed: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def all_changed(self) -> list[str]:
        """Every changed operation of every host."""
        return [name for names in self.changed.values() for name in names]


@dataclass
class Fleet:
    """Some hosts or machines, one inventory. `settings` holds node file and dotted overrides per host, and under "connect" another
    way in than root; change them and run again."""

    hosts: Sequence[Server]
    directory: Path
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    key: str = field(default="", repr=False)  # a failing test prints its arguments

    def __post_init__(self) -> None:
        for host in self.hosts:
            self.settings.setdefault(host.name, {"node": NODES[host.kind], "set": {}})
            self.settings[host.name]["set"]["gateway.keys_file"] = str(self.keys_file)
        if not self.key:
            self.key = self.add_key("tester")
        self.write()

    @property
    def keys_file(self) -> Path:
        """Where this fleet's key hashes are kept on the controller."""
        return self.directory / "keys.yaml"

    @property
    def inventory(self) -> Path:
        """The inventory file."""
        return self.directory / "inventory.py"

    def write(self) -> None:
        """Write inventory and settings."""
        (self.directory / "settings.json").write_text(json.dumps(self.settings))
        self.inventory.write_text(INVENTORY)
        if not (self.directory / "nodes").exists():
            (self.directory / "nodes").symlink_to(REPOSITORY / "inventory" / "nodes")

    def set(self, name: str, **settings: Any) -> None:
        """Change settings of one host by dotted path (written with __ for a dot)."""
        self.settings[name]["set"] |= {path.replace("__", "."): value for path, value in settings.items()}

    def gpuwright(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``gpuwright …`` as a user types it."""
        done = subprocess.run(
            [sys.executable, "-m", "gpuwright", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def add_key(self, name: str) -> str:
        """Make an API key; returns the key itself."""
        return self.gpuwright("key", "add", name, "--file", str(self.keys_file)).stdout.strip()

    def pyinfra(self, *options: str, timeout: float = 900, environment: dict[str, str] | None = None) -> Run:
        """``pyinfra INVENTORY deploy.py`` with `options`; ``--json`` is added to read what happened."""
        self.write()
        done = subprocess.run(
            [Path(sys.executable).with_name("pyinfra"), "--json", str(self.inventory), "deploy.py", *options],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | (environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        run = Run(done.returncode, done.stderr)
        try:
            run.changed, run.failed = operations(done.stdout)
        except NoDocument:
            run.said += done.stdout
        return run

    def deploy(self, *options: str, timeout: float = 900) -> Run:
        """A real run that must succeed."""
        run = self.pyinfra("-y", *options, timeout=timeout)
        assert run.status == 0, run.said[-6000:]
        return run

    def dry(self) -> Run:
        """What a run would change."""
        run = self.pyinfra("--dry")
        assert run.status == 0, run.said[-6000:]
        return run

    def audit(self) -> list[str]:
        """Controls that are not green, as the JUnit report of ``pytest tests/audit`` has them."""
        report = self.directory / "audit.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/audit", "--inventory", self.inventory, f"--junitxml={report}"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))
        assert len(cases) >= 40, done.stdout[-3000:]
        return [
            case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
        ]

    def client(self, host: Server, key: str | None = "", timeout: float = 60) -> httpx.Client:
        """An HTTP client of the host's gateway; `key` None sends none."""
        key = self.key if key == "" else key
        headers = {"Host": "gateway.lab"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return _Client(
            base_url=f"https://{host.address}",
            headers=headers,
            verify=False,
            timeout=timeout,
        )


class _Client(httpx.Client):
    """Sends the name the gateway's certificate is for."""

    def build_request(self, *arguments: Any, **options: Any) -> httpx.Request:
        request = super().build_request(*arguments, **options)
        request.extensions["sni_hostname"] = "gateway.lab"
        return request


def boot(names: list[str], directory: Path, release: str = "trixie") -> Fleet:
    """Blank hosts, booted, the simulated engine's image in the registry and the hub stand-in running."""
    return prepare(lab.up(names, release, blank=True), directory)


def prepare(servers: Sequence[Server], directory: Path) -> Fleet:
    """Booted hosts or machines, the simulated engine's image in the registry and the hub stand-in running."""
    from lab import hub, images

    images.build("sim")
    hub.serve()
    return Fleet(servers, directory)
