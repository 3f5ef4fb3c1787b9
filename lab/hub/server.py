"""The hub stand-in: what a plain downloader and `gpuwright pin` need of a model hub's HTTP API, with faults on demand.

Shapes follow the public API of huggingface.co as its client library uses it (huggingface_hub: hf_api.py for
``/api/models/…``, file_download.py for ``/resolve/``): a commit instead of a branch, paged file lists with ``Link``,
git blob ids for small files and sha256 for LFS files, and a redirect to a signed address elsewhere for LFS bytes.

    GET  /api/models/{repo}/revision/{revision}            {"id", "sha", "siblings": [{"rfilename"}], …}
    GET  /api/models/{repo}/tree/{revision}?recursive=true [{"type", "path", "size", "oid", "lfs": {…}}, …], paged
    GET, HEAD /{repo}/resolve/{revision}/{path}            the bytes, or 302 to /cdn/… for LFS files
    GET, HEAD /cdn/{repo}/{commit}/{path}?signature=…      LFS bytes; refuses a request that carries a token
    GET, POST, DELETE /stand-in/faults                     Fault objects as a JSON list
    POST /stand-in/access                                  {"private": [repo…], "gated": [repo…], "tokens": {token: [repo…]}}
    GET, DELETE /stand-in/requests                         what was asked: method, path, range, authorization seen, status, bytes

A model is a directory ``<root>/<org>/<name>/`` (branch main) or ``<root>/<org>/<name>@<branch>/``. Its commit is a hash
of paths and contents, so the same files give the same commit everywhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import hmac
import json
import os
import secrets
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
LFS_SIZE = 10 * 1024**2
"""Bytes from which the real hub demands LFS."""
BLOCK = 1024**2
STALL = 3600
"""Seconds a stalled connection is held open; whoever reads it must give up first."""


@dataclass
class Fault:
    """One thing that goes wrong, ``times`` times, for requests that match ``on`` and ``path``."""

    kind: Literal["stall", "cut", "wrong", "short", "long", "slow", "status", "page"]
    on: Literal["list", "resolve", "data"] = "data"
    """``list`` is the API, ``resolve`` the hub's answer about one file, ``data`` whichever answer has the bytes."""
    path: str = "*"
    """Shell pattern for the file's path inside the model (for ``list``: of the repository)."""
    after: int = 0
    """Bytes of the file, counted from its start, that still go out right."""
    times: int | None = 1
    """How often; None is for ever."""
    status: int = 500
    retry_after: str | None = None
    rate: int = 256 * 1024
    """Bytes per second of ``slow``."""


@dataclass(frozen=True)
class Entry:
    """One file of a model as the hub describes it."""

    path: str
    file: Path
    size: int
    sha256: str
    sha1: str
    """git blob id of the file, or of its pointer when it is an LFS file."""
    lfs: bool

    def listed(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "oid": self.sha1, "size": self.size, "path": self.path}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": len(_pointer(self.sha256, self.size))}
        return entry


