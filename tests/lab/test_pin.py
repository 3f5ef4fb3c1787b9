"""`gpuwright pin` against the lab's registry (Debian's docker-registry) and its hub stand-in, over the lab's own CA."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

import lab
from gpuwright.render import REPOSITORY
from lab import authority, hub, network, oci, registry

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """A lab of this module's own: no host, only its bridge, its registry and its hub stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUWRIGHT_LAB_DIR", str(tmp_path_factory.mktemp("lab")))
        segment = network.segment()
        registry.start(segment)
        hub.serve()
        yield segment
        lab.down()


def push(segment, folder, label):
    """An image without layers that nobody would run; returns the digest the registry knows it by."""
    folder.mkdir(exist_ok=True)
    config, manifest = oci.image(
        folder, [], architecture="amd64", entrypoint=["/none"], environment={}, labels={"test": label}
    )
    to = registry.Registry(segment)
    to.push_blob("pin-test", config.path, config.digest)
    return to.push_manifest("pin-test", "moving", manifest.path.read_bytes(), oci.MANIFEST)


@pytest.fixture
def site(services, tmp_path):
    """An inventory that names both by the bridge's address: this machine's /etc/hosts is not the lab's to write."""
    at = services.gateway
    node = {
        "gpuwright": 1,
        "summary": "a node whose image and model are pinned",
        "containers": {"registries": [{"host": f"{at}:{registry.PORT}", "ca": str(authority.ca_file())}]},
        "models": {
            "hub": f"https://{at}:{hub.PORT}",
            "hub_ca": str(authority.ca_file()),
            "items": {"tiny": {"repo": hub.REPO, "revision": "main"}},
        },
        "engine": {
            "engines": {
                "main": {
                    "image": f"{at}:{registry.PORT}/pin-test:moving",
                    "model": "tiny",
                    "served_name": "tiny",
                    "port": 18001,
                    "settings": {"kind": "vllm"},
                }
            }
        },
    }
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(node))
    (tmp_path / "site.py").write_text(
        'from gpuwright.spec.fleet import fleet as _fleet\nhosts = _fleet({"gpu-01": {"node": "one.yaml"}}, __file__)\n'
    )
    return tmp_path


def gpuwright(site, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "gpuwright", *arguments],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_tag_and_branch_become_digest_and_commit(services, site, tmp_path):
    image = f"{services.gateway}:{registry.PORT}/pin-test:moving"
    first = push(services, tmp_path / "first", "first")
    commit = hub.publish(hub.REPO)
    refused = gpuwright(site, "check", "site.py")
    assert refused.returncode == 1
    assert f"{image}  is not pinned; run: gpuwright pin site.py --only {image}" in refused.stderr

    done = gpuwright(site, "pin", "site.py")
    assert (done.returncode, done.stdout.splitlines()[:2]) == (
        0,
        [f"{image}: nothing -> {first}", f"{hub.REPO}@main: nothing -> {commit}"],
    )
    lock = yaml.safe_load((site / "pins.lock.yaml").read_text())
    assert (lock["images"], lock["models"]) == ({image: first}, {f"{hub.REPO}@main": commit})
    assert gpuwright(site, "check", "site.py").returncode == 0

    second = push(services, tmp_path / "second", "second")
    assert second != first
    moved = json.loads(gpuwright(site, "pin", "site.py", "--json").stdout)
    assert {pin["key"]: (pin["old"], pin["new"]) for pin in moved["pins"]} == {
        image: (first, second),
        f"{hub.REPO}@main": (commit, commit),
    }


@pytest.mark.parametrize(
    ("access", "fault", "sentence"),
    [
        ({"private": [hub.REPO]}, None, "refuses model lab/tiny@main (status 401); check its name"),
        ({"gated": [hub.REPO]}, None, "refuses model lab/tiny@main (status 401); check its name"),
        (None, {"kind": "status", "status": 429}, "asks to be left alone for a while (status 429)"),
        (None, {"kind": "status", "status": 503}, "answers status 503 for model lab/tiny@main; try again later"),
        (None, {"kind": "page"}, "answers something that is not JSON; is a proxy or a login page in between?"),
        (None, {"kind": "cut"}, "cannot reach"),
    ],
)
def test_a_hub_that_does_not_answer_the_question(services, site, tmp_path, access, fault, sentence):
    push(services, tmp_path / "image", "any")
    hub.control("access", access or {})
    hub.control("faults", [{"on": "list", **fault}] if fault else [])
    try:
        done = gpuwright(site, "pin", "site.py")
    finally:
        hub.control("faults", method="DELETE")
        hub.control("access", {})
    assert done.returncode == 1
    assert f"lab/tiny@main: {'' if sentence == 'cannot reach' else services.gateway}" in done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (site / "pins.lock.yaml").exists()
