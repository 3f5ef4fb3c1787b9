"""Values of every interface, set and read by the role's own scripts in a network of its own, with interfaces that were there before."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from gpuwright.boot import Sysctl
from roles.kernel import checks, facts, operations
from roles.kernel.facts import of_each
from roles.kernel.hardening import sysctls

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")

ASKED = [
    *(one for one in sysctls("baseline") if one.key.startswith("net.") and ".conf." in one.key),
    Sysctl("net.ipv6.conf.site.accept_redirects", "1", "kernel", "one interface is let be"),
]
# A name with a dot, as of a VLAN; a value that somebody set; what the node file lets be.
BEFORE = """
set -e
ip link add up.1 type veth peer name site
for one in up.1 site; do
  echo 1 >/proc/sys/net/ipv6/conf/$one/accept_redirects
  echo 1 >/proc/sys/net/ipv4/conf/$one/send_redirects
done
"""


def run(directory, *scripts: str) -> str:
    """What the last of them says."""
    *first, last = scripts
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", "".join(f"{script}\n" for script in first) + last],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def set_script() -> str:
    lines = "".join(f"{one.key}\t{one.value}\n" for one in ASKED)
    return f"printf %s {shlex.quote(lines)} | sh -c {shlex.quote(operations._SET)}"


def read_script(directory) -> str:
    file = directory / "zz.conf"
    file.write_text("".join(f"{one.key} = {one.value}\n" for one in ASKED))
    return facts.VALUES.script.replace(facts.SYSCTL, str(file))


def wrong(values) -> list[str]:
    return [one.key for one in of_each(ASKED, values) if values[one.key] != one.value]


def test_without_the_step_they_keep_what_they_had(tmp_path):
    values = facts.parse(run(tmp_path, BEFORE, read_script(tmp_path)))
    assert {"net.ipv6.conf.up/1.accept_redirects", "net.ipv4.conf.up/1.send_redirects"} <= set(wrong(values))


def test_every_interface_gets_its_value_and_what_has_a_line_of_its_own_gets_that(tmp_path):
    after = "ip link add veth9 type veth peer name veth10"
    quiet = f"({set_script()}) >/dev/null"
    values = facts.parse(run(tmp_path, BEFORE, quiet, after, read_script(tmp_path)))
    assert wrong(values) == []
    assert values["net.ipv6.conf.site.accept_redirects"] == "1"
    assert values["net.ipv4.conf.up/1.send_redirects"] == values["net.ipv6.conf.veth9.accept_redirects"] == "0"


def test_a_second_time_nothing_is_said(tmp_path):
    assert run(tmp_path, BEFORE, f"({set_script()}) >/dev/null", set_script()) == ""


def test_what_is_said_names_the_interface(tmp_path):
    said = run(tmp_path, BEFORE, set_script())
    assert "sysctl net.ipv6.conf.up/1.accept_redirects: 0 (was 1)" in said
    assert "conf.site.accept_redirects" not in said


def test_systemd_and_procps_read_the_drop_in_the_same_way(tmp_path):
    read = read_script(tmp_path)
    for reader in ("/lib/systemd/systemd-sysctl", "sysctl -q -p"):
        values = facts.parse(run(tmp_path, BEFORE, f"{reader} {tmp_path}/zz.conf", read))
        assert wrong(values) == [], reader


def test_the_audit_sees_interfaces_of_containers_for_these_keys_alone(tmp_path):
    said = checks.VALUES.parse(run(tmp_path, "ip link add veth9 type veth peer name other", checks.VALUES.script))
    assert {"net.ipv6.conf.veth9.accept_redirects", "net.ipv4.conf.other.rp_filter", "vm.swappiness"} <= said.keys()
    assert "net.ipv4.conf.veth9.rp_filter" not in said and "net.ipv4.neigh.veth9.gc_stale_time" not in said
