"""What the gateway lets through, with the real Caddy: every refusal is also seen not to have reached the engine."""

from __future__ import annotations

import base64
import json
import re
import time

import pytest

from roles.gateway import keys


@pytest.fixture(autouse=True)
def _nothing_arrived_yet(gateway):
    for stub in gateway.engines:
        stub.requests.clear()


def _host(gateway) -> str:
    return f"Host: gateway.test:{gateway.port}\r\n"


def _bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


def _get(gateway, path: str, *headers: str) -> bytes:
    return gateway.raw(f"GET {path} HTTP/1.1\r\n{_host(gateway)}{''.join(headers)}Connection: close\r\n\r\n".encode())


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


def test_a_key_opens_the_api(gateway):
    assert gateway.get("/v1/models", gateway.key) == (200, '{"engine": "a", "path": "/v1/models"}')
    assert gateway.arrived() == ["GET /v1/models HTTP/1.1"]


def test_no_key(gateway):
    status, body = gateway.get("/v1/models")
    assert status == 401
    assert json.loads(body)["error"]["code"] == 401
    headers = {name.lower(): value for name, value in gateway.answer_headers}
    assert headers["www-authenticate"] == 'Bearer realm="gpuwright"'
    assert headers["connection"] == "close"
    assert "server" not in headers
    assert gateway.arrived() == []


def _bad_authorizations(gateway) -> dict[str, list[str]]:
    good = gateway.key
    pair = base64.b64decode(good[3:]).decode()
    other = keys.generate("mallory-01" + "x")[0]
    wrong = "sk-" + base64.b64encode(f"{pair.split(':')[0]}:{'x' * 42}".encode()).decode()
    return {
        "known id, wrong secret": [_bearer(wrong)],
        "unknown id": [_bearer(other)],
        "basic, directly": [f"Authorization: Basic {good[3:]}\r\n"],
        "good, then bad": [_bearer(good), _bearer(wrong)],
        "bad, then good": [_bearer(wrong), _bearer(good)],
        "good twice": [_bearer(good), _bearer(good)],
        "good, then basic": [_bearer(good), f"Authorization: Basic {good[3:]}\r\n"],
        "two spaces": [f"Authorization: Bearer  {good}\r\n"],
        "a tab": [f"Authorization: Bearer\t{good}\r\n"],
        "lower-case scheme": [f"Authorization: bearer {good}\r\n"],
        "no scheme": [f"Authorization: {good}\r\n"],
        "one character short": [_bearer(good[:-1])],
        "one character long": [_bearer(good + "A")],
        "a comma and more": [_bearer(good + ", Bearer x")],
        "in X-Api-Key": [f"X-Api-Key: {good}\r\n"],
        "in Proxy-Authorization": [f"Proxy-Authorization: Bearer {good}\r\n"],
        "in a cookie": [f"Cookie: Authorization=Bearer {good}\r\n"],
        "claims the name only": ["X-Key-Id: alice-01\r\n"],
        "empty": ["Authorization: \r\n"],
        "underscore header": [f"Authorization_: Bearer {good}\r\n"],
    }


@pytest.mark.parametrize("case", list(_bad_authorizations(type("G", (), {"key": keys.generate("alice-01")[0]}))))
def test_what_is_no_key(gateway, case):
    answer = _get(gateway, "/v1/models", *_bad_authorizations(gateway)[case])
    assert _status(answer) == 401, answer[:200]
    assert gateway.arrived() == []


def test_a_key_in_the_query_is_no_key_and_is_not_logged(gateway):
    assert _status(_get(gateway, f"/v1/models?api_key={gateway.key}")) == 401
    assert gateway.arrived() == []


def test_an_unknown_id_costs_no_hash(gateway):
    """Caddy hashes at cost 14 for an unknown user, seconds of CPU: the gate keeps unknown ids from it."""
    unknown = keys.generate("mallory-01" + "x")[0]
    began = time.monotonic()
    for _ in range(20):
        assert gateway.get("/v1/models", unknown)[0] == 401
    assert time.monotonic() - began < 2


