"""What a node says of its boot, typed, and what follows from it. Answers written as the script prints them."""

from __future__ import annotations

import os
import re
import subprocess

import mutations
import pytest
from answers import BOOT, EVERYWHERE, IMAGE, boot_answer, container_answer, menu, printed
from asked import booted, word, words

from gpuwright import boot
from gpuwright.boot import Barrier, BlockedModule, ModuleOption, Wishes, noticed, pending, state
from gpuwright.snapshot import CouldNotLook, Snapshot


def answer(**said: str) -> boot.Boot:
    return state._parse(boot_answer(**said))


def test_entries_are_those_of_this_system_s_kernels():
    seen = answer(menu=menu("iommu=pt 'pci=a;b'"))
    assert [entry.kernel for entry in seen.entries] == ["6.12.57+deb13-amd64"] * 3 + ["6.12.48+deb13-amd64"]
    assert seen.entries[0].name.startswith("menuentry 'Debian GNU/Linux' --class debian")
    assert [entry.is_recovery for entry in seen.entries] == [False, False, True, False]
    assert seen.menu[0].words == (("root", "UUID=1"), ("ro", None), ("quiet", None), ("iommu", "pt"), ("pci", "a;b"))


@pytest.mark.parametrize(
    ("default", "environment", "kernel"),
    [
        ("0", "", "6.12.57+deb13-amd64"),
        ("gnulinux-advanced-1>gnulinux-6.12.48+deb13-amd64-advanced-1", "", "6.12.48+deb13-amd64"),
        ("${saved_entry}", "saved_entry=1>2\n", "6.12.48+deb13-amd64"),
        ("${saved_entry}", "", "6.12.57+deb13-amd64"),
        ("0", "next_entry=gnulinux-advanced-1>gnulinux-6.12.48+deb13-amd64-advanced-1\n", "6.12.48+deb13-amd64"),
        ("1>0", "", "6.12.57+deb13-amd64"),
        ("1>2", "", "6.12.48+deb13-amd64"),
        ("1>3", "", ""),  # there are three
        ("1", "", ""),  # the submenu itself
        ("2", "", ""),  # another system
        ("gnulinux-6.12.48+deb13-amd64-advanced-1", "", ""),  # GRUB looks into a submenu only when it is named
        ("Windows", "", ""),
    ],
)
def test_the_kernel_that_starts_next(default, environment, kernel):
    assert answer(menu=menu(default=default), environment=environment).default == kernel


def test_another_kernel_that_starts_next_is_noticed_and_nothing_waits_for_it():
    later = answer(kernel="6.12.48+deb13-amd64\n")
    seen = snapshot(later)
    assert noticed(seen) == ("kernel 6.12.57+deb13-amd64 starts next, 6.12.48+deb13-amd64 runs",)
    assert pending(seen, words()) == ()


def snapshot(seen: boot.Boot, reboot: str = "no") -> Snapshot:
    """A snapshot whose boot section gives `seen`."""

    class Fixed(Snapshot):
        def read(self, section):
            return seen if section is boot.BOOT else super().read(section)

    system = f"ID=debian\nARCHITECTURE=x86_64\nKERNEL=6\nVIRTUALIZATION=none\nREBOOT={reboot}"
    return Fixed({"system": (0, system)})


def test_what_the_distribution_asks_for_is_noticed():
    assert noticed(snapshot(answer(), reboot="yes")) == ("the distribution asks for it (/run/reboot-required)",)
    assert noticed(snapshot(answer(packages="libc6\nlinux-image-amd64\n"), reboot="yes")) == (
        "the distribution asks for it (/run/reboot-required): libc6, linux-image-amd64",
    )


@pytest.mark.parametrize(
    ("said", "unknown"),
    [
        ("Command line: x\n", ()),
        ("", None),  # the ring buffer and the journal have lost the first lines: nothing can be said
        (
            'Command line: x\nUnknown kernel command line parameters "BOOT_IMAGE=/boot/vmlinuz spectre_v2=of a=b c", '
            "will be passed to user space.\n",
            ("spectre_v2=of", "a=b", "c"),
        ),
        ("Kernel command line: x\nPCI: Unknown option `noacs'\n", ("pci=noacs",)),
        # cut at the length of a line of the log: which words it would have named cannot be told
        ('Command line: x\nUnknown kernel command line parameters "BOOT_IMAGE=/boot/vmlinuz spectre_v2=o', None),
        ("Command line: x\nPCI: Unknown option `noa", None),
    ],
)
def test_words_that_the_kernel_did_not_know(said, unknown):
    assert answer(said=said).unknown == unknown


