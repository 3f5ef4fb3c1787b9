"""A real kernel module, built by Debian's dkms on a lab host against Debian's headers: what `dkms` and `modinfo` then say is real.

The module is a STAND-IN of NVIDIA's that drives nothing (lab/repository/module.py). A host has its machine's kernel and loads no
module: that is tests/machine/test_dkms.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuwright import snapshot
from lab import hosts, repository
from lab.hosts import Host
from roles.nvidia import equality
from roles.nvidia.facts import NVIDIA, Nvidia

pytestmark = pytest.mark.lab

KEY = "/etc/apt/keyrings/gpuwright-lab.asc"
APT = "DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends"
VERSION = "580.95.05"


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """A host with the headers of Debian's kernel, dkms, and an apt that knows the module."""
    [made] = hosts.up(["module-1"], blank=True)
    repository.withdraw()
    repository.publish(f"module-{VERSION}")
    made.run(f"mkdir -p /etc/apt/keyrings; cat >{KEY}", stdin=repository.key_file().read_text())
    made.run("cat >/etc/apt/sources.list.d/lab-module.sources", stdin=repository.source("module", KEY))
    made.run(f"{APT} update && {APT} install dkms openssl linux-headers-amd64", timeout=900)
    yield made
    made.destroy()
    repository.withdraw()


@pytest.fixture(scope="module")
def kernel(host: Host) -> str:
    return host.run("basename /lib/modules/*-amd64").stdout.strip()


def facts(host: Host) -> Nvidia:
    """What role nvidia reads of it."""
    return snapshot.parse(host.run(snapshot.script([NVIDIA])).stdout).read(NVIDIA)


def kinds(host: Host) -> list[str]:
    return [finding.kind for finding in equality.findings(facts(host))]


def test_it_is_built_and_signed_for_a_kernel_that_is_not_running(host: Host, kernel: str) -> None:
    host.run(f"{APT} install nvidia-kernel-open-dkms", timeout=600)
    assert f"nvidia/{VERSION}, {kernel}, x86_64: installed" in host.run("dkms status").stdout
    [seen] = [one for one in facts(host).kernels if one.release == kernel]
    assert (seen.headers, seen.module) == (True, VERSION)
    assert host.run(f"modinfo -k {kernel} -F vermagic nvidia").stdout.startswith(f"{kernel} ")
    # dkms makes itself a key and signs with it: whether a kernel believes that key is another matter (Secure Boot).
    subject = host.run("openssl x509 -inform DER -in /var/lib/dkms/mok.pub -noout -subject -nameopt multiline").stdout
    assert seen.signer and seen.signer in subject
    assert kinds(host) == []


def test_a_kernel_without_headers_is_passed_over_in_silence_and_found(host: Host, kernel: str) -> None:
    other = kernel.replace("-amd64", "-without-headers")
    host.run(f"mkdir -p /lib/modules/{other}; touch /lib/modules/{other}/modules.order")
    try:
        said = host.run(f"dkms autoinstall -k {other} 2>&1", check=False)
        assert f"nvidia/{VERSION}, {other}" not in host.run("dkms status").stdout, said.stdout
        assert kinds(host) == ["module-missing"]
    finally:
        host.run(f"rm -r /lib/modules/{other}")


def test_a_module_that_does_not_compile_leaves_a_half_configured_package(host: Host, kernel: str) -> None:
    repository.publish("module-595.58.03/build")
    said = host.run(f"{APT} update >/dev/null; {APT} install nvidia-kernel-open-dkms 2>&1", check=False, timeout=600)
    assert said.returncode != 0
    assert "Bad return status for module build" in said.stdout
    log = host.run("cat /var/lib/dkms/nvidia/595.58.03/build/make.log").stdout
    assert "this package was made not to build" in log
    assert "half-installed" in kinds(host)
    assert "module-missing" in kinds(host)
    host.run(f"{APT} install --allow-downgrades nvidia-kernel-open-dkms={VERSION}-1", timeout=600)
    assert f"nvidia/{VERSION}, {kernel}, x86_64: installed" in host.run("dkms status").stdout
    assert kinds(host) == []


def test_it_says_that_it_is_a_stand_in(host: Host, kernel: str) -> None:
    assert "STAND-IN" in host.run(f"modinfo -k {kernel} -F description nvidia").stdout
    assert "STAND-IN" in host.run("dpkg-query -W -f '${Description}' nvidia-kernel-open-dkms").stdout
