"""The words that role pcie contributes to the kernel command line."""

from __future__ import annotations

import pytest

from gpuwright.boot import conflicts
from gpuwright.spec.node import Hardware
from roles.pcie.spec import PcieSpec
from roles.pcie.wishes import wishes


@pytest.mark.parametrize(
    ("architecture", "mode", "words"),
    [
        ("x86_64", "pt", ["iommu=pt", "intel_iommu=on"]),
        ("x86_64", "translated", ["iommu=nopt", "intel_iommu=on"]),
        ("x86_64", "off", ["iommu=off", "amd_iommu=off", "intel_iommu=off"]),
        ("arm64", "pt", ["iommu.passthrough=1"]),
        ("arm64", "translated", ["iommu.passthrough=0"]),
        ("arm64", "off", []),  # refused by a rule: there is no such word
    ],
)
def test_words(architecture, mode, words):
    asked = wishes(PcieSpec(iommu=mode), Hardware(architecture=architecture))
    assert [word.text for word in asked.words] == words
    assert conflicts(asked) == []
    assert all(word.role == "pcie" and word.reason for word in asked.words)
    assert asked.sysctls == asked.options == asked.blocked == ()


def test_no_inert_word_is_contributed():
    """AMD's IOMMU has no option "on" in mainline; the kernel would call it unknown."""
    for mode in ("pt", "translated"):
        assert "amd_iommu" not in {word.key for word in wishes(PcieSpec(iommu=mode), Hardware()).words}
