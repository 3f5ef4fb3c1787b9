"""Debian's docker-registry on the lab's bridge, with TLS by the lab's authority; and a push that needs no Docker."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import urllib.parse
from pathlib import Path

from lab import authority, tools
from lab.command import LabError
from lab.network import Segment
from lab.paths import CACHE, make_private, state
from lab.service import Service

NAME = "registry.lab"
PORT = 5000


def host() -> str:
    """What an image reference of the lab begins with."""
    return f"{NAME}:{PORT}"


def start(segment: Segment) -> None:
    """Start the registry. Its blobs are a cache: they outlive the lab."""
    tools.need(tools.REGISTRY)
    directory = make_private(state() / "services" / "registry")
    blobs = CACHE / f"registry-{segment.number}"
    blobs.mkdir(parents=True, exist_ok=True)
    certificate = authority.issue(NAME, segment)
    config = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(blobs)}, "delete": {"enabled": True}},
        "http": {
            "addr": f"{segment.gateway}:{PORT}",
            "tls": {"certificate": str(certificate.chain), "key": str(certificate.key)},
        },
    }
    # JSON is YAML.
    (directory / "config.yml").write_text(json.dumps(config, indent=1) + "\n")
    Service("registry", ["docker-registry", "serve", str(directory / "config.yml")], segment.gateway, PORT).start()


class Registry:
    """The little of the registry protocol that a push takes (OCI distribution specification 1.1)."""

    def __init__(self, segment: Segment) -> None:
        context = ssl.create_default_context(cafile=str(authority.ca_file()))
        # By address: this machine's /etc/hosts is not the lab's to write.
        self._connection = http.client.HTTPSConnection(segment.gateway, PORT, context=context, timeout=300)

    def has(self, repository: str, digest: str, kind: str = "blobs") -> bool:
        return self._ask("HEAD", f"/v2/{repository}/{kind}/{digest}")[0] == 200

    def push_blob(self, repository: str, path: Path, digest: str) -> None:
        """Upload a file unless the registry has it."""
        if self.has(repository, digest):
            return
        status, headers = self._ask("POST", f"/v2/{repository}/blobs/uploads/")
        if status != 202:
            raise LabError(f"the lab's registry refused an upload to {repository} with status {status}")
        place = urllib.parse.urlsplit(headers["location"])
        query = urllib.parse.urlencode([*urllib.parse.parse_qsl(place.query), ("digest", digest)])
        with path.open("rb") as content:
            status, _ = self._ask(
                "PUT",
                f"{place.path}?{query}",
                content,
                {"Content-Type": "application/octet-stream", "Content-Length": str(path.stat().st_size)},
            )
        if status != 201:
            raise LabError(f"the lab's registry refused blob {digest} of {repository} with status {status}")

    def push_manifest(self, repository: str, tag: str, manifest: bytes, media_type: str) -> str:
        """Publish a manifest under a tag and return its digest."""
        status, _ = self._ask("PUT", f"/v2/{repository}/manifests/{tag}", manifest, {"Content-Type": media_type})
        if status != 201:
            raise LabError(f"the lab's registry refused the manifest of {repository}:{tag} with status {status}")
        return f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def _ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str]]:
        accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        try:
            self._connection.request(method, path, body, {**accept, **(headers or {})})  # type: ignore[arg-type]
            response = self._connection.getresponse()
            response.read()
        except OSError as error:
            raise LabError(f"the lab's registry does not answer: {error}") from None
        return response.status, {name.lower(): value for name, value in response.getheaders()}
