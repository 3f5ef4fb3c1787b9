"""What somebody finds who asks the node from the controller: nothing without a key, and nothing beside the gateway.

A key for the questions that need one comes from the environment, GPUWRIGHT_AUDIT_KEY; without it they are skipped and
say so. It is sent to the verified gateway only.
"""

import os
import ssl
from pathlib import Path

import pytest

from gpuwright.audit import outside
from gpuwright.audit.outside import Place
from gpuwright.ingress import ingress
from gpuwright.spec.base import SecretRef
from gpuwright.spec.secret import resolve
from roles.gateway.paths import NEVER
from roles.gateway.spec import TlsInternal, TlsOff, TlsOwn

pytestmark = pytest.mark.outside

KEY = "GPUWRIGHT_AUDIT_KEY"
INTERNAL_ROOT = "/var/lib/gpuwright-gateway/caddy/pki/authorities/local/root.crt"


@pytest.fixture
def places(node):
    """The gateway's listeners as the controller reaches them."""
    gateway = node.spec.gateway
    if gateway is None:
        pytest.skip("not applicable: the node file has no gateway")
    found = []
    for listen in gateway.listen:
        address = node.address if listen.address in ("0.0.0.0", "::") else listen.address
        if not listen.address.startswith("127.") and listen.address != "::1" and not node.name.startswith("@"):
            found.append(Place(address, listen.port, gateway.hostnames[0], not isinstance(gateway.tls, TlsOff)))
    if not found:
        pytest.skip("not applicable: the gateway listens on loopback only")
    return found


@pytest.fixture
def key():
    """A key to ask with, never shown."""
    if not os.environ.get(KEY):
        pytest.skip(f"manual: set {KEY} to a key of this gateway to ask what a client is answered")
    return resolve(SecretRef(env=KEY), KEY)


@pytest.fixture
def client(node):
    """A TLS client that trusts what a client of this gateway trusts."""
    tls = node.spec.gateway.tls if node.spec.gateway else None
    if isinstance(tls, TlsInternal):
        return outside.trusting(node.host.file(INTERNAL_ROOT).content_string)
    return outside.trusting(Path(tls.certificate).read_text() if isinstance(tls, TlsOwn) else None)


def test_nothing_is_answered_without_a_key(places):
    paths = ["/v1/models", "/v1/chat/completions", "/metrics", "/docs", "/openapi.json", "/"]
    asked = [(method, path) for path in paths for method in ("GET", "POST")]
    for place in places:
        answers = {entry: outside.status(place, outside.anybody(), *entry) for entry in asked}
        assert answers == dict.fromkeys(asked, 401)


def test_a_key_that_nobody_was_given_is_refused(places):
    for place in places:
        assert outside.status(place, outside.anybody(), "GET", "/v1/models", outside.unknown_key()) == 401


def test_another_name_than_the_gateways_is_not_answered(places):
    for place in places:
        elsewhere = Place(place.address, place.port, "elsewhere.invalid", place.tls)
        try:
            answer = outside.status(elsewhere, outside.anybody(), "GET", "/v1/models")
        except ssl.SSLError:
            answer = None
        assert answer is None


def test_the_certificate_is_for_the_gateways_names(node, places, client):
    if isinstance(node.spec.gateway.tls, TlsOff):
        pytest.skip("not applicable: tls is off, the gateway listens on loopback only")
    for place in places:
        for name in node.spec.gateway.hostnames:
            assert outside.handshake(Place(place.address, place.port, name, True), client)


def test_a_client_with_a_key_gets_the_list_of_models_and_no_other_path(places, key, client):
    for place in places:
        assert outside.status(place, client, "GET", "/v1/models", key) == 200
        asked = [path for path in NEVER if "{" not in path]
        assert {path: outside.status(place, client, "GET", path, key) for path in asked} == dict.fromkeys(asked, 404)


def test_engines_are_reached_through_the_gateway_alone(node):
    if node.spec.engine is None or node.name.startswith("@"):
        pytest.skip("not applicable: the node has no engine, or is this machine")
    ports = [engine.port for engine in node.spec.engine.engines.values()]
    assert [port for port in ports if outside.is_open(node.address, port)] == []


def test_neither_docker_nor_an_admin_interface_is_on_the_network(node):
    if node.name.startswith("@"):
        pytest.skip("not applicable: the node is this machine")
    # 2375, 2376 Docker's API; 2019 Caddy's; 2377, 7946 a swarm; 10250 a kubelet nobody asked for.
    ports = [2375, 2376, 2377, 7946, 2019, 10250]
    if node.spec.gateway:
        ports.append(node.spec.gateway.health_port)
    assert [port for port in ports if outside.is_open(node.address, port)] == []


def test_nothing_is_reached_that_the_node_file_does_not_open(node):
    if node.spec.firewall is None or node.name.startswith("@"):
        pytest.skip("not applicable: the node file has no firewall, or the node is this machine")
    served = ingress(node.spec)
    opened = {*served.ssh, *served.gateway}
    opened |= {entry.port for entry in node.spec.firewall.ports if entry.protocol == "tcp"}
    found = outside.open_ports(node.address, range(1, 65536))
    assert set(found) <= opened, "from here more is reached than the node file opens to anybody"
    assert set(served.ssh) <= set(found), "the controller's own way in must be among what was found"


def test_ssh_lets_nobody_in_without_a_key(node):
    if node.name.startswith("@"):
        pytest.skip("not applicable: the node is this machine")
    methods = outside.ssh_methods(node.address, int(node.data.get("ssh_port", 22)))
    assert "publickey" in methods
    assert "none" not in methods
    if methods == ("publickey",):
        return
    allowed = outside.ssh_methods_allowed(node.spec)
    if allowed is None:
        pytest.skip(f"manual: sshd offers {', '.join(methods)}, and the node file has no access, so it is the site's")
    assert set(methods) <= allowed, "sshd offers from here what the node file does not ask for"
    pytest.skip(f"waived: sshd offers {', '.join(methods)}, as access in the node file has it")
