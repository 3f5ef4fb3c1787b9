"""The plug-in of kernel-install, run for real on entries as 90-loaderentry.install writes them. Nothing here has been booted."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from asked import booted, words

from gpuwright import boot
from gpuwright.render import static
from roles.kernel.files import CHOSEN, PLUG_IN, boot_files
from roles.kernel.operations import menu_is_stale

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a private /etc/kernel and /var/lib")

# version of systemd, name of the entry, its options line: with and without boot counting
ENTRIES = [
    ("249", "0123456789abcdef-6.1.0-18-amd64.conf", "options    root=UUID=1 ro quiet"),
    ("252", "debian-6.1.0-18-amd64.conf", "options    root=UUID=1 ro quiet"),
    ("257", "debian-6.1.0-18-amd64+3.conf", "options    root=UUID=1 ro quiet systemd.machine_id=0123"),
]


def run(tmp_path, name, options, wanted, recorded=(), cmdline=None):
    root = tmp_path / "boot"
    entry = root / "loader/entries" / name
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text(f"title      Debian\nversion    6.1.0-18-amd64\n{options}\nlinux      /vmlinuz\n")
    seen = booted(loader="systemd-boot", recorded=recorded)
    files = {file.path: file.data for file in boot_files(seen, wanted)}
    for path in ("etc/kernel", "etc/gpuwright/kernel", "state"):
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
    (tmp_path / "etc/gpuwright/kernel/words").write_bytes(files[CHOSEN])
    (tmp_path / "state/words").write_bytes(files[boot.WORDS])
    if not (tmp_path / "etc/alternatives").exists():  # awk is found through it
        shutil.copytree("/etc/alternatives", tmp_path / "etc/alternatives", symlinks=True)
    (tmp_path / "plug-in").write_bytes(static(f"kernel{PLUG_IN}"))
    if cmdline is not None:
        (tmp_path / "etc/kernel/cmdline").write_text(cmdline)
    mounts = (
        f"mount -t tmpfs none /var/lib && mkdir -p /var/lib/gpuwright/kernel && cp {tmp_path}/state/words /var/lib/gpuwright/kernel/"
        f" && mount --bind {tmp_path}/etc /etc"
    )
    directory = root / "0123456789abcdef" / "6.1.0-18-amd64"
    subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"cp {tmp_path}/plug-in /run/$$.plug-in; {mounts} && sh /run/$$.plug-in add 6.1.0-18-amd64 {directory}; status=$?; rm /run/$$.plug-in; exit $status",
        ],
        check=True,
    )
    [line] = [line for line in entry.read_text().splitlines() if line.startswith("options")]
    assert sorted(path.name for path in entry.parent.iterdir()) == [name]
    return boot.parse_line(line.removeprefix("options"))


@pytest.mark.parametrize(("_", "name", "options"), ENTRIES)
def test_our_words_come_last_and_nothing_is_lost(tmp_path, _, name, options):
    wanted = words("iommu=pt", "pci=disable_acs_redir=a;b", 'dyndbg="file x +p"')
    line = run(tmp_path, name, options, wanted)
    assert line == (
        *boot.parse_line(options.removeprefix("options")),
        ("iommu", "pt"),
        ("pci", "disable_acs_redir=a;b"),
        ("dyndbg", "file x +p"),
    )
    seen = booted(loader="systemd-boot", entries=(boot.Entry(name, "6.1.0-18-amd64", line),))
    assert not menu_is_stale(seen, wanted)


def test_run_again_it_adds_nothing(tmp_path):
    _, name, options = ENTRIES[1]
    once = run(tmp_path, name, f"{options} iommu=pt", words("iommu=pt"), recorded=("iommu=pt",))
    assert once == boot.parse_line("root=UUID=1 ro quiet iommu=pt")


def test_a_word_that_came_from_the_running_line_goes_again(tmp_path):
    _, name, options = ENTRIES[1]
    line = run(tmp_path, name, f"{options} iommu=pt nohz=on", words("nohz=on"), recorded=("iommu=pt", "nohz=on"))
    assert line == boot.parse_line("root=UUID=1 ro quiet nohz=on")


def test_a_site_s_own_command_line_keeps_the_same_word(tmp_path):
    _, name, options = ENTRIES[1]
    line = run(
        tmp_path,
        name,
        f"{options} iommu=pt",
        words("nohz=on"),
        recorded=("iommu=pt",),
        cmdline="root=UUID=1 ro quiet iommu=pt",
    )
    assert line == boot.parse_line("root=UUID=1 ro quiet iommu=pt nohz=on")
