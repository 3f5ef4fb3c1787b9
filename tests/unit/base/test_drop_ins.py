"""Files and decisions of role base. No host."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import get_args

import pytest
from pydantic import ValidationError

from gpuwright import snapshot
from gpuwright.hardening import PROFILES
from roles import base as role
from roles.base import auditing, facts, hardening
from roles.base.spec import STACK, BaseSpec

UPGRADES = "/etc/apt/apt.conf.d/52gpuwright-unattended-upgrades"


def content(spec: BaseSpec, path: str, timesyncd: bool = True, audit: bool = False) -> str:
    (found,) = [file.data.decode() for file in role.drop_ins(spec, timesyncd, audit) if file.path == path]
    return found


def test_every_file_names_its_owner():
    for file in role.drop_ins(BaseSpec(time_servers=("ntp.example",)), timesyncd=True, audit=True):
        assert "Owned by gpuwright, role base." in file.data.decode().splitlines()[0], file.path


def test_the_journal_is_persistent_compressed_and_capped():
    lines = content(BaseSpec(journal_max_use="1 GiB"), "/etc/systemd/journald.conf.d/gpuwright.conf").splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "[Journal]",
        "Storage=persistent",
        "Compress=yes",
        "SystemMaxUse=1073741824",
    ]


def test_journald_leaves_the_kernel_s_audit_on_where_it_is_on():
    """Debian 12's turns it off at every start of its own, as at the end of our own step about the journal."""
    path = "/etc/systemd/journald.conf.d/gpuwright.conf"
    assert content(BaseSpec(), path, audit=True).splitlines()[-1] == "Audit=yes"
    assert "Audit=" not in content(BaseSpec(), path)


@pytest.mark.parametrize(
    ("prefix", "blocks", "lets"),
    [
        ("nvidia", ["nvidia-driver-580", "nvidia"], ["libnvidia-common-460", "xnvidia"]),
        ("libnvidia", ["libnvidia-common-460"], ["nvidia-driver-580"]),
        ("docker", ["docker.io", "docker-ce"], ["python3-docker"]),
        ("docker.io", ["docker.io"], ["docker-io"]),
        ("libstdc++6", ["libstdc++6"], ["libstdccc6"]),
    ],
)
def test_the_block_list_matches_prefixes_and_only_them(prefix, blocks, lets):
    pattern = role.blocked(prefix)
    assert all(re.match(pattern, name) for name in blocks)
    assert not any(re.search(pattern, name) for name in lets)


