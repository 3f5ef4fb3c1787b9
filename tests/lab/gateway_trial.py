"""A lab host with the roles base and gateway only. The engine behind it is a STAND-IN: a second Caddy that answers like one
and writes down what reaches it. systemd, SSH, pyinfra and the gateway itself are real."""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from outcome import NoDocument, operations

from gpuwright.render import REPOSITORY
from lab import hosts
from lab.hosts import Host

DEPLOY = """
from pyinfra.context import ctx_host, ctx_state

from gpuwright import connect, ownership
from gpuwright.spec.fleet import node
from gpuwright.upstreams import upstreams
from roles.base import base
from roles.gateway import gateway

host = ctx_host.get()
connect.keep_tuned(ctx_state.get(), host)
spec = node(host)
ownership.retire_roles(present=[role for role in spec.roles if role in ("base", "gateway")])
base(spec.base, profile=spec.hardening)
if spec.gateway:
    gateway(spec.gateway, engines=upstreams(spec.engine), profile=spec.hardening)
"""

STAND_IN = """
{
	admin off
	persist_config off
	log default {
		output stderr
	}
}
http://:18001 {
	bind 127.0.0.1
	log {
		output file /var/log/stand-in-engine.log
	}
	log_append key_id {http.request.header.X-Key-Id}
	log_append credentials {http.request.header.Authorization}
	respond /health 200
	respond `{"engine":"stand-in"}`
}
"""

START_STAND_IN = """
set -e
[ -e /usr/local/bin/stand-in-engine ] || cp /usr/local/lib/gpuwright/caddy /usr/local/bin/stand-in-engine
systemctl reset-failed stand-in-engine 2>/dev/null || true
systemctl is-active -q stand-in-engine || systemd-run -q --unit stand-in-engine \\
  /usr/local/bin/stand-in-engine run --config /etc/stand-in-engine.Caddyfile --adapter caddyfile
mkdir -p /run/gpuwright/ready
touch /run/gpuwright/ready/main
"""

ENGINE = {
    "image": "registry.test/sim@sha256:" + "0" * 64,
    "model": "tiny",
    "served_name": "lab",
    "port": 18001,
    "settings": {"kind": "vllm", "max_model_len": 4096},
}


@dataclass
class Run:
    """One run of pyinfra: exit status, everything it said, and what changed."""

    status: int
    said: str
    changed: list[str] = field(default_factory=list)


@dataclass
class Trial:
    """`gateway` is that part of the node file; change it and run again."""

    host: Host
    directory: Path
    gateway: dict[str, Any] | None = None
    key: str = ""

    def __post_init__(self) -> None:
        if self.gateway is None:
            self.gateway = {
                "caddy": {"file": f"{sysconfig.get_path('scripts')}/caddy"},
                "hostnames": ["gateway.lab"],
                "listen": [{"address": "0.0.0.0", "port": 443}],
                "aliases": [{"prefix": "/old-model"}],
                "keys_file": str(self.keys_file),
                "drain": "30 s",
            }
        self.key = self.gpuwright("key", "add", "tester", "--file", str(self.keys_file)).stdout.strip()

    @property
    def keys_file(self) -> Path:
        """Names and hashes, on the controller."""
        return self.directory / "keys.yaml"

    def gpuwright(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``gpuwright …`` as a user types it."""
        command = [sys.executable, "-m", "gpuwright", *arguments]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)

    def run(self, *options: str, deploy: str = DEPLOY, as_json: bool = True) -> Run:
        """``pyinfra inventory deploy``; the node file is written first."""
        document: dict[str, Any] = {
            "gpuwright": 1,
            "summary": "a lab host",
            "models": {"items": {"tiny": {"repo": "lab/tiny", "revision": "c" * 40}}},
            "containers": {},
            "engine": {"engines": {"main": ENGINE}},
        }
        if self.gateway:
            document["gateway"] = self.gateway
        (self.directory / "nodes").mkdir(exist_ok=True)
        (self.directory / "nodes/trial.yaml").write_text(yaml.safe_dump(document))
        settings = {
            "node": "trial",
            "ssh_hostname": self.host.address,
            "ssh_user": "root",
            "ssh_key": str(self.host.ssh_key),
            "ssh_known_hosts_file": str(self.host.known_hosts),
        }
        (self.directory / "inventory.py").write_text(
            "from gpuwright.spec.fleet import fleet as _fleet\n"
            f"hosts = _fleet({ {self.host.name: settings}!r}, __file__)\n"
        )
        (self.directory / "deploy.py").write_text(deploy)
        command = [str(Path(sys.executable).with_name("pyinfra")), *(["--json"] if as_json else [])]
        finished = subprocess.run(
            [*command, "inventory.py", "deploy.py", *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        run = Run(finished.returncode, finished.stderr + ("" if as_json else finished.stdout))
        with contextlib.suppress(NoDocument):
            run.changed = operations(finished.stdout)[0].get(self.host.name, [])
        return run

    def deploy(self) -> Run:
        """A real run that must succeed."""
        run = self.run("-y")
        assert run.status == 0, run.said[-4000:]
        return run

    def sh(self, command: str, check: bool = True) -> str:
        """What a command prints on the host."""
        return self.host.run(command, check=check).stdout.strip()

    def start_engine(self) -> None:
        """The stand-in engine, and the ready file that a gate would make."""
        self.host.run(f"cat >/etc/stand-in-engine.Caddyfile <<'EOF'\n{STAND_IN}\nEOF\n{START_STAND_IN}")

    def ask(self, path: str, key: str | None = None, method: str = "GET", port: int = 443, **options: Any) -> int:
        """Status of a request from outside, under the gateway's name, its certificate judged."""
        root = self.directory / "root.crt"
        root.write_text(self.sh("cat /var/lib/gpuwright-gateway/caddy/pki/authorities/local/root.crt"))
        headers = {"Host": f"gateway.lab:{port}"} | ({"Authorization": f"Bearer {key}"} if key else {})
        with httpx.Client(verify=ssl.create_default_context(cafile=str(root)), timeout=20) as client:
            request = client.build_request(
                method,
                f"https://{self.host.address}:{port}{path}",
                headers=headers,
                extensions={"sni_hostname": "gateway.lab"},
                **options,
            )
            return client.send(request).status_code


def blank(name: str, release: str, directory: Path) -> Trial:
    """A blank host, booted, and nothing deployed on it yet."""
    (host,) = hosts.up([name], release, blank=True)
    return Trial(host, directory)
