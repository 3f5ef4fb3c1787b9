"""Real vLLM on a booted host, asked through the gateway with the client library that users have.

The engine is vLLM 0.32.0 itself (its CPU build, lab/engines/vllm); the model is lab/models.py's, written by hand: it says
one sentence, and calls a tool when it is given one.
"""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import subprocess
import threading
import time
from http.client import HTTPSConnection
from typing import Any

import fleet
import load
import openai
import pytest
import yaml

import lab
from gpuwright.render import REPOSITORY
from gpuwright.spec import fleet as loading
from lab import hub, images, models
from roles.engine import container, flags

pytestmark = [pytest.mark.lab, pytest.mark.proof]

NAME = "vl-1"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    images.build("vllm")
    hub.serve()
    site = fleet.Fleet(
        lab.up([NAME], blank=True), tmp_path_factory.mktemp("vllm"), settings={NAME: {"node": "lab-vllm", "set": {}}}
    )
    started = time.monotonic()
    site.deploy(timeout=1200)
    print(f"\nblank host to ready: {time.monotonic() - started:.0f} s")
    yield site
    for host in site.hosts:
        host.destroy()


@pytest.fixture(scope="module")
def host(site):
    return site.hosts[0]


class _Named(openai.DefaultHttpxClient):
    """Sends the name that the gateway's certificate is for; the lab has no name service."""

    def build_request(self, *arguments: Any, **options: Any) -> Any:
        request = super().build_request(*arguments, **options)
        request.extensions = {**request.extensions, "sni_hostname": "gateway.lab"}
        return request


def client(host, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"https://{host.address}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        default_headers={"Host": "gateway.lab"},
        http_client=_Named(verify=False),
    )


@pytest.fixture
def user(site, host):
    with client(host, site.key) as user:
        yield user


def arrived(host) -> list[str]:
    """What the engine itself says it was asked, health checks aside."""
    log = host.run("docker logs gpuwright-main 2>&1").stdout.splitlines()
    return [line for line in log if " HTTP/1." in line and "/health" not in line]


def raw(host, method: str, target: str, headers: list[tuple[str, str]], body: bytes = b"") -> int:
    """A request written by hand, byte for byte; the status."""
    trusting = ssl._create_unverified_context()
    connection = HTTPSConnection(host.address, timeout=30, context=trusting)
    connection.sock = trusting.wrap_socket(
        socket.create_connection((host.address, 443), 30), server_hostname="gateway.lab"
    )
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in [("Host", "gateway.lab"), ("Content-Length", str(len(body))), *headers]:
            connection.putheader(name, value)
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_models_are_listed(user):
    assert [model.id for model in user.models.list()] == ["lab"]


def test_a_chat_is_answered(user):
    answer = user.chat.completions.create(model="lab", messages=HELLO)
    assert answer.choices[0].message.content == models.ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.system_fingerprint or "").startswith("vllm-0.32.0"), "the answer is the real engine's"


def test_a_chat_is_streamed(user):
    pieces = list(user.chat.completions.create(model="lab", messages=HELLO, stream=True))
    said = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(said) == models.ANSWER
    assert len([one for one in said if one]) > 3


