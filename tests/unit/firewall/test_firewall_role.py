"""What the role decides from its settings and from what it saw. No host."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path

import pytest
from pyinfra.api import OperationError

from gpuwright.ingress import Ingress, ingress
from gpuwright.nftables import differences, parse
from gpuwright.spec.load import typed
from roles import firewall as role
from roles.firewall import facts, table
from roles.firewall.spec import FirewallSpec, OpenPort

PORTS = Ingress(ssh=(22,), gateway=(443,))
SPEC = FirewallSpec(ssh=("10.20.0.0/16", "2001:db8::/32"), gateway=("0.0.0.0/0", "::/0"))
RECORDED = json.loads((Path(__file__).parents[1] / "audit/recorded.json").read_text())
LIVE = "\n".join(RECORDED["audit-firewall-table"])


def said(**answers: str) -> facts.Firewall:
    """The observation as the script prints it, parsed."""
    lines = [f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in answers.items()]
    return facts.read("\n".join(lines))


def rules(spec: FirewallSpec = SPEC, ports: Ingress = PORTS) -> list[str]:
    return [line.strip() for line in table.rules(spec, ports).decode().splitlines()]


# --- rules ----------------------------------------------------------------------------------------------------------


def test_both_families_are_opened_for_their_own_networks():
    assert 'ip saddr 10.20.0.0/16 tcp dport 22 counter accept comment "ssh"' in rules()
    assert 'ip6 saddr 2001:db8::/32 tcp dport 22 counter accept comment "ssh"' in rules()
    assert 'meta nfproto ipv4 tcp dport 443 counter accept comment "gateway"' in rules()
    assert 'meta nfproto ipv6 tcp dport 443 counter accept comment "gateway"' in rules()


def test_a_family_without_networks_is_shut():
    found = rules(SPEC.model_copy(update={"gateway": ("10.0.0.0/8",)}))
    assert [line for line in found if 'comment "gateway"' in line] == [
        'ip saddr 10.0.0.0/8 tcp dport 443 counter accept comment "gateway"'
    ]


def test_networks_that_overlap_become_one():
    """nft refuses a set whose intervals conflict."""
    found = rules(SPEC.model_copy(update={"ssh": ("10.20.0.0/16", "10.20.3.0/24", "10.21.0.0/16", "192.0.2.7/32")}))
    assert 'ip saddr { 10.20.0.0/15, 192.0.2.7 } tcp dport 22 counter accept comment "ssh"' in found


def test_a_further_port_is_open_for_programs_and_for_what_containers_publish():
    exporter = OpenPort(port=9100, networks=("10.20.7.0/24",), reason="node exporter")
    found = rules(SPEC.model_copy(update={"ports": (exporter,)}))
    assert 'ip saddr 10.20.7.0/24 tcp dport 9100 counter accept comment "node exporter"' in found
    assert (
        "ct status dnat ip saddr 10.20.7.0/24 meta l4proto tcp ct original proto-dst 9100 counter accept comment "
        '"node exporter"'
    ) in found


def test_ssh_and_the_gateway_are_never_let_through_to_a_container():
    assert not [line for line in rules() if line.startswith("ct status dnat")]


@pytest.mark.parametrize(("egress", "last"), [("established", "drop"), ("any", "accept")])
def test_what_containers_may_open(egress, last):
    text = table.rules(SPEC.model_copy(update={"container_egress": egress}), PORTS).decode()
    chain = text.partition("chain from_containers {")[2].partition("}")[0]
    assert chain.strip().splitlines()[-1].strip().startswith(f"counter {last}")
    assert ('iifname "docker0" counter drop' in text) is (egress == "established")


def test_only_our_table_is_ever_deleted():
    statements = [line for line in rules() if not line.startswith("#")]
    assert statements.index("table inet gpuwright") < statements.index("delete table inet gpuwright")
    assert not [line for line in statements if "flush" in line]
    assert len([line for line in statements if line.startswith(("table ", "delete "))]) == 3


def test_a_gateway_on_loopback_needs_no_port():
    node = {
        "gpuwright": 1,
        "summary": "a node",
        "firewall": {"ssh": ["10.20.0.0/16"], "ssh_ports": [2222, 22]},
        "gateway": {
            "hostnames": ["a"],
            "listen": [{"address": "127.0.0.1", "port": 8443}, {"address": "::", "port": 443}],
        },
    }
    assert ingress(typed(node)) == Ingress(ssh=(22, 2222), gateway=(443,))
    del node["gateway"], node["firewall"]
    assert ingress(typed(node)) == Ingress(ssh=(), gateway=())


# --- what the kernel has ---------------------------------------------------------------------------------------------


def test_counts_and_handles_are_no_difference():
    other = LIVE.replace('"packets": 0', '"packets": 9').replace('"handle": 1,', '"handle": 71,')
    assert other != LIVE
    assert differences(table.TABLE, parse(other), parse(LIVE)) == []


def test_no_table_is_no_difference_to_nothing():
    wanted = parse(LIVE)
    assert differences(table.TABLE, None, wanted) == ["table inet gpuwright is not loaded"]
    assert differences(table.TABLE, wanted, None) == ["the rules in the file cannot be loaded"]


def test_what_differs_is_named():
    wanted = parse(LIVE)
    assert wanted

    def after(change) -> list[str]:
        live = copy.deepcopy(wanted)
        change(live)
        return differences(table.TABLE, live, wanted)

    accept = {"expr": [{"accept": None}]}
    assert after(lambda t: t.pop("refused")) == ["chain refused is gone"]
    assert after(lambda t: t.update(extra=[{}])) == ["chain extra is not ours"]
    assert after(lambda t: t["input"].append(accept)) == [
        'chain input: 1 rule(s) that are not ours, the first: [{"accept": null}]'
    ]
    assert after(lambda t: t["arrival"].pop()) == [
        "chain arrival: 1 rule(s) are gone, the first: loopback addresses are for this machine only"
    ]
    assert after(lambda t: t["input"].insert(1, t["input"].pop(2))) == [
        "chain input: its rules are in another order, or twice"
    ]
    assert after(lambda t: t["input"][0]["chain"].update(policy="accept"))[0].startswith(
        "chain input: hook or policy is "
    )


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_blank_host_has_nothing_and_is_not_refused():
    seen = facts.read("")
    assert (seen.live, seen.wanted, seen.others, seen.client, seen.uplinks) == (None, None, (), None, ())
    role.refuse("gpu-1", seen, SPEC, PORTS)


@pytest.mark.parametrize("client", ["10.20.3.4", "2001:db8::9", "::ffff:10.20.3.4", "127.0.0.1", "::1"])
def test_a_run_that_stays_inside_is_not_refused(client):
    """On loopback ends a forwarder, and what is behind it cannot be seen: the guard decides."""
    role.refuse("gpu-1", said(connection=f"{client} 50000 10.20.0.1 22"), SPEC, PORTS)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"connection": "192.0.2.5 50000 10.20.0.1 22"}, "this run comes from 192.0.2.5, and firewall.ssh lets in 10.20.0.0/16, 2001:db8::/32 only: it would shut itself out. Add that address or its network to firewall.ssh."),
        ({"connection": "10.20.3.4 50000 10.20.0.1 2222"}, "this run came in by port 2222, and the firewall would open 22 for ssh: it would shut itself out. Set firewall.ssh_ports: [2222]."),
        ({"other": "ufw"}, "ufw is active and owns the packet filter of this host; two firewalls are one too many. Put what it allows into firewall.ports, run `ufw disable` and deploy again, or leave out 'firewall:'."),
        ({"read-only": "/etc"}, "/etc is read-only, so rules would be gone with the next boot; make it writable (mount -o remount,rw /), or leave out 'firewall:'."),
        ({"other": "firewalld"}, "run `systemctl disable --now firewalld.service` and deploy again"),
        ({"uplinks": "eno1 br-lan"}, "br-lan leads out of this host, and firewall.container_interfaces takes br-* for a bridge of containers: whoever comes in by it would count as one."),
        ({"interfaces": "lo -\nbr-storage -\ndocker0"}, "br-storage is no bridge, and firewall.container_interfaces takes br-* for a bridge of containers: whoever comes in by it would count as one. Rename br-storage, or set firewall.container_interfaces without br-* (docker0 and br-gpw-* are the default one and those of engines; containers on bridges that are not named there are not reached and open nothing through this machine)."),
        ({"interfaces": "eno1 -\nbr-0a1b\nbr-storage eno2 bond0.20"}, "br-storage has eno2, bond0.20 as a port, which is no container's, and firewall.container_interfaces takes br-* for a bridge of containers"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_sentence(answers, sentence):
    with pytest.raises(OperationError) as error:
        role.refuse("gpu-1", said(**answers), SPEC, PORTS)
    assert sentence in str(error.value)
    assert str(error.value).startswith("gpu-1: ")
    assert str(error.value).endswith(" Nothing was changed.")


def test_bridges_of_containers_and_interfaces_of_other_names_are_not_refused():
    seen = said(uplinks="eno1", interfaces="lo -\neno1 -\nveth1f -\ndocker0\nbr-0a1b\nlan eno2")
    assert (seen.bridges["lan"], seen.bridges["docker0"]) == (("eno2",), ())
    role.refuse("gpu-1", seen, SPEC, PORTS)


def test_a_bridge_out_of_the_host_is_named_once():
    with pytest.raises(OperationError) as error:
        role.refuse("gpu-1", said(uplinks="br-lan", interfaces="br-lan eno2"), SPEC, PORTS)
    assert str(error.value).count("would count as one") == 1


def test_rules_of_the_site_in_a_table_of_dockers_are_refused():
    with pytest.raises(OperationError) as error:
        role.refuse("gpu-1", said(), SPEC, PORTS, ["ip nat is a table of iptables or Docker, and more"])
    assert str(error.value) == (
        "gpu-1: nftables.service would not load the site's rules in /etc/nftables.conf beside Docker's and these: ip nat is a "
        "table of iptables or Docker, and more. Nothing was changed."
    )


@pytest.mark.parametrize("text", ["live !", "live bm90IEpTT04="])
def test_an_answer_of_another_shape_is_no_answer(text):
    with pytest.raises(ValueError):
        facts.read(text)
