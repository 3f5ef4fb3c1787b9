"""Keys, engines and configurations that change while requests run, with the real Caddy."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from roles.gateway import keys, probe
from roles.gateway.spec import GatewaySpec


def _stream(gateway, key: str, events: int, pause: float, session: str = "s", started: threading.Event | None = None):
    """A streamed answer, to its end; the lines that came."""
    body = json.dumps({"stream": True, "events": events, "pause": pause}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.test:{gateway.port}\r\nAuthorization: Bearer {key}\r\n"
        f"X-Session-Id: {session}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    received = b""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as sock:
        sock.sendall(head.encode() + body)
        while chunk := sock.recv(65536):
            received += chunk
            if started is not None and b"data:" in received:
                started.set()
    return [line for line in received.decode().splitlines() if line.startswith("data:")]


def test_a_rotated_and_a_revoked_key_while_a_stream_runs(launch):
    gateway = launch().all_ready()
    old = gateway.key
    started = threading.Event()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = pool.submit(_stream, gateway, old, 40, 0.1, "s", started)
        assert started.wait(5)

        new = keys.rotate(gateway.entries, "alice")[1]
        gateway.configure()
        assert gateway.run("reload", "--force").returncode == 0
        assert gateway.get("/v1/models", old)[0] == 200
        assert gateway.get("/v1/models", new)[0] == 200

        keys.revoke(gateway.entries, "alice-01")
        wanted = gateway.configure()
        began = time.monotonic()
        assert gateway.run("reload", "--force").returncode == 0
        while gateway.get("/v1/models", old)[0] != 401:
            assert time.monotonic() - began < 1, "a revoked key is refused within a second of the reload"
        assert gateway.get("/v1/models", new)[0] == 200
        assert gateway.identity() == wanted.identity
        assert not stream.done()
        lines = stream.result(20)
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 41


def test_a_broken_configuration_leaves_the_old_one_serving(launch):
    gateway = launch().all_ready()
    before = gateway.identity()
    (gateway.directory / "config" / "Caddyfile").write_text("http://broken {\n\tno_such_directive\n}\n")
    answer = gateway.run("reload")
    assert answer.returncode == 1
    assert "no_such_directive" in answer.stderr
    assert gateway.identity() == before
    assert gateway.get("/v1/models", gateway.key)[0] == 200


def test_a_canary_key_is_in_the_running_gateway_only(launch):
    """A deploy's probe: one more key through the environment of `caddy reload`, gone with the next reload."""
    gateway = launch().all_ready()
    identity = gateway.identity()
    key, hashed = keys.generate("deploy-1")
    assert gateway.get("/v1/models", key)[0] == 401
    answer = gateway.run(
        "reload",
        "--force",
        GPUWRIGHT_CANARY_ID="+deploy-1",
        GPUWRIGHT_CANARY_PREFIX="|" + keys.prefix("deploy-1"),
        GPUWRIGHT_CANARY_ACCOUNT=f"deploy-1 {hashed}",
    )
    assert answer.returncode == 0, answer.stderr
    assert gateway.identity() == f"{identity}+deploy-1", "a run killed here is seen by the next one"
    assert gateway.get("/v1/models", key)[0] == 200
    assert gateway.get("/v1/models", gateway.key)[0] == 200
    spec = GatewaySpec.model_validate(gateway.settings)
    answers = probe.ask(spec, spec.listen[0], "127.0.0.1", key, None)
    assert answers == probe.Answers((), True)
    assert gateway.run("reload", "--force").returncode == 0
    assert gateway.identity() == identity
    assert gateway.get("/v1/models", key)[0] == 401
    for path in gateway.directory.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert hashed.encode() not in content, path
            assert key.encode() not in content, path


def test_the_probe_names_what_is_wrong(launch):
    gateway = launch().all_ready()
    spec = GatewaySpec.model_validate(gateway.settings)
    wrong = keys.generate("deploy-1")[0]
    answers = probe.ask(spec, spec.listen[0], "127.0.0.1", wrong, None)
    place = f"127.0.0.1:{gateway.port}"
    assert answers.faults == (
        f"GET /v1/models with a key at {place}: 401, expected 200 or 503",
        f"GET /metrics with a key at {place}: 401, expected 404",
    )
    nobody = spec.listen[0].model_copy(update={"port": gateway.engines[0].port})
    gateway.engines[0].kill()
    assert probe.ask(spec, nobody, "127.0.0.1", wrong, None).unreachable is not None


