"""The hub stand-in on loopback for every test here."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from lab.hub import weights
from lab.hub.server import Models, Server, State
from tests.unit.models.loopback import REPO, Hub, Job


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    weights.make(root, REPO)
    return root


@pytest.fixture
def hub(hub_root: Path) -> Any:
    if shutil.which("jq") is None or shutil.which("curl") is None:
        pytest.skip("the download script needs jq and curl here: apt-get install jq curl")
    server = Server(("127.0.0.1", 0), State(Models(hub_root)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield Hub(server, hub_root)
    server.stop()
    thread.join()


@pytest.fixture
def job(tmp_path: Path, hub: Hub) -> Job:
    return Job(tmp_path, hub)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ca.crt`` and ``server.pem`` (certificate for 127.0.0.1 with its key)."""
    directory = tmp_path_factory.mktemp("authority")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(*new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test authority",
            "-addext", "basicConstraints=critical,CA:TRUE")  # fmt: skip
    openssl(*new, "-CA", "ca.crt", "-CAkey", "ca.key", "-keyout", "server.key", "-out", "server.crt",
            "-subj", "/CN=hub stand-in", "-addext", "subjectAltName=IP:127.0.0.1",
            "-addext", "basicConstraints=CA:FALSE")  # fmt: skip
    (directory / "server.pem").write_text(
        (directory / "server.crt").read_text() + (directory / "server.key").read_text()
    )
    return directory