def test_a_stream_arrives_while_it_is_made(user):
    """A proxy that collects streams collects all of them; an engine on a busy CPU hands on in lumps now and then. So one
    stream of several that arrives piece by piece shows that nothing on the way collects."""
    seen = []
    for _ in range(5):
        started = time.monotonic()
        stream = user.chat.completions.create(
            model="lab", messages=HELLO, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        times = [time.monotonic() for piece in stream if piece.choices]
        assert len(times) > 200
        first = (times[0] - started) / (times[-1] - started)
        lumps = 1 + sum(after - before > 0.002 for before, after in itertools.pairwise(times))
        seen.append((round(first, 2), lumps))
        if first < 0.5 and lumps > 20:
            return
    pytest.fail(f"no stream arrived while it was made; first piece's share of the time, and lumps: {seen}")


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["auto", "required", "named"],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_tool_is_called(user, choice, streamed):
    asked: dict[str, Any] = {
        "model": "lab",
        "messages": [{"role": "user", "content": "What is the weather in Berlin right now? Use the tool."}],
        "tools": [WEATHER],
        "tool_choice": choice,
    }
    if not streamed:
        [call] = user.chat.completions.create(**asked).choices[0].message.tool_calls or []
        name, arguments = call.function.name, call.function.arguments
    else:
        deltas = [
            piece.choices[0].delta for piece in user.chat.completions.create(**asked, stream=True) if piece.choices
        ]
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        name = "".join(call.name or "" for call in calls)
        arguments = "".join(call.arguments or "" for call in calls)
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": "lab"}


def test_an_agent_goes_round(user):
    messages: Any = [{"role": "user", "content": "What is the weather in Berlin?"}]
    first = user.chat.completions.create(model="lab", messages=messages, tools=[WEATHER]).choices[0].message
    [call] = first.tool_calls or []
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = user.chat.completions.create(model="lab", messages=messages, tools=[WEATHER]).choices[0].message
    assert (last.content, last.tool_calls) == (models.ANSWER, None)


def test_a_prompt_of_6_mib_reaches_the_engine(host, user):
    """The gateway's limit is far above; that the prompt is too long for this model is the engine's own word."""
    before = len(arrived(host))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as refused:
        user.chat.completions.create(
            model="lab", messages=[{"role": "user", "content": "lorem ipsum " * (6 * 1024**2 // 12)}]
        )
    assert refused.value.status_code == 400
    assert len(arrived(host)) == before + 1


def test_what_is_refused_never_reaches_the_engine(site, host):
    question = json.dumps({"model": "lab", "messages": HELLO}).encode()
    chat = "/v1/chat/completions"
    kind = ("Content-Type", "application/json")
    mine = ("Authorization", f"Bearer {site.key}")
    wrong = ("Authorization", f"Bearer {site.key[:-1]}{'A' if site.key[-1] != 'A' else 'B'}")
    before = arrived(host)
    seen = {
        "no key": raw(host, "POST", chat, [kind], question),
        "wrong key": raw(host, "POST", chat, [kind, wrong], question),
        "another scheme": raw(host, "POST", chat, [kind, ("Authorization", f"Basic {site.key}")], question),
        "key in x-api-key": raw(host, "POST", chat, [kind, ("X-Api-Key", site.key)], question),
        "doubled, wrong first": raw(host, "POST", chat, [kind, wrong, mine], question),
        "doubled, right first": raw(host, "POST", chat, [kind, mine, wrong], question),
    }
    assert seen == dict.fromkeys(seen, 401)
    assert 413 in [status for _ in range(5) if (status := too_long(host, chat, [kind, mine]))]
    assert arrived(host) == before


def too_long(host, path: str, headers: list[tuple[str, str]]) -> int | None:
    """The status of a body over the limit; None when the gateway hung up before this client had stopped writing."""
    try:
        return raw(host, "POST", path, headers, b" " * (34 * 1024**2))
    except (ssl.SSLError, ConnectionError):
        return None


SHUT = [
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/generative_scoring"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/inference/v1/abort_requests"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/systemone"),
    ("POST", "/v1/chat/completions/render"),
    ("GET", "/v1/chat/completions"),
    ("DELETE", "/v1/models"),
    # the same places by other spellings
    ("GET", "/v1/models/../../metrics"),
    ("GET", "/v1/models/..%2f..%2fmetrics"),
    ("GET", "/v1/models/%2e%2e/%2e%2e/metrics"),
    ("GET", "/v1//../metrics"),
    ("GET", "//metrics"),
    ("GET", "/./metrics"),
    ("GET", "/%6detrics"),
    ("GET", "/v1/models;/../metrics"),
    ("GET", "/v1/models%00/metrics"),
    ("GET", "/V1/MODELS/../../metrics"),
    ("GET", "/lab/../metrics"),
    ("GET", "/lab/v1/../../metrics"),
    ("POST", "/v1/chat/completions/../../../invocations"),
    ("POST", "/lab/v1/models/..%2f..%2f..%2finvocations"),
    ("GET", "https://gateway.lab/metrics"),
]


def test_what_is_shut_stays_shut_however_it_is_spelt(site, host):
    before = arrived(host)
    mine = ("Authorization", f"Bearer {site.key}")
    seen = {f"{method} {path}": raw(host, method, path, [mine], b"{}") for method, path in SHUT}
    assert {line: status for line, status in seen.items() if status not in (400, 404, 405)} == {}
    assert arrived(host) == before


class Listener(threading.Thread):
    """Streams one answer after another with a key until it is refused, so that a stream runs whenever a key changes."""

    def __init__(self, host, key: str) -> None:
        super().__init__(daemon=True)
        self.host, self.key = host, key
        self.ends: list[tuple[int, str | None]] = []
        self.refused = 0
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(60), "no first token"

    def run(self) -> None:
        with client(self.host, self.key) as user:
            for _ in range(60):
                try:
                    pieces, end = 0, None
                    for piece in user.chat.completions.create(
                        model="lab", messages=HELLO, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
                    ):
                        self.begun.set()
                        pieces += 1
                        end = piece.choices[0].finish_reason if piece.choices else end
                    self.ends.append((pieces, end))
                except openai.AuthenticationError:
                    self.refused += 1
                    return

    def result(self) -> None:
        """Every stream ended as the engine ended it, and what ended the listening was a refusal."""
        self.join(300)
        assert not self.is_alive()
        assert self.refused == 1
        assert self.ends, "no stream ran over the change"
        assert {end for _, end in self.ends} == {"length"}
        assert min(pieces for pieces, _ in self.ends) > 200


def test_a_key_is_rotated_and_revoked_while_a_stream_runs(site, host):
    old = site.add_key("passing")
    site.deploy()
    listener = Listener(host, old)
    fresh = site.gpuwright("key", "rotate", "passing", "--file", str(site.keys_file)).stdout.strip()
    assert fresh != old
    site.deploy()
    assert listener.is_alive(), "a rotation leaves the older key valid"
    with client(host, fresh) as user:
        assert user.models.list().data[0].id == "lab", "and the new one is valid already"

    site.gpuwright("key", "revoke", "passing-01", "--file", str(site.keys_file))
    site.deploy()
    listener.result()
    with client(host, fresh) as user:
        assert user.models.list().data[0].id == "lab", "the newer generation is not revoked with the older"

    site.gpuwright("key", "revoke", "passing", "--file", str(site.keys_file))
    site.deploy()
    with client(host, fresh) as user, pytest.raises(openai.AuthenticationError):
        user.models.list()
    with client(host, site.key) as user:
        assert user.models.list().data[0].id == "lab", "keys that nobody touched work"


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The command line of every vLLM engine of every shipped node file."""
    names = sorted(file.stem for file in (REPOSITORY / "inventory/nodes").glob("*.yaml"))
    inventory = tmp_path_factory.mktemp("every") / "site.py"
    (inventory.parent / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
    inventory.write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        f"hosts = _fleet({{name: {{'node': name}} for name in {names}}}, __file__)\n"
    )
    return {
        f"{node} {name}": container.command_line(engine)
        for node, spec in loading.collect(inventory).specs.items()
        for name, engine in spec.engine.engines.items()
        if engine.settings.kind == "vllm"
    }


def asked_of_the_parser(host, lines: list[list[str]]) -> list[str | None]:
    """vLLM's own parser, in the image that runs on the host."""
    image = host.run("docker inspect --format '{{.Config.Image}}' gpuwright-main").stdout.strip()
    done = subprocess.run(
        [
            *host.ssh_argv(),
            f"docker run --rm -i --network=none --entrypoint=python3 {image} /opt/vllm/parser.py check",
        ],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[str | None] = json.loads(done.stdout)
    return answers


def test_the_p2p_probe_finds_every_lying_copier_out(host):
    """The comparison of role pcie's probe with the torch of an engine's image; the copiers are FAKES on CPU tensors."""
    image = host.run("docker inspect --format '{{.Config.Image}}' gpuwright-main").stdout.strip()
    files = {
        "p2p_copiers.py": REPOSITORY / "tests/unit/pcie/p2p_copiers.py",
        "p2p-probe.py": REPOSITORY / "files/pcie/usr/local/lib/gpuwright/p2p-probe.py",
    }
    for name, file in files.items():
        host.run(f"cat >/run/{name}", stdin=file.read_text())
    mounts = " ".join(f"-v /run/{name}:/{name}:ro" for name in files)
    shut = "--network=none --read-only --user=10001:10001 --entrypoint=python3"
    said = host.run(
        f"docker run --rm {shut} {mounts} {image} -B /p2p_copiers.py /p2p-probe.py 2>&1", timeout=300
    ).stdout
    assert "every FAKE copier is found out" in said


def test_vllms_own_parser_accepts_every_shipped_node_file(host, lines):
    assert len(lines) >= 5
    answers = dict(zip(lines, asked_of_the_parser(host, list(lines.values())), strict=True))
    assert {name: refusal for name, refusal in answers.items() if refusal} == {}


def test_the_parser_and_the_table_refuse_the_same(host):
    wrong = [
        ["--max-model-length=4096"],
        ["--tool-call-parser=glm-47"],
        ["--reasoning-parser=glm4"],
        ["--kv-cache-dtype=fp9"],
        ["--max-num-seqs=many"],
        ["--enforce-eager=true"],
        ["--max-model-len"],
    ]
    right = [
        ["--max_model_len=4096"],
        ["--speculative-config.method=mtp"],
        ["--no-enable-prefix-caching"],
        ["-tp=2"],
        ["-O3"],
    ]
    answers = asked_of_the_parser(host, [["serve", "/model", *words] for words in [*wrong, *right]])
    assert [bool(answer) for answer in answers] == [True] * len(wrong) + [False] * len(right)
    assert [bool(flags.unknown_flags("vllm", words)) for words in [*wrong, *right]] == [
        bool(answer) for answer in answers
    ]


def test_one_of_two_real_engines_is_killed_under_load(site, host):
    """Last in this file: it starts a second engine and kills it."""
    main = yaml.safe_load((REPOSITORY / "inventory/nodes/lab-vllm.yaml").read_text())["engine"]["engines"]["main"]
    site.set(NAME, engine__engines__second={**main, "port": 18002, "after": ["main"]})
    site.deploy(timeout=1200)
    load.kill_under_load(site, host, "second", users=4)
    load.comes_back(site, host, "second", seconds=300)
