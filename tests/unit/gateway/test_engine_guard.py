"""Who may ask an engine on its node: what the role makes of the node file. That the kernel does it is shown on hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpuwright.upstreams import Upstream
from roles.gateway import engine_guard

RECORDED = json.loads((Path(__file__).parents[1] / "audit/recorded.json").read_text())


@pytest.mark.parametrize(
    ("only_way_in", "profile", "wanted"),
    [
        (None, "baseline", False),
        (None, "server-cis1", False),
        (None, "strict", True),
        (False, "strict", False),
        (True, "baseline", True),
    ],
)
def test_the_node_file_is_asked_before_the_profile(only_way_in, profile, wanted):
    assert engine_guard.wanted(only_way_in, profile) is wanted


def test_every_engine_s_port_is_shut_to_all_but_root_and_the_gateway():
    engines = [Upstream(name, "lab", "vllm", port, None, False) for name, port in (("b", 18002), ("a", 18001))]
    text = engine_guard.rules(engines, ["gpuwright-gateway", "prometheus"]).decode()
    refusals = [line.strip() for line in text.splitlines() if "reject" in line]
    assert len(refusals) == 2
    assert "ct original proto-dst { 18001, 18002 } ct original ip daddr 127.0.0.0/8" in refusals[0]
    assert all('meta skuid != { "root", "gpuwright-gateway", "prometheus" } ' in line for line in refusals)


def test_a_flushed_chain_is_loaded_again():
    text = "\n".join(RECORDED["gateway-engine-guard"])
    found = engine_guard._parse(text)
    assert found.differences == []
    sha256, live, made = text.split("\n--\n")
    assert live.strip() == made.strip()
    none = engine_guard._parse(f"{sha256}\n--\n\n--\n{made}")
    assert none.differences == ["table inet gpuwright_engines is not loaded"]
    kept = json.loads(live)["nftables"][:3]
    flushed = engine_guard._parse(f"{sha256}\n--\n{json.dumps({'nftables': kept})}\n--\n{made}")
    assert flushed.differences == [
        "chain output: 2 rule(s) are gone, the first: engines are reached by the gateway",
    ]
