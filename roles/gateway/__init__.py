"""Role `gateway`: Caddy with keys in front of the engines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pyinfra.api import OperationError, deploy

from gpuwright import render, sandbox, units
from gpuwright.atomic import File, Validate, files
from gpuwright.ownership import Owned, retire
from gpuwright.spec.base import Profile
from gpuwright.spec.secret import SecretError, resolve
from gpuwright.upstreams import Upstream
from roles.gateway import engine_guard, keys, operations
from roles.gateway.caddyfile import configuration
from roles.gateway.spec import GatewaySpec, TlsAcme, TlsOwn

DIRECTORY = "/etc/gpuwright/gateway"
GOOD = Owned("directory", "/var/lib/gpuwright/gateway-good")


def _certificates(spec: GatewaySpec) -> tuple[list[File], bytes | None]:
    """TLS files to write, and what a client must trust (None: what every machine trusts)."""
    if isinstance(spec.tls, TlsOwn):
        chain = Path(spec.tls.certificate).read_bytes()
        key = resolve(spec.tls.key, "gateway.tls.key")
        return [
            File(f"{DIRECTORY}/tls.crt", chain),
            File(f"{DIRECTORY}/tls.key", key, mode="0640", group=operations.USER),
        ], chain
    if isinstance(spec.tls, TlsAcme) and spec.tls.ca is not None:
        root = Path(spec.tls.ca).read_bytes()
        return [File(f"{DIRECTORY}/acme-ca.crt", root)], root
    return [], None


@deploy("Gateway")
def gateway(spec: GatewaySpec, engines: Sequence[Upstream], profile: Profile) -> None:
    """Caddy in front of `engines`: keys, allowed paths, load balancing, access log.

    + spec: the role's settings
    + engines: what it leads to
    + profile: says, where `spec` does not, whether local accounts reach engines past the gateway
    """
    try:
        accepted = keys.accepted(keys.load(Path(spec.keys_file)), spec.keys)
        certificates, roots = _certificates(spec)
        fingerprint = hashlib.sha256(b"\0".join(file.data for file in certificates)).digest()
        wanted = configuration(spec, tuple(engines), accepted, fingerprint)
    except (keys.KeyFileError, SecretError, ValueError) as error:
        raise OperationError(str(error)) from None
    except OSError as error:
        raise OperationError(f"gateway.tls: cannot read {error.filename} ({error.strerror})") from None

    low_port = any(listen.port < 1024 for listen in spec.listen)

    def unit(identity: str) -> bytes:
        return render.template(
            "gateway/etc/systemd/system/gpuwright-gateway.service.j2",
            version=spec.caddy.version,
            drain=spec.drain,
            low_port=low_port,
            unit_identity=identity,
            sandbox=sandbox.gateway(low_port).lines(),
        )

    unit_identity = hashlib.sha256(unit("")).hexdigest()[:32]

    script = File(operations.CONFIG, render.static("gateway/usr/local/lib/gpuwright/gateway-config"), mode="0755")
    configured = [
        File(f"{DIRECTORY}/Caddyfile", wanted.caddyfile, mode="0640", group=operations.USER),
        File(f"{DIRECTORY}/keys.caddy", wanted.keys, mode="0640", group=operations.USER),
        *certificates,
    ]
    service = File(f"/etc/systemd/system/{operations.UNIT}", unit(unit_identity))
    user = Owned("user", operations.USER)
    binary = Owned("file", operations.CADDY)

    files(
        name="Install the gateway's script gateway-config",
        role="gateway",
        files=[script],
        claims=[user, GOOD],
    )
    operations.user(name=f"Create system user {operations.USER}")
    guard: list[Owned] = []
    if engines and engine_guard.wanted(spec.local_clients, profile):
        clients = engine_guard.clients(spec.local_clients, operations.USER)
        written = engine_guard.files(engines, clients)
        guard = [*(file.owned for file in written), Owned("table", engine_guard.TABLE)]
        files(
            name="Write the engine guard's rules",
            role="gateway",
            files=written,
            validate=[engine_guard.known(clients), Validate(f"nft -c -f .{engine_guard.PATH}")],
            claims=[Owned("table", engine_guard.TABLE)],
        )
        units.running(
            name=f"Keep local accounts away from engines (table {engine_guard.TABLE})",
            units=[engine_guard.UNIT],
            stale=engine_guard.stale,
            reload=True,
            dropped_into=["nftables.service"],
        )
    operations.binary(name=f"Install Caddy {spec.caddy.version} as {operations.CADDY}", caddy=spec.caddy)
    files(
        name=f"Write the gateway's configuration for {', '.join(spec.hostnames)} ({len(accepted)} keys)",
        role="gateway",
        files=[*configured, service],
        validate=[Validate(f"{operations.CONFIG} check .{DIRECTORY}")],
    )
    operations.serving(
        name=f"Run {operations.UNIT} with it, and ask it from outside",
        spec=spec,
        identity=wanted.identity,
        unit_identity=unit_identity,
        roots=roots,
    )
    retire(
        "gateway", keep=[script.owned, service.owned, *(file.owned for file in configured), user, binary, GOOD, *guard]
    )
