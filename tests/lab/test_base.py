"""Role base on a booted host: the ring, and what journald and unattended-upgrades really run with."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator

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
    assert node.deploy().changed == ["Base | Write the drop-ins of journal, updates, needrestart, time and core dumps"]
    assert node.sh(f"stat -c '%a %U' {DROP_IN}") == "644 root"
    assert node.deploy().changed == []


def test_unattended_upgrades_reads_security_origins_and_the_block_list(node):
    said = node.host.run("unattended-upgrade --dry-run --debug 2>&1", check=False, timeout=300).stdout
    (origins,) = re.findall(r"^Allowed origins are: (.*)$", said, re.M)
    assert "origin=Debian,codename=trixie-security,label=Debian-Security" in origins
    assert "label=Debian," not in origins + ","
    (blocked,) = re.findall(r"^Initial blacklist: (.*)$", said, re.M)
    assert {"^nvidia", "^libnvidia", "^libcuda", "^docker", "^linux-image"} <= set(blocked.split())
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


def test_two_time_daemons_are_named_and_left_alone(node):
    unit = "/etc/systemd/system/ntpd.service"
    node.sh(f"printf '[Service]\\nExecStart=/bin/sleep infinity\\n[Install]\\nWantedBy=multi-user.target\\n' >{unit}")
    node.sh("systemctl enable -q ntpd.service chrony.service")
    try:
        run = node.deploy()
        assert "chrony.service and ntpd.service pull the clock to and fro" in run.said
        assert run.changed == []
        assert node.sh("systemctl is-enabled ntpd.service chrony.service").split() == ["enabled", "enabled"]
    finally:
        node.sh(f"systemctl disable -q ntpd.service; rm {unit}; systemctl daemon-reload")
    assert "pull the clock" not in node.deploy().said


def kernel_says(node: Trial, *messages: str, speaker: str = "kernel") -> None:
    """A lab host has no kernel log: systemd's own journal-remote writes a journal file with what a kernel would have said.

    `speaker`: journald takes the first word of what a program writes to /dev/kmsg for it.
    """
    entry = (
        "__REALTIME_TIMESTAMP=$(($(date +%s) + {number}))000000\n__MONOTONIC_TIMESTAMP=$(awk '{{printf \"%d\", $1 * 1000000}}' "
        "/proc/uptime){number}\n_BOOT_ID=$(tr -d - </proc/sys/kernel/random/boot_id)\n_MACHINE_ID=$(cat /etc/machine-id)\n"
        "_TRANSPORT=kernel\nPRIORITY=3\nSYSLOG_IDENTIFIER={speaker}\nMESSAGE={message}\n\n"
    )
    text = "".join(
        entry.format(number=number, message=message, speaker=speaker) for number, message in enumerate(messages)
    )
    node.host.run(
        f"cat <<END | /usr/lib/systemd/systemd-journal-remote --output=$(echo /var/log/journal/$(cat /etc/machine-id))/stand-in.journal -\n{text}END\n"
    )


def kept(node: Trial) -> list[str]:
    """What the record holds, oldest first."""
    lines = node.sh(
        "cd /var/lib/gpuwright/gpu-faults; cat $(ls -1 record.* 2>/dev/null | sort -rt. -k2n) record"
    ).splitlines()
    return [line.split(" ", 2)[2] for line in lines]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


XID = "NVRM: Xid (PCI:0000:4d:00): {}, pid=1234, name=python3, a fault"


def test_a_gpu_fault_is_kept_when_the_journal_has_forgotten_it(node):
    node.host.run(
        "DEBIAN_FRONTEND=noninteractive apt-get -qq -y install systemd-journal-remote >/dev/null 2>&1", timeout=300
    )
    kernel_says(node, XID.format(79), "usb 1-1: new device", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, a link")
    wanted = [XID.format(79), "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, a link"]
    until(lambda: kept(node) == wanted)
    node.sh("rm /var/log/journal/*/stand-in.journal; journalctl -q --rotate; journalctl -q --vacuum-time=1s")
    node.host.power_cycle()
    assert kept(node) == wanted
    kernel_says(node, XID.format(31))
    until(lambda: kept(node) == [*wanted, XID.format(31)])
    # Read again from the last one on, and not kept twice.
    node.sh("systemctl restart gpuwright-gpu-faults.service")
    kernel_says(node, XID.format(13).removeprefix("NVRM: "), speaker="NVRM")
    until(lambda: len(kept(node)) > 3)
    assert kept(node) == [*wanted, XID.format(31), XID.format(13)]
    assert node.deploy().changed == []


def test_a_record_at_its_cap_is_put_aside_and_seven_are_kept(node):
    before = kept(node)
    node.sh(
        "cd /var/lib/gpuwright/gpu-faults; for n in 1 2 3 4 5 6 7; do echo \"t k old $n\" >record.$n; done; yes 't k x' | head -c 1100000 >>record"
    )
    kernel_says(node, XID.format(48))
    until(lambda: node.sh("wc -l </var/lib/gpuwright/gpu-faults/record") == "1")
    assert node.sh("cd /var/lib/gpuwright/gpu-faults; ls record*; cat record.7").split() == [
        *("record", *(f"record.{number}" for number in range(1, 8)), "t", "k", "old", "6")
    ]
    assert kept(node)[-1] == XID.format(48) and set(before) <= set(kept(node))
    node.sh("rm /var/lib/gpuwright/gpu-faults/record*; systemctl restart gpuwright-gpu-faults.service")


def test_another_script_of_the_recorder_is_what_runs_after_the_next_run(node):
    node.sh(
        "sed -i 's/gpu-faults [0-9a-f]*$/gpu-faults 0123/' /etc/systemd/system/gpuwright-gpu-faults.service; systemctl daemon-reload; systemctl restart gpuwright-gpu-faults.service"
    )
    assert node.deploy().changed == ["Base | Write the recorder of GPU faults", "Base | Run the recorder of GPU faults"]
    assert node.deploy().changed == []


CRASH = "cd /tmp; rm -f core*; {}; ls /tmp/core* /var/lib/systemd/coredump/* 2>/dev/null || true"


def test_what_crashes_leaves_no_core_file(node):
    for crash in (
        "sh -c 'kill -SEGV $$' || true",
        "systemd-run -q --wait -p WorkingDirectory=/tmp sh -c 'kill -SEGV $$' || true",
    ):
        assert node.sh(CRASH.format(crash)) == ""
    assert node.sh("systemctl show --property=DefaultLimitCORE --value") == "0"
    node.node["base"] = {"deviations": {"core-dumps": "a crash is being looked for until March"}}
    node.deploy()
    assert node.sh("systemctl show --property=DefaultLimitCORE --value") == "infinity"
    assert node.deploy().changed == []
    node.node["base"] = {}
    node.deploy()
    assert node.sh("systemctl show --property=DefaultLimitCORE --value") == "0"
    assert node.deploy().changed == []


def test_a_drop_in_of_others_that_brings_core_dumps_back_is_named(node):
    node.sh(
        "printf '[Manager]\\nDefaultLimitCORE=infinity\\n' >/etc/systemd/system.conf.d/zzz-site.conf; systemctl daemon-reload"
    )
    run = node.run("-y")
    assert run.status == 1
    assert (
        "systemd still starts units with LimitCORE=infinity; a file read after zz-gpuwright.conf says so:" in run.said
    )
    assert "zzz-site.conf" in run.said
    node.sh("rm /etc/systemd/system.conf.d/zzz-site.conf; systemctl daemon-reload")
    assert node.deploy().changed == []


LOCK = (
    "use Fcntl qw(:DEFAULT :flock); open F, '>', '/var/lib/dpkg/lock-frontend' or die; "
    "my $lock = pack('s s x4 q q i', F_WRLCK, 0, 0, 0, 0); fcntl(F, F_SETLK, $lock) or die; sleep shift"
)


def test_whoever_has_apt_locked_is_named_while_a_run_waits(node):
    node.sh(f"systemd-run -q --unit=locks perl -e {shlex.quote(LOCK)} 20; sleep 1")
    assert node.sh("systemctl is-active locks") == "active"
    assert node.sh("apt-get -q -y install tree 2>&1 || true").startswith("E: Could not get lock"), (
        "it is apt's own lock"
    )
    node.node["base"] = {"extra_packages": ["tree"]}
    run = node.deploy()
    assert re.search(
        r"apt is locked by process \d+ \(/usr/bin/perl -e .*\); waiting, up to 600 s, 0 s so far", run.said
    )
    assert "install ok installed" in node.sh("dpkg -s tree")
    node.node["base"] = {}


def test_what_dpkg_left_when_the_power_went_is_finished(node):
    """One package to be laid down again and one to be configured, as dpkg notes them in the middle of its work."""
    for package, state in (("tree", "reinstreq half-installed"), ("tzdata", "ok unpacked")):
        node.sh(f"apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq -y install {package} >/dev/null 2>&1")
        node.sh(
            f"sed -i '/^Package: {package}$/,/^$/s/^Status: .*/Status: install {state}/' /var/lib/dpkg/status; rm -f /usr/bin/tree"
        )
    assert "tree" in node.sh("dpkg --audit") and "tzdata" in node.sh("dpkg --audit")
    node.node["base"] = {"extra_packages": ["tree"]}
    node.deploy()
    assert node.sh("dpkg --audit; tree --version | cut -c 1-4") == "tree"
    node.node["base"] = {}


def test_nobody_is_asked_when_a_package_wants_to_know_something(node):
    """tzdata asks at priority high, and waits for an answer where a terminal is."""
    node.sh(
        "echo tzdata tzdata/Areas seen false | debconf-set-selections; DEBIAN_FRONTEND=noninteractive apt-get -qq -y purge tzdata >/dev/null 2>&1"
    )
    node.node["base"] = {"extra_packages": ["tzdata"]}
    node.deploy()
    assert "install ok installed" in node.sh("dpkg -s tzdata")
    node.node["base"] = {}


def test_upgrades_come_in_stages(node):
    today = int(node.sh("date +%w"))
    days = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
    node.node["base"] = {"upgrade_days": [days[(today + 3) % 7]]}
    node.deploy()
    said = node.host.run("unattended-upgrade --dry-run --debug 2>&1", check=False, timeout=300).stdout
    assert "patch days are" in said and "Initial blacklist" not in said, said
    node.node["base"] = {"upgrade_days": [days[today]]}
    node.deploy()
    said = node.host.run("unattended-upgrade --dry-run --debug 2>&1", check=False, timeout=300).stdout
    assert "Initial blacklist" in said
    assert node.deploy().changed == []
    node.node["base"] = {}
    node.deploy()


def test_the_journal_of_the_boot_before_is_there_after_a_reboot(node):
    node.sh("logger gpuwright-before-the-reboot; journalctl --sync")
    node.host.reboot()
    assert "gpuwright-before-the-reboot" in node.sh("journalctl -q -b -1 -o cat")
    assert node.deploy().changed == []


def test_upgrades_that_are_switched_off_are_off(node):
    """The package stays, and Debian's own 20auto-upgrades has it on."""
    every = "apt-config shell every APT::Periodic::Unattended-Upgrade"
    assert "on" in node.sh("grep -q 'Unattended-Upgrade \"1\"' /etc/apt/apt.conf.d/20auto-upgrades && echo on")
    assert node.sh(every) == "every='1'"
    node.node["base"] = {"unattended_upgrades": False}
    assert node.run("--dry").changed == [
        "Base | Write the drop-ins of journal, updates, needrestart, time and core dumps"
    ]
    node.deploy()
    assert node.sh(every) == "every='0'"
    assert node.deploy().changed == []
