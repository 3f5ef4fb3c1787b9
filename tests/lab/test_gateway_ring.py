"""The gateway on a booted host: the ring, keys while it serves, and every way in which a new configuration can be wrong.
The engine is a STAND-IN (gateway_trial)."""

from __future__ import annotations

import base64
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import gateway_trial
import pytest
from gateway_trial import Trial

from roles.gateway import keys
from roles.gateway.facts import GATEWAY, GatewayState, Listener

pytestmark = pytest.mark.lab

SCRIPT = "Gateway | Install the gateway's script gateway-config"
USER = "Gateway | Create system user gpuwright-gateway"
CADDY = "Gateway | Install Caddy 2.11.7 as /usr/local/lib/gpuwright/caddy"
RUN = "Gateway | Run gpuwright-gateway.service with it, and ask it from outside"
GOOD = "/etc/gpuwright/gateway"


def written(count: int, names: str = "gateway.lab") -> str:
    return f"Gateway | Write the gateway's configuration for {names} ({count} keys)"


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Iterator[Trial]:
    trial = gateway_trial.blank("gw-1", "trixie", tmp_path_factory.mktemp("gateway"))
    yield trial
    trial.host.destroy()


def state(node: Trial) -> GatewayState:
    return GATEWAY.parse(node.host.run(GATEWAY.script).stdout)


def ready(node: Trial) -> None:
    """Engine and health check are there."""
    node.start_engine()
    deadline = time.monotonic() + 20
    while node.ask("/v1/models", node.key) != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def files(node: Trial) -> str:
    return node.sh(f"cd {GOOD} && sha256sum * && stat -c '%a %U %G %n' *")


def test_a_blank_host_is_predicted_and_converged_and_then_left_alone(node):
    dry = node.run("--dry")
    assert dry.status == 0, dry.said
    first = node.deploy()
    assert set(first.changed) <= set(dry.changed)
    assert [name for name in first.changed if name.startswith("Gateway")] == [SCRIPT, USER, CADDY, written(1), RUN]
    assert "no engine is ready behind it yet (503)" in first.said
    assert node.deploy().changed == []
    assert node.run("--dry").changed == []


def test_it_answers_as_it_should(node):
    assert node.ask("/v1/models", node.key) == 503
    ready(node)
    assert node.ask("/v1/models") == 401
    assert node.ask("/v1/chat/completions", node.key, "POST", json={}) == 200
    assert node.ask("/old-model/v1/chat/completions", node.key, "POST", json={}) == 200
    assert node.ask("/metrics", node.key) == 404
    engine = node.sh("cat /var/log/stand-in-engine.log")
    assert '"key_id":"tester-0001"' in engine.replace(" ", "")
    assert "sk-" not in engine and "Bearer" not in engine and "Basic" not in engine


def test_it_is_what_the_unit_says(node):
    seen = state(node)
    assert seen.identity_running == seen.identity_on_disk
    assert seen.exe_is_on_disk
    assert seen.listeners == (Listener("0.0.0.0", 443), Listener("127.0.0.1", 2020))
    assert seen.unit["User"] == "gpuwright-gateway"
    assert seen.modes[f"{GOOD}/keys.caddy"] == "0640 root gpuwright-gateway"
    assert seen.modes["/run/gpuwright-gateway/admin.sock"] == "0600 gpuwright-gateway gpuwright-gateway"
    assert seen.modes["/var/log/gpuwright-gateway/access.log"] == "0600 gpuwright-gateway gpuwright-gateway"
    assert seen.certificates[0].path.endswith("/gateway.lab.crt")
    assert all(certificate.expires is not None for certificate in seen.certificates)
    score = re.search(r"level for \S+: ([\d.]+)", node.sh("systemd-analyze security gpuwright-gateway.service"))
    assert score and float(score[1]) <= 1.7
    status = node.sh(f"cat /proc/{seen.pid}/status")
    assert re.search(r"^CapEff:\s+0000000000000400$", status, re.M), "CAP_NET_BIND_SERVICE and nothing else"
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)


