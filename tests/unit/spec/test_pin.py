"""`gpuwright pin` against a registry and a hub of the test's own, over TLS with a certificate authority of its own.

The servers are stand-ins: they answer the few requests that pin makes, and fail in the ways that registries and hubs do.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import ipaddress
import json
import ssl
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import yaml
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpuwright.cli import main
from gpuwright.spec import pins, resolve

COMMIT = "a" * 40
INDEX = json.dumps(
    {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {"digest": "sha256:" + "1" * 64, "platform": {"os": "linux", "architecture": "amd64"}},
            {"digest": "sha256:" + "2" * 64, "platform": {"os": "unknown", "architecture": "unknown"}},
        ],
    }
).encode()
DIGEST = "sha256:" + hashlib.sha256(INDEX).hexdigest()
ELF = b"\x7fELF and more"


class Site(BaseHTTPRequestHandler):
    """Registry, token service, hub and release page in one; `answers` changes what it says."""

    answers: ClassVar = {}
    seen: ClassVar = []

    def do_GET(self):
        path = self.path.split("?")[0]
        Site.seen.append((self.path, self.headers.get("Authorization"), self.headers.get("Accept", "")))
        if path in Site.answers:
            status, headers, body = Site.answers[path]
        elif path == "/token":
            status, headers, body = 200, {}, json.dumps({"token": "anonymous"}).encode()
        elif path.startswith("/v2/") and self.headers.get("Authorization") != "Bearer anonymous":
            realm = f'Bearer realm="https://127.0.0.1:{self.server.server_port}/token",service="r",scope="repository:sim:pull"'
            status, headers, body = 401, {"WWW-Authenticate": realm}, b""
        elif path == "/v2/team/sim/manifests/v1":
            status, headers, body = 200, {"Docker-Content-Digest": DIGEST}, INDEX
        elif path == "/api/models/maker/small/revision/main":
            status, headers, body = 200, {}, json.dumps({"sha": COMMIT}).encode()
        elif path == "/caddy":
            status, headers, body = 200, {}, ELF
        else:
            status, headers, body = 404, {}, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1: certificate file and key file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("authority")
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture
def site(authority, monkeypatch):
    """A running site; `site.host` is its host:port. Loopback registries speak TLS here: Docker's exception is off."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "ca.pem", authority / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    monkeypatch.setattr(resolve, "_scheme", lambda host: "https")
    for proxy in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    Site.answers, Site.seen = {}, []
    server.host = f"127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


NODE = """\
gpuwright: 1
summary: one host for pin
containers:
  registries: [{{host: "{host}", ca: ca.pem}}]
models:
  hub: https://{host}
  hub_ca: ca.pem
  token: {{env: HUB_TOKEN}}
  items:
    small: {{repo: maker/small, revision: main}}
engine:
  engines:
    main:
      image: {host}/team/sim:v1
      model: small
      served_name: small
      port: 18001
      settings: {{kind: vllm}}
"""


@pytest.fixture
def inventory(site, authority, tmp_path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "SEKRET-hub")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes/one.yaml").write_text(NODE.format(host=site.host))
    (tmp_path / "ca.pem").write_bytes((authority / "ca.pem").read_bytes())
    (tmp_path / "prod.py").write_text(
        'from gpuwright.spec.fleet import fleet as _fleet\ngpu_nodes = _fleet({"gpu-01": {"node": "one"}}, __file__)\n'
    )
    return tmp_path / "prod.py"


