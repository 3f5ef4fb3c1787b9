"""Settings of the GPU half of role `containers`: NVIDIA's container toolkit."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from gpuwright.spec.base import ControllerPath, Fingerprint, RepositoryUrl, Strict

# The first with units that renew the CDI specification (gpu-node.md 4.2).
OLDEST = (1, 18, 0)


def _version(value: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+", value):
        raise ValueError('a version of the toolkit is three numbers, as in "1.18.2", without the package\'s "-1"')
    if tuple(map(int, value.split("."))) < OLDEST:
        raise ValueError(
            f"toolkit {value} does not renew the CDI specification when the driver changes; take 1.18.0 or later "
            "(1.18.2 also tries again when the driver is loaded late)"
        )
    return value


class ToolkitSpec(Strict):
    """NVIDIA's container toolkit, which writes the CDI specification that Docker gives GPUs by."""

    source: Literal["vendor", "nvidia", "local"] = Field(
        default="vendor",
        description="vendor: what the machine came with is checked and never touched (DGX OS); nvidia: NVIDIA's repository or a "
        "mirror of it; local: whichever repositories the machine has already",
    )
    version: Annotated[str, AfterValidator(_version)] | None = Field(
        default=None, description="of all four packages, exactly; needed unless source is vendor"
    )
    repository: RepositoryUrl = Field(
        default="https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)",
        description="address of NVIDIA's flat repository or a mirror of it; $(ARCH) is apt's own word",
    )
    repository_key: ControllerPath | None = Field(
        default=None, description="path on the controller of the repository key (ASCII armour)"
    )
    repository_fingerprint: Fingerprint | None = Field(
        default=None, description="of that key; a file with another key is refused"
    )

    @model_validator(mode="after")
    def _complete(self) -> ToolkitSpec:
        if self.source == "vendor":
            if self.version or self.repository_key:
                raise ValueError(
                    "source vendor never touches the toolkit; take out version and repository_key, or set source"
                )
            return self
        if self.version is None:
            raise ValueError(f"source {self.source} needs version: the toolkit is pinned and held at it")
        if self.source == "nvidia" and self.repository_key is None:
            raise ValueError("source nvidia needs repository_key: the path of the key that signs the repository")
        return self