def test_the_driver_s_own_account_of_its_options():
    seen = answer(
        nvidia='ResmanDebugLevel: 4294967295\nCoherentGPUMemoryMode: "driver"\n',
        options="is nvidia_uvm uvm_disable_hmm Y\n",
    )
    assert ("nvidia", "NVreg_CoherentGPUMemoryMode", "driver") in seen.options
    assert ("nvidia_uvm", "uvm_disable_hmm", "Y") in seen.options


def test_an_initramfs_is_known_by_its_identity():
    image = "/boot/initrd.img-6.12.57+deb13-amd64"
    assert answer().initrds[0].inside is None
    assert answer(initramfs=f"{image}:100.200.300 abc\n").initrds[0].inside == "abc"
    assert answer(initramfs=f"{image}:100.201.300 abc\n").initrds[0].inside is None  # made anew since


# A machine of which every line of the answer says something.
FULL = boot_answer(
    menu=menu("iommu=pt"),
    environment="saved_entry=0\n",
    recorded="iommu=pt\nnohz=on\n",
    attempt="before\nthe kernel runs without iommu=pt\n",
    serving="main\n",
    initramfs=f"{IMAGE}:100.200.300 abc\n",
    packages="libc6\n",
    nvidia="EnableS0ixPowerManagement: 0\n",
    options="is nvidia_uvm uvm_disable_hmm Y\nhidden ixgbe max_vfs\nunknown ixgbe max_vfz\n",
    later="/etc/default/grub.d/zzz.cfg\n",
)


def read(text: str | bytes) -> boot.Boot:
    return Snapshot({"boot": (0, text if isinstance(text, str) else text.decode(errors="replace"))}).read(boot.BOOT)


def test_a_mutated_answer_is_read_right_or_not_at_all():
    truth = read(FULL)
    right = refused = 0
    for mutant in mutations.mutants(FULL, rounds=24):
        try:
            seen = read(mutant)
        except CouldNotLook:
            refused += 1
            continue
        assert seen == truth, mutant
        right += 1
    assert right + refused >= 200
    assert min(right, refused) >= 40


@pytest.mark.parametrize("name", [*BOOT, "menu"])
def test_a_line_that_is_lost_or_cut_is_never_taken_for_an_empty_one(name):
    [line] = [line for line in FULL.splitlines() if line.startswith(f"{name} ")]
    for damaged in ("", *(f"{line[:cut]}\n" for cut in range(len(line)))):
        with pytest.raises(CouldNotLook):
            read(FULL.replace(f"{line}\n", damaged))


@pytest.mark.parametrize("virtualization", ["none", "docker"])
def test_what_the_script_prints_is_a_whole_answer_wherever_it_runs(tmp_path, virtualization):
    program = tmp_path / "systemd-detect-virt"
    program.write_text(f"#!/bin/sh\necho {virtualization}\n[ {virtualization} != none ]\n")
    program.chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", boot.BOOT.script], env=paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = read(done.stdout)
    assert (seen.kernel, seen.container) == (os.uname().release, virtualization != "none")


@pytest.mark.parametrize("virtualization", ["", "\n"])
def test_a_machine_that_may_be_a_container_is_not_judged(virtualization):
    with pytest.raises(CouldNotLook, match="does not say whether this is a container"):
        read(printed(EVERYWHERE | {"container": virtualization}))


# --- pending ---


def test_a_container_waits_for_nothing_but_changes():
    seen = Snapshot({"boot": (0, container_answer())})
    assert pending(seen, words("iommu=pt")) == ()
    change = boot.Change("nvidia", "nvidia.version", "the driver", lambda seen: ("another is wanted",), "/script")
    assert pending(seen, Wishes(words=words("iommu=pt").words, changes=(change,))) == ("another is wanted",)