def _pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Models:
    """The directory of models, hashed once per file and change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hashes: dict[tuple[str, int, int], tuple[str, str]] = {}
        self._lock = threading.Lock()

    def branches(self, repo: str) -> dict[str, Path]:
        """``{"main": directory, …}``; empty when there is no such repository."""
        organisation, _, name = repo.partition("/")
        parent = self.root / organisation
        if not name or not parent.is_dir():
            return {}
        found = {"main": parent / name} if (parent / name).is_dir() else {}
        return found | {d.name.partition("@")[2]: d for d in sorted(parent.glob(f"{name}@*")) if d.is_dir()}

    def commit(self, repo: str, revision: str) -> tuple[str, list[Entry]] | None:
        """Commit id and files for a branch or a commit id; None when there is no such revision."""
        for branch, directory in self.branches(repo).items():
            entries = self._entries(directory)
            digest = hashlib.sha1(repr([(e.path, e.sha256) for e in entries]).encode()).hexdigest()
            if revision in (branch, digest):
                return digest, entries
        return None

    def _entries(self, directory: Path) -> list[Entry]:
        files = sorted(f for f in directory.rglob("*") if f.is_file())
        with self._lock:
            return [self._entry(file, file.relative_to(directory).as_posix()) for file in files]

    def _entry(self, file: Path, path: str) -> Entry:
        status = file.stat()
        lfs = path.endswith(LFS_SUFFIXES) or status.st_size >= LFS_SIZE
        key = (str(file), status.st_size, status.st_mtime_ns)
        if key not in self._hashes:
            with file.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            self._hashes[key] = (sha256, _blob(_pointer(sha256, status.st_size) if lfs else file.read_bytes()))
        sha256, sha1 = self._hashes[key]
        return Entry(path, file, status.st_size, sha256, sha1, lfs)


@dataclass
class State:
    """What all connections share."""

    models: Models
    cdn: str | None = None
    """Base URL that LFS redirects point to; None: this server."""
    page: int = 1000
    pace: int | None = None
    """Bytes per second of all connections together, to stand for a line; None: as fast as it goes."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    faults: list[Fault] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    tokens: dict[str, set[str]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: float = 0.0

    def fault(self, on: str, path: str) -> Fault | None:
        """The first fault that matches; its count goes down."""
        with self.lock:
            for fault in self.faults:
                if fault.on == on and fnmatch.fnmatchcase(path, fault.path) and fault.times != 0:
                    fault.times = None if fault.times is None else fault.times - 1
                    return dataclasses.replace(fault)
        return None

    def sign(self, path: str) -> str:
        return hmac.new(self.key, path.encode(), "sha256").hexdigest()[:32]

    def paced(self, count: int) -> None:
        """Wait until ``count`` more bytes fit the line."""
        if self.pace is None:
            return
        with self.lock:
            self._sent = max(self._sent, time.monotonic()) + count / self.pace
            wait = self._sent - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class Answer(Exception):
    """An answer that ends the request: status, error code as the real hub names it, and a sentence."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "hub-stand-in"
    sys_version = ""
    timeout = 120
    server: Server

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are recorded by :meth:`_serve`; nothing is printed."""

    @property
    def state(self) -> State:
        return self.server.state

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.record: dict[str, Any] = {
            "method": self.command,
            "path": unquote(url.path),
            "range": self.headers.get("Range"),
            "authorization": "Authorization" in self.headers,
            "host": self.headers.get("Host"),
            "status": 0,
            "bytes": 0,
        }
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        parts = unquote(url.path).lstrip("/").split("/")
        if parts[0] != "stand-in":
            with self.state.lock:
                self.state.requests.append(self.record)
        try:
            if parts[0] == "stand-in":
                self._control(parts[1], body)
            elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] in ("revision", "tree"):
                self._api(f"{parts[2]}/{parts[3]}", parts[4], "/".join(parts[5:]), parse_qs(url.query), url.path)
            elif parts[0] == "cdn" and len(parts) >= 5:
                self._cdn(
                    f"{parts[1]}/{parts[2]}", parts[3], "/".join(parts[4:]), unquote(url.path), parse_qs(url.query)
                )
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._resolve(f"{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]))
            else:
                raise Answer(404, "", "hub stand-in: no such address")
        except Answer as answer:
            self._refuse(answer)
        except (ConnectionError, ssl.SSLError, TimeoutError):
            self.close_connection = True

    # -- answers -------------------------------------------------------------------------------------------------

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.record["status"] = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _json(self, value: Any, **headers: str) -> None:
        body = json.dumps(value).encode()
        self._begin(200, len(body), {"Content-Type": "application/json"} | headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, answer: Answer) -> None:
        body = json.dumps({"error": str(answer)}).encode()
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in answer.headers.items()}}
        if answer.code:
            headers |= {"X-Error-Code": answer.code, "X-Error-Message": str(answer)}
        self._begin(answer.status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    # -- the hub -------------------------------------------------------------------------------------------------

    def _allowed(self, repo: str) -> None:
        """Raise what the real hub answers: unknown and private look alike to somebody without a token."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = bool(self.state.models.branches(repo))
        if token and token not in self.state.tokens:
            raise Answer(401, "", "Invalid credentials in Authorization header")
        granted = repo in self.state.tokens.get(token, set())
        if not known or (repo in self.state.private and not granted):
            raise (
                Answer(404, "RepoNotFound", "Repository not found")
                if token
                else Answer(401, "RepoNotFound", "Invalid username or password.")
            )
        if repo in self.state.gated and not granted:
            raise Answer(403 if token else 401, "GatedRepo", f"Access to model {repo} is restricted.")

    def _revision(self, repo: str, revision: str) -> tuple[str, list[Entry]]:
        self._allowed(repo)
        found = self.state.models.commit(repo, revision)
        if found is None:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _status_fault(self, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.kind == "status":
            headers = {"Retry_After": fault.retry_after} if fault.retry_after else {}
            raise Answer(fault.status, "", f"hub stand-in: asked to answer {fault.status}", **headers)
        if fault.kind == "stall":
            self.server.stopping.wait(STALL)
            raise ConnectionError
        if fault.kind == "cut":
            self.close_connection = True
            raise ConnectionError

    def _api(self, repo: str, what: str, revision: str, query: dict[str, list[str]], url: str) -> None:
        fault = self.state.fault("list", repo)
        self._status_fault(fault)
        if fault and fault.kind == "page":
            body = b"<html>Please log in to the network</html>"
            self._begin(200, len(body), {"Content-Type": "text/html"})
            self.wfile.write(body)
            return
        revision, _, _ = revision.partition("/")
        commit, entries = self._revision(repo, revision)
        if what == "revision":
            siblings = [{"rfilename": e.path} for e in entries]
            private, gated = repo in self.state.private, repo in self.state.gated
            self._json({"id": repo, "modelId": repo, "sha": commit, "private": private, "gated": gated,
                        "siblings": siblings})  # fmt: skip
            return
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        listed = list(_tree(entries, recursive))
        limit = min(int(query.get("limit", [str(self.state.page)])[0]), self.state.page)
        start = int(query.get("cursor", ["0"])[0])
        headers = {"X-Repo-Commit": commit}
        if start + limit < len(listed):
            scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
            following = f"{scheme}://{self.headers['Host']}{url}?recursive={str(recursive).lower()}&limit={limit}"
            headers["Link"] = f'<{following}&cursor={start + limit}>; rel="next"'
        self._json(listed[start : start + limit], **headers)

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        self._status_fault(self.state.fault("resolve", path))
        commit, entries = self._revision(repo, revision)
        entry = next((e for e in entries if e.path == path), None)
        if entry is None:
            raise Answer(404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not entry.lfs:
            self._bytes(entry, headers | {"ETag": f'"{entry.sha1}"'})
            return
        location = f"/cdn/{repo}/{commit}/{entry.path}"
        scheme = "https" if isinstance(self.connection, ssl.SSLSocket) else "http"
        base = self.state.cdn or f"{scheme}://{self.headers['Host']}"
        linked = {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
        address = f"{base}{quote(location)}?signature={self.state.sign(location)}"
        body = f"Found. Redirecting to {address}".encode()
        self._begin(302, len(body), headers | linked | {"Location": address})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cdn(self, repo: str, commit: str, path: str, location: str, query: dict[str, list[str]]) -> None:
        if "Authorization" in self.headers:
            # Object stores refuse a signed address together with a token; a token here has also left the hub.
            raise Answer(400, "", "Only one auth mechanism allowed")
        if not hmac.compare_digest(query.get("signature", [""])[0], self.state.sign(location)):
            raise Answer(403, "", "signature missing or wrong")
        found = self.state.models.commit(repo, commit)
        entry = next((e for e in found[1] if e.path == path), None) if found else None
        if entry is None:
            raise Answer(404, "", "no such object")
        self._bytes(entry, {"ETag": f'"{entry.sha256}"', "Accept-Ranges": "bytes"})

    def _bytes(self, entry: Entry, headers: dict[str, str]) -> None:
        """Send a file or the asked range of it, with whatever fault applies."""
        fault = self.state.fault("data", entry.path) if self.command != "HEAD" else None
        if fault and fault.kind == "status":
            self._status_fault(fault)
        start, end, status = 0, entry.size, 200
        wanted = self.headers.get("Range")
        if wanted and wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, entry.size - int(last))
            end = min(entry.size, int(last) + 1) if first and last else entry.size
            if start >= entry.size:
                raise Answer(416, "", "range not satisfiable", Content_Range=f"bytes */{entry.size}")
            status = 206
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{entry.size}"
        stop = end
        if fault and fault.kind in ("short", "cut", "stall"):
            stop = max(start, min(end, fault.after))
        extra = b"more bytes than the file has\n" if fault and fault.kind == "long" else b""
        length = stop - start if fault and fault.kind == "short" else end - start + len(extra)
        self._begin(status, length, headers)
        if self.command == "HEAD":
            return
        with entry.file.open("rb") as file:
            self._send(file, start, stop, fault)
        self.wfile.write(extra)
        if fault and fault.kind == "stall":
            self.server.stopping.wait(STALL)
        if fault and fault.kind in ("cut", "stall"):
            raise ConnectionError

    def _send(self, file: BinaryIO, start: int, stop: int, fault: Fault | None) -> None:
        plain = not isinstance(self.connection, ssl.SSLSocket) and not (fault and fault.kind == "wrong")
        self.wfile.flush()
        while start < stop:
            count = min(BLOCK, stop - start)
            if fault and fault.kind == "slow":
                count = min(count, max(1, fault.rate // 10))
                time.sleep(count / fault.rate)
            self.state.paced(count)
            if plain:
                count = self.connection.sendfile(file, start, count)
            else:
                block = bytearray(os.pread(file.fileno(), count, start))
                if fault and fault.kind == "wrong" and start <= fault.after < start + len(block):
                    block[fault.after - start] ^= 0xFF
                self.wfile.write(block)
            start += count
            self.record["bytes"] += count

    # -- the stand-in's own controls -----------------------------------------------------------------------------

    def _control(self, what: str, body: bytes) -> None:
        state = self.state
        if what == "faults" and self.command == "POST":
            state.faults.extend(Fault(**fault) for fault in json.loads(body))
        elif what == "faults" and self.command == "DELETE":
            state.faults.clear()
        elif what == "requests" and self.command == "DELETE":
            state.requests.clear()
        elif what == "access" and self.command == "POST":
            access = json.loads(body)
            state.private, state.gated = set(access.get("private", [])), set(access.get("gated", []))
            state.tokens = {token: set(repos) for token, repos in access.get("tokens", {}).items()}
        elif what not in ("faults", "requests"):
            raise Answer(404, "", "hub stand-in: faults, access or requests")
        self._json([dataclasses.asdict(f) for f in state.faults] if what == "faults" else list(state.requests))


def _tree(entries: list[Entry], recursive: bool) -> Iterator[dict[str, Any]]:
    directories = sorted({"/".join(e.path.split("/")[:n]) for e in entries for n in range(1, e.path.count("/") + 1)})
    for directory in directories:
        if recursive or "/" not in directory:
            yield {"type": "directory", "oid": _blob(directory.encode()), "size": 0, "path": directory}
    for entry in entries:
        if recursive or "/" not in entry.path:
            yield entry.listed()


class Server(ThreadingHTTPServer):
    """The listening socket; TLS when a certificate is given."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], state: State, *, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        self.state = state
        self.stopping = threading.Event()
        self.tls: ssl.SSLContext | None = None
        if certificate is not None:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(certificate, key)
        super().__init__(address, Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.tls is None:
            return super().finish_request(request, client_address)
        # The handshake happens here, in the connection's own thread: a silent client holds up nobody else.
        request.settimeout(30)
        with self.tls.wrap_socket(request, server_side=True) as connection:
            return super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | ssl.SSLError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.server_address[0]!s}:{self.server_address[1]}"

    def stop(self) -> None:
        """Stop serving; stalled connections end too."""
        self.stopping.set()
        self.shutdown()
        self.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description="hub stand-in: a model hub's HTTP API over a directory (lab only)")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8443)
    parser.add_argument("--root", type=Path, required=True, help="directory with <org>/<name>/ inside")
    parser.add_argument("--certificate", type=Path, help="PEM chain: serve https")
    parser.add_argument("--key", type=Path, help="PEM key, unless the certificate file has it")
    parser.add_argument("--cdn", help="base URL that LFS redirects point to; default: this server")
    parser.add_argument("--pace", type=int, help="bytes per second of all connections together")
    options = parser.parse_args()
    state = State(Models(options.root), cdn=options.cdn, pace=options.pace)
    server = Server((options.address, options.port), state, certificate=options.certificate, key=options.key)
    print(f"hub stand-in on {server.url}, models in {options.root}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
