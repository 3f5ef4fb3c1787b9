"""node-drain's look at drivers, run for real on kernels that are laid out below a directory; no engine runs there."""

from __future__ import annotations

import os
import subprocess

import pytest

from gpuwright.render import static

RUNNING, OTHER, THIRD = "6.12.57-amd64", "6.12.60-amd64", "6.12.48-amd64"
DRIVER = "updates/dkms/nvidia.ko.xz"


def laid_out(root, kernels):
    for kernel, modules in kernels.items():
        (root / "boot").mkdir(exist_ok=True)
        (root / f"boot/vmlinuz-{kernel}").touch()
        for module in ("kernel/fs/ext4.ko.xz", *modules):
            file = root / "lib/modules" / kernel / module
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


def drain(root, *arguments, container=False):
    programs = {"uname": f"echo {RUNNING}", "systemctl": ":", "systemd-detect-virt": "true" if container else "false"}
    (root / "bin").mkdir()
    for name, does in programs.items():
        (root / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (root / "bin" / name).chmod(0o755)
    script = static("kernel/usr/local/lib/gpuwright/node-drain").decode()
    script = script.replace("/lib/modules/", f"{root}/lib/modules/").replace("/boot/vmlinuz-", f"{root}/boot/vmlinuz-")
    script = script.replace("/boot/*)", f"{root}/boot/*)")
    paths = {"PATH": f"{root}/bin:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script, "node-drain", *arguments], env=paths, capture_output=True, text=True)


def test_a_driver_that_the_next_kernel_lacks_is_refused(tmp_path):
    laid_out(tmp_path, {RUNNING: [DRIVER], OTHER: []})
    done = drain(tmp_path, OTHER)
    assert (done.returncode, done.stdout) == (
        1,
        f"not rebooted: kernel {OTHER} starts next, and these drivers of {RUNNING} were not built for {OTHER}: nvidia; "
        f"build them for it (dkms autoinstall -k {OTHER}) or remove that kernel\n",
    )


@pytest.mark.parametrize("next_kernel", [RUNNING, OTHER])
def test_one_that_has_it_is_well_whatever_another_lacks(tmp_path, next_kernel):
    laid_out(tmp_path, {RUNNING: [DRIVER], OTHER: ["updates/dkms/nvidia.ko.zst"], THIRD: []})
    done = drain(tmp_path, next_kernel)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("arguments", [(), ("",)])
def test_where_the_next_kernel_cannot_be_told_every_installed_one_must_have_it(tmp_path, arguments):
    laid_out(tmp_path, {RUNNING: [DRIVER], OTHER: [DRIVER], THIRD: []})
    done = drain(tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"not rebooted: which kernel starts next cannot be told from the boot loader's settings, and these drivers of {RUNNING} "
        f"were not built for {THIRD}: nvidia; "
    )


def test_a_kernel_of_systemd_boot_lies_with_its_modules(tmp_path):
    laid_out(tmp_path, {RUNNING: [DRIVER]})
    for name in (OTHER, THIRD):
        (tmp_path / "lib/modules" / name / "updates").mkdir(parents=True)
    assert drain(tmp_path, "").returncode == 0  # what is left of kernels that are gone
    (tmp_path / "bin").rename(tmp_path / "before")
    (tmp_path / "lib/modules" / OTHER / "vmlinuz").touch()
    assert f"not built for {OTHER}: nvidia" in drain(tmp_path, "").stdout


def test_where_all_have_it_or_no_kernel_starts_at_all_nothing_is_refused(tmp_path):
    laid_out(tmp_path, {RUNNING: [DRIVER], OTHER: [DRIVER]})
    assert drain(tmp_path, "").returncode == 0
    (tmp_path / "bin").rename(tmp_path / "before")
    laid_out(tmp_path, {THIRD: []})
    assert drain(tmp_path, "", container=True).returncode == 0
