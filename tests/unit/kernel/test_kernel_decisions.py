"""What the role decides from what it saw. No host."""

from __future__ import annotations

import types

import pytest
from answers import boot_answer, snapshot
from asked import booted, words

import roles.kernel
from gpuwright import boot
from gpuwright.boot import BlockedModule, Sysctl, Wishes
from gpuwright.hardening import PROFILES
from gpuwright.spec.node import Hardware
from roles.kernel import barrier, facts, files, hardening, operations
from roles.kernel.spec import KernelSpec
from roles.kernel.wishes import wishes

# --- boot menu ---


def test_a_menu_with_the_words_is_left_alone():
    assert not operations.menu_is_stale(booted("ro quiet iommu=pt"), words("iommu=pt"))


def test_nothing_is_asked_and_nothing_was_ever_ours():
    assert not operations.menu_is_stale(booted("ro", entries=()), words())


@pytest.mark.parametrize(
    "menu", ["ro", "ro iommu=off", "ro iommu=pt iommu=off", "ro iommu=off iommu=pt", "ro amd_iommu=off iommu=pt"]
)
def test_a_word_that_is_missing_or_void(menu):
    assert operations.menu_is_stale(booted("ro", menu), words("iommu=pt"))


def test_one_kernel_of_several_without_the_word():
    entries = tuple(
        boot.Entry(f"e{i}", f"6.{i}", boot.grub_words(line)) for i, line in enumerate(["ro iommu=pt", "ro"])
    )
    assert operations.menu_is_stale(booted(entries=entries), words("iommu=pt"))


def test_entries_for_repairs_stay_without_our_words():
    repair = boot.Entry("menuentry 'x (recovery mode)' 'gnulinux-6-recovery-1'", "6", boot.grub_words("ro single"))
    normal = boot.Entry("menuentry 'x' 'gnulinux-simple-1'", "6", boot.grub_words("ro iommu=pt"))
    assert not operations.menu_is_stale(booted(entries=(normal, repair)), words("iommu=pt"))


def test_a_word_that_was_ours_goes():
    assert operations.menu_is_stale(booted("ro nohz=on", recorded=("nohz=on",)), words())
    assert not operations.menu_is_stale(booted("ro nohz=on", site="nohz=on", recorded=("nohz=on",)), words())
    assert not operations.menu_is_stale(booted("ro nohz=on"), words())  # never ours


def test_an_empty_menu_is_made_anew():
    assert operations.menu_is_stale(booted(entries=()), words("iommu=pt"))


def test_a_word_of_the_site_that_gives_way_is_said():
    [said] = operations.overridden(booted(site="quiet iommu=off"), words("iommu=pt"))
    assert said.startswith("iommu=off of the boot loader's own settings gives way to iommu=pt (pcie: a reason)")
    [said] = operations.overridden(booted(site="amd_iommu=off"), words("iommu=pt", "quiet"))
    assert said.startswith("amd_iommu=off of the boot loader's own settings gives way to iommu=pt")
    assert operations.overridden(booted(site="iommu=pt pci=realloc console=tty0"), words("iommu=pt", "pci=nomsi")) == []


def test_without_a_boot_loader_that_we_know():
    wanted = words("iommu=pt")
    assert operations.menu_fault(booted("ro iommu=pt", loader="none"), wanted) is None  # somebody put it there
    assert "iommu=pt cannot be put on the kernel's command line" in operations.menu_fault(
        booted("ro", loader="none"), wanted
    )


def test_what_comes_after_two_dashes_is_init_s():
    wanted = words("iommu=pt")
    assert boot.parse_line("ro -- iommu=pt") == boot.grub_words("ro -- iommu=pt") == (("ro", None), boot.END)
    seen = booted("ro -- 3 iommu=pt", site="-- 3")
    assert not boot.holds(seen.line, wanted.words[0])
    assert operations.menu_is_stale(seen, wanted)
    fault = operations.menu_fault(seen, wanted)
    assert "have '--' on the kernel's command line" in fault and "iommu=pt would; take it out" in fault
    assert operations.menu_fault(seen, words()) is None
    assert (
        operations.menu_fault(booted("ro --- x", site="--- x"), wanted) is None
    )  # an installer's, and none of the kernel's
    assert "/etc/kernel/cmdline" in operations.menu_fault(booted("ro --", loader="systemd-boot"), wanted)
    assert operations.menu_fault(booted("ro --", site="ro", loader="systemd-boot"), wanted) is None


def test_settings_of_grub_that_sh_cannot_read():
    assert "/etc/default/grub" in operations.menu_fault(booted("ro", site=None), words("iommu=pt"))


def test_the_record_keeps_what_was_ever_ours():
    found = {file.path: file.data for file in files.boot_files(booted(recorded=("nohz=on",)), words("iommu=pt"))}
    assert found[boot.WORDS] == b"iommu=pt\nnohz=on\n"
    found = {file.path for file in files.boot_files(booted(recorded=("iommu=pt", "nohz=on")), words())}
    assert found == {boot.WORDS}  # the drop-in goes, what it once said stays known
    assert files.boot_files(booted(), words()) == []