def test_rotation_and_revocation_are_a_reload(node):
    pid = state(node).pid
    old = node.key
    new = node.gpuwright("key", "rotate", "tester", "--file", str(node.keys_file)).stdout.strip()
    assert node.deploy().changed == [written(2), RUN]
    assert (node.ask("/v1/models", old), node.ask("/v1/models", new)) == (200, 200)
    node.gpuwright("key", "revoke", "tester-1", "--file", str(node.keys_file))
    assert node.deploy().changed == [written(1), RUN]
    assert (node.ask("/v1/models", old), node.ask("/v1/models", new)) == (401, 200)
    assert state(node).pid == pid
    node.key = new
    assert node.deploy().changed == []


def test_a_file_that_somebody_edited_is_put_back(node):
    pid = state(node).pid
    node.sh(f"sed -i 's/X-Key-Id/X-Nobody/' {GOOD}/Caddyfile; chmod 0644 {GOOD}/keys.caddy")
    node.sh("systemctl reload gpuwright-gateway.service")
    # The edited file states the right identity, and it was loaded: what Caddy says it runs gives it away.
    assert state(node).identity_running == state(node).identity_on_disk
    assert node.deploy().changed == [written(1), RUN]
    assert node.sh(f"stat -c %a {GOOD}/keys.caddy") == "640"
    assert node.deploy().changed == []
    ready(node)
    assert '"key_id":"tester-0002"' in node.sh("grep /v1/models /var/log/stand-in-engine.log | tail -n 1").replace(
        " ", ""
    )
    assert state(node).pid == pid


def test_a_configuration_that_somebody_loaded_by_hand_is_put_back(node):
    node.sh(
        "curl -sf --unix-socket /run/gpuwright-gateway/admin.sock -X DELETE http://x/config/apps/http/servers/srv0/routes"
    )
    assert node.deploy().changed == [RUN]
    ready(node)
    assert node.deploy().changed == []


def test_a_run_killed_between_swap_and_reload_is_healed(node):
    """What runs is asked of the running gateway, not of the files."""
    right = state(node).identity_on_disk
    other = "0" * 32
    node.sh(f"cp {GOOD}/Caddyfile /root/right; sed -i s/{right}/{other}/ {GOOD}/Caddyfile")
    node.sh("systemctl reload gpuwright-gateway.service")
    node.sh(f"cat /root/right >{GOOD}/Caddyfile")
    assert (state(node).identity_running, state(node).identity_on_disk) == (other, right)
    assert node.deploy().changed == [RUN]
    assert state(node).identity_running == right
    assert node.deploy().changed == []


def test_a_run_killed_while_its_probe_key_was_in_is_healed(node):
    key, hashed = keys.generate("deploy-1")
    lines = f"deploy-1\\n{keys.prefix('deploy-1')}\\ndeploy-1 {hashed}\\n"
    node.sh(f"printf '{lines}' | /usr/local/lib/gpuwright/gateway-config activate reload")
    assert node.ask("/v1/models", key) == 200
    assert state(node).identity_running.endswith("+deploy-1")
    assert node.deploy().changed == [RUN]
    assert node.ask("/v1/models", key) == 401


def test_a_stopped_or_disabled_gateway_is_started(node):
    node.sh("systemctl disable -q --now gpuwright-gateway.service")
    assert node.deploy().changed == [RUN]
    assert node.sh("systemctl is-enabled gpuwright-gateway.service") == "enabled"
    ready(node)
    assert node.deploy().changed == []


def test_a_changed_unit_is_a_restart(node):
    pid = state(node).pid
    node.gateway["drain"] = "31 s"
    assert node.deploy().changed == [written(1), RUN]
    seen = state(node)
    assert seen.pid != pid
    assert seen.unit["TimeoutStopUSec"] == "31s"
    ready(node)
    assert node.deploy().changed == []


def test_another_binary_is_replaced_and_the_process_with_it(node):
    pid = state(node).pid
    node.sh("cp /usr/local/lib/gpuwright/caddy /root/c; echo >>/root/c; mv /root/c /usr/local/lib/gpuwright/caddy")
    assert not state(node).exe_is_on_disk
    assert node.deploy().changed == [CADDY, RUN]
    seen = state(node)
    assert seen.exe_is_on_disk and seen.pid != pid
    ready(node)