PATHS = {
    # path: status with a valid key. 404 is the gateway's; 400 is Go's refusal of the request line.
    "//v1/models": 404,
    "/v1//models": 404,
    "/v1/./models": 404,
    "/./v1/models": 404,
    "/v1/../metrics": 404,
    "/v1/models/../../metrics": 404,
    "/metrics/../v1/models": 404,
    "/V1/Models": 404,
    "/v1/models/": 404,
    "/v1/models//": 404,
    "/v1/models;x": 404,
    "/v1/models;/../metrics": 404,
    "/v1/models%2f": 404,
    "/v1%2fmodels%2f..%2f..%2fmetrics": 404,
    "/v1/models%2f..%2f..%2fmetrics": 404,
    "/%2e%2e/metrics": 404,
    "/v1/%2e%2e/metrics": 404,
    "/v1/models%00": 404,
    "/v1/models%00/metrics": 404,
    "/v1\\models": 404,
    "/v1/models\\..\\..\\metrics": 404,
    "/v1/models%3f": 404,
    "/v1/models%20": 404,
    "/v1/models%0d%0aX-Key-Id:%20root": 404,
    "/v1/models%23": 404,
    "/v1/models.": 404,
    "/v1/models.json": 404,
    "/v1/modelſ": 404,
    "/v1/models%c5%bf": 404,
    "/v1/%E2%80%AE/models": 404,
    "/metrics?x=/v1/models": 404,
    "/?/v1/models": 404,
    "http://gateway.test/metrics": 404,
    "/v1/%zz": 400,
    "*": 404,
    "/{engine_path}": 404,
    "/{http.request.header.Authorization}": 404,
    "/glm-5.3-flash/../metrics": 404,
    "/glm-5.3-flash": 404,
    "/glm-5.3-flash/v1": 404,
    "/glm-5.3-flash/metrics": 404,
    "/GLM-5.3-flash/v1/models": 404,
}


@pytest.mark.parametrize(("path", "status"), PATHS.items())
def test_path_tricks(gateway, path, status):
    answer = _get(gateway, path, _bearer(gateway.key))
    assert _status(answer) == status, answer[:300]
    assert gateway.arrived() == []


SHUT = [
    "/metrics",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/docs/oauth2-redirect",
    "/tokenize",
    "/detokenize",
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/flush_cache",
    "/invocations",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/health",
    "/ping",
    "/load",
    "/version",
    "/server_info",
    "/get_server_info",
    "/generate",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/kv_event_sources",
    "/generative_scoring",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/systemone",
    "/update_weights_from_disk",
]


@pytest.mark.parametrize("path", SHUT)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_stays_shut(gateway, method, path):
    status, body = gateway.request(method, path, gateway.key)
    assert (status, json.loads(body)["error"]["code"]) == (404, 404)
    assert gateway.arrived() == []


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_other_methods(gateway, method):
    answer = gateway.raw(
        f"{method} /v1/models HTTP/1.1\r\n{_host(gateway)}{_bearer(gateway.key)}Connection: close\r\n\r\n".encode()
    )
    assert _status(answer) in (400, 404), answer[:200]
    assert gateway.arrived() == []


def test_an_encoded_letter_arrives_as_the_constant(gateway):
    assert _status(_get(gateway, "/v1/%6dodels", _bearer(gateway.key))) == 200
    assert gateway.arrived() == ["GET /v1/models HTTP/1.1"]


def test_the_query_ends_at_the_gateway(gateway):
    assert _status(_get(gateway, "/v1/models?x=1&api_key=abc", _bearer(gateway.key))) == 200
    assert gateway.arrived() == ["GET /v1/models HTTP/1.1"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/embeddings")],
)
def test_an_alias_is_rewritten(gateway, method, path):
    body = "{}" if method == "POST" else None
    assert gateway.request(method, f"/glm-5.3-flash{path}", gateway.key, body=body)[0] == 200
    assert gateway.request(method, path, gateway.key, body=body)[0] == 200
    assert gateway.arrived() == [f"{method} {path} HTTP/1.1"] * 2


def test_the_engine_hears_the_name_and_never_the_key(gateway):
    key = gateway.key
    headers = {
        "X-Key-Id": "root",
        "X-Api-Key": "secret-1",
        "Cookie": "session=secret-2",
        "Forwarded": "for=1.2.3.4",
        "X-Forwarded-For": "1.2.3.4",
        "Connection": "Authorization, X-Key-Id, Upgrade",
        "Upgrade": "websocket",
        "X-Session-Id": "s1",
    }
    assert gateway.request("POST", "/v1/chat/completions", key, headers, body='{"a": 1}')[0] == 200
    (request,) = gateway.engines[0].requests
    assert request.all("X-Key-Id") == ["alice-01"]
    for name in ("Authorization", "X-Api-Key", "Cookie", "Forwarded", "Upgrade"):
        assert request.all(name) == [], name
    assert request.all("X-Forwarded-For") == ["127.0.0.1"]
    assert request.all("X-Session-Id") == ["s1"]
    assert request.body == b'{"a": 1}'
    assert "server" not in {name.lower() for name, _ in gateway.answer_headers}
    assert "via" not in {name.lower() for name, _ in gateway.answer_headers}


def test_an_oversized_body_is_one_413_and_the_end_of_the_connection(gateway):
    """Without `Connection: close` the rest of the body is parsed as further requests (security.md 1.5)."""
    hidden = f"GET /v1/models HTTP/1.1\r\n{_host(gateway)}{_bearer(gateway.key)}\r\n"
    for shift in (0, 1, 7, 64):
        body = b"x" * shift + (hidden * (2 * 1024**2 // len(hidden))).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{_host(gateway)}{_bearer(gateway.key)}"
        answer = gateway.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"413"], answer[:200]
        assert b"\r\nConnection: close\r\n" in answer
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        answer = gateway.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunked)
        assert re.findall(rb"HTTP/1\.1 (\d+)", answer) in ([b"413"], []), answer[:200]
    assert not [line for line in gateway.arrived() if line.startswith("GET")]