def reasons(seen: boot.Boot, wanted: Wishes) -> tuple[str, ...]:
    return pending(snapshot(seen), wanted)


def test_a_word_that_does_not_run():
    assert reasons(booted("ro quiet"), words("iommu=pt")) == ("the kernel runs without iommu=pt (pcie: a reason)",)
    assert reasons(booted("ro iommu=pt"), words("iommu=pt")) == ()


def test_another_value_runs():
    found = reasons(booted("ro iommu=pt iommu=off"), words("iommu=pt"))
    assert found == ("the kernel runs with iommu=off instead of iommu=pt (pcie: a reason)",)
    assert reasons(booted("ro iommu=off iommu=pt"), words("iommu=pt")) == ()  # the kernel keeps the last


def test_where_a_key_may_be_repeated_one_of_them_is_enough():
    assert reasons(booted("console=ttyS0 console=tty0"), words("console=ttyS0")) == ()
    assert reasons(booted("pci=realloc pci=nomsi"), words("pci=realloc")) == ()


def test_dashes_and_underscores_are_the_same_to_the_kernel():
    assert reasons(booted("transparent-hugepage=madvise"), words("transparent_hugepage=madvise")) == ()


def test_a_word_of_ours_that_nothing_asks_for_still_runs():
    seen = booted("ro iommu=pt nohz=on", recorded=("iommu=pt", "nohz=on"))
    assert reasons(seen, words("iommu=pt")) == ("the kernel runs with nohz=on, which nothing asks for any more",)


def test_nor_is_a_word_that_the_site_itself_asks_for():
    assert reasons(booted("ro nohz=on", site="nohz=on", recorded=("nohz=on",)), words()) == ()


NOUVEAU = Wishes(blocked=(BlockedModule("nouveau", "kernel", "only NVIDIA's driver"),))
UDF = Wishes(blocked=(BlockedModule("udf", "kernel", "unused", spared_when_used=True),))


def test_a_blocked_driver_that_is_loaded():
    assert reasons(booted(modules=(("nouveau", 3),)), NOUVEAU) == (
        "module nouveau is loaded and must not be (kernel: only NVIDIA's driver)",
    )
    assert reasons(booted(), NOUVEAU) == ()
    assert reasons(booted(modules=(("udf", 1),)), UDF) == ()


def option(value: str) -> Wishes:
    return Wishes(options=(ModuleOption("nvidia", "NVreg_CoherentGPUMemoryMode", value, "memory", "HBM"),))


def test_a_module_that_runs_with_another_option():
    now = booted(modules=(("nvidia", 1),), options=(("nvidia", "NVreg_CoherentGPUMemoryMode", "numa"),))
    assert reasons(now, option("numa")) == ()
    assert reasons(now, option("driver")) == (
        "module nvidia runs with NVreg_CoherentGPUMemoryMode=numa instead of NVreg_CoherentGPUMemoryMode=driver (memory: HBM)",
    )
    assert reasons(booted(), option("driver")) == ()  # not loaded: the next load has it


IXGBE = Wishes(options=(ModuleOption("ixgbe", "max_vfs", "8", "kernel", "virtual functions"),))


def ixgbe(kind: str) -> boot.Boot:
    return answer(modules="ixgbe 0\n", options=f"{kind} ixgbe max_vfs\n")


def test_an_option_that_the_kernel_shows_nowhere_is_no_reason_for_a_reboot_and_nobody_can_tell():
    seen = ixgbe("hidden")
    assert reasons(seen, IXGBE) == ()
    assert boot.options_hidden(seen, IXGBE) == IXGBE.options
    assert boot.options_unknown(snapshot(seen), IXGBE) == ()


def test_an_option_that_the_module_does_not_have_is_said_and_no_reason_for_a_reboot():
    seen = ixgbe("unknown")
    assert reasons(seen, IXGBE) == ()
    assert boot.options_hidden(seen, IXGBE) == ()
    assert boot.options_unknown(snapshot(seen), IXGBE) == (
        "module ixgbe has no parameter max_vfs, so max_vfs=8 has no effect (kernel: virtual functions); put the name right: "
        "modinfo -p ixgbe lists those it has",
    )
    change = boot.Change("nvidia", "nvidia.version", "the driver", lambda seen: ("another is wanted",), "/script")
    assert boot.options_unknown(snapshot(seen), Wishes(options=IXGBE.options, changes=(change,))) == ()
    assert boot.options_unknown(snapshot(answer(options="unknown ixgbe max_vfs\n")), IXGBE) == ()  # not loaded


