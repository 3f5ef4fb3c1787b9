"""The GRUB drop-in, read by the shell that grub-mkconfig is, after settings of every shape that people leave there.

Nobody's word is lost, ours come last and once, and without our drop-in the line is what it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from asked import booted, words

from gpuwright.boot import GRUB_DROP_IN, Wishes, grub_text, grub_words
from lab import tools
from roles.kernel.files import boot_files

# Shapes of /etc/default/grub and of drop-ins, as (file, text); None is /etc/default/grub itself.
SHAPES: dict[str, list[tuple[str | None, str]]] = {
    "one key": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n')],
    "both keys": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"\nGRUB_CMDLINE_LINUX="rd.auto=1 net.ifnames=0"\n')],
    "only the other key": [(None, 'GRUB_CMDLINE_LINUX="console=tty0 console=ttyS0,115200n8"\n')],
    "empty values": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT=""\nGRUB_CMDLINE_LINUX=""\n')],
    "no key at all": [(None, "GRUB_TIMEOUT=5\n")],
    "no file": [],
    "single quotes": [(None, "GRUB_CMDLINE_LINUX_DEFAULT='quiet loglevel=3'\n")],
    "no quotes": [(None, "GRUB_CMDLINE_LINUX_DEFAULT=quiet\nGRUB_CMDLINE_LINUX=mem_sleep_default=deep\n")],
    "comments and a commented key": [
        (
            None,
            '# edit, then run update-grub\n#GRUB_CMDLINE_LINUX_DEFAULT="old=1"\n'
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet"  # GRUB_CMDLINE_LINUX="x=1"\n',
        )
    ],
    "twice, the last counts": [
        (None, 'GRUB_CMDLINE_LINUX_DEFAULT="first=1"\nGRUB_CMDLINE_LINUX_DEFAULT="second=2 pci=realloc"\n')
    ],
    "appends to itself": [
        (None, 'GRUB_CMDLINE_LINUX="a=1"\nGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX crashkernel=256M"\n')
    ],
    "a drop-in of a cloud image": [
        (None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"\n'),
        ("50-cloudimg-settings.cfg", 'GRUB_CMDLINE_LINUX_DEFAULT="console=tty1 console=ttyS0"\n'),
    ],
    "a drop-in that appends": [
        (None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n'),
        (
            "kdump-tools.cfg",
            'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT crashkernel=2G-4G:320M,4G-:512M"\n',
        ),
    ],
    "a continued line": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet \\\n  nvme_core.default_ps_max_latency_us=0"\n')],
    "tabs and many blanks": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="  quiet\t splash   "\n')],
    "GRUB quotes inside": [(None, "GRUB_CMDLINE_LINUX_DEFAULT='quiet dyndbg=\"file drivers/pci/*  +p\"'\n")],
    "a value with ;": [(None, "GRUB_CMDLINE_LINUX=\"'pci=disable_acs_redir=0000:0a:00.0;0000:0b:00.0'\"\n")],
    "the same word already": [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="amd_iommu=on iommu=pt"\n')],
    "mitigations off in both keys": [
        (
            None,
            'GRUB_CMDLINE_LINUX_DEFAULT="net.ifnames=0 mitigations=off amd_iommu=on iommu=pt"\n'
            'GRUB_CMDLINE_LINUX="rd.luks=0 rd.lvm.vg=sys mitigations=off spectre_v2=off"\n',
        )
    ],
    "options of one word, and ACS overridden": [
        (None, 'GRUB_CMDLINE_LINUX="pci=nomsi,realloc pcie_acs_override=downstream,id:10de:2bb5"\n')
    ],
    "exported, with a command": [
        (None, 'GRUB_DISTRIBUTOR=`( . /etc/os-release; echo ${NAME} )`\nexport GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n')
    ],
}

OURS = ("iommu=pt", "transparent_hugepage=madvise", "pci=disable_acs_redir=0000:80:01.0;0000:80:03.0")

# What grub-mkconfig does before it runs /etc/grub.d/10_linux, and how that puts the two together. A stand-in for both, so that
# the shell is real and this machine's own settings are out of it; tests/machine runs the real ones.
MKCONFIG = """
set -e
[ ! -f "$ROOT/etc/default/grub" ] || . "$ROOT/etc/default/grub"
for file in "$ROOT"/etc/default/grub.d/*.cfg; do
  if [ -e "$file" ]; then . "$file"; fi
done
printf '%s %s' "${GRUB_CMDLINE_LINUX-}" "${GRUB_CMDLINE_LINUX_DEFAULT-}"
"""

SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]


def evaluate(root: Path, shell: str) -> str:
    done = subprocess.run(
        [shell, "-c", MKCONFIG], env={"ROOT": str(root), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def leave(root: Path, shape: list[tuple[str | None, str]]) -> None:
    folder = root / "etc/default/grub.d"
    folder.mkdir(parents=True)
    for name, text in shape:
        (folder / name if name else root / "etc/default/grub").write_text(text)


def drop_in(root: Path, wanted: Wishes) -> None:
    target = root / GRUB_DROP_IN[1:]
    target.unlink(missing_ok=True)
    for file in boot_files(booted(), wanted):
        if file.path == GRUB_DROP_IN:
            target.write_bytes(file.data)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ours_are_added_and_nothing_is_lost(tmp_path, shape, shell):
    leave(tmp_path, SHAPES[shape])
    before = evaluate(tmp_path, shell)
    drop_in(tmp_path, words(*OURS))
    after = evaluate(tmp_path, shell)
    theirs = grub_words(before)
    ours = [tuple(text.split("=", 1)) for text in OURS]
    assert list(grub_words(after)) == [*theirs, *ours]
    assert evaluate(tmp_path, shell) == after  # reading it again adds nothing: ours are not in anybody's file
    files = {
        path.name: path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != "zz-gpuwright.cfg"
    }
    assert files == {name or "grub": text for name, text in SHAPES[shape]}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_role_s_word_goes_and_takes_nothing_with_it(tmp_path, shape):
    leave(tmp_path, SHAPES[shape])
    before = evaluate(tmp_path, "sh")
    drop_in(tmp_path, words(*OURS))
    drop_in(tmp_path, words(OURS[1]))
    assert list(grub_words(evaluate(tmp_path, "sh"))) == [*grub_words(before), tuple(OURS[1].split("=", 1))]
    drop_in(tmp_path, words())
    assert evaluate(tmp_path, "sh") == before


def test_what_the_shell_of_grub_mkconfig_cannot_read_is_not_ours_to_read():
    """``+=`` is bash; under dash, which runs grub-mkconfig on Debian and Ubuntu, it ends grub-mkconfig with or without us."""
    done = subprocess.run(["dash", "-ec", 'A="x"; A+=" y"; echo "$A"'], capture_output=True, text=True)
    assert done.returncode != 0
    bash = subprocess.run(["bash", "-ec", 'A="x"; A+=" y"; echo "$A"'], capture_output=True, text=True)
    assert bash.stdout == "x y\n"


@pytest.mark.parametrize("theirs", ["iommu=off", "amd_iommu=off", "amd-iommu=off"])
@pytest.mark.parametrize("key", ["GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT"])
def test_an_off_that_the_kernel_never_takes_back_gives_way(tmp_path, key, theirs):
    leave(tmp_path, [(None, f'{key}="a=1 {theirs} b=2 {theirs} iommu=soft iommu.strict=1 xiommu=off"\n')])
    drop_in(tmp_path, words("iommu=pt"))
    assert evaluate(tmp_path, "sh").split() == ["a=1", "b=2", "iommu=soft", "iommu.strict=1", "xiommu=off", "iommu=pt"]
    drop_in(tmp_path, words())
    assert evaluate(tmp_path, "sh").split() == f"a=1 {theirs} b=2 {theirs} iommu=soft iommu.strict=1 xiommu=off".split()


def test_both_offs_behind_what_weakens_the_machine_give_way_alone(tmp_path):
    """What weakens a machine is its site's: the audit is red for it, and the line keeps it."""
    leave(tmp_path, [(None, 'GRUB_CMDLINE_LINUX="rd.luks=0 mitigations=off spectre_v2=off amd_iommu=off iommu=off"\n')])
    before = evaluate(tmp_path, "sh")
    drop_in(tmp_path, words("iommu=pt"))
    assert evaluate(tmp_path, "sh").split() == ["rd.luks=0", "mitigations=off", "spectre_v2=off", "iommu=pt"]
    drop_in(tmp_path, words())
    assert evaluate(tmp_path, "sh") == before


def test_an_off_that_is_asked_for_stays(tmp_path):
    leave(tmp_path, [(None, 'GRUB_CMDLINE_LINUX="amd_iommu=off iommu=off"\n')])
    drop_in(tmp_path, words("iommu=off", "amd_iommu=off"))
    assert evaluate(tmp_path, "sh").split() == ["amd_iommu=off", "iommu=off", "iommu=off", "amd_iommu=off"]


def test_what_stands_in_quotes_is_not_a_word_of_its_own(tmp_path):
    leave(tmp_path, [(None, "GRUB_CMDLINE_LINUX_DEFAULT='dyndbg=\"file iommu=off  +p\"'\n")])
    drop_in(tmp_path, words("iommu=pt"))
    assert dict(grub_words(evaluate(tmp_path, "sh"))) == {"dyndbg": "file iommu=off  +p", "iommu": "pt"}


HARD = [
    "pci=disable_acs_redir=0000:0a:00.0;0000:0b:00.0",
    "memmap=64G$16G",
    "a=b=c=d",
    'dyndbg="file drivers/pci/pci.c +p"',
    "x={y}|z&1<2>3#4!5*6?7[8](9)~`,^%@:",
    "systemd.setenv=A=$HOME",
    'x="$(touch gone) `id`"',
    "quiet",
    "empty=",
]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("shell", SHELLS)
def test_hard_words_come_through_sh_and_grub_unchanged(tmp_path, text, shell):
    leave(tmp_path, [(None, 'GRUB_CMDLINE_LINUX_DEFAULT="quiet_first"\n')])
    wanted = words(text)
    drop_in(tmp_path, wanted)
    line = evaluate(tmp_path, shell)
    asked = wanted.words[0]
    assert grub_words(line)[-1] == (asked.key, asked.value)
    assert line.endswith(f" {grub_text(asked)}")


@pytest.fixture(scope="session")
def grub_script_check():
    """GRUB's own parser; installed where we may, because what it says is the only proof that the quotes are right."""
    if shutil.which("grub-script-check") is None and os.geteuid() != 0:
        pytest.skip("needs grub-script-check (package grub-common)")
    tools.need({"grub-script-check": "grub-common"})


@pytest.mark.usefixtures("grub_script_check")
@pytest.mark.parametrize("text", HARD)
def test_grub_reads_the_generated_line(tmp_path, text):
    asked = words(text).words[0]
    script = tmp_path / "grub.cfg"
    script.write_text(f"menuentry 'x' {{\n  linux /vmlinuz root=/dev/sda1 ro {grub_text(asked)}\n}}\n")
    assert subprocess.run(["grub-script-check", script]).returncode == 0


def test_an_unquoted_semicolon_would_end_the_command():
    """Why the quotes are there: GRUB's parser takes ``;`` for the end of a command."""
    assert grub_words("ro pci=a;b")[-1] != ("pci", "a;b")
    assert grub_words("ro 'pci=a;b'")[-1] == ("pci", "a;b")


def test_the_drop_in_says_for_whom_each_word_is():
    [_, file] = boot_files(booted(), words("iommu=pt"))
    assert b"# pcie: iommu=pt: a reason\n" in file.data
