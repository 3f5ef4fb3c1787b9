"""Settings of role `gateway`: Caddy with keys in front of the engines."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from gpuwright.spec.base import ControllerPath, Name, Port, Reason, Seconds, SecretRef, Sha256, Size, Strict


def _account(value: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}|[*]", value):
        raise ValueError(
            "an account has 1 to 32 of a-z, 0-9, '-' and '_', and starts with a letter or '_'; '*' is everybody"
        )
    return value


LocalAccount = Annotated[str, AfterValidator(_account)]
"""The name of an account on a node, mostly of a service (useradd(8)); ``*`` for all of them."""


class CaddyBinary(Strict):
    """The pinned Caddy (>= 2.11.2; Debian's is too old). Exactly one of `file` and `url`."""

    version: str = Field(default="2.11.7", pattern=r"^\d+\.\d+\.\d+$", description="2.11.2 or later")
    file: ControllerPath | None = Field(default=None, description="a binary that you fetched and checked")
    url: str | None = Field(
        default=None, description="what the node downloads: a binary or a .tar.gz with one; none: the release on GitHub"
    )
    sha256: Sha256 | None = Field(default=None, description="of the binary; filled from pins.lock.yaml")


class TlsInternal(Strict):
    """Caddy's own CA; clients trust its root (security.md 1.9)."""

    mode: Literal["internal"] = "internal"


class TlsOwn(Strict):
    """A certificate of the site."""

    mode: Literal["own"] = "own"
    certificate: ControllerPath = Field(description="path on the controller of the PEM chain")
    key: SecretRef = Field(description="its private key, PEM")


class TlsAcme(Strict):
    """A public certificate authority, or a private one by directory URL. Proof is TLS-ALPN, on port 443."""

    mode: Literal["acme"] = "acme"
    email: str = Field(pattern=r"^[^\s@{}\"`]+@[^\s@{}\"`]+$", description="where the authority writes to")
    directory: str | None = Field(
        default=None, pattern=r"^https://[^\s{}\"`]+$", description="of a private authority; none: Caddy's public ones"
    )
    ca: ControllerPath | None = Field(
        default=None, description="path on the controller of the root that signs the directory"
    )


class TlsOff(Strict):
    """Plain HTTP; allowed on loopback only."""

    mode: Literal["off"] = "off"


class Listen(Strict):
    """One address the gateway listens on."""

    address: str = Field(description="IP address of an interface of the node, or 0.0.0.0 / ::")
    port: Port = Field(default=443, description="where clients connect")

    @property
    def is_loopback(self) -> bool:
        """Reached from the node itself only."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def is_any(self) -> bool:
        """All addresses of the node."""
        return ipaddress.ip_address(self.address).is_unspecified


class Alias(Strict):
    """An old model path such as /glm-5.3-flash/v1 (seed 1), rewritten to constants."""

    prefix: str = Field(pattern=r"^/[A-Za-z0-9][A-Za-z0-9._-]*$", description="what old clients put before /v1")
    engine: Name | None = Field(default=None, description="leads to all engines that serve the same model as this one")


class GatewaySpec(Strict):
    """Unit ``gpuwright-gateway.service``."""

    caddy: CaddyBinary = CaddyBinary()
    hostnames: tuple[str, ...] = Field(description="names (or addresses) clients use; the certificate is for these")
    listen: tuple[Listen, ...] = Field(min_length=1)
    tls: Annotated[TlsInternal | TlsOwn | TlsAcme | TlsOff, Field(discriminator="mode")] = TlsInternal()
    keys_file: ControllerPath = Field(
        default="keys.yaml",
        description="path on the controller of key names and hashes; beside the inventory by default",
    )
    keys: tuple[str, ...] | None = Field(
        default=None, description="names from keys_file that this node accepts; none given: all of them"
    )
    aliases: tuple[Alias, ...] = ()
    extra_paths: tuple[str, ...] = Field(default=(), description="further METHOD:/path of the engine to let through")
    local_clients: dict[LocalAccount, Reason] | None = Field(
        default=None,
        description="accounts of the node that reach its engines past the gateway, each with its reason, such as a metrics "
        "agent's (/metrics is on no path of the gateway); {}: none but root and the gateway's; '*': everybody; left out: "
        "none in hardening strict, everybody in the others",
    )
    session_header: str = Field(
        default="X-Session-Id", description="requests with the same value go to the same engine, whose cache knows them"
    )
    body_limit: Size | None = Field(
        default=None, description="derived when absent: max(32 MiB, 8 bytes x context), +64 MiB multimodal"
    )
    response_timeout: Seconds = Field(
        default=900, description="until an engine's first byte; an answer that is not streamed comes whole"
    )
    drain: Seconds = Field(default=600, description="how long a stop waits for streams (TimeoutStopSec=)")
    health_port: Port = Field(
        default=2020, description="on loopback; where the gateway asks itself whether an engine is ready"
    )
    log_keep_days: int = Field(default=30, ge=1, description="of the access log")
    log_mask_addresses: bool = Field(default=False, description="mask client addresses in the access log (GDPR)")

    @model_validator(mode="after")
    def _keys_beside_the_inventory(self, info: ValidationInfo) -> GatewaySpec:
        # pydantic validates a default without the context that says where the inventory lies.
        directory = (info.context or {}).get("directory")
        if directory is None or "keys_file" in self.model_fields_set:
            return self
        return self.model_copy(update={"keys_file": str(Path(directory, self.keys_file))})
