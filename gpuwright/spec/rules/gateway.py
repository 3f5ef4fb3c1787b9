"""Cross-checks on the gateway."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from gpuwright.spec.names import exists, is_host_name, is_ip_address, is_placeholder
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found, sizes
from gpuwright.spec.sentence import nearest
from gpuwright.upstreams import upstreams
from roles.engine.spec import VllmSettings
from roles.gateway import caddyfile, keys

OLDEST_CADDY = (2, 11, 2)
BYTES_PER_TOKEN = 8
"""Of a request body: what a prompt of one token can take (a million-token prompt is megabytes)."""


def listens_on_addresses(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None:
        return
    seen: set[tuple[str, int]] = set()
    for index, listen in enumerate(spec.gateway.listen):
        path = ("gateway", "listen", index)
        if not is_ip_address(listen.address):
            yield Found((*path, "address"), "must be an IP address of the node, or 0.0.0.0 or ::")
            continue
        if listen.port == 22:
            yield Found((*path, "port"), "belongs to SSH")
        if listen.port == spec.gateway.health_port and (listen.is_any or listen.is_loopback):
            yield Found((*path, "port"), "is also gateway.health_port; change one of them")
        if (listen.address, listen.port) in seen:
            yield Found((*path, "port"), "is named twice for this address")
        seen.add((listen.address, listen.port))


def plain_http_stays_on_loopback(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None or spec.gateway.tls.mode != "off":
        return
    for index, listen in enumerate(spec.gateway.listen):
        if is_ip_address(listen.address) and not listen.is_loopback:
            sentence = "would carry keys in the clear: with tls mode off the gateway listens on 127.0.0.1 or ::1 only"
            yield Found(("gateway", "listen", index, "address"), sentence)


def host_names_are_names(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is not None and not spec.gateway.hostnames:
        yield Found(("gateway", "hostnames"), "must name at least one name that clients use")
    for index, name in enumerate(spec.gateway.hostnames if spec.gateway else ()):
        path = ("gateway", "hostnames", index)
        if not is_host_name(name):
            yield Found(path, "is not a host name or IP address")
        elif is_placeholder(name):
            sentence = (
                'is a placeholder; give this host its own name in the inventory: "set": {"gateway.hostnames": […]}'
            )
            yield Found(path, sentence, unfinished=True)


def aliases_lead_somewhere(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None or spec.engine is None:
        return
    engines = spec.engine.engines
    names = {engine.served_name for engine in engines.values()}
    seen: set[str] = set()
    for index, alias in enumerate(spec.gateway.aliases):
        path = ("gateway", "aliases", index)
        if alias.engine is not None and alias.engine not in engines:
            yield Found((*path, "engine"), f"is not an engine of this node{nearest(alias.engine, list(engines))}")
        if alias.engine is None and len(names) > 1:
            yield Found(path, "must name its engine, because this node serves several models")
        if alias.prefix in ("/v1", "/health", "/healthz", "/metrics"):
            yield Found((*path, "prefix"), "is a path of the gateway itself")
        if alias.prefix in seen:
            yield Found((*path, "prefix"), "is named twice")
        seen.add(alias.prefix)


def body_limit_lets_a_full_prompt_in(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None or spec.gateway.body_limit is None or spec.engine is None:
        return
    contexts = [
        (e.settings.max_model_len if isinstance(e.settings, VllmSettings) else e.settings.context_length) or 0
        for e in spec.engine.engines.values()
    ]
    needed = BYTES_PER_TOKEN * max(contexts, default=0)
    if spec.gateway.body_limit < needed:
        sentence = (
            f"is less than a full prompt of {max(contexts)} tokens can take ({sizes(needed)}); leave it out or raise it"
        )
        yield Found(("gateway", "body_limit"), sentence)


def paths_and_headers_are_well_formed(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None:
        return
    for index, path in enumerate(spec.gateway.extra_paths):
        if not re.fullmatch(r"(GET|POST|PUT|PATCH|DELETE):(/[A-Za-z0-9._~-]+)+", path):
            yield Found(("gateway", "extra_paths", index), "must be METHOD:/path, as in POST:/tokenize")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", spec.gateway.session_header):
        yield Found(("gateway", "session_header"), "must be a header name of letters, digits and '-'")
    elif spec.gateway.session_header.lower() in ("authorization", "cookie", "host", "x-api-key"):
        yield Found(
            ("gateway", "session_header"), "is a header with a meaning of its own; use one such as X-Session-Id"
        )


def caddy_comes_from_one_place(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None:
        return
    caddy = spec.gateway.caddy
    if tuple(map(int, caddy.version.split("."))) < OLDEST_CADDY:
        yield Found(("gateway", "caddy", "version"), "is too old: 2.11.2 is the oldest that has what the gateway needs")
    if caddy.file is not None and caddy.url is not None:
        yield Found(("gateway", "caddy"), "has both file and url; keep one")


def agrees_with_its_engines(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None:
        return
    with contextlib.suppress(ValueError):  # an address that is none: another rule's
        for path, sentence in caddyfile.faults(spec.gateway, upstreams(spec.engine)):
            yield Found(path, sentence)


def keys_are_readable(spec: NodeSpec) -> Iterator[Found]:
    if spec.gateway is None:
        return
    try:
        entries = keys.load(Path(spec.gateway.keys_file))
    except keys.KeyFileError as error:
        yield Found(("gateway", "keys_file"), f"cannot be used: {error}")
        return
    for index, name in enumerate(spec.gateway.keys or ()):
        try:
            keys.accepted(entries, [name])
        except keys.KeyFileError as error:
            yield Found(("gateway", "keys", index), f"is not among the keys: {error}")


def files_on_the_controller_exist(spec: NodeSpec) -> Iterator[Found]:
    wanted: list[tuple[tuple[str | int, ...], str | None]] = []
    if spec.gateway is not None:
        wanted.append((("gateway", "caddy", "file"), spec.gateway.caddy.file))
        wanted.append((("gateway", "tls", "certificate"), getattr(spec.gateway.tls, "certificate", None)))
        wanted.append((("gateway", "tls", "ca"), getattr(spec.gateway.tls, "ca", None)))
    if spec.models is not None:
        wanted.append((("models", "hub_ca"), spec.models.hub_ca))
    if spec.nvidia is not None:
        wanted.append((("nvidia", "repository_key"), spec.nvidia.repository_key))
    if spec.containers is not None:
        wanted.append((("containers", "repository_key"), spec.containers.repository_key))
        for index, registry in enumerate(spec.containers.registries):
            wanted.append((("containers", "registries", index, "ca"), registry.ca))
    for path, file in wanted:
        if file is not None and not (exists(file) and Path(file).is_file()):
            sentence = "is no file on this controller; put it there (relative paths start at the inventory's folder)"
            yield Found(path, sentence, unfinished=True)


RULES = (
    listens_on_addresses,
    plain_http_stays_on_loopback,
    host_names_are_names,
    aliases_lead_somewhere,
    body_limit_lets_a_full_prompt_in,
    paths_and_headers_are_well_formed,
    caddy_comes_from_one_place,
    agrees_with_its_engines,
    keys_are_readable,
    files_on_the_controller_exist,
)
