"""Cross-checks on what PCI Express is asked to be."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def somebody_writes_the_command_line(spec: NodeSpec) -> Iterator[Found]:
    if spec.pcie is not None and spec.kernel is None:
        sentence = (
            "needs the role kernel, which writes the IOMMU's words to the command line; add 'kernel:' to the node file"
        )
        yield Found(("pcie",), sentence, show=False)


def an_smmu_cannot_be_turned_off(spec: NodeSpec) -> Iterator[Found]:
    if spec.pcie is not None and spec.pcie.iommu == "off" and spec.hardware.architecture == "arm64":
        yield Found(("pcie", "iommu"), "is not possible on arm64: no kernel word turns an SMMU off; use pt")


def accelerators_are_endpoints(spec: NodeSpec) -> Iterator[Found]:
    for index, found in enumerate(spec.hardware.accelerators.classes):
        if found.startswith("06"):
            path = ("hardware", "accelerators", "classes", index)
            yield Found(path, "is the class of a bridge; name the endpoints, 0300 and 0302 for GPUs")


def a_reason_has_something_to_waive(spec: NodeSpec) -> Iterator[Found]:
    if spec.pcie is not None and spec.pcie.vfio_guests_accepted and spec.pcie.acs_redirect == "kept":
        path = ("pcie", "vfio_guests_accepted")
        yield Found(path, "has nothing to accept while acs_redirect is kept; leave one of the two out", show=False)


RULES = (
    somebody_writes_the_command_line,
    an_smmu_cannot_be_turned_off,
    accelerators_are_endpoints,
    a_reason_has_something_to_waive,
)
