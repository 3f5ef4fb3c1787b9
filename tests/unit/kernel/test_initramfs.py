"""The script initramfs-modprobe with stand-ins for what makes and unpacks images: what a killed one left goes, and two never meet."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from gpuwright.render import REPOSITORY

SCRIPT = REPOSITORY / "files/kernel/usr/local/lib/gpuwright/initramfs-modprobe"
WANTED = hashlib.sha256(b"new\n").hexdigest()
PROGRAMS = {
    "unmkinitramfs": 'mkdir -p "$2/main/etc/modprobe.d" && cp "$1" "$2/main/etc/modprobe.d/gpuwright.conf"',
    "update-initramfs": 'echo "$TMPDIR" >"$GPUWRIGHT_ROOT/worked-in"; echo new >"$GPUWRIGHT_ROOT/boot/initrd.img-$3"',
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A machine with one kernel, whose image holds an older file, and with what a power cut left of a run before."""
    for name in ("bin", "boot", "var/tmp/gpuwright-initramfs.aB3dE6/tree/main", "lib/modules/6.12"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "boot/initrd.img-6.12").write_text("old\n")
    for name, script in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(node: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PATH": f"{node}/bin:{os.environ['PATH']}", "GPUWRIGHT_ROOT": str(node)}
    return subprocess.Popen(
        ["sh", SCRIPT, WANTED], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def test_what_a_killed_one_left_is_gone_and_nothing_is_left_again(node: Path) -> None:
    process = start(node)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "initramfs: kernel 6.12: making it anew\n")
    assert list((node / "var/tmp").iterdir()) == []
    assert (node / "worked-in").read_text().startswith(f"{node}/var/tmp/gpuwright-initramfs.")
    record = (node / "var/lib/gpuwright/kernel/initramfs").read_text()
    assert record.startswith("/boot/initrd.img-6.12:") and record.endswith(f" {WANTED}\n")


def test_one_that_still_works_keeps_what_it_unpacked(node: Path) -> None:
    state = node / "var/lib/gpuwright/kernel"
    state.mkdir(parents=True)
    held = os.open(state, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    process = start(node)
    try:
        assert process.stdout
        assert process.stdout.readline() == "initramfs: another run looks into the images; waiting for it\n"
        assert (node / "var/tmp/gpuwright-initramfs.aB3dE6/tree/main").exists()
        os.close(held)
        process.communicate(timeout=60)
        assert process.returncode == 0
        assert list((node / "var/tmp").iterdir()) == []
    finally:
        process.kill()