@pytest.mark.parametrize(
    ("unknown", "text", "found"),
    [
        (("iommu=pt",), "iommu=pt", ["iommu=pt"]),
        (("pci=noacs",), "pci=realloc,noacs", ["pci=noacs"]),
        ((), "iommu=pt", []),
        (None, "iommu=pt", []),
    ],
)
def test_wanted_words_that_the_kernel_does_not_know(unknown, text, found):
    assert operations.unknown_words(booted(unknown=unknown), words(text)) == found


@pytest.mark.parametrize(
    ("line", "unknown", "recorded", "found"),
    [
        ("ro quiet", (), (), []),
        ("ro quiet", None, (), []),
        (
            "ro splash pci=noacs iommu=pt",
            ("splash", "pci=noacs", "iommu=pt"),
            (),
            [
                "this kernel does not know splash, pci=noacs of the boot loader's own settings; unless a program reads that, it "
                "has no effect; it stays as it is"
            ],
        ),
        ("ro nohz=on", ("nohz=on", "pci=x"), ("nohz=on", "pci=realloc,x"), []),  # once ours, and goes
        (
            "ro amd-iommu=on",
            (),
            (),
            [
                "amd-iommu=on of the boot loader's own settings has no effect: it is no option of mainline "
                "(drivers/iommu/amd/init.c): AMD's IOMMU is on by itself; it stays as it is"
            ],
        ),
        (
            "ro pcie-acs-override=downstream",
            (),
            (),
            [
                "pcie-acs-override=downstream of the boot loader's own settings needs a patch outside mainline, and pretends "
                "isolation that is not there instead of clearing redirection; pcie.acs_redirect does that; it stays as it is"
            ],
        ),
    ],
)
def test_words_of_the_site_that_do_nothing_are_said_and_stay(line, unknown, recorded, found):
    seen = booted(line, unknown=unknown, recorded=recorded)
    assert operations.of_the_site(seen, words("iommu=pt")) == found


def test_a_run_says_them_before_its_first_step(monkeypatch):
    warned, noted = [], []
    log = types.SimpleNamespace(warning=warned.append, info=noted.append)
    host = types.SimpleNamespace(print_prefix="[gpu-1] ")
    monkeypatch.setattr(roles.kernel, "ctx_host", types.SimpleNamespace(get=lambda: host))
    monkeypatch.setattr(roles.kernel, "logger", log)
    monkeypatch.setattr(operations, "logger", log)
    roles.kernel.say(booted("ro splash iommu=pt", unknown=("splash", "iommu=pt")), words("iommu=pt"))
    assert warned == ["[gpu-1] kernel: this kernel does not know iommu=pt; it has no effect"]
    assert len(noted) == 1 and noted[0].startswith(
        "[gpu-1] kernel: this kernel does not know splash of the boot loader's own"
    )


# --- modules ---

UNUSED = Wishes(
    blocked=(
        *(BlockedModule(name, "kernel", "unused", spared_when_used=True) for name in ("udf", "freevxfs", "sctp")),
        BlockedModule("nouveau", "kernel", "driver"),
    )
)


@pytest.mark.parametrize(
    ("seen", "spared", "unloaded"),
    [
        ({}, [], []),
        ({"modules": (("udf", 1),)}, ["udf"], []),
        ({"modules": (("udf", 0),)}, [], ["udf"]),
        ({"filesystems": frozenset({"udf"})}, ["udf"], []),  # in fstab: the next boot mounts it
        ({"filesystems": frozenset({"vxfs"}), "modules": (("freevxfs", 0),)}, ["freevxfs"], []),
        ({"modules": (("nouveau", 0),)}, [], []),  # a driver is never taken from under a running machine
        ({"modules": (("sctp", 4), ("udf", 0))}, ["sctp"], ["udf"]),
    ],
)
def test_what_the_node_uses_is_left_alone(seen, spared, unloaded):
    now = booted(**seen)
    assert [block.module for block in operations.spared(now, UNUSED)] == spared
    assert operations.to_unload(now, UNUSED) == unloaded
    text = files.modprobe_file(now, UNUSED).data.decode()
    for name in ("udf", "freevxfs", "sctp", "nouveau"):
        assert (f"install {name} /bin/false" in text) is (name not in spared)
        assert (f"blacklist {name}" in text) is (name not in spared)


def test_options_are_quoted_as_modprobe_reads_them():
    wanted = Wishes(
        options=(
            boot.ModuleOption("nvidia", "NVreg_RegistryDwords", "ForceP2P=0x11;RMForceP2PType=1", "pcie", "P2P"),
            boot.ModuleOption("nvidia_uvm", "uvm_disable_hmm", "1", "pcie", "P2P"),
        )
    )
    text = files.modprobe_file(booted(), wanted).data.decode()
    assert 'options nvidia NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1"\n' in text
    assert "options nvidia_uvm uvm_disable_hmm=1\n" in text