def test_what_the_driver_itself_says_counts_where_the_kernel_shows_nothing():
    seen = answer(
        modules="nvidia 1\n",
        nvidia='CoherentGPUMemoryMode: "numa"\n',
        options="unknown nvidia NVreg_CoherentGPUMemoryMode\n",
    )
    assert reasons(seen, option("numa")) == ()
    assert len(reasons(seen, option("driver"))) == 1
    assert boot.options_unknown(snapshot(seen), option("driver")) == ()


@pytest.mark.parametrize(
    ("file", "modinfo", "said"),
    [
        ("8\n", None, "is ixgbe max_vfs 8\n"),
        (
            None,
            "parm:           allow_unsupported_sfp:x (uint)\nparm:           max_vfs:y (uint)\n",
            "hidden ixgbe max_vfs\n",
        ),
        (None, "parm:           max_vfs2:x max_vfs: y (uint)\n", "unknown ixgbe max_vfs\n"),
        (None, None, "hidden ixgbe max_vfs\n"),  # its file is gone: a kernel that was replaced
    ],
)
def test_the_script_asks_the_module_for_what_the_kernel_does_not_show(tmp_path, file, modinfo, said):
    [part] = re.findall(r"^sed .*?^done \|", boot.BOOT.script, re.MULTILINE | re.DOTALL)
    (tmp_path / "modprobe.conf").write_text("# kernel: x\noptions ixgbe max_vfs=8\noptions absent x=1\n")
    parameters = tmp_path / "sys/module/ixgbe/parameters"
    parameters.mkdir(parents=True)
    if file is not None:
        (parameters / "max_vfs").write_text(file)
    program = tmp_path / "modinfo"
    program.write_text("#!/bin/sh\nexit 1\n" if modinfo is None else f"#!/bin/sh\nprintf '%s' '{modinfo}'\n")
    program.chmod(0o755)
    script = part.replace("/sys/", f"{tmp_path}/sys/").replace(boot.MODPROBE, f"{tmp_path}/modprobe.conf")
    done = subprocess.run(
        ["sh", "-c", f"{script} cat"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == said


@pytest.mark.parametrize(("shown", "asked"), [("Y", "1"), ("N", "0"), ("Y", "Y")])
def test_booleans_are_shown_as_letters(shown, asked):
    wanted = Wishes(options=(ModuleOption("nvidia_uvm", "uvm_disable_hmm", asked, "pcie", "x"),))
    assert (
        reasons(booted(modules=(("nvidia_uvm", 0),), options=(("nvidia_uvm", "uvm_disable_hmm", shown),)), wanted) == ()
    )


# --- what engines wait for ---


def test_engines_wait_while_it_is_pending_and_a_plan_of_a_run_that_reboots_does_not():
    seen = snapshot(booted("ro"))
    never, needed = Barrier(words("iommu=pt"), reboots=False), Barrier(words("iommu=pt"), reboots=True)
    [why] = never.holds_back(seen, planning=False)
    assert "iommu=pt" in why
    assert never.holds_back(seen, planning=True) == (why,)
    assert needed.holds_back(seen, planning=True) == ()
    assert needed.holds_back(seen, planning=False) == (why,)


def test_what_cannot_be_seen_holds_back_too():
    [why] = Barrier(words("iommu=pt"), reboots=False).holds_back(Snapshot({}), planning=False)
    assert why == "whether it needs a reboot cannot be seen: boot: the node gave no answer"


def test_words_with_blanks_are_compared_without_quotes():
    wanted = Wishes(words=(word('dyndbg="file pci.c +p"'),))
    assert reasons(booted('ro "dyndbg=file pci.c +p"'), wanted) == ()  # as GRUB quotes it
    assert reasons(booted('ro dyndbg="file pci.c +p"'), wanted) == ()  # as a person does
