"""What the role decides before anything runs. No host."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
from pyinfra.api import OperationError

from gpuwright import atomic, connect, snapshot
from gpuwright.ownership import Owned
from roles import access as role
from roles.access import facts
from roles.access.facts import Ssh
from roles.access.spec import AccessSpec

KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}B alice"
SPEC = AccessSpec.model_validate({"users": {"alice": {"keys": [KEY], "sudo": "all"}}})
OFFERED = {
    "KexAlgorithms": ("curve25519-sha256",),
    "Ciphers": ("aes256-ctr",),
    "MACs": ("hmac-sha2-256",),
    "PubkeyAcceptedAlgorithms": ("ssh-ed25519",),
    "HostKeyAlgorithms": ("ssh-ed25519",),
}


def host(logged_in_as: str | None = None, name: str = "gpu-01", **data: str):
    """A host with or without a connection, as pyinfra has it."""
    transport = SimpleNamespace(get_username=lambda: logged_in_as)
    client = SimpleNamespace(get_transport=lambda: transport) if logged_in_as else None
    return SimpleNamespace(name=name, print_prefix="", data=data, connector=SimpleNamespace(client=client))


class Node:
    """The role's two deploys on a host that answers, and what they would have done."""

    def __init__(self, monkeypatch, host, *accounts: str) -> None:
        self.locked: list[str] = []
        self.changes: list[dict] = []
        self.said: list[str] = []
        self.checked = facts.Checked()
        self.ssh: Ssh | None = Ssh(writable=True, present=True, offered=OFFERED)
        recorded = [Owned("account", name) for name in accounts] + [Owned("file", "/etc/sudoers.d/zz-gpuwright")]
        set_to = monkeypatch.setattr
        set_to(role, "ctx_host", SimpleNamespace(get=lambda: host))
        set_to(snapshot, "read", lambda host: SimpleNamespace(read=self.read))
        set_to(role.ownership, "recorded_of", lambda host, name: recorded)
        set_to(
            role.ownership, "retire", lambda name, keep: self.locked.extend(t.name for t in recorded if t not in keep)
        )
        set_to(role.logger, "warning", self.said.append)
        for module, name in ((role, "installed"), (role, "files"), (role.guard, "retire")):
            set_to(module, name, lambda **_: None)
        for name in ("accounts", "ed25519_host_key", "effective"):
            set_to(role.operations, name, lambda **_: None)
        set_to(role.guard, "change", lambda **settings: self.changes.append(settings))

    def read(self, section):
        if section is facts.SSH and self.ssh is None:
            raise snapshot.CouldNotLook("access: took longer than 20 s")
        return self.ssh if section is facts.SSH else self.checked

    def access(self, guarded: int = 120) -> None:
        role.access._inner(SPEC, profile="baseline", audit_script=b"", guarded=guarded)

    def retired(self) -> None:
        role.access_retired._inner(guarded=120)


@pytest.mark.parametrize(
    ("connection", "account"),
    [
        (host("bob", ssh_user="alice"), "bob"),
        (host(ssh_user="alice"), "alice"),
        (host(), None),
    ],
)
def test_the_connection_says_whose_it_is_and_ssh_user_only_where_there_is_none(connection, account):
    assert connect.account(connection) == account


def test_a_run_on_the_node_itself_is_the_account_that_runs(monkeypatch):
    monkeypatch.setenv("LOGNAME", "carol")
    assert connect.account(host(name="@local")) == "carol"


def test_accounts_that_are_no_longer_named_are_locked_but_for_the_run_s_own(monkeypatch):
    """It came in by a key in its home and becomes root by a file of the site: the guard's proof says nothing of this."""
    node = Node(monkeypatch, host("bob"), "alice", "bob", "eve")
    node.access()
    assert node.locked == ["eve"]
    assert node.said == ["account bob is not locked, because this run is logged in as it; deploy once as another"]


def test_a_role_that_goes_spares_the_run_s_own_account_although_nobody_named_it(monkeypatch):
    node = Node(monkeypatch, host("bob"), "alice", "bob")
    node.retired()
    assert "alice" in node.locked and "bob" not in node.locked


def test_a_node_that_does_not_answer_is_refused_in_a_sentence(monkeypatch):
    node = Node(monkeypatch, host("alice"))
    node.ssh = None
    with pytest.raises(OperationError, match="gpu-01: who may log in cannot be seen"):
        node.access()
    assert node.changes == []


def test_what_sshd_was_not_asked_about_is_said(monkeypatch):
    node = Node(monkeypatch, host("alice"))
    node.checked = facts.Checked(notes=("sshd was asked about 7 of 900 accounts",))
    node.access()
    assert node.said == ["sshd was asked about 7 of 900 accounts"]


@pytest.mark.parametrize(("guarded", "seconds"), [(120, 15), (20, 5)])
def test_asking_sshd_leaves_the_guard_most_of_its_time(monkeypatch, guarded, seconds):
    node = Node(monkeypatch, host("alice"))
    node.access(guarded)
    [change] = node.changes
    assert f"{role.CHECK} . {seconds}" in [check.command for check in change["validate"]]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a private /var/lib")
def test_a_sudo_drop_in_that_visudo_refuses_is_not_put_in_place(monkeypatch, tmp_path):
    node = Node(monkeypatch, host("alice"))
    node.access()
    [change] = node.changes
    asked = tmp_path / "asked"
    (tmp_path / "visudo").write_text(f'#!/bin/sh\n[ "$1" = -cqf ] && cat "$2" >{asked}\necho syntax error\nexit 1\n')
    (tmp_path / "visudo").chmod(0o755)
    (tmp_path / "node").mkdir()
    command = atomic.write("access", change["files"], validate=change["validate"], into=str(tmp_path / "node"))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /var/lib && {command.get_raw_value()}"],
        input=command.connector_arguments["_stdin"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65
    assert f"refused by: visudo -cqf .{role.SUDOERS}; nothing was written" in done.stderr
    assert "alice" in asked.read_text(), "it saw the file as it would be"
    assert list((tmp_path / "node").iterdir()) == []


@pytest.mark.parametrize("way", ["access", "retired"])
def test_nothing_is_locked_where_nobody_says_whose_the_connection_is(monkeypatch, way):
    node = Node(monkeypatch, host(), "eve")
    with pytest.raises(OperationError, match="nothing says which one this run is logged in as; name it"):
        getattr(node, way)()
    assert node.locked == []