def run(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert "Traceback" not in done.output
    assert "SEKRET" not in done.output
    return done


def test_an_unpinned_deploy_is_refused_with_the_command_that_pins(inventory, site):
    done = run("check", "prod.py")
    assert done.exit_code == 1
    assert done.output.splitlines()[1:] == [
        "nodes/one.yaml:10  models.items.small.revision  maker/small@main  is not pinned; "
        "run: gpuwright pin prod.py --only maker/small@main",
        f"nodes/one.yaml:14  engine.engines.main.image  {site.host}/team/sim:v1  is not pinned; "
        f"run: gpuwright pin prod.py --only {site.host}/team/sim:v1",
    ]
    assert run("check", "prod.py", "--allow-unfinished").exit_code == 0


def test_pin_writes_what_registry_and_hub_say_and_then_the_deploy_is_right(inventory, site):
    done = run("pin", "prod.py")
    assert done.exit_code == 0
    assert f"{site.host}/team/sim:v1: nothing -> {DIGEST}" in done.output
    assert f"maker/small@main: nothing -> {COMMIT}" in done.output
    lock = yaml.safe_load((inventory.parent / "pins.lock.yaml").read_text())
    assert lock == {
        "images": {f"{site.host}/team/sim:v1": DIGEST},
        "models": {"maker/small@main": COMMIT},
        "caddy": {},
    }
    assert run("check", "prod.py").exit_code == 0
    # the token goes to the hub and to nobody else
    for path, authorization, _ in Site.seen:
        assert (authorization == "Bearer SEKRET-hub") == path.startswith("/api/")
    again = run("pin", "prod.py")
    assert again.exit_code == 0
    assert "(unchanged)" in again.output
    assert "pins.lock.yaml was right already" in again.output


def test_a_moved_tag_shows_old_and_new(inventory, site):
    run("pin", "prod.py")
    moved = INDEX + b" "
    new = "sha256:" + hashlib.sha256(moved).hexdigest()
    Site.answers["/v2/team/sim/manifests/v1"] = (200, {}, moved)
    done = run("pin", "prod.py", "--only", f"{site.host}/team/sim:v1")
    assert f"{site.host}/team/sim:v1: {DIGEST} -> {new}" in done.output
    assert pins.read(None, inventory).lock.images == {f"{site.host}/team/sim:v1": new}
    assert pins.read(None, inventory).lock.models == {"maker/small@main": COMMIT}


def test_json(inventory, site):
    done = CliRunner().invoke(main, ["pin", "prod.py", "--json"])
    data = json.loads(done.output)
    assert data["written"] is True
    assert data["failed"] == []
    assert {line["key"]: (line["old"], line["new"]) for line in data["pins"]} == {
        f"{site.host}/team/sim:v1": (None, DIGEST),
        "maker/small@main": (None, COMMIT),
    }


def test_only_something_that_is_not_there(inventory):
    done = run("pin", "prod.py", "--only", "maker/smal@main")
    assert done.exit_code == 1
    assert "maker/smal@main: not what this inventory pins; it pins 127.0.0.1:" in done.output


MANIFEST, REVISION = "/v2/team/sim/manifests/v1", "/api/models/maker/small/revision/main"


@pytest.mark.parametrize(
    ("path", "answer", "sentence"),
    [
        (MANIFEST, (404, {}, b""), "{host} knows no image team/sim:v1"),
        (
            MANIFEST,
            (403, {}, b""),
            "{host} refuses image team/sim:v1 (status 403); write the digest into the node file",
        ),
        (MANIFEST, (429, {}, b""), "{host} asks to be left alone for a while (status 429); try again later"),
        (MANIFEST, (503, {}, b""), "{host} answers status 503 for image team/sim:v1; try again later"),
        (
            MANIFEST,
            (401, {"WWW-Authenticate": 'Basic realm="x"'}, b""),
            "{host} wants a login for team/sim; write the digest into the node file instead of the tag",
        ),
        (
            MANIFEST,
            (200, {"Docker-Content-Digest": "sha256:" + "f" * 64}, INDEX),
            "{host} says sha256:" + "f" * 64 + f" for team/sim:v1, but what it sends is {DIGEST}; not pinned",
        ),
        (
            MANIFEST,
            (200, {}, INDEX.replace(b"amd64", b"arm64")),
            "{host}/team/sim:v1 is built for arm64, not for amd64",
        ),
        (
            MANIFEST,
            (200, {}, b"<html>please log in</html>"),
            "{host} answers something that is not JSON; is a proxy or a login page in between?",
        ),
        ("/token", (500, {}, b""), "{host} wants a login for team/sim; write the digest into the node file"),
        (REVISION, (404, {}, b""), "{host} knows no model maker/small@main"),
        (
            REVISION,
            (401, {}, b""),
            "{host} refuses model maker/small@main (status 401); check its name; a private or gated one needs models.token",
        ),
        (
            REVISION,
            (200, {}, b'{"sha": "latest"}'),
            "{host} gives no commit for maker/small@main; is it a hub of models?",
        ),
        (REVISION, (200, {}, b"[]"), "{host} answers something that is not JSON; is a proxy"),
    ],
)
def test_an_answer_that_is_none_is_one_sentence_and_writes_nothing(path, answer, sentence, inventory, site):
    Site.answers[path] = answer
    done = run("pin", "prod.py")
    assert done.exit_code == 1
    assert sentence.format(host=site.host) in done.output
    assert "pins.lock.yaml was not changed" in done.output
    assert not (inventory.parent / "pins.lock.yaml").exists()


def test_nobody_there(inventory, site):
    site.shutdown()
    site.server_close()
    done = run("pin", "prod.py")
    assert done.exit_code == 1
    assert f"cannot reach {site.host}: Connection refused" in done.output


def test_a_certificate_of_an_unknown_authority(inventory, site):
    node = inventory.parent / "nodes/one.yaml"
    node.write_text(node.read_text().replace("  hub_ca: ca.pem\n", ""))
    done = run("pin", "prod.py")
    assert done.exit_code == 1
    assert f"the certificate of {site.host} is not trusted (self-signed certificate); name the authority" in done.output


def test_a_redirect_to_elsewhere_does_not_take_the_token_along(inventory, site):
    Site.answers[REVISION] = (307, {"Location": f"https://{site.host}/elsewhere"}, b"")
    Site.answers["/elsewhere"] = (200, {}, json.dumps({"sha": COMMIT}).encode())
    assert run("pin", "prod.py").exit_code == 0
    assert [(path, token) for path, token, _ in Site.seen if path == "/elsewhere"] == [("/elsewhere", None)]


def archive(name, content):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


GATEWAY = """\
gateway:
  caddy: {{url: "https://{host}{path}"}}
  hostnames: [llm.site.internal]
  listen: [{{address: 127.0.0.1, port: 8443}}]
"""


@pytest.mark.parametrize(
    ("path", "body", "sha256"),
    [
        ("/caddy", ELF, hashlib.sha256(ELF).hexdigest()),
        ("/caddy.tar.gz", archive("caddy", ELF), hashlib.sha256(ELF).hexdigest()),
    ],
)
def test_caddy_is_pinned_by_the_hash_of_the_binary(path, body, sha256, inventory, site, monkeypatch, authority):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    Site.answers[path] = (200, {}, body)
    node = inventory.parent / "nodes/one.yaml"
    node.write_text(node.read_text() + GATEWAY.format(host=site.host, path=path))
    assert run("pin", "prod.py").exit_code == 0
    pin = pins.read(None, inventory).lock.caddy["2.11.7/amd64"]
    assert (pin.url, pin.sha256) == (f"https://{site.host}{path}", sha256)
    assert run("check", "prod.py").exit_code == 0


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/caddy", b"<html>", "holds no Linux program"),
        ("/caddy.tar.gz", b"<html>", "is no archive with a file 'caddy' in it"),
        ("/caddy.tar.gz", archive("README", b"x"), "is no archive with a file 'caddy' in it"),
    ],
)
def test_something_that_is_not_caddy(path, body, sentence, inventory, site, monkeypatch, authority):
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    Site.answers[path] = (200, {}, body)
    node = inventory.parent / "nodes/one.yaml"
    node.write_text(node.read_text() + GATEWAY.format(host=site.host, path=path))
    done = run("pin", "prod.py")
    assert done.exit_code == 1
    assert f"https://{site.host}{path} {sentence}" in done.output


def test_a_loopback_registry_speaks_http_as_docker_does():
    assert [resolve._scheme(host) for host in ("127.0.0.1:5000", "localhost", "registry.lab:5000", "docker.io")] == [
        "http",
        "http",
        "https",
        "https",
    ]


def test_the_lock_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    file = tmp_path / "pins.lock.yaml"
    pins.write(pins.Lock(models={"a/b@main": COMMIT}), file)
    before = file.read_bytes()
    monkeypatch.setattr(type(file), "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        pins.write(pins.Lock(), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_an_inventory_that_gives_its_pins_itself(inventory):
    inventory.write_text(inventory.read_text().replace("__file__)", "__file__, pins={})"))
    done = run("pin", "prod.py")
    assert done.exit_code == 1
    assert "prod.py gives its pins itself; there is no lock file to write" in done.output
    assert "prod.py gives its pins itself and misses this one" in run("check", "prod.py").output