def test_not_ready_is_503_and_ready_is_200(launch):
    gateway = launch()
    status, body = gateway.get("/v1/models", gateway.key)
    assert (status, json.loads(body)["error"]["message"]) == (503, "No engine is ready; try again.")
    headers = {name.lower(): value for name, value in gateway.answer_headers}
    assert headers["retry-after"] == "10"
    assert headers["connection"] == "close"
    assert gateway.get("/healthz")[0] == 503
    assert gateway.get("/v1/models")[0] == 401, "without a key it is 401, ready or not"
    assert gateway.get("/metrics", gateway.key)[0] == 404
    assert gateway.arrived() == []

    gateway.all_ready()
    assert gateway.get("/v1/models", gateway.key)[0] == 200
    assert gateway.get("/healthz") == (200, "ok")

    gateway.ready()
    assert gateway.get("/v1/models", gateway.key)[0] == 503, "removing the file drains at once"


def test_a_ready_file_does_not_help_an_engine_that_is_ill(launch):
    gateway = launch()
    gateway.engines[0].healthy = False
    gateway.ready("a")
    time.sleep(2.5)
    assert gateway.get("/v1/models", gateway.key)[0] == 503
    assert gateway.arrived() == []
    gateway.engines[0].healthy = True
    gateway.all_ready()


def test_a_reload_sends_nothing_to_an_engine_that_is_not_ready(launch):
    """Caddy takes every upstream for healthy after a reload, until its first check."""
    gateway = launch(["a", "b"])
    gateway.ready("a")
    gateway.wait_for(lambda: gateway.reached() == {"a"}, "a alone")
    gateway.engines[1].requests.clear()
    for _ in range(3):
        gateway.configure()
        assert gateway.run("reload", "--force").returncode == 0
        time.sleep(0.2)
        for session in range(12):
            assert gateway.get("/v1/models", gateway.key, {"X-Session-Id": str(session)})[0] == 200
    assert gateway.engines[1].requests == []


def test_a_session_stays_with_its_engine_and_one_dies(launch):
    gateway = launch(["a", "b"]).all_ready()

    def engine_of(session: int) -> str:
        status, body = gateway.get("/v1/models", gateway.key, {"X-Session-Id": f"session-{session}"})
        return json.loads(body)["engine"] if status == 200 else f"status {status}"

    homes = {session: engine_of(session) for session in range(12)}
    assert set(homes.values()) == {"a", "b"}
    for _ in range(3):
        assert {session: engine_of(session) for session in homes} == homes

    gateway.engines[0].kill()
    gateway.wait_for(lambda: all(engine_of(session) == "b" for session in homes), "all sessions on b", 15)
    gateway.engines[0].start()
    gateway.wait_for(lambda: {session: engine_of(session) for session in homes} == homes, "a to be back", 15)


def test_one_engine_killed_under_load(launch):
    gateway = launch(["a", "b"]).all_ready()
    stop = time.monotonic() + 4

    def load(worker: int) -> list[int]:
        statuses = []
        while time.monotonic() < stop:
            try:
                statuses.append(gateway.get("/v1/models", gateway.key, {"X-Session-Id": f"w{worker}"})[0])
            except OSError:
                statuses.append(0)
            time.sleep(0.01)
        return statuses

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(load, worker) for worker in range(8)]
        time.sleep(1)
        gateway.engines[0].kill()
        statuses = [status for worker in workers for status in worker.result()]
    refused = [status for status in statuses if status != 200]
    # What was under way on the dead engine's connections is lost (a retry could run a prompt twice); nothing else is.
    assert len(refused) <= 8, refused
    assert set(refused) <= {502}, refused
    assert all(gateway.get("/v1/models", gateway.key, {"X-Session-Id": f"w{n}"})[0] == 200 for n in range(8))


