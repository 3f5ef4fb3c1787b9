"""Settings of role `pcie`: how the accelerators reach one another over PCI Express."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuwright.spec.base import Strict
from roles.pcie.p2p_spec import P2pSpec

IommuMode = Literal["pt", "off", "translated"]


class PcieSpec(Strict):
    """IOMMU mode, and what bridges do with traffic between accelerators."""

    iommu: IommuMode = Field(
        default="pt",
        description="pt maps the host's devices one to one and keeps interrupt remapping; off has no IOMMU at all and can cost "
        "processors; translated is the usual default, with which all-reduce hangs where ACS redirect is on "
        "(gpu-node.md 2.1)",
    )
    acs_redirect: Literal["cleared", "kept"] = Field(
        default="cleared",
        description="cleared: bridges between an accelerator and its root port let peers talk directly; kept: they send "
        "everything up to the root, as VFIO guests need it",
    )
    vfio_guests_accepted: str | None = Field(
        default=None,
        pattern=r"^[^\x00-\x1f]*$",
        description="the reason why ACS redirect may be cleared although this host has VFIO guests; it weakens the "
        "isolation of devices below the same bridge; the audit lists a guest that it finds as waived",
    )
    p2p: P2pSpec = P2pSpec()