@pytest.mark.skipif(not shutil.which("apt-config"), reason="needs apt-config")
def test_apt_reads_security_origins_only_and_adds_to_a_sites_block_list(tmp_path):
    site = tmp_path / "50"
    site.write_text(
        'Unattended-Upgrade::Origins-Pattern { "origin=Debian,codename=trixie,label=Debian"; };\n'
        'Unattended-Upgrade::Allowed-Origins { "x:y"; };\n'
        'Unattended-Upgrade::Package-Blacklist { "^site"; };\n'
    )
    ours = tmp_path / "52"
    ours.write_text(content(BaseSpec(upgrade_blocklist=("mlnx-ofed", "cuda")), UPGRADES))
    both = tmp_path / "both"
    both.write_text(site.read_text() + ours.read_text())
    dump = subprocess.run(
        ["apt-config", "dump"], env={"APT_CONFIG": str(both), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert dump.returncode == 0 and not dump.stderr
    lines = dump.stdout.splitlines()
    origins = [line.split('"')[1] for line in lines if re.match(r"Unattended-Upgrade::(Origins|Allowed).*:: ", line)]
    assert origins == list(role.SECURITY_ORIGINS)
    blocked = [line.split('"')[1] for line in lines if line.startswith("Unattended-Upgrade::Package-Blacklist:: ")]
    assert blocked[0] == "^site", "the site's own list stays"
    assert blocked[1:] == [role.blocked(name) for name in (*STACK, "mlnx-ofed")], "a name is added, and the stack stays"
    assert 'Unattended-Upgrade::Automatic-Reboot "false";' in lines


def test_needrestart_only_lists():
    text = content(BaseSpec(), "/etc/needrestart/conf.d/gpuwright.conf")
    assert "$nrconf{restart} = 'l';" in text.splitlines()


@pytest.mark.skipif(not shutil.which("perl"), reason="needs perl")
def test_needrestarts_drop_in_is_perl():
    text = content(BaseSpec(), "/etc/needrestart/conf.d/gpuwright.conf")
    assert (
        subprocess.run(["perl", "-e", f"our %nrconf; {text}; print $nrconf{{restart}}"], capture_output=True).stdout
        == b"l"
    )


def test_what_is_switched_off_has_no_package_and_says_so():
    why = "a crash is being looked for"
    spec = BaseSpec(unattended_upgrades=False, time_servers=("ntp.example",), deviations={"core-dumps": why})
    assert [file.path for file in role.drop_ins(spec, timesyncd=False, audit=False)] == [
        "/etc/needrestart/conf.d/gpuwright.conf",
        "/etc/systemd/journald.conf.d/gpuwright.conf",
        UPGRADES,
    ]
    assert 'APT::Periodic::Unattended-Upgrade "0";' in content(spec, UPGRADES).splitlines()
    assert role.packages(spec, "baseline", timesyncd=False) == list(role.PACKAGES)


def test_time_servers_of_a_site():
    spec = BaseSpec(time_servers=("ntp1.example", "192.0.2.7"))
    assert "NTP=ntp1.example 192.0.2.7" in content(spec, "/etc/systemd/timesyncd.conf.d/gpuwright.conf").splitlines()


@pytest.mark.parametrize(
    ("present", "keeping", "ours", "start"),
    [
        ((), (), True, None),
        ((), ("systemd-timesyncd.service",), True, None),
        (("chrony",), ("chrony.service",), False, None),
        (("chrony",), (), False, "chrony.service"),  # installed and disabled: nobody keeps the time
        (("openntpd",), (), False, "openntpd.service"),
        ((), ("ntpd.service",), False, None),  # of no package that is known here
        (("chrony",), ("systemd-timesyncd.service",), False, None),
    ],
)
def test_one_daemon_keeps_the_time(present, keeping, ours, start):
    found = role.timekeeping(BaseSpec(), present, keeping, container=False)
    assert (found.ours, found.start, found.warning) == (ours, start, "")
    off = role.timekeeping(BaseSpec(time_sync=False), present, keeping, container=False)
    assert (off.ours, off.start) == (False, None)
    assert role.timekeeping(BaseSpec(), present, keeping, container=True).start is None


@pytest.mark.parametrize("time_sync", [True, False])
def test_two_daemons_that_keep_the_time_are_named_and_left_alone(time_sync):
    both = ("chrony.service", "ntpd.service")
    found = role.timekeeping(BaseSpec(time_sync=time_sync), ("chrony",), both, container=False)
    assert "chrony.service and ntpd.service pull the clock to and fro" in found.warning
    assert (found.ours, found.start) == (False, None)


def test_a_daemon_counts_that_runs_or_is_enabled_and_no_other():
    lines = [
        "chrony.service loaded inactive disabled",
        "ntp.service not-found inactive ",
        "ntpsec.service masked inactive masked",
        "openntpd.service loaded inactive enabled",
        "systemd-timesyncd.service loaded active disabled",
    ]
    assert facts.keeping(lines) == ["openntpd.service", "systemd-timesyncd.service"]


@pytest.mark.parametrize(
    ("answer", "stale"),
    [
        ("PERSISTENT=yes\nMAX_USE=2147483648\n", []),
        ("PERSISTENT=yes\nMAX_USE=2147479552\n", []),  # rounded down to a page
        ("PERSISTENT=yes\nMAX_USE=4294967296\n", [role.JOURNALD]),
        ("PERSISTENT=no\n", [role.JOURNALD]),
        ("PERSISTENT=yes\n", []),  # the line itself has been rotated away
    ],
)
def test_journald_is_restarted_when_it_runs_with_something_else(answer, stale):
    assert role.journal_is_stale(snapshot.Snapshot({"journal": (0, answer)}), BaseSpec()) == stale


def test_an_answer_of_another_shape_is_not_an_observation():
    with pytest.raises(snapshot.CouldNotLook):
        snapshot.Snapshot({"journal": (0, "nonsense")}).read(facts.JOURNAL)


@pytest.mark.parametrize(("virtualization", "container"), [("none", False), ("kvm", False), ("systemd-nspawn", True)])
def test_a_container_has_its_machines_clock(virtualization, container):
    system = snapshot.System("debian", "13", "trixie", "x86_64", "6.12", virtualization, False)
    assert system.is_container is container


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"upgrade_blocklist": ["^nvidia"]}, "a package name has only a-z"),
        ({"extra_packages": ["htop=3"]}, "a package name has only a-z"),
        ({"time_servers": ["a b"]}, "a time server is one host name or address"),
        ({"time_servers": ["ntp.example\nNTP=x"]}, "a time server is one host name or address"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_load(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        BaseSpec.model_validate(settings)


# --- what profiles set ---


def test_apparmor_comes_with_the_profiles_that_ask_for_it_and_stays_away_where_the_node_file_says_so():
    without = BaseSpec(deviations={"apparmor": "a program of the site needs it off"})
    found = [
        ("apparmor" in role.packages(spec, profile, True)) for spec in (BaseSpec(), without) for profile in PROFILES
    ]
    assert found == [False, True, True, False, False, False]


def test_every_deviation_is_about_a_setting_of_the_profiles():
    for name in get_args(get_args(BaseSpec.model_fields["deviations"].annotation)[0]):
        assert any(f"{{{name}:" in setting.waiver for setting in (*hardening.SETTINGS, *auditing.SETTINGS)), name


@pytest.mark.skipif(not shutil.which("apt-config"), reason="needs apt-config")
def test_stages_and_further_origins_are_read_by_apt(tmp_path):
    site = 'Unattended-Upgrade::Update-Days { "6"; };\n'
    spec = BaseSpec(
        upgrade_days=("sunday", "tuesday"),
        upgrade_origins={"origin=Site,archive=stable": "the site's own packages"},
    )
    both = tmp_path / "both"
    both.write_text(site + content(spec, UPGRADES))
    dump = subprocess.run(
        ["apt-config", "dump"], env={"APT_CONFIG": str(both), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    lines = dump.stdout.splitlines()
    assert [line for line in lines if "Update-Days::" in line] == [
        'Unattended-Upgrade::Update-Days:: "0";',
        'Unattended-Upgrade::Update-Days:: "2";',
    ]
    assert 'Unattended-Upgrade::Origins-Pattern:: "origin=Site,archive=stable";' in lines
    assert "Update-Days" not in content(BaseSpec(), UPGRADES)


@pytest.mark.parametrize("origin", ["origin=Docker;", 'a="b"', "Docker", "origin=A, label=B", "origin=A{"])
def test_an_origin_that_apt_would_read_otherwise_is_refused(origin):
    with pytest.raises(ValidationError, match="an origin is a pattern"):
        BaseSpec.model_validate({"upgrade_origins": {origin: "a reason of the site"}})
