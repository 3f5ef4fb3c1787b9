"""Settings of role `nvidia`: which driver, from where, and how its cards are set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gpuwright.spec.base import ControllerPath, Fingerprint, RepositoryUrl, Strict

NVIDIA_REPOSITORY = "https://developer.download.nvidia.com/compute/cuda/repos"
NVIDIA_FINGERPRINT = "EB693B3035CD5710E231E123A4B469963BF863CC"
"""Of the key 3bf863cc.pub that lies in every folder of that repository."""


DriverVersion = Annotated[str, Field(pattern=r"^\d{3}\.\d{1,3}(\.\d{2})?$")]
"""A driver release as nvidia-smi shows it: 580.95.05."""
RegistryValue = Annotated[str, Field(pattern=r"^(0x[0-9A-Fa-f]{1,8}|\d{1,10})$")]
RegistryName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]


class NvidiaSpec(Strict):
    """The GPU driver: where it comes from, which release, and what its cards are set to."""

    source: Literal["vendor", "nvidia", "distribution", "local"] = Field(
        description="`vendor`: the machine came with it (DGX OS); it is checked and never touched. `nvidia`: NVIDIA's package "
        "repository, or a mirror of it. `distribution`: the distribution's own packages. `local`: a flat repository of the "
        "site's own that holds NVIDIA's packages (air-gapped sites)"
    )
    version: DriverVersion | None = Field(
        default=None,
        description="the one release of the driver, as nvidia-smi shows it: its packages are pinned and held at it; required "
        "but for `vendor`, where it is what is expected",
    )
    repository: RepositoryUrl | None = Field(
        default=None,
        description=f"for `nvidia` the base address that folders such as debian13/x86_64 lie below, {NVIDIA_REPOSITORY} where it "
        "is left out; for `local` the whole address, file:/// included",
    )
    repository_key: ControllerPath | None = Field(
        default=None,
        description="path on the controller of the key that signs the repository (ASCII armour); NVIDIA's lies in it as "
        "3bf863cc.pub",
    )
    repository_fingerprint: Fingerprint | None = Field(
        default=None,
        description=f"of that key; NVIDIA's is {NVIDIA_FINGERPRINT}, which is expected where it is left out for `nvidia`",
    )
    open_modules: bool = Field(
        default=True,
        description="the open kernel modules; Blackwell has no others (gpu-node.md 4.1)",
    )
    hold: bool = Field(
        default=False,
        description="true freezes the node's driver: no run installs, changes or repairs it; the audit goes on",
    )
    persistence: bool = Field(
        default=True, description="nvidia-persistenced keeps the cards initialised while nobody uses them"
    )
    power_limit_watts: int | None = Field(
        default=None,
        ge=1,
        le=5000,
        description="of every card, set again at every boot and read back; none leaves the cards at their own. Seed 3 plans "
        "450 W for a 16 A feed, and hardware.gpus.power_limit_watts is what the site planned with",
    )
    mig: Literal["off", "kept"] = Field(
        default="off",
        description="`off`: an engine gets whole cards, and a card that is in MIG mode is put out of it; `kept`: left alone",
    )
    fabric_manager: Literal["auto", "kept"] = Field(
        default="auto",
        description="`auto`: of the driver's very release where the machine has NVSwitches, and absent elsewhere "
        "(gpu-node.md 4.1); `kept`: left alone",
    )
    uvm_hmm: Literal["kept", "off"] = Field(
        default="kept",
        description="`off`: nvidia_uvm is loaded with uvm_disable_hmm=1, which hosts with several RTX PRO 6000 needed against "
        "lock-ups of P2P (gpu-node.md 2.3)",
    )
    registry: dict[RegistryName, RegistryValue] = Field(
        default_factory=dict,
        description="NVreg_RegistryDwords by name, as in ForceP2P: '0x11'; only for engines that read peer memory from kernels "
        "(gpu-node.md 2.3)",
    )

    @property
    def ours(self) -> bool:
        """Whether this role installs the driver."""
        return self.source != "vendor"

    @property
    def fingerprint(self) -> str | None:
        """What the repository's key must have; None where there is no repository."""
        return self.repository_fingerprint or (NVIDIA_FINGERPRINT if self.source == "nvidia" else None)

    @model_validator(mode="after")
    def _fits_its_source(self) -> NvidiaSpec:
        if self.ours and self.version is None:
            raise ValueError(f"source {self.source} needs version: the driver's release, as in 580.95.05")
        if self.source in ("nvidia", "local"):
            if self.source == "local" and self.repository is None:
                raise ValueError("source local needs repository: the address of the site's flat repository")
            if self.repository_key is None:
                raise ValueError(
                    f"source {self.source} needs repository_key: the path of the key that signs the repository"
                )
            if self.fingerprint is None:
                raise ValueError("source local needs repository_fingerprint: what `gpg --show-keys` says of its key")
        elif self.repository or self.repository_key or self.repository_fingerprint:
            raise ValueError(
                f"source {self.source} has no repository of its own; leave out repository, its key and fingerprint"
            )
        return self
