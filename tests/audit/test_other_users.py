"""What another user on the node can do: nothing to weights, evidence and keys. Asked by being that user."""

import pytest

ENGINE_USER, NOBODY = 10001, 65534


def as_user(host, uid, command):
    """The exit status of a command run by `uid` without any group or capability."""
    return host.run(f"setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs {command}").rc


def test_an_engines_user_cannot_write_the_weights(node, host):
    models = node.spec.models
    if models is None:
        pytest.skip("not applicable: the node file has no models")
    for model in models.items.values():
        directory = f"{models.store}/{model.repo}/{model.commit}"
        assert host.file(directory).is_directory
        for path in (models.store, directory, f"{directory}.manifest.json"):
            assert as_user(host, ENGINE_USER, f"test -w {path}") == 1, f"uid {ENGINE_USER} can write {path}"
        assert as_user(host, ENGINE_USER, f"test -r {directory}") == 0, f"uid {ENGINE_USER} cannot read {directory}"


def test_nobody_else_reads_the_evidence_of_engines(node, host):
    if node.spec.engine is None:
        pytest.skip("not applicable: the node file has no engine")
    for name in node.spec.engine.engines:
        folder = f"/var/lib/gpuwright/evidence/{name}"
        if host.file(folder).exists:
            assert as_user(host, NOBODY, f"test -x {folder}") == 1


def test_nobody_else_reads_keys_or_opens_the_admin_socket(node, host):
    if node.spec.gateway is None:
        pytest.skip("not applicable: the node file has no gateway")
    for path in ("/etc/gpuwright/gateway/keys.caddy", "/etc/gpuwright/gateway/Caddyfile"):
        assert host.file(path).exists
        assert as_user(host, NOBODY, f"test -r {path}") == 1, f"everybody can read {path}"
    reached = as_user(
        host, NOBODY, "curl -s --max-time 3 --unix-socket /run/gpuwright-gateway/admin.sock http://127.0.0.1/config/"
    )
    assert reached != 0


def test_docker_obeys_root_alone(node, host):
    if node.spec.containers is None:
        pytest.skip("not applicable: the node file has no containers")
    assert host.service("docker").is_running
    assert as_user(host, NOBODY, "docker version") != 0
