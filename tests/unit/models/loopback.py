"""The real download script against the hub stand-in on loopback, and what a test asks of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab.hub.server import Fault, Server, State

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "files/models/usr/local/lib/gpuwright/model-fetch"
REPO = "lab/tiny"


@dataclass
class Hub:
    """The stand-in in a thread of the test, and what it served."""

    server: Server
    root: Path

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def state(self) -> State:
        return self.server.state

    def commit(self, repo: str = REPO) -> str:
        found = self.state.models.commit(repo, "main")
        assert found
        return found[0]

    def fault(self, **fault: Any) -> None:
        self.state.faults.append(Fault(**fault))

    def data_bytes(self, path: str = "") -> int:
        """Bytes of file contents sent, for files whose path ends like that."""
        return sum(
            r["bytes"]
            for r in self.state.requests
            if r["path"].endswith(path) and ("/resolve/" in r["path"] or r["path"].startswith("/cdn/"))
        )


@dataclass
class Job:
    """One settings file and the ways to run the script on it."""

    tmp: Path
    hub: Hub
    settings: dict[str, Any] = field(default_factory=dict)
    token: str | None = None

    def __post_init__(self) -> None:
        self.store = self.tmp / "store"
        self.store.mkdir()
        self.run_directory = self.tmp / "run"
        self.settings = {
            "name": "llm", "repo": REPO, "commit": self.hub.commit(), "hub": self.hub.url, "store": self.store,
            "workers": 4, "stall_timeout": 2, "attempts": 3, "reserve": 1024**2, "report_every": 1,
        } | self.settings  # fmt: skip

    @property
    def directory(self) -> Path:
        return Path(self.settings["store"]) / self.settings["repo"] / self.settings["commit"]

    @property
    def manifest_path(self) -> Path:
        return self.directory.with_name(self.settings["commit"] + ".manifest.json")

    @property
    def manifest(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.manifest_path.read_text())
        return loaded

    @property
    def status(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_directory / f"{self.settings['name']}.json").read_text())
        return loaded

    def start(self, *options: str) -> subprocess.Popen[str]:
        configuration = self.tmp / f"{self.settings['name']}.conf"
        configuration.write_text("# test\n" + "".join(f"{k}={v}\n" for k, v in self.settings.items()))
        environment = {"PATH": os.environ["PATH"], "RUNTIME_DIRECTORY": str(self.run_directory)}
        if self.token is not None:
            credentials = self.tmp / "credentials"
            credentials.mkdir(exist_ok=True)
            (credentials / "hub-token").write_text(self.token)
            environment["CREDENTIALS_DIRECTORY"] = str(credentials)
        return subprocess.Popen(
            [str(SCRIPT), *options, str(configuration)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str, timeout: int = 60) -> tuple[int, str]:
        """Exit status and output."""
        process = self.start(*options)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"still running after {timeout} s:\n{output}")
        return process.returncode, output

    def assert_complete(self) -> None:
        """Every byte is what the hub has, readable by an engine's user, and nothing else lies there."""
        original = self.hub.root / self.settings["repo"]
        wanted = {f.relative_to(original).as_posix(): f.read_bytes() for f in original.rglob("*") if f.is_file()}
        got = {
            f.relative_to(self.directory).as_posix(): f.read_bytes() for f in self.directory.rglob("*") if f.is_file()
        }
        assert got.keys() == wanted.keys()
        assert got == wanted
        assert {f["path"] for f in self.manifest["files"]} == wanted.keys()
        for found in self.directory.rglob("*"):
            assert found.stat().st_mode & 0o7777 == (0o755 if found.is_dir() else 0o644)


def wait_until(condition: Any, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.02)
