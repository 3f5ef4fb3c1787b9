"""Taking things away, run for real in a mount namespace; repeatable, and forgotten only after it is gone."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpuwright.ownership import _ORDER, Owned, _removal, _remove

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a private /var/lib and /etc")


class Host:
    name = "a"


@pytest.fixture
def remove(tmp_path):
    for name in ("state/owned", "etc", "units", "bin"):
        (tmp_path / name).mkdir(parents=True)
    calls = tmp_path / "calls"
    for program in ("systemctl", "docker", "nft"):
        (tmp_path / "bin" / program).write_text(f'#!/bin/sh\necho {program} "$@" >>{calls}\n')
        (tmp_path / "bin" / program).chmod(0o755)

    def run(things, role="engine"):
        [command] = list(_remove._inner(role, things))
        mounts = (
            f"mount -t tmpfs none /var/lib && mkdir /var/lib/gpuwright && mount --bind {tmp_path}/state /var/lib/gpuwright"
            f" && mkdir -p /var/lib/target && mount --bind {tmp_path}/etc /var/lib/target"
            f" && mount --bind {tmp_path}/units /etc/systemd/system"
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{mounts} && {command.get_raw_value()}"],
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, calls.read_text().splitlines()

    return tmp_path, run


@pytest.fixture(autouse=True)
def current_host(monkeypatch):
    monkeypatch.setattr("gpuwright.ownership.ctx_host", type("Context", (), {"get": staticmethod(Host)}))


def test_units_stop_before_their_files_go_and_the_record_goes_last(remove):
    root, run = remove
    (root / "state/owned/engine").write_text(
        "file\t/var/lib/target/b.conf\nunit\tgpuwright-engine-b.service\nfile\t/etc/keep\n"
    )
    (root / "etc/b.conf").write_text("x")
    (root / "units/gpuwright-engine-b.service").write_text("x")
    gone = [
        Owned("file", "/var/lib/target/b.conf"),
        Owned("unit", "gpuwright-engine-b.service"),
        Owned("container", "gpuwright-b"),
    ]
    done, calls = run(gone)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "systemctl disable -q --now gpuwright-engine-b.service"
    assert calls[-1] == "systemctl daemon-reload"
    assert "docker container rm -f gpuwright-b" in calls
    assert not (root / "etc/b.conf").exists() and not (root / "units/gpuwright-engine-b.service").exists()
    assert (root / "state/owned/engine").read_text() == "file\t/etc/keep\n"
    done, _ = run(gone)
    assert done.returncode == 0, "a second removal of what is gone must succeed"


def test_the_last_thing_takes_the_record_with_it(remove):
    root, run = remove
    (root / "state/owned/engine").write_text("file\t/var/lib/target/b.conf\n")
    assert run([Owned("file", "/var/lib/target/b.conf")])[0].returncode == 0
    assert not (root / "state/owned/engine").exists()


def test_a_unit_that_does_not_stop_keeps_its_file_and_its_record(remove):
    root, run = remove
    (root / "bin/systemctl").write_text("#!/bin/sh\nexit 1\n")
    (root / "calls").write_text("")
    (root / "units/gpuwright-engine-b.service").write_text("x")
    (root / "state/owned/engine").write_text("unit\tgpuwright-engine-b.service\n")
    done, _ = run([Owned("unit", "gpuwright-engine-b.service")])
    assert done.returncode == 1
    assert "cannot remove unit gpuwright-engine-b.service" in done.stderr
    assert (root / "units/gpuwright-engine-b.service").exists()
    assert (root / "state/owned/engine").exists()


def test_a_directory_outside_our_trees_is_only_removed_when_empty():
    assert "rm -rf" not in _removal(Owned("directory", "/srv/models"))
    assert "rm -rf" in _removal(Owned("directory", "/var/lib/gpuwright/cache/a"))


def test_every_kind_has_its_place_in_the_order():
    assert set(_ORDER) == {
        "file",
        "unit",
        "container",
        "network",
        "volume",
        "table",
        "user",
        "account",
        "directory",
        "hold",
    }
