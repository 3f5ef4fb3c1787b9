"""A node's directories below a temporary folder, with a FAKE docker in the path; the scripts are the real ones."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gpuwright.render import REPOSITORY
from roles.engine import wanted
from roles.engine.spec import EngineSpec
from roles.models.spec import ModelsSpec

SCRIPTS = REPOSITORY / "files/engine/usr/local/lib/gpuwright"
DIGEST = "sha256:" + "b" * 64
REFERENCE = f"registry.test/sim@{DIGEST}"
COMMIT = "a" * 40
MODEL = f"/srv/models/lab/tiny/{COMMIT}"
MODELS = ModelsSpec(hub="https://hub.test", items={"tiny": {"repo": "lab/tiny", "revision": COMMIT}})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Node:
    """One node below `root`, with engine "main"."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.root = root
        self.fake = root / "fake"
        self.port = free_port()
        self.processes: list[subprocess.Popen[str]] = []
        self.fake.mkdir(parents=True)
        bin_ = root / "bin"
        bin_.mkdir()
        (bin_ / "docker").symlink_to(Path(__file__).parent / "fake/docker")
        # Ownership needs root; these tests do not.
        self.program("install", 'mkdir -p "${!#}"')
        self.program("sync", "echo sync >>$FAKE/calls")
        (self.fake / "images").write_text(f"{REFERENCE} sha256:{'c' * 64} {'amd64' if self.x86 else 'arm64'}\n")
        self.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
        self.write("proc/sys/vm/drop_caches", "")
        self.write(f"{MODEL}/model.safetensors", "x" * 100)
        self.write(f"{MODEL}.manifest.json", '{"files": [{"path": "model.safetensors", "size": 100, "sha256": ""}]}')
        self.configure(**settings)

    x86 = os.uname().machine == "x86_64"

    def configure(self, **settings: object) -> None:
        """Write the configuration as the role renders it; `settings` are the engine's, `spec` those of the role."""
        role, gpu_count = settings.pop("spec", {}), settings.pop("gpu_count", 0)
        assert isinstance(role, dict) and isinstance(gpu_count, int)
        engine = {
            "image": REFERENCE,
            "model": "tiny",
            "served_name": "lab",
            "port": self.port,
            "settings": {"kind": "vllm"},
            "drain": 2,
            "stop_timeout": 2,
            "readiness": {"deadline": 20, "conditions_limit": 3},
            **settings,
        }
        spec = EngineSpec(**role, engines={"main": engine})
        self.wanted = wanted("main", spec.engines["main"], spec, MODELS, gpu_count=gpu_count)
        for file in self.wanted.files:
            self.write(file.path, file.data.decode())

    def program(self, name: str, body: str) -> None:
        """A stand-in program in the path, in bash."""
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text)

    def read(self, path: str) -> str:
        return self.path(path).read_text()

    def exists(self, path: str) -> bool:
        return self.path(path).exists()

    @property
    def calls(self) -> list[str]:
        return (self.fake / "calls").read_text().splitlines()

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "GPUWRIGHT_ROOT": str(self.root),
            "FAKE": str(self.fake),
            **more,
        }

    def run(self, script: str, *arguments: str, timeout: float = 30, **environment: str) -> tuple[int, str]:
        """Exit status and output of one script."""
        done = subprocess.run(
            [SCRIPTS / script, *(arguments or ("main",))],
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.returncode, done.stdout

    def begin(self, script: str) -> subprocess.Popen[str]:
        """A script in the background, its output below fake/<script>.out."""
        with (self.fake / f"{script}.out").open("w") as out:
            process = subprocess.Popen(
                [SCRIPTS / script, "main"], env=self.environment(), stdout=out, stderr=subprocess.STDOUT, text=True
            )
        self.processes.append(process)
        return process

    def output(self, script: str) -> str:
        return (self.fake / f"{script}.out").read_text()

    def engine(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        """The simulated engine itself, on the engine's port."""
        process = subprocess.Popen(
            [
                sys.executable,
                REPOSITORY / "lab/engines/sim/server.py",
                *("serve", "/model", "--served-model-name=lab", "--host=127.0.0.1", f"--port={self.port}", *flags),
            ],
            env={**os.environ, **environment},
            stdout=(self.fake / "engine.log").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.killpg(int((self.fake / "pid").read_text()), signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()


def until(condition: object, seconds: float = 10) -> None:
    """Wait for a callable to be true."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
