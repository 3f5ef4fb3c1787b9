"""Role access on booted hosts: from root to an account of its own, through all profiles, with other people's files beside ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import sabotage
import trial
from trial import Trial

from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect

pytestmark = pytest.mark.lab

CHANGE = "Access | Change who may log in and become root"
DROP_IN = "/etc/ssh/sshd_config.d/00-gpuwright.conf"


def console(node: Trial, command: str) -> str:
    """What somebody at the machine's console would see: no network, no sshd."""
    argv = ["nsenter", "--all", "--target", str(node.host._init()), "sh", "-c", command]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def login_argv(node: Trial, user: str, key: str | None = None) -> list[str]:
    argv = node.host.ssh_argv("-o", "BatchMode=yes")
    argv[-1] = f"{user}@{node.host.address}"
    # ssh shows no notice at level ERROR.
    others = {
        "LogLevel=ERROR": "LogLevel=INFO",
        f"IdentityFile={node.host.ssh_key}": f"IdentityFile={key or node.host.ssh_key}",
    }
    return [others.get(argument, argument) for argument in argv]


def login(node: Trial, user: str, command: str = "true", key: str | None = None) -> subprocess.CompletedProcess[str]:
    """As a person logs in: by key, and with nobody there to type a password."""
    return subprocess.run(
        [*login_argv(node, user, key), command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def effective(node: Trial, user: str, keyword: str) -> str:
    return console(node, f"sshd -T -C user={user},host=x,addr=192.0.2.1 | sed -n 's/^{keyword} //p' | paste -sd' '")


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def node(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("access")
    name = {"trixie": "access-13", "bookworm": "access-12"}[request.param]
    blank = trial.blank(name, request.param, directory, {})
    for person in ("alice", "audit"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", person, "-f", directory / person], check=True
        )
    public = f"{blank.host.ssh_key}.pub"
    blank.node = {
        "base": {"unattended_upgrades": False, "guard": "20 s"},
        # The profiles above baseline ask for both.
        "firewall": {"ssh": [str(blank.host.segment.network)]},
        "kernel": {},
        "access": {
            "users": {
                "deploy": {"keys": [public], "sudo": "all"},
                "auditor": {"keys": [str(directory / "audit.pub")], "sudo": "audit"},
                "alice": {"keys": [str(directory / "alice.pub")]},
            },
        },
    }
    yield blank
    blank.host.destroy()


def test_a_blank_host_deployed_as_root(node):
    # what a cloud image and a vendor leave behind
    console(
        node,
        "echo 'PasswordAuthentication yes' >/etc/ssh/sshd_config.d/50-cloud-init.conf;"
        "printf 'Match User alice\\n  PasswordAuthentication yes\\n' >/etc/ssh/sshd_config.d/60-vendor.conf;"
        "ssh-keygen -q -t rsa -b 1024 -N '' -f /etc/ssh/ssh_host_rsa_key;"
        "mkdir /etc/ssh/keys; ssh-keygen -q -t rsa -b 1024 -N '' -f /etc/ssh/keys/vendor;"
        "printf 'HostKey /etc/ssh/ssh_host_ed25519_key\\nHostKey /etc/ssh/keys/vendor\\n' >/etc/ssh/sshd_config.d/61-vendor.conf;"
        "systemctl reload ssh",
    )
    dry = node.run("--dry")
    assert dry.status == 0, dry.said
    first = node.deploy()
    assert set(first.changed) <= set(dry.changed)
    assert CHANGE in first.changed
    assert "60-vendor.conf asks for PasswordAuthentication yes in Match User alice" in first.said
    assert node.deploy().changed == []
    assert node.run("--dry").changed == []


def test_what_it_is_in_baseline(node, tmp_path):
    for user in ("alice", "deploy", "root", "nobody-of-that-name"):
        assert effective(node, user, "passwordauthentication") == "no"
    assert effective(node, "root", "permitrootlogin") == "without-password"
    assert console(node, "ls /etc/ssh/ssh_host_rsa_key /etc/ssh/keys/* 2>/dev/null") == ""
    assert login(node, "deploy", "sudo -n id -un").stdout.strip() == "root"
    assert login(node, "alice", "sudo -n true", str(node.directory / "alice")).returncode != 0
    assert login(node, "alice", key=str(node.directory / "alice")).returncode == 0
    assert login(node, "alice").returncode != 0, "the deploy's key is not alice's"


def test_a_key_in_a_home_does_not_count(node):
    public = node.host.ssh_key.with_suffix(".pub").read_text().strip()
    console(
        node,
        f"install -d -o alice -g alice -m 700 ~alice/.ssh; echo '{public}' >~alice/.ssh/authorized_keys; chown alice: ~alice/.ssh/authorized_keys",
    )
    assert login(node, "alice").returncode != 0


def test_the_audit_account_looks_and_does_nothing_else(node):
    key = str(node.directory / "audit")
    script = "/usr/local/lib/gpuwright/audit-snapshot"
    assert (
        login(
            node, "auditor", f"sudo -n {script} | head -c 100000 | grep -c '^audit-access-effective 0 '", key
        ).stdout.strip()
        == "1"
    )
    for command in (
        f"sudo -n {script} x",
        "sudo -n true",
        "sudo -n cat /etc/shadow",
        f"cp {script} /tmp/a; sudo -n /tmp/a",
    ):
        assert login(node, "auditor", command, key).returncode != 0, command
    for user, banner in (("alice", "SSH-2.0"), ("auditor", "")):
        person = str(node.directory / {"alice": "alice", "auditor": "audit"}[user])
        *argv, where = login_argv(node, user, person)
        forwarded = subprocess.run(
            [*argv, "-W", "127.0.0.1:22", where], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
        assert forwarded.stdout[:7] == banner, "in baseline people forward, and the audit account does not"
    report = node.directory / "audit.json"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/audit/test_controls.py",
        f"--inventory={node.directory}/inventory.py",
    ]
    done = subprocess.run(
        [*argv, "--audit-user=auditor", f"--audit-key={key}", f"--audit-json={report}", "-n0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    [host] = json.loads(report.read_text())["hosts"]
    assert set(host["outcomes"]) <= {"pass", "not applicable"}
    # another script is no evidence
    console(node, f"echo '# x' >>{script}")
    done = subprocess.run(
        [*argv, "--audit-user=auditor", f"--audit-key={key}", "-n0"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "deploy first" in done.stdout
    assert node.deploy().changed == ["Access | Write the scripts that checks and audits call"]


def test_root_is_told_before_it_is_locked_out(node):
    node.node["hardening"] = "server-cis1"
    run = node.run("-y")
    assert run.status != 0
    assert (
        "'root'  could not log in any more: hardening server-cis1 refuses root over SSH; connect as deploy" in run.said
    )


def test_server_cis1_by_an_account_with_sudo(node):
    node.connect = {"ssh_user": "deploy", "_sudo": True}
    node.node["access"]["banner"] = "For authorised use only."
    assert CHANGE in node.deploy().changed
    assert node.deploy().changed == []
    assert login(node, "root").returncode != 0
    assert sorted(effective(node, "nobody-of-that-name", "allowusers").split()) == ["alice", "auditor", "deploy"]
    assert "For authorised use only." in login(node, "root").stderr


class Judged:
    """The node, and what its controls say of it."""

    def __init__(self, node: Trial) -> None:
        self.node = node
        collected = collect(node.directory / "inventory.py")
        assert not collected.faults, collected.faults
        name = node.host.name
        self.spec = collected.specs[name]
        self.controls = controls.of_node(self.spec)
        self.host = connection.connect(name, collected.hosts[name])

    def judge(self):
        snapshot = connection.read(self.host, self.controls)
        return {result.control.id: result for result in judge_all(self.controls, snapshot, self.spec)}


@pytest.fixture(scope="module")
def judged(node):
    assert node.connect, "server-cis1 comes before"
    return Judged(node)


@pytest.fixture(scope="module")
def green(judged):
    found = judged.judge()
    # What a lab host's kernel records, only its machine's kernel can tell.
    wrong = {
        key: (r.outcome.value, r.verdict.actual)
        for key, r in found.items()
        if r.outcome not in (Outcome.PASS, Outcome.NOT_APPLICABLE)
        and not (r.outcome is Outcome.MANUAL and "this is a container" in r.verdict.actual)
    }
    assert wrong == {}
    return {key: result.outcome for key, result in found.items()}


@pytest.mark.parametrize("control", [key for key in sabotage.SABOTAGES if key.startswith("GPW-ACCS-")])
def test_a_sabotage_turns_exactly_its_control_red(node, judged, green, control):
    entry = sabotage.SABOTAGES[control]
    assert green[control] is Outcome.PASS
    try:
        console(node, entry.do)
        red = {key: r for key, r in judged.judge().items() if r.outcome is not green[key]}
        seen = {key: (r.outcome.value, r.verdict.actual) for key, r in red.items()}
        assert set(red) == {control, *entry.also}, seen
        assert all(r.outcome is Outcome.FAIL for r in red.values()), seen
    finally:
        console(node, entry.undo)
    assert {key for key, r in judged.judge().items() if r.outcome is not green[key]} == set()


def test_a_deploy_heals_what_drifted(node, judged, green):
    for key, entry in sabotage.SABOTAGES.items():
        if key.startswith("GPW-ACCS-") and entry.heals:
            console(node, entry.do)
    node.deploy()
    assert {key for key, r in judged.judge().items() if r.outcome is not green[key]} == set()
    assert node.deploy().changed == []


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("00-a.conf", "Match all\\n PasswordAuthentication yes\\n", "passwordauthentication is yes for"),
        ("70-site.conf", "Match User bob\\n AllowUsers bob\\n", "allowusers is"),
    ],
)
def test_a_neighbour_that_cannot_be_overruled_is_refused_by_name(node, file, text, sentence):
    console(node, f"printf '{text}' >/etc/ssh/sshd_config.d/{file}; useradd -s /bin/bash bob; systemctl reload ssh")
    try:
        run = node.run("-y")
        assert run.status != 0
        assert sentence in run.said, run.said
        assert f"/etc/ssh/sshd_config.d/{file}" in run.said
    finally:
        console(node, f"rm /etc/ssh/sshd_config.d/{file}; userdel bob; systemctl reload ssh")
    assert node.deploy().changed == []


def test_types_of_keys_that_a_match_block_gives_one_account_are_seen(node, judged, green):
    file = "/etc/ssh/sshd_config.d/00-a.conf"
    console(node, f"printf 'Match User auditor\\n PubkeyAcceptedAlgorithms +ssh-rsa\\n' >{file}")
    try:
        found = judged.judge()["GPW-ACCS-004"]
        assert found.outcome is Outcome.FAIL
        assert "ssh-rsa" in found.verdict.actual and "for auditor" in found.verdict.actual
        assert "nobody-of-that-name" not in found.verdict.actual
    finally:
        console(node, f"rm {file}; systemctl reload ssh; sleep 0.3")
    assert judged.judge()["GPW-ACCS-004"].outcome is green["GPW-ACCS-004"]


def test_accounts_that_were_there_before_are_named_and_left_alone(node):
    console(
        node,
        "useradd -s /bin/bash bob; echo bob:a-word-of-nobody-17 | chpasswd; gpasswd -a bob disk; gpasswd -a bob sudo",
    )
    try:
        run = node.deploy()
        assert run.changed == []
        assert "bob has a password, which console and su take" in run.said
        assert "bob is in group disk, which is root by another name" in run.said
        assert "bob is in group sudo, so sudo makes it root" in run.said
        assert console(node, "id -nG bob").split() == ["bob", "disk", "sudo"]
    finally:
        console(node, "userdel bob")
    assert "bob" not in node.deploy().said


def test_an_audit_account_that_a_group_makes_root_is_refused(node):
    console(node, "gpasswd --add auditor disk")
    try:
        run = node.run("-y")
        assert run.status != 0
        assert "auditor has 'sudo: audit' and is in group disk, which makes it root" in run.said
        assert run.changed == []
    finally:
        console(node, "gpasswd --delete auditor disk")
    assert node.deploy().changed == []


def test_an_sshd_that_its_socket_starts(node):
    console(node, "systemctl disable --now ssh.service; systemctl enable --now ssh.socket")
    try:
        node.node["access"]["banner"] = "For authorised use only, and watched."
        assert node.deploy().changed == [CHANGE]
        assert "and watched" in login(node, "root").stderr
        assert node.deploy().changed == []
        assert console(node, "systemctl is-active ssh.socket") == "active"
        node.node["access"]["deviations"] = {"MaxSessions": {"value": "9", "reason": "as good as any other value"}}
        assert node.deploy().changed == [CHANGE]
        assert effective(node, "alice", "maxsessions") == "9"
    finally:
        node.node["access"].pop("deviations", None)
        node.deploy()
        console(
            node, "systemctl disable --now ssh.socket; systemctl stop ssh.service; systemctl enable --now ssh.service"
        )
    assert node.deploy().changed == []


def test_a_read_only_etc_is_refused_before_the_first_change(node):
    node.node["base"]["journal_max_use"] = "1 GiB"
    console(node, "mount --bind /etc /etc; mount -o remount,bind,ro /etc")
    try:
        run = node.run("-y")
        assert run.status != 0
        assert "/etc is read-only, so who may log in cannot be changed" in run.said
        assert run.changed == []
    finally:
        console(node, "umount /etc")
        del node.node["base"]["journal_max_use"]
    assert node.deploy().changed == []


@pytest.fixture
def without_the_own_key(node):
    """The node file takes away the very key that this run connects with."""
    users = node.node["access"]["users"]
    keep = users["deploy"]["keys"]
    users["deploy"]["keys"] = [str(node.directory / "alice.pub")]
    yield
    users["deploy"]["keys"] = keep


def test_a_run_without_its_own_key_is_refused_before_anything_changes(node, without_the_own_key):
    run = node.run("-y")
    assert run.status != 0
    assert "this run logged in as deploy with the key SHA256:" in run.said
    assert "which access.users.deploy.keys does not have: it could not log in again" in run.said
    assert "nothing was written" in run.said
    assert "no new connection" not in run.said
    assert login(node, "deploy").returncode == 0


def test_a_run_without_its_own_key_is_taken_back_where_nobody_could_know(node, without_the_own_key):
    """The same with a log that says nothing: the check is fooled, and the guard is not."""
    console(node, "mount --bind /usr/bin/false /usr/bin/journalctl")
    started = time.monotonic()
    try:
        run = node.run("-y")
    finally:
        console(node, "umount /usr/bin/journalctl")
    assert run.status != 0
    assert re.search("no new connection after the change of role access: .*Authentication error", run.said), run.said
    assert "the old state is back" in run.said
    assert time.monotonic() - started < 60


def test_the_next_run_says_so_once(node):
    run = node.deploy()
    assert len(run.changed) == 1 and "put the old state of role access back" in run.changed[0]
    assert node.deploy().changed == []


def test_a_sudo_drop_in_that_visudo_refuses_is_not_put_in_place(node):
    before = console(node, "sha256sum /etc/sudoers.d/zz-gpuwright")
    users = node.node["access"]["users"]
    users["alice"]["sudo"] = "all"
    console(node, "mount --bind /usr/bin/false /usr/sbin/visudo")
    try:
        run = node.run("-y")
    finally:
        console(node, "umount /usr/sbin/visudo")
        del users["alice"]["sudo"]
    assert run.status != 0
    assert "refused by: visudo -cqf ./etc/sudoers.d/zz-gpuwright; nothing was written" in run.said
    assert console(node, "sha256sum /etc/sudoers.d/zz-gpuwright") == before
    node.deploy()
    assert node.deploy().changed == []


def test_a_controller_that_knows_the_node_by_a_key_that_goes_gets_it_back(node):
    """strict deletes ECDSA host keys; this controller has never seen another one."""
    key = "/etc/ssh/ssh_host_ecdsa_key"
    console(node, f"[ -e {key} ] || ssh-keygen -q -t ecdsa -N '' -f {key}")
    node.deploy()
    assert node.deploy().changed == []
    public = console(node, f"cut -d' ' -f1,2 {key}.pub")
    known = node.directory / "known_by_ecdsa"
    known.write_text(f"{node.host.address} {public}\n")
    others = node.connect
    node.connect = {**others, "ssh_known_hosts_file": str(known)}
    node.node |= {"hardening": "strict", "console": True}
    try:
        run = node.run("-y")
    finally:
        node.connect = others
        node.node |= {"hardening": "server-cis1", "console": False}
    assert run.status != 0
    assert "no new connection after the change of role access" in run.said, run.said
    assert "the old state is back" in run.said
    assert console(node, f"cut -d' ' -f1,2 {key}.pub") == public
    assert console(node, f"ssh-keygen -y -f {key} | cut -d' ' -f1,2") == public
    node.deploy()
    assert node.deploy().changed == []


def test_strict_with_a_console(node):
    node.node |= {"hardening": "strict", "console": True}
    assert node.deploy().changed == [CHANGE]
    assert effective(node, "deploy", "disableforwarding") == "yes"
    assert "ecdh-sha2-nistp256" not in effective(node, "deploy", "kexalgorithms")
    assert node.deploy().changed == []


def test_after_a_reboot_it_is_the_same(node):
    # As Host.reboot does it, which waits for root's ssh: that is closed here.
    init = node.host._init()
    os.kill(init, signal.SIGRTMIN + 5)
    deadline = time.monotonic() + 120
    while node.host._init() in (0, init) or login(node, "deploy").returncode:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert node.deploy().changed == []


def test_somebody_who_left_is_out_and_their_number_stays(node):
    uid = console(node, "id -u alice")
    assert console(node, "stat -c '%a %U' ~alice") == "700 alice"
    session = subprocess.Popen(
        [*login_argv(node, "alice", str(node.directory / "alice")), "sleep 60"], stdin=subprocess.DEVNULL
    )
    try:
        time.sleep(1)
        assert session.poll() is None
        alice = node.node["access"]["users"].pop("alice")
        predicted = node.run("--dry").changed
        assert any("account alice" in name for name in predicted)
        assert any("/etc/ssh/authorized_keys.d/alice" in name for name in predicted)
        node.deploy()
        assert session.wait(10) != 0
    finally:
        session.kill()
    assert login(node, "alice", key=str(node.directory / "alice")).returncode != 0
    assert console(node, "getent passwd alice | cut -d: -f3,7") == f"{uid}:/usr/sbin/nologin"
    assert node.deploy().changed == []
    node.node["access"]["users"]["alice"] = alice
    node.deploy()
    assert login(node, "alice", key=str(node.directory / "alice")).returncode == 0
    assert node.deploy().changed == []


def test_the_role_does_not_go_while_the_run_depends_on_it(node):
    """Without the role this account neither has a key nor becomes root: only the guard can still help."""
    access = node.node.pop("access")
    node.node |= {"hardening": "baseline"}
    run = node.run("-y")
    assert run.status != 0
    assert "this user cannot become root without a password any more" in run.said
    assert "the guard put the old state back; the node is reachable again" in run.said
    assert login(node, "deploy", "sudo -n true").returncode == 0
    node.node["access"] = access
    node.deploy()


def test_the_account_of_the_run_is_not_locked_whatever_let_it_in(node):
    """With a key in its home and a file of the site's it proves the change, although the node file no longer names it."""
    users = node.node["access"]["users"]
    node.node |= {"hardening": "baseline"}
    public = node.host.ssh_key.with_suffix(".pub").read_text().strip()
    console(
        node,
        f"install -d -o deploy -g deploy -m 700 ~deploy/.ssh; echo '{public}' >~deploy/.ssh/authorized_keys;"
        "chown deploy: ~deploy/.ssh/authorized_keys; echo 'deploy ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/site",
    )
    deploy = users.pop("deploy")
    users["alice"]["sudo"] = "all"
    try:
        run = node.deploy()
        assert "account deploy is not locked, because this run is logged in as it" in run.said
        assert console(node, "ls /etc/ssh/authorized_keys.d/deploy 2>/dev/null") == ""
        assert login(node, "deploy", "sudo -n true").returncode == 0
        assert node.deploy().changed == []
    finally:
        users["deploy"] = deploy
        del users["alice"]["sudo"]
        node.deploy()
        console(node, "rm -rf /etc/sudoers.d/site ~deploy/.ssh")
    assert node.deploy().changed == []


def test_the_role_goes_when_somebody_else_deploys(node):
    node.node |= {"hardening": "baseline"}
    node.deploy()
    node.connect = {}
    node.node.pop("access")
    run = node.deploy()
    assert any(f"file {DROP_IN}" in name for name in run.changed)
    left = f"ls {DROP_IN} /etc/sudoers.d/zz-gpuwright /etc/ssh/authorized_keys.d/deploy 2>/dev/null"
    assert console(node, left) == ""
    assert login(node, "root").returncode == 0
    assert login(node, "deploy").returncode != 0
    assert node.deploy().changed == []
