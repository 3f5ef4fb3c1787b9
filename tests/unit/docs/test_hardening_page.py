"""docs/hardening.md says what the roles' tables say, and every setting of a profile has what a reader needs."""

import re
from pathlib import Path

import pytest

from gpuwright.audit import profiles, references
from gpuwright.audit.catalogue import evidence
from gpuwright.hardening import PROFILES
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules import hardening
from roles.access import sshd
from roles.base import auditing
from roles.base import hardening as base
from roles.kernel import hardening as kernel

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hardening.md"
SETTINGS = [
    *base.SETTINGS,
    *auditing.SETTINGS,
    *kernel.SYSCTLS,
    *kernel.MODULES,
    *profiles.of_access(),
    *profiles.OF_GATEWAY,
    *profiles.ASKED,
]

# CIS Debian 12 1.1.0: an id and the settings that are what it asks for, in our own words.
FITS = {
    **dict(zip(("1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"), ("cramfs", "freevxfs", "hfs", "hfsplus"), strict=True)),
    **dict(zip(("1.1.1.5", "1.1.1.8", "1.1.1.9"), ("jffs2", "udf", "usb_storage"), strict=True)),
    "1.2.2.1": "security updates",
    **dict.fromkeys(("1.3.1.1", "1.3.1.3"), "AppArmor"),
    "1.5.1": "kernel.randomize_va_space",
    "1.5.2": "kernel.yama.ptrace_scope",
    "1.5.3": "core dumps|kernel.core_pattern|fs.suid_dumpable",
    **dict.fromkeys(("2.3.1.1", "2.3.2.2"), "time"),
    "3.1.3": "bluetooth",
    **dict(zip(("3.2.1", "3.2.2", "3.2.3", "3.2.4"), ("dccp", "tipc", "rds", "sctp"), strict=True)),
    "3.3.2": r"net.ipv4.conf.[\w*]+.send_redirects",
    "3.3.3": "net.ipv4.icmp_ignore_bogus_error_responses",
    "3.3.4": "net.ipv4.icmp_echo_ignore_broadcasts",
    "3.3.5": r"net.ipv[46].conf.[\w*]+.accept_redirects",
    "3.3.6": r"net.ipv4.conf.[\w*]+.secure_redirects",
    "3.3.8": r"net.ipv[46].conf.[\w*]+.accept_source_route",
    "3.3.9": r"net.ipv4.conf.[\w*]+.log_martians",
    "3.3.10": "net.ipv4.tcp_syncookies",
    **dict.fromkeys(("4.3.5", "4.3.8", "4.3.9", "4.3.10"), "role firewall"),
    "5.1.4": "AllowUsers",
    "5.1.6": "Ciphers",
    "5.1.7": "ClientAlive(Interval|CountMax)",
    "5.1.8": "DisableForwarding",
    "5.1.9": "GSSAPIAuthentication",
    "5.1.10": "HostbasedAuthentication",
    "5.1.11": "IgnoreRhosts",
    "5.1.12": "KexAlgorithms",
    "5.1.13": "LoginGraceTime",
    "5.1.14": "LogLevel",
    "5.1.15": "MACs",
    "5.1.16": "MaxAuthTries",
    "5.1.17": "MaxSessions",
    "5.1.18": "MaxStartups",
    "5.1.19": "PermitEmptyPasswords",
    "5.1.20": "PermitRootLogin",
    "5.1.21": "PermitUserEnvironment",
    **dict.fromkeys(("6.1.1.1", "6.1.1.3", "6.1.2.3", "6.1.2.4"), "journal"),
    **dict.fromkeys(("6.2.1.1", "6.2.1.2", "6.2.2.1"), "audit daemon"),
    **dict.fromkeys(("6.2.1.3", "6.2.1.4", "6.2.3.20"), "rules locked, audited from boot on"),
    "6.2.3.1": "rules gpuwright-sudo",
    "6.2.3.2": "rules gpuwright-root",
    "6.2.3.4": "rules gpuwright-clock",
    "6.2.3.5": "rules gpuwright-network",
    "6.2.3.8": "rules gpuwright-accounts",
    "6.2.3.10": "rules gpuwright-mounts",
    **dict.fromkeys(("6.2.3.11", "6.2.3.12"), "rules gpuwright-logins"),
    "6.2.3.14": "rules gpuwright-apparmor",
    "6.2.3.19": "rules gpuwright-modules",
}


def test_the_page_is_not_stale() -> None:
    text = PAGE.read_text()
    assert text == profiles.renewed(text), "a table changed; run: python -m gpuwright.audit.profiles docs/hardening.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_says_why_what_it_breaks_and_how_to_waive_it(setting) -> None:
    assert setting.reason and setting.may_break
    assert any(setting.values)
    # A waiver names what stands in the node file; where there is none, the reason.
    assert re.search(r"`(base|kernel|access|gateway)\.\w+.*`|none: .{20,}", setting.waiver), setting.waiver


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_has_ids_or_a_reason_why_no_catalogue_has_any(setting) -> None:
    assert setting.references.ids or len(setting.references.none) > 20
    assert evidence(setting.references)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_id_of_cis_is_claimed_by_the_setting_that_it_asks_for_alone(setting) -> None:
    name = setting.name.replace("`", "")
    wrong = [one for one in setting.references.cis_debian12 if not re.fullmatch(FITS.get(one, "nobody"), name)]
    assert wrong == []


def test_every_id_in_the_table_of_what_fits_is_claimed() -> None:
    assert {one for setting in SETTINGS for one in setting.references.cis_debian12} == FITS.keys()


def test_an_id_that_is_not_the_subject_s_cannot_be_picked() -> None:
    assert references.KERNEL_NETWORK.only("3.3.2").cis_debian12 == ("3.3.2",)
    with pytest.raises(ValueError, match=r"has no id 3\.3\.7"):
        references.KERNEL_NETWORK.only("3.3.7")


@pytest.mark.parametrize("keyword", [*sshd.KEYWORDS, sshd.BANNER_KEYWORD], ids=lambda keyword: keyword.name)
def test_a_keyword_of_sshd_has_references(keyword) -> None:
    assert evidence(keyword.references)


def test_what_a_node_file_is_asked_for_is_what_it_is_refused_without() -> None:
    for profile in PROFILES:
        described = NodeSpec.model_validate({"gpuwright": 1, "summary": "a node", "hardening": profile})
        refused = " ".join(found.sentence for rule in hardening.RULES for found in rule(described))
        for setting in profiles.ASKED:
            asked = re.sub("role `(.*)`", r"'\1:'", setting.name).replace("`", "'")
            assert (asked in refused) is (setting.value(profile) is not None), (asked, profile)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="profiles: begin"):
        profiles.renewed("a page")
