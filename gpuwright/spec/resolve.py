"""Asks registries and hubs what a moving name means today: registry protocol v2, and the hub's HTTP API."""

from __future__ import annotations

import hashlib
import io
import json
import re
import ssl
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any

from gpuwright.spec.secret import Secret

TIMEOUT = 30
"""Seconds without an answer."""

_MOST = 16 * 1024**2
_MOST_BINARY = 256 * 1024**2

_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)

CADDY_RELEASE = "https://github.com/caddyserver/caddy/releases/download/v{version}/caddy_{version}_linux_{arch}.tar.gz"


class CannotResolve(Exception):
    """No answer, or one that is no answer. One sentence."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Message
    body: bytes


def image_digest(repository: str, tag: str, architecture: str, ca: Path | None = None) -> str:
    """``sha256:…`` of the manifest or index that a tag names now. Raises CannotResolve.

    The digest is computed from the manifest itself and compared with what the registry says. `architecture` is
    ``amd64`` or ``arm64``: an index without it is refused, because the node could not run it.
    """
    host, _, name = repository.partition("/")
    base = f"{_scheme(host)}://{'registry-1.docker.io' if host == 'docker.io' else host}"
    if host == "docker.io" and "/" not in name:
        name = f"library/{name}"
    url = f"{base}/v2/{name}/manifests/{urllib.parse.quote(tag)}"
    headers = {"Accept": _MANIFESTS}
    answer = _get(url, headers, ca)
    if answer.status == 401:
        token = _registry_token(answer.headers.get("WWW-Authenticate", ""), host, name, ca)
        answer = _get(url, headers, ca, bearer=token)
    if answer.status != 200:
        raise CannotResolve(_refusal(host, f"{name}:{tag}", answer.status, "image"))
    digest = "sha256:" + hashlib.sha256(answer.body).hexdigest()
    told = answer.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise CannotResolve(f"{host} says {told} for {name}:{tag}, but what it sends is {digest}; not pinned")
    platforms = {
        entry.get("platform", {}).get("architecture") for entry in _json(answer, host).get("manifests", [])
    } - {None, "unknown"}
    if platforms and architecture not in platforms:
        raise CannotResolve(f"{repository}:{tag} is built for {', '.join(sorted(platforms))}, not for {architecture}")
    return digest


def model_commit(hub: str, repo: str, revision: str, ca: Path | None = None, token: Secret | None = None) -> str:
    """The 40-digit commit that a branch or tag of a model names now. Raises CannotResolve."""
    url = f"{hub.rstrip('/')}/api/models/{repo}/revision/{urllib.parse.quote(revision, safe='')}"
    host = urllib.parse.urlsplit(hub).netloc
    answer = _get(url, {"Accept": "application/json"}, ca, bearer=token.reveal().decode() if token else None)
    if answer.status != 200:
        raise CannotResolve(_refusal(host, f"{repo}@{revision}", answer.status, "model"))
    commit = _json(answer, host).get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise CannotResolve(f"{host} gives no commit for {repo}@{revision}; is it a hub of models?")
    return commit


def caddy_binary(version: str, architecture: str, url: str | None = None) -> tuple[str, str]:
    """Address and sha256 of a Caddy binary, taken from what the address gives now. Raises CannotResolve."""
    url = url or CADDY_RELEASE.format(version=version, arch=architecture)
    host = urllib.parse.urlsplit(url).netloc
    answer = _get(url, {}, None, most=_MOST_BINARY)
    if answer.status != 200:
        raise CannotResolve(_refusal(host, f"Caddy {version} for {architecture}", answer.status, "release"))
    binary = answer.body
    if url.endswith((".tar.gz", ".tgz")):
        try:
            with tarfile.open(fileobj=io.BytesIO(answer.body), mode="r:gz") as archive:
                member = archive.extractfile("caddy")
                binary = member.read() if member else b""
        except (tarfile.TarError, KeyError, OSError, EOFError):
            raise CannotResolve(f"{url} is no archive with a file 'caddy' in it") from None
    if not binary.startswith(b"\x7fELF"):
        raise CannotResolve(f"{url} holds no Linux program")
    return url, hashlib.sha256(binary).hexdigest()


def _scheme(host: str) -> str:
    """Docker speaks plain HTTP to loopback registries and to nobody else."""
    return "http" if re.fullmatch(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?", host) else "https"


def _registry_token(challenge: str, host: str, name: str, ca: Path | None) -> str:
    """An anonymous pull token, as the registry's challenge says where to get it."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.lower().startswith("bearer") or "realm" not in fields:
        raise CannotResolve(f"{host} wants a login for {name}; write the digest into the node file instead of the tag")
    query = {"scope": fields.get("scope", f"repository:{name}:pull")}
    if "service" in fields:
        query["service"] = fields["service"]
    answer = _get(f"{fields['realm']}?{urllib.parse.urlencode(query)}", {"Accept": "application/json"}, ca)
    body = _json(answer, host) if answer.status == 200 else {}
    token = body.get("token") or body.get("access_token")
    if not isinstance(token, str):
        raise CannotResolve(f"{host} wants a login for {name}; write the digest into the node file instead of the tag")
    return token


