"""The hub stand-in: a model hub's HTTP API over a directory, with faults on demand. For the lab and tests only."""

from __future__ import annotations

import json
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

from lab import authority, models, network, pins
from lab.hub.server import Models
from lab.paths import make_private, state
from lab.service import Service

NAME = "hub.lab"
PORT = 443
REPO = "lab/tiny"
REPOSITORY = Path(__file__).resolve().parents[2]


def serve() -> None:
    """Start the hub stand-in on the lab's bridge with the tiny model, and pin the commit its branch is at."""
    root = state() / "models"
    models.write(root / REPO)
    segment = network.segment()
    certificate = authority.issue(NAME, segment)
    make_private(state() / "services")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from lab.hub.server import main; main()",
    ]
    command += ["--address", segment.gateway, "--port", str(PORT), "--root", str(root)]
    command += ["--certificate", str(certificate.chain), "--key", str(certificate.key)]
    Service("hub", command, segment.gateway, PORT).start()
    publish(REPO)


def publish(repo: str) -> str:
    """Pin the commit that branch main of a model is at now, for the lab's inventory; returns it."""
    found = Models(state() / "models").commit(repo, "main")
    assert found is not None, f"{state()}/models has no {repo}"
    pins.record("models", f"{repo}@main", found[0])
    return found[0]


def control(what: str, body: Any = None, method: str = "POST") -> Any:
    """Tell the stand-in about faults and access, or ask what it was asked (see lab/hub/server.py)."""
    context = ssl.create_default_context(cafile=str(authority.ca_file()))
    url = f"https://{network.segment().gateway}:{PORT}/stand-in/{what}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        return json.loads(answer.read() or b"null")