def test_the_limit_itself_passes(gateway):
    assert gateway.request("POST", "/v1/chat/completions", gateway.key, body="x" * 1024**2)[0] == 200
    assert gateway.request("POST", "/v1/chat/completions", gateway.key, body="x" * (1024**2 + 1))[0] == 413


SMUGGLING = {
    "CL and TE": "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "two lengths": "Content-Length: 0\r\nContent-Length: 44\r\n\r\n",
    "TE twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "TE with a space": "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "TE with a tab": "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "TE unknown": "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "length with a sign": "Content-Length: +0\r\n\r\n",
    "length in hexadecimal": "Content-Length: 0x0\r\n\r\n",
    "bare CR": "X: a\rContent-Length: 0\r\n\r\n",
    "folded header": "X: a\r\n Content-Length: 0\r\n\r\n",
    "broken chunk": "Transfer-Encoding: chunked\r\n\r\n3;x=\nabc\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
def test_smuggling(gateway, case):
    """Whatever the first request is taken for, the hidden one gets its own decision: it has no key."""
    hidden = f"GET /metrics HTTP/1.1\r\n{_host(gateway)}X: "
    head = f"POST /v1/chat/completions HTTP/1.1\r\n{_host(gateway)}{_bearer(gateway.key)}"
    answer = gateway.raw((head + SMUGGLING[case] + hidden + "\r\n\r\n").encode("latin-1"))
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    assert len(statuses) <= 2, answer
    assert all("metrics" not in line for line in gateway.arrived())
    assert all(b"GET /metrics" not in request.body for request in gateway.engines[0].requests)


@pytest.mark.parametrize(
    "head",
    [
        "GET /v1/models HTTP/1.1\r\n",
        "GET /v1/models HTTP/1.1\r\nHost: \r\n",
        "GET /v1/models HTTP/0.9\r\n",
        "GET /v1/models\r\n",
        "GET /v1/models HTTP/3.0\r\n",
    ],
)
def test_no_host(gateway, head):
    answer = gateway.raw(f"{head}{_bearer(gateway.key)}\r\n".encode())
    assert _status(answer) in (0, 400, 505), answer[:200]
    assert gateway.arrived() == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "gateway.test.evil", "gateway-health", "gateway-identity"])
def test_another_name_gets_no_answer(gateway, host):
    """Caddy's own answer would be an empty 200."""
    answer = gateway.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n{_bearer(gateway.key)}\r\n".encode())
    assert answer == b""
    assert gateway.arrived() == []


def test_a_large_header(gateway):
    assert _status(_get(gateway, "/v1/models", _bearer(gateway.key), f"X: {'x' * 40_000}\r\n")) == 431
    assert gateway.arrived() == []


def test_healthz_needs_no_key(gateway):
    assert gateway.get("/healthz") == (200, "ok")
    assert gateway.request("POST", "/healthz")[0] == 401


def test_the_log_has_the_name_and_no_key_material(gateway):
    key = gateway.key
    gateway.request("POST", "/v1/chat/completions", key, {"X-Api-Key": key, "Cookie": key}, body='{"prompt": "PROMPT"}')
    gateway.get(f"/v1/models?key={key}", key)
    gateway.get(f"/{key}", key)
    _get(gateway, f"/v1/models?Authorization={key}", f"Authorization: Basic {key[3:]}\r\n")
    gateway.wait_for(lambda: gateway.logs().count("alice-01") >= 2, "the access log")
    logs = gateway.logs()
    lines = [json.loads(line) for line in (gateway.directory / "log" / "access.log").read_text().splitlines()]
    assert {line["user_id"] for line in lines} >= {"", "alice-01"}
    assert any(line["upstream"] == f"127.0.0.1:{gateway.engines[0].port}" for line in lines)
    identifier, secret = base64.b64decode(key[3:]).decode().split(":")
    assert identifier == "alice-01"
    for form in (
        key,
        key[3:],
        secret,
        base64.b64encode(secret.encode()).decode().rstrip("=")[:-1],
        secret.encode().hex(),
    ):
        assert form not in logs, form
    assert key[-40:] not in logs
    assert "PROMPT" not in logs
    assert all(entry.hash not in logs for entry in gateway.entries)


def test_the_log_and_the_sockets_are_private(gateway):
    assert (gateway.directory / "log" / "access.log").stat().st_mode & 0o777 == 0o600
    for name in ("admin.sock", "identity.sock"):
        assert (gateway.directory / "run" / name).stat().st_mode & 0o777 == 0o600
    assert not list(gateway.directory.rglob("autosave.json"))
