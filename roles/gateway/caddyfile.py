"""The gateway's configuration as text: what the node file, the engines and the keys come to."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuwright import render
from gpuwright.upstreams import Upstream, body_limit
from roles.gateway.keys import ApiKey
from roles.gateway.paths import NEVER, OPEN
from roles.gateway.spec import Alias, GatewaySpec, Listen, TlsAcme, TlsOff


@dataclass(frozen=True)
class Pool:
    """All engines that serve one model: one of them answers, which one is the load balancer's business."""

    served_name: str
    upstreams: tuple[Upstream, ...]

    @property
    def name(self) -> str:
        """Its name in the Caddyfile: the first engine's."""
        return self.upstreams[0].engine


@dataclass(frozen=True)
class Route:
    """``METHOD:/path`` of a client, the engine's own path, and the pool that answers."""

    match: str
    target: str
    pool: str


@dataclass(frozen=True)
class Configuration:
    """The two files, and the identity that the running gateway states of itself."""

    caddyfile: bytes
    keys: bytes
    identity: str


def pools(engines: Sequence[Upstream]) -> tuple[Pool, ...]:
    """Engines by the model they serve, in the order of the node file. The first pool is the default one (/v1)."""
    by_name: dict[str, list[Upstream]] = {}
    for engine in engines:
        by_name.setdefault(engine.served_name, []).append(engine)
    return tuple(Pool(name, tuple(members)) for name, members in by_name.items())


def pool_of(alias: Alias, found: Sequence[Pool]) -> Pool:
    """Where an alias leads. Raises ValueError with a sentence."""
    if alias.engine is None:
        return found[0]
    for pool in found:
        if any(upstream.engine == alias.engine for upstream in pool.upstreams):
            return pool
    names = ", ".join(upstream.engine for pool in found for upstream in pool.upstreams)
    raise ValueError(f"gateway.aliases: {alias.prefix} leads to engine {alias.engine!r}; this node has: {names}")


def faults(spec: GatewaySpec, engines: Sequence[Upstream]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What settings and engines must agree on: the setting to blame, and a sentence about it."""
    found = pools(engines)
    for index, extra in enumerate(spec.extra_paths):
        if (path := extra.partition(":")[2]) in NEVER:
            yield ("gateway", "extra_paths", index), f"stays shut: {NEVER[path]}"
    if isinstance(spec.tls, TlsAcme) and not any(listen.port == 443 for listen in spec.listen):
        yield ("gateway", "tls", "mode"), "proves the name on port 443; listen there too, or choose internal or own"
    named = {alias.engine for alias in spec.aliases}
    for pool in found[1:]:
        if not named & {upstream.engine for upstream in pool.upstreams}:
            yield (
                ("gateway", "aliases"),
                f"lead nowhere to {pool.served_name!r} (engine {pool.name}): /v1 is {found[0].served_name!r}, the first "
                f"engine's; add - {{prefix: /{pool.name}, engine: {pool.name}}}",
            )
    for index, listen in enumerate(spec.listen):
        where = ("gateway", "listen", index, "port")
        if listen.port == spec.health_port and (listen.is_loopback or listen.is_any):
            yield where, "is gateway.health_port; change one of them"
        same = [other for other in spec.listen if other.port == listen.port and other is not listen]
        if listen.is_any and any((":" in other.address) == (":" in listen.address) for other in same):
            yield where, f"is listened on by {listen.address} and by another address that it includes; keep one"


def routes(spec: GatewaySpec, found: Sequence[Pool]) -> list[Route]:
    """Every method and path that is let through, aliases included."""
    result: list[Route] = []
    prefixes = [("", found[0]), *((alias.prefix, pool_of(alias, found)) for alias in spec.aliases)]
    for prefix, pool in prefixes:
        # A pool with two kinds of engine offers what both have.
        allowed = [entry.key for entry in OPEN[pool.upstreams[0].kind]]
        for upstream in pool.upstreams[1:]:
            also = {entry.key for entry in OPEN[upstream.kind]}
            allowed = [key for key in allowed if key in also]
        for key in [*allowed, *(extra for extra in spec.extra_paths if extra not in allowed)]:
            method, _, path = key.partition(":")
            result.append(Route(f"{method}:{prefix}{path}", path, pool.name))
    return result


def _is_address(hostname: str) -> bool:
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Port:
    number: int
    binds: tuple[str, ...]


def _ports(listens: Sequence[Listen]) -> list[_Port]:
    by_number: dict[int, list[str]] = {}
    for listen in listens:
        # Bare 0.0.0.0 and :: would each mean both families to Go.
        network = {"0.0.0.0": "tcp4/0.0.0.0", "::": "tcp6/[::]"}.get(listen.address)
        address = network or (f"[{listen.address}]" if ":" in listen.address else listen.address)
        by_number.setdefault(listen.port, []).append(address)
    return [_Port(number, tuple(addresses)) for number, addresses in by_number.items()]


# No text matches: nothing can follow the end. Stands where a node accepts no key yet.
_NOTHING = "$x"


def configuration(
    spec: GatewaySpec, engines: tuple[Upstream, ...], keys: Sequence[ApiKey], certificates: bytes = b""
) -> Configuration:
    """Render both files. `certificates` is whatever else a reload must follow (TLS files); it only enters the identity.

    Raises ValueError when settings and engines do not agree.
    """
    if not engines:
        raise ValueError("gateway: this node has no engine to stand in front of; add 'engine:', or drop 'gateway:'")
    for path, sentence in faults(spec, engines):
        raise ValueError(f"{'.'.join(str(part) for part in path)}: {sentence}")
    found = pools(engines)
    limit = spec.body_limit or body_limit(engines)
    values = {
        "upstreams": engines,
        "pools": found,
        "routes": routes(spec, found),
        "prefixes": [key.prefix for key in keys] or [_NOTHING],
        "hostnames": [f"[{name}]" if ":" in name else name for name in spec.hostnames],
        "strict_sni": not any(_is_address(name) for name in spec.hostnames),
        "binds": ["127.0.0.1"],
        "ports": _ports(spec.listen),
        "scheme": "http" if isinstance(spec.tls, TlsOff) else "https",
        "tls": spec.tls,
        "health_port": spec.health_port,
        "body_limit": limit,
        "body_limit_reason": "from the node file"
        if spec.body_limit
        else "max(32 MiB, 8 bytes x context length), and 64 MiB for multimodal models",
        "response_timeout": spec.response_timeout,
        "session_header": spec.session_header,
        "log_keep_days": spec.log_keep_days,
        "mask_addresses": spec.log_mask_addresses,
    }
    keys_caddy = render.template("gateway/etc/gpuwright/gateway/keys.caddy.j2", keys=keys)
    template = "gateway/etc/gpuwright/gateway/Caddyfile.j2"
    plain = render.template(template, identity="", **values)
    identity = hashlib.sha256(b"\0".join((plain, keys_caddy, certificates))).hexdigest()[:32]
    return Configuration(render.template(template, identity=identity, **values), keys_caddy, identity)


IDENTITY = re.compile(r'respond "([0-9a-f]{32})')
"""Where a Caddyfile states its identity."""
