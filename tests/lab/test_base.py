"""Role base on a booted host: the ring, and what journald and unattended-upgrades really run with."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import trial
from trial import Trial

pytestmark = pytest.mark.lab

JOURNALD = "Base | Run systemd-journald with its drop-in"
DROP_IN = "/etc/systemd/journald.conf.d/gpuwright.conf"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    blank = trial.blank("base", "trixie", tmp_path_factory.mktemp("base"), {})
    yield blank
    blank.host.destroy()


def journal_limit(node: Trial) -> str:
    """As journald itself says it, for the journal it has open."""
    said = node.sh("journalctl -q -b -o cat MESSAGE_ID=ec387f577b844b8fa948f33cad9a75e6 JOURNAL_NAME='System Journal'")
    return re.findall(r"max ([\d.]+[MG])", said)[-1]


def test_a_blank_host_is_predicted_converged_and_then_left_alone(node):
    dry = node.run("--dry")
    assert dry.status == 0, dry.said
    first = node.deploy()
    assert set(first.changed) <= set(dry.changed)
    assert JOURNALD in first.changed
    assert node.deploy().changed == []
    assert node.run("--dry").changed == []


def test_the_journal_is_persistent_and_capped(node):
    assert node.sh("ls -d /var/log/journal/$(cat /etc/machine-id)")
    assert journal_limit(node) == "2G"


def test_a_new_limit_is_taken_over(node):
    node.node["base"] = {"journal_max_use": "1 GiB"}
    assert JOURNALD in node.deploy().changed
    assert journal_limit(node) == "1G"
    node.node["base"] = {}
    node.deploy()
    assert journal_limit(node) == "2G"
    assert node.deploy().changed == []


def test_a_run_killed_between_the_drop_in_and_the_restart_is_healed(node):
    node.sh(f"cp {DROP_IN} /root/right; sed -i 's/^SystemMaxUse=.*/SystemMaxUse=64M/' {DROP_IN}")
    node.sh("systemctl restart systemd-journald.service")
    node.sh(f"cat /root/right >{DROP_IN}")
    assert journal_limit(node) == "64M"
    assert node.deploy().changed == [JOURNALD]
    assert journal_limit(node) == "2G"


def test_a_drop_in_that_somebody_edited_is_put_back(node):
    node.sh(f"echo Storage=volatile >>{DROP_IN}; chmod 0600 {DROP_IN}")
    assert node.deploy().changed == ["Base | Write the drop-ins of journal, updates, needrestart and time"]
    assert node.sh(f"stat -c '%a %U' {DROP_IN}") == "644 root"
    assert node.deploy().changed == []


def test_unattended_upgrades_reads_security_origins_and_the_block_list(node):
    said = node.host.run("unattended-upgrade --dry-run --debug 2>&1", check=False, timeout=300).stdout
    (origins,) = re.findall(r"^Allowed origins are: (.*)$", said, re.M)
    assert "origin=Debian,codename=trixie-security,label=Debian-Security" in origins
    assert "label=Debian," not in origins + ","
    (blocked,) = re.findall(r"^Initial blacklist: (.*)$", said, re.M)
    assert blocked.split()[:3] == ["^nvidia", "^libnvidia", "^cuda"]
    assert "^docker" in blocked.split()
    assert node.sh("systemctl is-enabled apt-daily.timer apt-daily-upgrade.timer").split() == ["enabled", "enabled"]


def test_the_time_of_a_container_is_said_to_be_not_applicable(node):
    run = node.deploy()
    assert "time: not applicable, the host is a container and has its machine's clock" in run.said
    assert node.sh("systemctl show systemd-timesyncd.service --property=LoadState --value") == "loaded"


def test_a_time_daemon_of_the_site_stays(node):
    node.host.run("DEBIAN_FRONTEND=noninteractive apt-get install -y -q chrony", timeout=300)
    run = node.deploy()
    assert run.changed == []
    assert "time: chrony keeps it already; systemd-timesyncd is not installed" in run.said
    assert "install ok installed" in node.sh("dpkg -s chrony")


def test_the_journal_of_the_boot_before_is_there_after_a_reboot(node):
    node.sh("logger gpuwright-before-the-reboot; journalctl --sync")
    node.host.reboot()
    assert "gpuwright-before-the-reboot" in node.sh("journalctl -q -b -1 -o cat")
    assert node.deploy().changed == []


def test_what_is_switched_off_is_taken_away(node):
    node.node["base"] = {"unattended_upgrades": False}
    predicted = node.run("--dry").changed
    assert len(predicted) == 1 and "file /etc/apt/apt.conf.d/52gpuwright-unattended-upgrades" in predicted[0]
    node.deploy()
    assert not node.sh("ls /etc/apt/apt.conf.d/52gpuwright-unattended-upgrades 2>/dev/null", check=False)
    assert node.deploy().changed == []
