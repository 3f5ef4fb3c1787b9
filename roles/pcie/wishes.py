"""What the role asks of the kernel: the words that set the IOMMU's mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwright.boot import Wishes, Word
from roles.pcie.spec import PcieSpec

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Hardware

_KEEPS_ITS_OWN = "one of these is for the other vendor's processors and does nothing here"

# Documentation/admin-guide/kernel-parameters.txt. The vendor of the processor is not known when a node file is loaded,
# and need not be: `intel_iommu=` is ignored without a DMAR table, and AMD's IOMMU is on unless it is told otherwise.
# `amd_iommu=on`, which many pages show, is no option of mainline (parse_amd_iommu_options): it would be inert.
# `iommu=` is for x86 alone; Arm has `iommu.passthrough=`, and no word that turns an SMMU off.
_WORDS: dict[tuple[str, str], tuple[tuple[str, str, str], ...]] = {
    ("x86_64", "pt"): (
        ("iommu", "pt", "the host's devices are mapped one to one, so that peer traffic is not translated"),
        ("intel_iommu", "on", "some kernels leave Intel's IOMMU off; other processors ignore the word"),
    ),
    ("x86_64", "translated"): (
        ("iommu", "nopt", "every device has a mapping of its own, whatever the kernel's default is"),
        ("intel_iommu", "on", "some kernels leave Intel's IOMMU off; other processors ignore the word"),
    ),
    ("x86_64", "off"): (
        ("iommu", "off", "no DMA remapping"),
        ("amd_iommu", "off", f"no IOMMU of AMD; {_KEEPS_ITS_OWN}"),
        ("intel_iommu", "off", f"no IOMMU of Intel; {_KEEPS_ITS_OWN}"),
    ),
    ("arm64", "pt"): (
        ("iommu.passthrough", "1", "the host's devices are mapped one to one, so that peer traffic is not translated"),
    ),
    ("arm64", "translated"): (
        ("iommu.passthrough", "0", "every device has a mapping of its own, whatever the kernel's default is"),
    ),
}


def wishes(spec: PcieSpec, hardware: Hardware) -> Wishes:
    """The words for the mode that is asked for; none where the architecture has no such mode (a rule refuses it)."""
    words = _WORDS.get((hardware.architecture, spec.iommu), ())
    return Wishes(words=tuple(Word(key, value, "pcie", reason) for key, value, reason in words))