def test_a_run_ends_with_an_option_that_its_module_does_not_have():
    """Whether or not it may reboot: no reboot brings it."""
    wanted = Wishes(options=(boot.ModuleOption("ixgbe", "max_vfz", "8", "kernel", "x"),))
    now = {"modules": "ixgbe 0\n", "options": "unknown ixgbe max_vfz\n"}
    seen = snapshot({"boot": boot_answer(**now), "sysctl": ""})
    for may_wait in (True, False):
        [fault] = operations.shortfalls(seen, wanted, may_wait)
        assert fault.startswith("module ixgbe has no parameter max_vfz, so max_vfz=8 has no effect (kernel: x)")


def test_without_a_wish_there_is_no_file():
    assert files.modprobe_file(booted(), Wishes()) is None
    assert files.sysctl_file(Wishes()) is None


# --- sysctl ---


def test_the_drop_in_and_what_reads_it_back_agree():
    wanted = Wishes(
        sysctls=(Sysctl("vm.swappiness", "10", "kernel", "x"), Sysctl("net.ipv4.tcp_rmem", "4096 1 2", "kernel", "y"))
    )
    file = files.sysctl_file(wanted)
    assert file.path == "/etc/sysctl.d/zz-gpuwright.conf"
    assert "vm.swappiness = 10\n" in file.data.decode()
    answer = "asked vm.swappiness\nasked net.ipv4.tcp_rmem\nasked no.such_key\nvm.swappiness = 10\nnet.ipv4.tcp_rmem = 4096\t1\t2\n"
    assert facts.parse(answer) == {"vm.swappiness": "10", "net.ipv4.tcp_rmem": "4096 1 2", "no.such_key": None}


# --- the reboot ---


def test_a_reboot_that_changed_nothing_is_not_repeated():
    tried = ("before", "the kernel runs without iommu=pt")
    assert barrier.not_again(booted(attempt=tried), ["the kernel runs without iommu=pt"])
    assert not barrier.not_again(
        booted(attempt=tried), ["the kernel runs without iommu=pt", "module nouveau is loaded"]
    )
    assert not barrier.not_again(booted(), ["the kernel runs without iommu=pt"])
    # recorded, and the run died before the machine went down
    assert not barrier.not_again(booted(attempt=("now", *tried[1:])), ["the kernel runs without iommu=pt"])


# --- profiles ---

HARDWARE = Hardware()


@pytest.mark.parametrize("settings", [hardening.SYSCTLS, hardening.MODULES])
def test_a_stricter_profile_never_lets_go_of_a_setting(settings):
    for setting in settings:
        set_in = [value is not None for value in setting.values]
        assert set_in == sorted(set_in) and any(set_in), setting.name
        assert setting.references.ids, setting.name


def test_each_profile_asks_for_more():
    counts = [len(list(wishes(KernelSpec(), HARDWARE, profile).all())) for profile in PROFILES]
    assert counts == sorted(set(counts))


def test_what_breaks_a_gpu_node_is_in_no_profile():
    for profile in PROFILES:
        asked = wishes(KernelSpec(), HARDWARE, profile)
        values = {one.key: one.value for one in asked.sysctls}
        assert not values.keys() & {"net.ipv4.ip_forward", "kernel.modules_disabled", "vm.overcommit_memory"}
        assert not [key for key in values if key.endswith("accept_ra")]
        assert values["kernel.yama.ptrace_scope"] == "1" and values["net.ipv4.conf.all.rp_filter"] == "2"
        assert not {one.module for one in asked.blocked} & {"overlay", "squashfs", "vfat", "br_netfilter"}


def test_the_node_file_s_value_stands_in_the_profile_s_place():
    spec = KernelSpec.model_validate(
        {
            "sysctls": [
                {"name": "kernel.core_pattern", "value": "/var/crash/%p", "reason": "a crash is being looked for"}
            ]
        }
    )
    [value] = [one for one in wishes(spec, HARDWARE, "strict").sysctls if one.key == "kernel.core_pattern"]
    assert (value.value, value.may_lack) == ("/var/crash/%p", False)


def test_a_module_that_the_node_file_keeps_is_not_blocked():
    spec = KernelSpec.model_validate({"kept_modules": {"usb-storage": "virtual media"}})
    blocked = {one.module for one in wishes(spec, HARDWARE, "baseline").blocked}
    assert "usb_storage" not in blocked and "udf" in blocked


def test_the_profile_s_values_and_modules_are_left_out_with_a_reason():
    without = KernelSpec.model_validate({"deviations": {"sysctls": "tuned by its maker", "modules": "the same"}})
    assert list(wishes(without, HARDWARE, "strict").all()) == []
    with pytest.raises(ValueError, match="at least 1 character"):
        KernelSpec.model_validate({"deviations": {"sysctls": ""}})
