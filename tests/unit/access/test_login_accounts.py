"""Which accounts a password or a group opens: the script on made-up tables, and what a deploy says of it."""

from __future__ import annotations

import subprocess

import pytest
from pyinfra.api import OperationError

from roles import access
from roles.access import accounts, facts
from roles.access.accounts import LoginAccount
from roles.access.spec import AccessSpec

SHADOW = """root:!:20000:0:99999:7:::
alice:$y$j9T$salt$hash:20000:0:99999:7:::
bob::20000:0:99999:7:::
carol:!$y$j9T$salt$hash:20000:0:99999:7:::
daemon:*:20000:0:99999:7:::
deploy:*:20000:0:99999:7:::
"""
GROUP = """root:x:0:
disk:x:6:alice
sudo:x:27:deploy,alice
docker:x:995:daemon
dockers:x:996:bob
lxd:x:997:
"""
PASSWD = """root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
alice:x:1000:1000::/home/alice:/bin/bash
bob:x:1001:1001::/home/bob:
carol:x:1002:997::/home/carol:/bin/sh
deploy:x:1003:1003::/home/deploy:/bin/bash
old:$1$salt$hash:1004:1004::/home/old:/bin/bash
ldap:x:1005:1005::/home/ldap:/bin/bash
"""
FOUND = (
    LoginAccount("root", "none"),
    LoginAccount("alice", "usable", ("disk", "sudo")),
    LoginAccount("bob", "empty"),
    LoginAccount("carol", "none", ("lxd",)),
    LoginAccount("deploy", "none", ("sudo",)),
    LoginAccount("old", "usable"),
    LoginAccount("ldap", "none"),
)
KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}B alice"


def test_accounts_are_read_from_the_three_tables(tmp_path):
    for name, text in (("shadow", SHADOW), ("group", GROUP), ("passwd", PASSWD)):
        (tmp_path / name).write_text(text)
    script = f'getent() {{ cat "{tmp_path}/$1"; }}\n{accounts.SCRIPT}'
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert accounts.parse(said.stdout) == FOUND
    assert "hash" not in said.stdout
    assert facts.parse(f"etc\twritable\n{said.stdout}").logins == FOUND


def test_no_account_at_all_is_no_answer():
    with pytest.raises(ValueError, match="no login account was seen"):
        accounts.parse("")


def spec(**settings) -> AccessSpec:
    users = {"deploy": {"keys": [KEY], "sudo": "all"}, "auditor": {"keys": [KEY], "sudo": "audit"}}
    return AccessSpec.model_validate({"users": users, **settings})


def seen(*logins: LoginAccount) -> facts.Ssh:
    return facts.Ssh(writable=True, present=True, logins=logins)


def test_a_deploy_names_what_was_there_before():
    assert access.notes(spec(), seen(*FOUND)) == [
        "alice has a password, which console and su take: usermod --password '*' alice, or name it in access.console_passwords with "
        "a reason",
        "alice is in group disk, which is root by another name: gpasswd --delete alice GROUP",
        "alice is in group sudo, so sudo makes it root, and the node file does not say so: gpasswd --delete alice GROUP, or give it "
        "'sudo: all'",
        "carol is in group lxd, which is root by another name: gpasswd --delete carol GROUP",
        "old has a password, which console and su take: usermod --password '*' old, or name it in access.console_passwords with "
        "a reason",
    ]
    named = spec(console_passwords={"root": "sealed in the safe", "alice": "the console's own"})
    assert access.notes(named, seen(LoginAccount("root", "usable", ("disk",)), LoginAccount("alice", "usable"))) == []


@pytest.mark.parametrize("group", [*accounts.ROOT_BY, *accounts.SUDO_BY])
def test_an_audit_account_that_a_group_makes_root_is_refused(group):
    sentence = rf"n: auditor has 'sudo: audit' and is in group {group}, which makes it root; take it out \(gpasswd --delete auditor {group}\)"
    with pytest.raises(OperationError, match=sentence):
        access.refuse_auditors("n", spec(), seen(LoginAccount("auditor", "none", (group,))))
    access.refuse_auditors("n", spec(), seen(LoginAccount("auditor", "none"), LoginAccount("deploy", "none", (group,))))
