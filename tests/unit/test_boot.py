"""What roles ask of the kernel, put together."""

from __future__ import annotations

import pytest

from gpuwright.boot import BlockedModule, ModuleOption, Sysctl, Wishes, Word, conflicts, together


def test_what_two_roles_ask_for_stands_there_once_with_the_first_reason():
    wishes = together(
        [
            Wishes(
                words=(Word("iommu", "pt", "pcie", "P2P"),), blocked=(BlockedModule("nouveau", "kernel", "driver"),)
            ),
            Wishes(words=(Word("iommu", "pt", "nvidia", "other"),), blocked=(BlockedModule("nouveau", "nvidia", "x"),)),
        ]
    )
    assert [word.text for word in wishes.words] == ["iommu=pt"]
    assert wishes.words[0].reason == "P2P"
    assert [block.role for block in wishes.blocked] == ["kernel"]
    assert conflicts(wishes) == []


def test_two_values_for_one_subject_are_a_conflict_that_names_both_roles_and_reasons():
    wishes = together(
        [
            Wishes(
                words=(Word("iommu", "pt", "pcie", "P2P"),),
                sysctls=(Sysctl("vm.zone_reclaim_mode", "1", "memory", "HBM"),),
            ),
            Wishes(words=(Word("iommu", "off", "kernel", "asked for"),)),
            Wishes(sysctls=(Sysctl("vm.zone_reclaim_mode", "0", "kernel", "asked for"),)),
        ]
    )
    assert conflicts(wishes) == [
        "kernel word iommu: pcie asks for pt (P2P), kernel for off (asked for); only one can hold",
        "sysctl vm.zone_reclaim_mode: memory asks for 1 (HBM), kernel for 0 (asked for); only one can hold",
    ]


def test_a_dash_makes_no_other_subject_of_a_word():
    on, off = Word("intel_iommu", "on", "pcie", "P2P"), Word("intel-iommu", "off", "kernel", "asked for")
    assert conflicts(Wishes(words=(on, off))) == [
        "kernel word intel_iommu: pcie asks for on (P2P), kernel for off (asked for); only one can hold"
    ]
    again = Word("intel-iommu", "on", "kernel", "asked for")
    assert together([Wishes(words=(on, again))]).words == (on,)


@pytest.mark.parametrize("key", ["amd_iommu", "amd-iommu"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_word_that_makes_another_void_is_a_conflict_in_either_order(key, turned):
    pt, off = Word("iommu", "pt", "pcie", "P2P"), Word(key, "off", "kernel", "asked for")
    assert conflicts(Wishes(words=(off, pt) if turned else (pt, off))) == [
        "kernel word iommu: pcie asks for pt (P2P), and kernel for a word that makes it void wherever it stands on the line: "
        "amd_iommu=off (asked for); only one can hold"
    ]


def test_an_iommu_that_is_off_altogether_is_none():
    words = tuple(Word(key, "off", "pcie", "x") for key in ("iommu", "amd_iommu", "intel_iommu"))
    assert conflicts(Wishes(words=words)) == []


def test_a_word_with_and_without_a_value_are_a_conflict():
    wishes = together([Wishes(words=(Word("nokaslr", None, "a", "x"), Word("nokaslr", "1", "b", "y")))])
    assert conflicts(wishes) == ["kernel word nokaslr: a asks for no value (x), b for 1 (y); only one can hold"]


def test_a_key_that_may_be_repeated_is_no_conflict():
    serial = Word("console", "ttyS0", "kernel", "serial line")
    screen = Word("console", "tty0", "kernel", "screen")
    wishes = together([Wishes(words=(serial, screen))])
    assert [word.text for word in wishes.words] == ["console=ttyS0", "console=tty0"]
    assert conflicts(wishes) == []


def test_options_of_one_module_differ_by_name():
    modeset = ModuleOption("nvidia_drm", "modeset", "1", "nvidia", "x")
    fbdev = ModuleOption("nvidia_drm", "fbdev", "0", "nvidia", "x")
    assert conflicts(together([Wishes(options=(modeset, fbdev))])) == []