def test_a_client_that_leaves_frees_the_engine(launch):
    gateway = launch().all_ready()
    body = json.dumps({"stream": True, "events": 600, "pause": 0.05}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.test:{gateway.port}\r\n"
        f"Authorization: Bearer {gateway.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as sock:
        sock.sendall(head.encode() + body)
        assert b"200 OK" in sock.recv(4096)
    before = time.monotonic()
    while len(gateway.engines[0].connections) > 1:  # one may be a health check
        assert time.monotonic() - before < 5, "the engine still streams to nobody"
        time.sleep(0.05)


def test_two_models(launch):
    gateway = launch(
        ["a", "b", "c"],
        models=["glm", "glm", "qwen"],
        aliases=[{"prefix": "/qwen", "engine": "c"}, {"prefix": "/old-glm", "engine": "b"}, {"prefix": "/glm"}],
    )
    gateway.ready("a", "b", "c")
    gateway.wait_for(lambda: gateway.reached() == {"a", "b"}, "both engines of the first model")
    gateway.wait_for(lambda: gateway.get("/qwen/v1/models", gateway.key)[0] == 200, "the second model")
    for session in range(8):
        headers = {"X-Session-Id": str(session)}
        assert json.loads(gateway.get("/qwen/v1/models", gateway.key, headers)[1])["engine"] == "c"
        assert json.loads(gateway.get("/old-glm/v1/models", gateway.key, headers)[1])["engine"] in ("a", "b")
        assert json.loads(gateway.get("/glm/v1/models", gateway.key, headers)[1])["engine"] in ("a", "b")


def test_no_keys_at_all(launch):
    gateway = launch(key_names=())
    for text in (None, keys.generate("alice-01")[0], keys.generate("deploy-1")[0]):
        began = time.monotonic()
        assert gateway.get("/v1/models", text)[0] == 401
        assert time.monotonic() - began < 0.5
    assert gateway.run("validate").returncode == 0


def test_extra_paths_open_what_they_say(launch):
    gateway = launch(extra_paths=["POST:/v1/messages"], aliases=[{"prefix": "/glm"}]).all_ready()
    assert gateway.request("POST", "/v1/messages", gateway.key, body="{}")[0] == 200
    assert gateway.request("POST", "/glm/v1/messages", gateway.key, body="{}")[0] == 200
    assert gateway.request("GET", "/v1/messages", gateway.key)[0] == 404
    assert gateway.arrived() == ["POST /v1/messages HTTP/1.1"] * 2


def _root(gateway) -> Path:
    return gateway.directory / "data" / "caddy" / "pki" / "authorities" / "local" / "root.crt"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_tls_internal(launch, name):
    gateway = launch(tls={"mode": "internal"}, hostnames=[name])
    gateway.ready("a")
    gateway.wait_for(lambda: _root(gateway).exists(), "the CA")
    context = ssl.create_default_context(cafile=str(_root(gateway)))
    base = f"https://{name}:{gateway.port}"
    headers = {"Authorization": f"Bearer {gateway.key}"}

    def answers() -> bool:
        try:
            return httpx.get(f"{base}/v1/models", headers=headers, verify=context).status_code == 200
        except httpx.HTTPError:
            return False

    gateway.wait_for(answers, "a certificate and a health check")
    assert httpx.get(f"{base}/v1/models", verify=context).status_code == 401
    with (
        OpenAI(
            base_url=f"{base}/v1", api_key=gateway.key, http_client=httpx.Client(verify=context), max_retries=0
        ) as client,
        pytest.raises(Exception, match="404"),
    ):
        client.get("/metrics", cast_to=object)
    spec = GatewaySpec.model_validate(gateway.settings)
    answered = probe.ask(spec, spec.listen[0], "127.0.0.1", gateway.key, _root(gateway).read_bytes())
    assert answered == probe.Answers((), True)
    # Another Host over a good connection: never an answer of an engine.
    gateway.engines[0].requests.clear()
    try:
        status = httpx.get(f"{base}/v1/models", headers={**headers, "Host": "other"}, verify=context).status_code
        assert status == 421
    except httpx.HTTPError:
        pass
    assert gateway.arrived() == []
    # Another server name: no certificate, no connection.
    unverified = ssl._create_unverified_context()
    with (
        socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as sock,
        pytest.raises((ssl.SSLError, OSError)),
    ):
        unverified.wrap_socket(sock, server_hostname="other.test")
    # An untrusted certificate is a fault, not something to look away from.
    faults = probe.ask(spec, spec.listen[0], "127.0.0.1", gateway.key, None, patience=0).faults
    assert "TLS with" in faults[0]


def test_only_loopback_listens(launch):
    gateway = launch()
    inodes = {
        link.split("[")[1].rstrip("]")
        for fd in Path(f"/proc/{gateway.process.pid}/fd").iterdir()
        if (link := str(fd.readlink())).startswith("socket:")
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(fields[1])
    port, health = gateway.port, gateway.settings["health_port"]
    assert sorted(listening) == sorted([f"0100007F:{port:04X}", f"0100007F:{health:04X}"])


def test_the_health_site_answers_only_for_engines(launch):
    gateway = launch().all_ready()
    health = gateway.settings["health_port"]
    base = f"http://127.0.0.1:{health}/"
    headers = {"Host": f"gateway-health:{health}"}
    address = f"127.0.0.1:{gateway.engines[0].port}"
    assert httpx.get(base, headers={**headers, "X-Upstream": address}).status_code == 200
    assert httpx.get(base + "metrics", headers={**headers, "X-Upstream": address}).text == ""
    assert httpx.get(base, headers={**headers, "X-Upstream": "127.0.0.1:1"}).status_code == 503
    assert httpx.get(base, headers=headers).status_code == 503
    assert gateway.arrived() == []