def _refusal(host: str, what: str, status: int, kind: str) -> str:
    if status == 404:
        return f"{host} knows no {kind} {what}"
    if status in (401, 403) and kind == "model":
        # the hub does not tell strangers which of its private models exist
        hint = "check its name; a private or gated one needs models.token, and its licence accepted on the hub"
        return f"{host} refuses {kind} {what} (status {status}); {hint}"
    if status in (401, 403):
        return f"{host} refuses {kind} {what} (status {status}); write the digest into the node file"
    if status == 429:
        return f"{host} asks to be left alone for a while (status 429); try again later"
    return f"{host} answers status {status} for {kind} {what}; try again later"


def _get(url: str, headers: dict[str, str], ca: Path | None, bearer: str | None = None, most: int = _MOST) -> _Answer:
    """One GET; any status is an answer. Redirects are followed without the authorization."""
    host = urllib.parse.urlsplit(url).netloc
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "gpuwright", **headers})
        if bearer is not None:
            request.add_unredirected_header("Authorization", f"Bearer {bearer}")
        context = ssl.create_default_context(cafile=None)
        if ca is not None:
            context.load_verify_locations(cafile=str(ca))
        with urllib.request.urlopen(request, timeout=TIMEOUT, context=context) as response:
            return _Answer(response.status, response.headers, _body(response, most, host))
    except urllib.error.HTTPError as error:
        with error:
            return _Answer(error.code, error.headers, b"")
    except ssl.SSLError as error:
        raise CannotResolve(_tls(host, error)) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            raise CannotResolve(_tls(host, error.reason)) from None
        raise CannotResolve(f"cannot reach {host}: {_reason(error.reason)}") from None
    except (TimeoutError, HTTPException, ConnectionError, OSError) as error:
        raise CannotResolve(f"cannot reach {host}: {_reason(error)}") from None
    except ValueError:
        raise CannotResolve(f"{url!r} is not an address that can be asked") from None


def _body(response: Any, most: int, host: str) -> bytes:
    body: bytes = response.read(most + 1)
    if len(body) > most:
        raise CannotResolve(f"{host} sends more than {most // 1024**2} MiB; that is no answer to this question")
    return body


def _json(answer: _Answer, host: str) -> dict[str, Any]:
    try:
        data = json.loads(answer.body)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise CannotResolve(f"{host} answers something that is not JSON; is a proxy or a login page in between?")
    return data


def _tls(host: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return (
            f"the certificate of {host} is not trusted ({why}); name the authority that signed it in "
            "containers.registries (registries) or models.hub_ca (hub)"
        )
    return f"cannot speak TLS with {host}: {error.reason or error}"


def _reason(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer in {TIMEOUT} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason) or type(reason).__name__
