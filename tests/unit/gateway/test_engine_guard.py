"""Who may ask an engine on its node: what the role makes of the node file. That the kernel does it is shown on hosts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.snapshot import Snapshot
from gpuwright.spec.load import typed
from gpuwright.upstreams import Upstream
from roles.gateway import checks, engine_guard

RECORDED = json.loads((Path(__file__).parents[1] / "audit/recorded.json").read_text())
REASON = "scrapes /metrics of every engine"
LOADER = Path(__file__).parents[3] / f"files/gateway{engine_guard.LOADER}"


@pytest.mark.parametrize(
    ("local_clients", "profile", "wanted"),
    [
        (None, "baseline", False),
        (None, "server-cis1", False),
        (None, "strict", True),
        ({"*": REASON}, "strict", False),
        ({}, "baseline", True),
        ({"prometheus": REASON}, "baseline", True),
    ],
)
def test_the_node_file_is_asked_before_the_profile(local_clients, profile, wanted):
    assert engine_guard.wanted(local_clients, profile) is wanted


def test_every_engine_s_port_is_shut_to_all_but_clients():
    engines = [Upstream(name, "lab", "vllm", port, None, False) for name, port in (("b", 18002), ("a", 18001))]
    text = engine_guard.rules(engines).decode()
    refusals = [line.strip() for line in text.splitlines() if "reject" in line]
    assert len(refusals) == 2
    assert "ct original proto-dst { 18001, 18002 } ct original ip daddr 127.0.0.0/8" in refusals[0]
    assert all("meta skuid != @clients " in line for line in refusals)
    assert "elements = { 0 }" in text, "root alone, until the others are put in"


def test_a_client_that_is_not_there_keeps_nobody_else_out(tmp_path):
    """nft would not load a file with a name that it cannot find, and everything would be open."""
    (tmp_path / "bin").mkdir()
    for name, body in (
        ("nft", f'echo "$*" >>{tmp_path}/said'),
        ("id", "case $2 in gone) exit 1 ;; first) echo 101 ;; last) echo 102 ;; esac"),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "clients").write_text("first\ngone\nlast\n")
    script = LOADER.read_text().replace("/etc/gpuwright/engine-guard", str(tmp_path))
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "said").read_text().splitlines() == [
        f"-f {tmp_path}/table.nft",
        "add element inet gpuwright_engines clients { 101 }",
        "add element inet gpuwright_engines clients { 102 }",
    ]
    assert "no account gone" in done.stderr


def test_a_flushed_chain_is_loaded_again():
    lines = RECORDED["gateway-engine-guard"]
    assert engine_guard._parse("\n".join(lines)).differences == []
    rules, client, live, made = lines
    assert engine_guard._parse("\n".join([rules, client, made])).differences == [
        "table inet gpuwright_engines is not loaded"
    ]
    flushed = json.dumps({"nftables": json.loads(live.removeprefix("live "))["nftables"][:4]})
    assert engine_guard._parse("\n".join([rules, client, f"live {flushed}", made])).differences == [
        "chain output: 2 rule(s) are gone, the first: engines are reached by the gateway",
    ]
    more = live.replace('"elem": [0, 995]', '"elem": [0, 995, 1000]')
    assert engine_guard._parse("\n".join([rules, client, more, made])).differences[0].startswith("chain clients: ")


def test_a_blank_node_has_nothing_and_that_is_an_answer():
    found = engine_guard._parse("")
    assert (found.sha256, found.clients, found.live, found.wanted) == ("", (), None, None)


def verdict(local_clients, hardening, answer):
    """Of GPW-GATE-024, for a node whose units run."""
    node = {
        "gpuwright": 1,
        "summary": "a node",
        "hardening": hardening,
        "models": {"items": {"m": {"repo": "lab/tiny", "revision": "c0ffee" * 6 + "c0ff"}}},
        "engine": {
            "engines": {
                "main": {
                    "model": "m",
                    "port": 18001,
                    "gpus": [],
                    "image": {"repository": "registry.lab/sim", "digest": "sha256:" + "d1" * 32},
                    "settings": {"kind": "vllm", "max_model_len": 4096},
                    "served_name": "lab",
                }
            }
        },
        "gateway": {"hostnames": ["a"], "listen": [{"address": "127.0.0.1", "port": 8443}]},
    }
    if local_clients is not None:
        node["gateway"]["local_clients"] = local_clients
    units = f"Id={engine_guard.UNIT}\nActiveState=active\nUnitFileState=enabled\n"
    seen = Snapshot({"gateway-engine-guard": (0, answer), "units": (0, units)})
    return checks._only_way_in(seen, typed(node))


def test_whoever_is_let_past_is_a_waiver_with_its_reason():
    assert verdict(None, "baseline", "").outcome is Outcome.NOT_APPLICABLE
    everybody = verdict({"*": REASON}, "strict", "")
    assert (everybody.outcome, everybody.actual) == (Outcome.WAIVED, f"everybody: {REASON}")
    one = verdict({"prometheus": REASON}, "strict", "")
    assert one.outcome is Outcome.FAIL
