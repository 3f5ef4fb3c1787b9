"""Words of the command line that take a protection of the kernel away, pretend one, or do nothing."""

from __future__ import annotations

import re

from gpuwright.boot import plain_key

# Words that switch off what protects the kernel (Documentation/admin-guide/kernel-parameters.txt; the list under
# `mitigations=off` there is the core of it). A bare word, or a key with the values that weaken it.
_WEAKENING: dict[str, str] = {
    "apparmor": "0",
    "audit": "0|off",
    "gather_data_sampling": "off",
    "indirect_target_selection": "off",
    "kpti": "0|n|no|off",
    "kvm.nx_huge_pages": "off",
    "kvm_intel.vmentry_l1d_flush": "never",
    "l1tf": "off",
    "lockdown": "none",
    "mds": "off",
    "mitigations": r"off(;.*)?|.*[;,]no_.*",
    "mmio_stale_data": "off",
    "no_entry_flush": ".*",
    "no_stf_barrier": ".*",
    "no_uaccess_flush": ".*",
    "nobp": "0",
    "noexec": "off",
    "nokaslr": ".*",
    "nopti": ".*",
    "nosmap": ".*",
    "nosmep": ".*",
    "nospec_store_bypass_disable": ".*",
    "nospectre_bhb": ".*",
    "nospectre_v1": ".*",
    "nospectre_v2": ".*",
    "pti": "off",
    "reg_file_data_sampling": "off",
    "retbleed": "off",
    "selinux": "0",
    "spec_rstack_overflow": "off",
    "spec_store_bypass_disable": "off",
    "spectre_bhi": "off",
    "spectre_v2": "off",
    "spectre_v2_user": "off",
    "srbds": "off",
    "ssbd": "force-off",
    "tsa": "off",
    "tsx_async_abort": "off",
    "vmscape": "off",
}

# Words that pages recommend and that do nothing on a mainline kernel, each with what is known of it.
_INERT = {
    "amd_iommu=on": "is no option of mainline (drivers/iommu/amd/init.c): AMD's IOMMU is on by itself",
    "iommu=on": "is no option of mainline (arch/x86/kernel/pci-dma.c); pcie.iommu sets the mode",
}

PRETENDED_ISOLATION = "pcie_acs_override"
WHAT_IT_PRETENDS = (
    "needs a patch outside mainline, and pretends isolation that is not there instead of clearing redirection; "
    "pcie.acs_redirect does that"
)


def inert(key: str, value: str | None) -> str | None:
    """Why a word has no effect, as the end of a sentence; None where it may have one."""
    return _INERT.get(plain_key(key) if value is None else f"{plain_key(key)}={value}")


def weakens(key: str, value: str | None) -> bool:
    """Whether a word, as the kernel takes it, takes a protection away."""
    values = _WEAKENING.get(plain_key(key))
    return values is not None and re.fullmatch(values, value or "") is not None
