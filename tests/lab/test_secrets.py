"""Secrets appear nowhere: not in what a run says at its most talkative, not in a process list while it runs, not in units,
containers, journals or evidence, not in what the tests leave behind; plain, base64 or hexadecimal."""

from __future__ import annotations

import base64
import subprocess
import threading

import fleet
import pytest

from lab import hub, models
from lab.paths import state

pytestmark = pytest.mark.lab

REPO = "lab/private"
TOKEN = "hf_SEKRETtokenZ7kQ9wLm2"

# Sampled for as long as the run takes: a secret may be in an argument for a moment only.
WATCH = r"""
while [ ! -e /tmp/watch-stop ]; do
  for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline; tr '\0' ' ' <$p/environ; echo; done >>/tmp/watched 2>/dev/null
  sleep 0.02
done
"""

# Everything a person with root, a log shipper or a backup would come across, except the places that hold a secret on purpose.
COLLECT = r"""
cat /tmp/watched
journalctl --no-pager --output=export
systemctl show --no-pager '*'
for unit in $(systemctl list-unit-files --no-legend 'gpuwright-*' | cut -d' ' -f1); do systemctl cat "$unit"; done
docker ps -aq | xargs -r docker inspect
docker ps -aq | xargs -r -n1 docker logs 2>&1
grep -r . /var/lib/gpuwright/evidence /run/gpuwright /var/log/gpuwright-gateway /etc/gpuwright/engines 2>/dev/null
cat /etc/docker/daemon.json /var/lib/gpuwright/owned/*
"""


def forms(secret: str) -> list[bytes]:
    """A secret as it may turn up: plain, base64 at each of the three alignments, hexadecimal."""
    raw = secret.encode()
    found = [raw, raw.hex().encode()]
    for shift in range(3):
        encoded = base64.b64encode(b"x" * shift + raw)
        found.append(encoded[4 if shift else 0 : -4])
    return found


def leaks(text: bytes, secrets: dict[str, str]) -> list[str]:
    return [name for name, secret in secrets.items() if any(form in text for form in forms(secret))]


def test_the_search_finds_what_it_looks_for():
    for shift in range(3):
        text = base64.b64encode(b"y" * shift + TOKEN.encode() + b"tail")
        assert leaks(b"..." + text, {"token": TOKEN}) == ["token"]


def test_no_secret_anywhere(tmp_path_factory, monkeypatch):
    directory = tmp_path_factory.mktemp("secrets")
    monkeypatch.setenv("LAB_HUB_TOKEN", TOKEN)
    hub.serve()
    models.write(state() / "models" / REPO)  # a repository of this test's own: others need no token
    hub.publish(REPO)
    hub.control("access", {"private": [REPO], "tokens": {TOKEN: [REPO]}})
    site = fleet.boot(["secret-1"], directory)
    [host] = site.hosts
    tls_key = directory / "tls.key"
    openssl = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=gateway.lab"
    where = ["-addext", "subjectAltName=DNS:gateway.lab", "-keyout", str(tls_key), "-out", str(directory / "tls.crt")]
    subprocess.run([*openssl.split(), *where], check=True, capture_output=True)
    secrets = {
        "hub token": TOKEN,
        "API key": site.key,
        "API key's secret": base64.b64decode(site.key.removeprefix("sk-")).decode().partition(":")[2],
        "TLS key": "".join(tls_key.read_text().splitlines()[1:-1])[20:60],
    }
    site.set(
        host.name,
        models__items__tiny__repo=REPO,
        models__token={"env": "LAB_HUB_TOKEN"},
        gateway__tls={"mode": "own", "certificate": str(directory / "tls.crt"), "key": {"file": str(tls_key)}},
    )
    try:
        watcher = threading.Thread(target=host.run, args=(WATCH,), kwargs={"check": False, "timeout": 900})
        watcher.start()
        first = site.pyinfra("-y", "--diff", "-vvv", "--debug")
        again = site.pyinfra("--dry", "--diff", "-vvv", "--debug")
        with site.client(host) as client:
            client.get("/v1/models")
            client.get(f"/v1/models?api_key={site.key}", headers={"X-Api-Key": site.key})
        host.run("touch /tmp/watch-stop")
        watcher.join()
        assert first.status == 0, first.said[-3000:]
        assert again.status == 0, again.said[-3000:]
        collected = host.run(COLLECT, check=False, timeout=120).stdout
        for proof_of_sight in ("gpuwright-engine-main.service", "gpuwright-write", "gpuwright-model-tiny.service"):
            assert proof_of_sight in collected, "the search did not look where it should"
        assert leaks(first.said.encode(), secrets) == []
        assert leaks(again.said.encode(), secrets) == []
        assert leaks(collected.encode(), secrets) == []
        settings = (
            (directory / "settings.json").read_bytes() + site.inventory.read_bytes() + site.keys_file.read_bytes()
        )
        assert leaks(settings, secrets) == []
    finally:
        hub.control("access", {})
        host.destroy()
