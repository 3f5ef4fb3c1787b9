"""The drop-in in front of other people's files, judged by the real sshd of a booted host, in a mount namespace of its own."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile

import pytest

import lab
from gpuwright.hardening import PROFILES
from gpuwright.render import REPOSITORY
from roles.access import sshd
from roles.access.spec import AccessSpec

pytestmark = pytest.mark.lab
MAIN = "Include /etc/ssh/sshd_config.d/*.conf\nKbdInteractiveAuthentication no\nUsePAM yes\nX11Forwarding yes\n"
CHECK = REPOSITORY / "files/access/usr/local/lib/gpuwright/access-sshd-check"


class Etc:
    """Somebody's /etc/ssh, hidden from the host's own sshd by a mount namespace for every command."""

    def __init__(self, host):
        self.host = host
        self.files = {"sshd_config": MAIN}
        self.staged = {}
        said = host.run(" ".join(f"echo {query} $(ssh -Q {query});" for query in set(sshd.QUERIES.values()))).stdout
        lists = {line.split()[0]: tuple(line.split()[1:]) for line in said.splitlines()}
        self.offered = {keyword: lists[query] for keyword, query in sshd.QUERIES.items()}

    def write(self, name, text):
        self.files[name] = text

    def ours(self, profile="server-cis1", **settings):
        spec = AccessSpec.model_validate(
            {"users": {"deploy": {"keys": ["d.pub"], "sudo": "all"}, "auditor": {"keys": ["a.pub"]}}, **settings}
        )
        host_keys = [sshd.HostKey("/etc/ssh/ssh_host_ed25519_key", "ED25519", 256)]
        lines = sshd.expected(spec, profile, self.offered, host_keys)
        self.staged = {
            sshd.DROP_IN: sshd.drop_in(spec, profile, self.offered, host_keys).decode(),
            sshd.EXPECTED: "".join(f"{' '.join(line)}\n" for line in lines),
        }

    def check(self):
        """What the check says of the staged files, in front of these."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, text in [
                *((f"ssh/{name}", text) for name, text in self.files.items()),
                *((f"stage{path}", text) for path, text in self.staged.items()),
                ("check", CHECK.read_text()),
            ]:
                member, data = tarfile.TarInfo(name), text.encode()
                member.size, member.mode = len(data), 0o600
                tar.addfile(member, io.BytesIO(data))
        script = """
            work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; base64 -d | tar -x -C "$work"; mkdir -p "$work/ssh/sshd_config.d"
            cp -a /etc/ssh/ssh_host_ed25519_key* "$work/ssh/"; mount --bind "$work/ssh" /etc/ssh
            sh "$work/check" "$work/stage"
        """
        return self.host.run(
            f"unshare --mount sh -c {shlex.quote(script)}", base64.encodebytes(archive.getvalue()).decode(), check=False
        )


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def host(request):
    name = {"trixie": "sshd-13", "bookworm": "sshd-12"}[request.param]
    [host] = lab.up([name], request.param, blank=True)
    yield host
    host.destroy()


@pytest.fixture
def etc(host):
    return Etc(host)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_plain_host_does_what_each_profile_wants(etc, profile):
    etc.ours(profile)
    done = etc.check()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_keyword_is_one_that_sshd_knows_and_says_back(etc):
    etc.ours("strict", banner="no entry")
    expected = etc.staged[sshd.EXPECTED]
    for keyword in (*sshd.KEYWORDS, sshd.BANNER_KEYWORD):
        if keyword.value("strict") is not None:
            assert f" {keyword.name.lower()} " in expected
    assert etc.check().returncode == 0


def test_values_of_others_that_come_later_do_not_count(etc):
    etc.write("sshd_config.d/50-cloud-init.conf", "PasswordAuthentication yes\n")
    etc.write(
        "sshd_config.d/60-vendor.conf", "Match User auditor\n  PasswordAuthentication yes\n  PermitRootLogin yes\n"
    )
    etc.ours()
    done = etc.check()
    assert done.returncode == 0, done.stdout


def test_without_our_block_for_everybody_a_vendor_s_block_would_count(etc):
    """The test above would pass with a check that sees nothing."""
    etc.write("sshd_config.d/60-vendor.conf", "Match User auditor\n  PasswordAuthentication yes\n")
    etc.ours()
    etc.staged[sshd.DROP_IN] = etc.staged[sshd.DROP_IN].replace("Match all", "Match User deploy")
    done = etc.check()
    assert done.returncode == 1
    assert "passwordauthentication is yes for auditor," in done.stdout
    assert "and must be no; see /etc/ssh/sshd_config.d/60-vendor.conf" in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        # sorts before ours
        ("sshd_config.d/00-a.conf", "Match all\n  PasswordAuthentication yes\n", "passwordauthentication is yes"),
        ("sshd_config.d/00-a.conf", "Match Address 10.9.0.0/16\n  PermitRootLogin yes\n", "permitrootlogin is yes"),
        ("sshd_config", f"LoginGraceTime 0\n{MAIN}", "logingracetime is 0"),
        # lists of names add up over blocks
        ("sshd_config.d/60-b.conf", "Match User bob\n  AllowUsers bob\nMatch User deploy\n  AllowUsers bob\n", "allowusers is deploy auditor bob"),
        # the folder is not read at all
        ("sshd_config", "KbdInteractiveAuthentication no\n", "passwordauthentication is yes"),
    ],
)  # fmt: skip
def test_what_cannot_be_overruled_is_refused_by_name(etc, name, text, sentence):
    etc.write(name, text)
    etc.ours()
    done = etc.check()
    assert done.returncode == 1, done.stdout
    assert sentence in done.stdout, done.stdout
    if name != "sshd_config":
        assert f"/etc/ssh/{name}" in done.stdout


def test_a_file_that_sshd_refuses_is_refused_with_its_words(etc):
    etc.write("sshd_config.d/70-site.conf", "PermitRootLogin no -\n")
    etc.ours()
    done = etc.check()
    assert done.returncode == 1
    assert "sshd refuses its configuration: /etc/ssh/sshd_config.d/70-site.conf" in done.stdout


def test_a_password_user_and_nobody_else(etc):
    etc.ours(password_users={"auditor": "until the smart cards arrive in March"})
    assert etc.check().returncode == 0
    drop_in = etc.staged[sshd.DROP_IN]
    assert "# until the smart cards arrive in March\nMatch User auditor\n  PasswordAuthentication yes\n" in drop_in


def test_a_deviation_says_its_reason_where_it_is_set(etc):
    etc.ours(deviations={"MaxAuthTries": {"value": "8", "reason": "agents with many keys"}, "X11Forwarding": {"reason": "as Debian has it"}})  # fmt: skip
    drop_in = etc.staged[sshd.DROP_IN]
    assert "# Not as in profile server-cis1: agents with many keys\n  MaxAuthTries 8" in drop_in
    assert "X11Forwarding" not in drop_in
    assert etc.check().returncode == 0
