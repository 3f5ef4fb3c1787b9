"""The block list of unattended upgrades against every package that the stack is made of, by its real names."""

import re

import pytest

from lab.repository import debian, docker, driver, toolkit
from roles.base import blocked
from roles.base.spec import BaseSpec

PATTERNS = [blocked(prefix) for prefix in BaseSpec().blocked_upgrades]

# NVIDIA's and Docker's own repositories, as the lab has their names.
VENDORS = [
    *(package.name for package in driver.packages("580.95.05")),
    *(package.name for package in toolkit.packages("1.18.2")),
    *docker._NAMES.values(),
    *(package.name for package in debian.kernel()),
]
# Debian's and Ubuntu's own packages of the same things.
DISTRIBUTIONS = """
    docker.io docker-cli containerd nvidia-driver-580-server-open nvidia-utils-580-server libnvidia-compute-580-server
    libnvidia-cfg1-580-server nvidia-kernel-common-580-server nvidia-dkms-580-server-open libcuda1 libcudadebugger1 libnvcuvid1
    libnvoptix1 firmware-nvidia-gsp firmware-nvidia-graphics nvidia-fabricmanager-580 libnvidia-nscq-580
    linux-modules-6.8.0-90-generic linux-modules-nvidia-580-server-open-6.8.0-90-generic linux-image-generic linux-headers-generic
    linux-image-cloud-amd64 linux-image-unsigned-6.8.0-90-generic cuda-toolkit-13-0 cuda-drivers cuda-compat-13-0
    libnvsdm-580 nvlsm libegl-nvidia0 libgles-nvidia2 libglx-nvidia0 xserver-xorg-video-nvidia-580 runc linux-generic
    linux-objects-nvidia-580-server-open-6.8.0-90-generic linux-signatures-nvidia-6.8.0-90-generic
""".split()  # noqa: SIM905
# What an upgrade stops nothing with: these get their security fixes.
OTHERS = "openssl libssl3t64 openssh-server systemd linux-libc-dev libnvme1 libc6 curl jq nftables containernetworking-plugins".split()  # noqa: SIM905


@pytest.mark.parametrize("name", sorted({*VENDORS, *DISTRIBUTIONS}))
def test_the_stack_is_left_alone(name):
    # As unattended-upgrades matches: re.match, from the start of the name.
    assert any(re.match(pattern, name) for pattern in PATTERNS)


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_not(name):
    assert not any(re.match(pattern, name) for pattern in PATTERNS)