def refused(node: Trial, *sentences: str) -> None:
    """The run fails with these sentences; files, process and answers are what they were."""
    before, seen = files(node), state(node)
    run = node.run("-y", as_json=False)
    assert run.status == 1
    for sentence in sentences:
        assert sentence in run.said, run.said[-3000:]
    assert "Traceback" not in run.said
    assert files(node) == before
    after = state(node)
    assert after.pid == seen.pid
    assert after.identity_running == seen.identity_running == after.identity_on_disk
    assert (node.ask("/v1/models"), node.ask("/v1/models", node.key)) == (401, 200)


@pytest.fixture
def own(node, tmp_path) -> Iterator[dict[str, str]]:
    """A certificate of the site for gateway.lab; the node's own settings are put back at the end."""
    script = f"""
cd {tmp_path}
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem -days 30 \\
  -subj /CN=gateway.lab -addext subjectAltName=DNS:gateway.lab
openssl ecparam -name prime256v1 -genkey -noout -out other.pem
"""
    subprocess.run(["sh", "-ec", script], check=True, capture_output=True)
    before = dict(node.gateway)
    yield {name: str(tmp_path / f"{name}.pem") for name in ("cert", "key", "other")}
    node.gateway = before
    node.deploy()
    ready(node)
    assert node.deploy().changed == []


def test_what_caddy_refuses_is_never_written(node, own):
    node.gateway["tls"] = {"mode": "own", "certificate": own["cert"], "key": {"file": own["other"]}}
    refused(node, "refused by: /usr/local/lib/gpuwright/gateway-config check", "private key does not match public key")


def test_what_is_wrong_from_outside_is_taken_back(node, own):
    """Caddy accepts it, and clients would not: the certificate is for another name."""
    node.gateway["tls"] = {"mode": "own", "certificate": own["cert"], "key": {"file": own["key"]}}
    node.gateway["hostnames"] = ["another.lab"]
    refused(
        node,
        "the new configuration was taken back: TLS with another.lab",
        "what was right last is back and runs",
    )


def take_8443(node: Trial) -> None:
    node.sh(
        "systemctl is-active -q taken || systemd-run -q --unit taken "
        "/usr/local/bin/stand-in-engine respond --listen :8443 taken"
    )
    node.sh("for n in $(seq 50); do ss -Hltn 'sport = :8443' | grep -q . && break; sleep 0.1; done")


def test_an_address_that_is_taken_is_taken_back(node, own):
    take_8443(node)
    node.gateway["listen"] = [{"address": "0.0.0.0", "port": 443}, {"address": "0.0.0.0", "port": 8443}]
    refused(node, "address already in use", "what was right last is back and runs")
    node.sh("systemctl stop taken")


def test_a_restart_that_fails_is_taken_back(node, own):
    """With a changed unit the process has to go; the old one comes back, unit and all."""
    before, seen = files(node), state(node)
    take_8443(node)
    node.gateway["listen"] = [{"address": "0.0.0.0", "port": 443}, {"address": "0.0.0.0", "port": 8443}]
    node.gateway["drain"] = "33 s"
    run = node.run("-y", as_json=False)
    assert run.status == 1
    assert "address already in use" in run.said, run.said
    assert "what was right last is back and runs" in run.said
    assert files(node) == before
    after = state(node)
    assert (after.identity_running, after.unit_running) == (seen.identity_running, seen.unit_running)
    assert after.unit["TimeoutStopUSec"] == seen.unit["TimeoutStopUSec"] != "33s"
    ready(node)
    node.sh("systemctl stop taken")


