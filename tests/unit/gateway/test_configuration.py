"""What node file, engines and keys come to; the text itself is judged by the real Caddy in test_requests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwright import render, sandbox, units
from gpuwright.upstreams import MIB, Upstream, body_limit, upstreams
from roles.engine.spec import EngineSpec
from roles.gateway import keys, probe
from roles.gateway.caddyfile import IDENTITY, configuration
from roles.gateway.facts import GATEWAY, Listener
from roles.gateway.paths import BY_REQUEST, NEVER, OPEN
from roles.gateway.spec import GatewaySpec

A = Upstream("a", "glm", "vllm", 18001, 4096, False)
B = Upstream("b", "glm", "sglang", 18002, 4096, False)
C = Upstream("c", "qwen", "vllm", 18003, 4096, False)


def spec(**settings) -> GatewaySpec:
    return GatewaySpec.model_validate(
        {
            "caddy": {"file": "caddy"},
            "hostnames": ["llm.test"],
            "listen": [{"address": "0.0.0.0", "port": 443}],
            **settings,
        }
    )


def text(engines=(A,), entries=(), certificates=b"", **settings) -> str:
    return configuration(spec(**settings), engines, entries, certificates).caddyfile.decode()


def test_keys_lie_beside_the_inventory():
    given = {"hostnames": ["llm.test"], "listen": [{"address": "0.0.0.0", "port": 443}]}
    context = {"directory": Path("/site/inventory")}
    assert GatewaySpec.model_validate(given, context=context).keys_file == "/site/inventory/keys.yaml"
    given["keys_file"] = "../keys.yaml"
    assert GatewaySpec.model_validate(given, context=context).keys_file == "/site/inventory/../keys.yaml"


@pytest.mark.parametrize(
    ("context", "multimodal", "limit"),
    [
        (None, False, 32 * MIB),
        (1_048_576, False, 32 * MIB),
        (8 * MIB, False, 64 * MIB),
        (1_048_576, True, 96 * MIB),
        (8 * MIB, True, 128 * MIB),
    ],
)
def test_the_body_limit_is_derived(context, multimodal, limit):
    engines = (A, Upstream("x", "glm", "vllm", 1, context, multimodal))
    assert body_limit(engines) == limit
    assert f"\t\tmax_size {limit}\n" in text(engines)


def test_a_limit_of_the_node_file_wins():
    assert f"\t\tmax_size {MIB}\n" in text(body_limit="1 MiB")


def test_engines_as_the_gateway_sees_them():
    image = "registry.test/sim@sha256:" + "0" * 64
    engine = {"image": image, "model": "m", "served_name": "glm"}
    given = EngineSpec.model_validate(
        {
            "engines": {
                "one": {**engine, "port": 18001, "settings": {"kind": "vllm", "max_model_len": 1000}},
                "two": {
                    **engine,
                    "port": 18002,
                    "settings": {"kind": "sglang", "context_length": 2000, "multimodal": True},
                },
            }
        }
    )
    assert upstreams(given) == (
        Upstream("one", "glm", "vllm", 18001, 1000, False),
        Upstream("two", "glm", "sglang", 18002, 2000, True),
    )
    assert upstreams(None) == ()


def test_the_identity_follows_everything_that_runs():
    entries: list[keys.ApiKey] = []
    first = configuration(spec(), (A,), entries)
    assert IDENTITY.search(first.caddyfile.decode())[1] == first.identity
    assert configuration(spec(), (A,), entries) == first
    seen = {first.identity}
    keys.add(entries, "alice")
    for changed in (
        configuration(spec(), (A,), entries),
        configuration(spec(), (A, B), entries),
        configuration(spec(log_keep_days=31), (A,), entries),
        configuration(spec(), (A,), entries, b"a new certificate"),
    ):
        assert changed.identity not in seen
        seen.add(changed.identity)


@pytest.mark.parametrize(
    ("engines", "settings", "sentence"),
    [
        ((), {}, "gateway: this node has no engine to stand in front of"),
        (
            (A, C),
            {},
            "gateway.aliases: lead nowhere to 'qwen' (engine c): /v1 is 'glm', the first engine's; "
            "add - {prefix: /c, engine: c}",
        ),
        (
            (A,),
            {"aliases": [{"prefix": "/x", "engine": "z"}]},
            "gateway.aliases: /x leads to engine 'z'; this node has: a",
        ),
        (
            (A,),
            {"listen": [{"address": "127.0.0.1", "port": 2020}]},
            "gateway.listen.0.port: is gateway.health_port",
        ),
        (
            (A,),
            {"listen": [{"address": "0.0.0.0", "port": 443}, {"address": "10.0.0.1", "port": 443}]},
            "gateway.listen.0.port: is listened on by 0.0.0.0 and by another address",
        ),
        (
            (A,),
            {"tls": {"mode": "acme", "email": "a@b.test"}, "listen": [{"address": "0.0.0.0", "port": 8443}]},
            "gateway.tls.mode: proves the name on port 443",
        ),
        (
            (A,),
            {"extra_paths": ["GET:/metrics"]},
            "gateway.extra_paths.0: stays shut: shows what all clients do",
        ),
        (
            (A,),
            {"extra_paths": ["POST:/collective_rpc"]},
            "gateway.extra_paths.0: stays shut: runs a method by name",
        ),
    ],
)
def test_what_does_not_fit_together(engines, settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        text(engines, **settings)


def test_listeners_are_bound_not_matched():
    """An address in a site name is only a Host matcher: Caddy would listen on all interfaces (security.md 1.4)."""
    rendered = text(
        listen=[
            {"address": "10.0.0.5", "port": 443},
            {"address": "fd00::5", "port": 443},
            {"address": "0.0.0.0", "port": 8888},
        ],
        hostnames=["llm.test", "10.0.0.5", "fd00::5"],
    )
    sites = re.findall(r"(?m)^(https?://\S.*) \{\n\tbind (.*)$", rendered)
    assert sites == [
        ("http://gateway-identity", "unix/{$RUNTIME_DIRECTORY}/identity.sock|0600"),
        ("http://gateway-health:2020", "127.0.0.1"),
        ("https://llm.test:443, https://10.0.0.5:443, https://[fd00::5]:443", "10.0.0.5 [fd00::5]"),
        ("https://:443", "10.0.0.5 [fd00::5]"),
        ("https://llm.test:8888, https://10.0.0.5:8888, https://[fd00::5]:8888", "tcp4/0.0.0.0"),
        ("https://:8888", "tcp4/0.0.0.0"),
    ]


def test_no_passive_checks_and_no_flush_interval():
    """Passive checks let one client take every engine down; -1 keeps engines busy for nobody (security.md 1.5, 1.6)."""
    directives = [line.split()[0] for line in text((A, B)).splitlines() if line.strip() and line.strip()[0] != "#"]
    assert not {"fail_duration", "max_fails", "unhealthy_status", "unhealthy_latency", "flush_interval"} & set(
        directives
    )
    assert {"health_uri", "health_upstream", "persist_config", "skip_install_trust"} <= set(directives)


@pytest.mark.parametrize(
    "tls",
    [
        {"mode": "internal"},
        {"mode": "own", "certificate": "x", "key": {"file": "x"}},
        {"mode": "acme", "email": "ops@llm.test"},
        {"mode": "acme", "email": "ops@llm.test", "directory": "https://ca.test/acme", "ca": "x"},
    ],
)
def test_caddy_accepts_every_kind_of_tls(tls, tmp_path):
    from tests.unit.gateway.conftest import caddy

    entries: list[keys.ApiKey] = []
    keys.add(entries, "alice")
    made = configuration(spec(tls=tls, log_mask_addresses=True), (A, B), entries)
    (tmp_path / "Caddyfile").write_bytes(made.caddyfile)
    (tmp_path / "keys.caddy").write_bytes(made.keys)
    answer = subprocess.run(
        [caddy(), "adapt", "--config", "Caddyfile", "--adapter", "caddyfile"],
        cwd=tmp_path,
        env={"RUNTIME_DIRECTORY": "/run/x", "LOGS_DIRECTORY": "/var/log/x"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Reading the file is enough here: certificates that are not there are `validate`'s business.
    assert answer.returncode == 0, answer.stderr[-500:]
    formatted = subprocess.run([caddy(), "fmt", "Caddyfile"], cwd=tmp_path, capture_output=True, check=False).stdout
    assert formatted == made.caddyfile, "the file on a node reads as Caddy formats it"


def test_every_route_of_the_engine_is_decided():
    """All routes of vLLM 0.32.0, from its own list: open, open on request, or never; nothing by accident."""
    routes = [
        "/detokenize",
        "/docs",
        "/docs/oauth2-redirect",
        "/generative_scoring",
        "/health",
        "/inference/v1/abort_requests",
        "/inference/v1/generate",
        "/invocations",
        "/is_scaling_elastic_ep",
        "/kv_event_sources",
        "/load",
        "/metrics",
        "/openapi.json",
        "/ping",
        "/redoc",
        "/scale_elastic_ep",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/models",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/systemone",
        "/version",
    ]
    opened = {entry.path for entries in OPEN.values() for entry in entries}
    assert not opened & (set(NEVER) | set(BY_REQUEST))
    assert not set(NEVER) & set(BY_REQUEST)
    assert [route for route in routes if route not in opened | set(NEVER) | set(BY_REQUEST)] == []
    rendered = text()
    lines = re.findall(r"(?m)^\t\t(?:GET|POST|DELETE):(\S+) ", rendered)
    assert sorted(lines) == sorted(entry.path for entry in OPEN["vllm"])


# --- the unit -------------------------------------------------------------------------------------------------------


def _unit(low_port=True) -> str:
    return render.template(
        "gateway/etc/systemd/system/gpuwright-gateway.service.j2",
        version="2.11.7",
        drain=600,
        low_port=low_port,
        unit_identity="0" * 32,
        sandbox=sandbox.gateway(low_port).lines(),
    ).decode()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_the_unit_is_hardened(tmp_path):
    unit = _unit()
    assert units.lint("gpuwright-gateway.service", unit) == []
    assert "TimeoutStopSec=600\n" in unit
    assert not [line for line in unit.splitlines() if line.startswith("Exec") and "--environ" in line]
    file = tmp_path / "gpuwright-gateway.service"
    file.write_text(unit)
    answer = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(file)], capture_output=True, text=True, check=False
    ).stdout
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", answer)
    assert score, answer[-500:]
    assert float(score[1]) <= 1.7


def test_a_high_port_needs_no_capability():
    for low_port, capability in ((False, ""), (True, "CAP_NET_BIND_SERVICE")):
        unit = _unit(low_port)
        assert f"\nAmbientCapabilities={capability}\n" in unit
        assert f"\nCapabilityBoundingSet={capability}\n" in unit


# --- what is read from a node, and what is asked of it --------------------------------------------------------------


def test_facts_are_read():
    state = GATEWAY.parse(
        "user yes\nidentity_on_disk 0123\ntls internal\nready a\nready b\n"
        "mode 640 root gpuwright-gateway /etc/gpuwright/gateway/keys.caddy\n"
        "unit User=gpuwright-gateway\nunit ExecStart={ path=/usr/local/lib/gpuwright/caddy ; argv[]=a=b }\n"
        "pid 12\nunit_running 4567\nexe /usr/local/lib/gpuwright/caddy\nexe_is_on_disk yes\nidentity_running 0123\n"
        "listen 127.0.0.1:2020\nlisten *:443\nlisten [fd00::5]:443\n"
    )
    assert state.user_exists and state.exe_is_on_disk
    assert (state.pid, state.identity_on_disk, state.identity_running, state.unit_running) == (
        12,
        "0123",
        "0123",
        "4567",
    )
    assert state.ready == {"a", "b"}
    assert state.tls_on_disk == "internal"
    assert state.unit["User"] == "gpuwright-gateway"
    assert state.unit["ExecStart"].endswith("argv[]=a=b }")
    assert state.modes == {"/etc/gpuwright/gateway/keys.caddy": "0640 root gpuwright-gateway"}
    assert state.listeners == (Listener("*", 443), Listener("fd00::5", 443), Listener("127.0.0.1", 2020))


def test_nothing_there_is_an_answer():
    state = GATEWAY.parse("")
    assert (state.user_exists, state.pid, state.identity_running, state.listeners) == (False, None, None, ())


def test_the_scripts_pass_shellcheck(tmp_path):
    script = tmp_path / "facts.sh"
    script.write_text("#!/bin/sh\n" + GATEWAY.script)
    for file in (script, render.REPOSITORY / "files/gateway/usr/local/lib/gpuwright/gateway-config"):
        answer = subprocess.run(
            [str(Path(sys.executable).parent / "shellcheck"), "--severity=warning", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout


def test_the_questions_for_curl_hold_the_key_on_standard_input():
    requests, codes = probe.curl(spec(), spec().listen, "sk-KEY")
    assert codes == "(401) (200|503) (404)"
    assert requests.count("\nnext\n") == 2
    assert requests.count('header = "Authorization: Bearer sk-KEY"') == 2
    assert 'connect-to = "llm.test:443:127.0.0.1:443"' in requests