def test_a_certificate_of_the_site(node, own):
    node.gateway["tls"] = {"mode": "own", "certificate": own["cert"], "key": {"file": own["key"]}}
    run = node.run("-y", "--diff", "-vvv", "--debug", as_json=False)
    assert run.status == 0, run.said[-3000:]
    secret = Path(own["key"]).read_text().splitlines()[1]
    assert secret not in run.said
    assert base64.b64encode(secret.encode()).decode()[:40] not in run.said
    assert node.sh(f"stat -c '%a %U %G' {GOOD}/tls.key") == "640 root gpuwright-gateway"
    assert state(node).tls_on_disk == "own"
    served = ssl.get_server_certificate((node.host.address, 443))
    assert served.split() == Path(own["cert"]).read_text().split()
    assert node.deploy().changed == []


def test_a_gateway_on_loopback_is_asked_on_the_node(node, own):
    node.gateway["listen"] = [{"address": "127.0.0.1", "port": 8888}]
    node.gateway["tls"] = {"mode": "off"}
    assert node.deploy().changed == [written(1), RUN]
    assert state(node).listeners == (Listener("127.0.0.1", 2020), Listener("127.0.0.1", 8888))
    assert (
        node.sh("curl -s -o /dev/null -w '%{http_code}' -H 'Host: gateway.lab' http://127.0.0.1:8888/v1/models")
        == "401"
    )
    assert node.deploy().changed == []


def test_a_network_that_lets_no_controller_in(node, own):
    node.sh("nft 'add table inet shut; add chain inet shut in { type filter hook input priority 0; }'")
    node.sh("nft 'add rule inet shut in iif != lo tcp dport 443 drop'")
    try:
        node.gateway["log_keep_days"] = 31
        run = node.run("-y", as_json=False)
        assert run.status == 0, run.said[-3000:]
        assert f"not reached from this controller: {node.host.address}:443" in run.said
        assert "asked from the node itself" in run.said
    finally:
        node.sh("nft delete table inet shut")


def test_no_key_material_anywhere(node):
    """The plain key exists at its owner's: not on the node, not in a log, not in a unit, not in a process list."""
    node.ask(f"/v1/models?key={node.key}", node.key)
    secret = base64.b64decode(node.key[3:]).decode().split(":")[1]
    for form in (node.key, node.key[3:], secret, base64.b64encode(secret.encode()).decode()[:50]):
        found = node.sh(
            f"grep -rlsF -- '{form}' /etc /var/lib /var/log /run /usr/local /root /tmp --exclude-dir=incoming || true; "
            f"journalctl --no-pager -q | grep -F -- '{form}' || true; "
            "systemctl show gpuwright-gateway.service | grep -F -- '" + form + "' || true"
        )
        assert found == "", form


def test_it_comes_back_after_a_reboot(node):
    node.host.reboot()
    ready(node)
    seen = state(node)
    assert seen.identity_running == seen.identity_on_disk
    assert (node.ask("/v1/models"), node.ask("/metrics", node.key)) == (401, 404)
    assert node.deploy().changed == []


def test_a_role_that_is_gone_is_taken_away(node):
    before, node.gateway = node.gateway, None
    dry = node.run("--dry")
    assert any("gpuwright-gateway.service" in name for name in dry.changed), "the dry run says so"
    node.deploy()
    left = node.sh(
        "ls -d /etc/gpuwright/gateway/* /usr/local/lib/gpuwright/caddy /usr/local/lib/gpuwright/gateway-config "
        "/etc/systemd/system/gpuwright-gateway.service /var/lib/gpuwright/gateway-good 2>/dev/null; "
        "id -u gpuwright-gateway 2>/dev/null; ss -Hltn 'sport = :443'; true"
    )
    assert left == ""
    assert node.sh("ls /var/log/gpuwright-gateway"), "a log is never lost"
    node.gateway = before


def test_a_first_deploy_that_is_wrong_from_outside_leaves_the_gateway_closed(node, own):
    before, node.gateway = node.gateway, None
    node.deploy()
    node.gateway = before
    node.gateway["tls"] = {"mode": "own", "certificate": own["cert"], "key": {"file": own["key"]}}
    node.gateway["hostnames"] = ["another.lab"]
    run = node.run("-y", as_json=False)
    assert run.status == 1
    assert "there is no earlier configuration to put back; the gateway is stopped" in run.said
    assert node.sh("ss -Hltn 'sport = :443'") == ""
