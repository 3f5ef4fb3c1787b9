"""What the gateway changes on a node: its user, its Caddy, and which configuration runs."""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand, OperationError, StringCommand, operation
from pyinfra.context import ctx_host
from pyinfra.facts.server import Command

from gpuwright import atomic, snapshot
from gpuwright.ownership import Owned
from roles.gateway import keys, probe
from roles.gateway.facts import GATEWAY, GatewayState
from roles.gateway.spec import CaddyBinary, GatewaySpec, TlsInternal, TlsOff, TlsOwn

USER = "gpuwright-gateway"
UNIT = "gpuwright-gateway.service"
CADDY = "/usr/local/lib/gpuwright/caddy"
CONFIG = "/usr/local/lib/gpuwright/gateway-config"
INTERNAL_ROOT = "/var/lib/gpuwright-gateway/caddy/pki/authorities/local/root.crt"


def _state(host: object) -> GatewayState | None:
    try:
        return snapshot.read(host).read(GATEWAY)
    except snapshot.CouldNotLook:
        return None


@operation()
def user() -> Generator[StringCommand, None, None]:
    """Create the system user that the gateway runs as."""
    host = ctx_host.get()
    state = _state(host)
    if state is not None and state.user_exists:
        host.noop(f"user {USER} exists")
        return
    snapshot.forget(host)
    yield StringCommand(
        f"id -u {USER} >/dev/null 2>&1 || "
        f"useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin {USER}"
    )


@functools.lru_cache(maxsize=4)
def _sha256(path: str, modified: int) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wanted_sha256(caddy: CaddyBinary) -> str:
    if caddy.file is not None:
        try:
            found = _sha256(caddy.file, Path(caddy.file).stat().st_mtime_ns)
        except OSError as error:
            raise OperationError(f"gateway.caddy.file: cannot read {caddy.file} ({error.strerror})") from None
        if caddy.sha256 is not None and found != caddy.sha256:
            raise OperationError(
                f"gateway.caddy.file: {caddy.file} has sha256 {found}, expected {caddy.sha256}; "
                "it is not the binary that was pinned"
            )
        return found
    if caddy.sha256 is None:
        raise OperationError("gateway.caddy: what a node downloads needs sha256; run: gpuwright pin")
    return caddy.sha256


_DOWNLOAD = r"""
set -eu
url=$1 sha256=$2 version=$3
umask 022
new=$(mktemp /usr/local/lib/gpuwright/.gpuwright.XXXXXXXX.tmp)
trap 'rm -f "$new" "$new.download"' EXIT
curl --fail --silent --show-error --location --retry 5 --retry-all-errors --speed-limit 1024 --speed-time 60 \
  --output "$new.download" "$url"
case $url in
  *.tar.gz | *.tgz) tar -xzOf "$new.download" caddy >"$new" ;;
  *) mv -fT "$new.download" "$new" ;;
esac
found=$(sha256sum <"$new" | cut -d ' ' -f 1)
if [ "$found" != "$sha256" ]; then
  echo "gpuwright: $url gave a Caddy with sha256 $found, expected $sha256; nothing was installed" >&2
  exit 65
fi
chmod 0755 "$new"
case $("$new" version) in
  "v$version "*) ;;
  *) echo "gpuwright: $url is not Caddy $version; nothing was installed" >&2; exit 65 ;;
esac
sync "$new"
mv -fT "$new" /usr/local/lib/gpuwright/caddy
"""


@operation()
def binary(caddy: CaddyBinary) -> Generator[StringCommand, None, None]:
    """Install the pinned Caddy; never half-written, and never another one than the pinned.

    + caddy: version, and where it comes from

    Raises OperationError when the controller's file is not the pinned one, or when a download has no sha256.
    """
    host = ctx_host.get()
    wanted = _wanted_sha256(caddy)
    try:
        found = {f.name: f for f in snapshot.read(host).read(snapshot.OWNED) if f.role == "gateway"}.get(CADDY)
    except snapshot.CouldNotLook:
        found = None
    if found is not None and (found.sha256, found.mode, found.user) == (wanted, "0755", "root"):
        host.noop(f"Caddy {caddy.version} is there")
        return
    snapshot.forget(host)
    if caddy.file is not None:
        yield atomic.write(
            "gateway",
            [atomic.File(CADDY, Path(caddy.file).read_bytes(), mode="0755")],
            validate=[atomic.Validate(f".{CADDY} version | grep -q '^v{caddy.version} '")],
        )
    else:
        yield atomic.write("gateway", [], claims=[Owned("file", CADDY)])
        yield StringCommand(
            "sh",
            "-c",
            shlex.quote(_DOWNLOAD),
            "gpuwright-caddy",
            shlex.quote(str(caddy.url)),
            wanted,
            caddy.version,
        )


def _outside_address(host: Any, address: str) -> str | None:
    """Where the controller reaches a listener: its own address, or for "all addresses" the one it deploys through."""
    if address in ("0.0.0.0", "::"):
        return None if host.name.startswith("@") else str(host.data.get("ssh_hostname") or host.name)
    return None if address.startswith("127.") or address == "::1" else address


@operation()
def serving(
    spec: GatewaySpec, identity: str, unit_identity: str, roots: bytes | None
) -> Generator[StringCommand | FunctionCommand, None, None]:
    """Run the configuration that is on disk, ask it from outside, and put the old one back if an answer is wrong.

    + spec: the gateway's settings
    + identity: what the running gateway must state of its configuration
    + unit_identity: the same of its unit
    + roots: PEM of what signs the certificate, None for the machine's own roots

    What runs is read back from the running process, so a run killed anywhere is healed by the next one. The questions
    that need a key use one made for them: it is in the running gateway for seconds and on no disk.
    """
    host = ctx_host.get()
    state = _state(host)
    try:
        unit = snapshot.read(host).read(snapshot.UNITS).get(UNIT, {})
    except snapshot.CouldNotLook:
        unit = {}
    same_process = (
        state is not None
        and state.pid is not None
        and state.exe_is_on_disk
        and state.unit_running == unit_identity
        # Caddy announces a reload to systemd, and says nothing more when it refuses one.
        and unit.get("ActiveState") in ("active", "reloading")
    )
    if (
        same_process
        and state is not None
        and state.identity_running == identity
        and state.loaded == state.loaded_when_right
        and unit.get("UnitFileState") == "enabled"
        and unit.get("NeedDaemonReload") != "yes"
    ):
        host.noop(f"the gateway runs configuration {identity[:8]}")
        return

    snapshot.forget(host)
    canary = keys.new_id(keys.RESERVED, 1)
    key, hashed = keys.generate(canary)
    yield StringCommand(
        CONFIG,
        "activate",
        "reload" if same_process else "restart",
        _stdin=f"{canary}\n{keys.prefix(canary)}\n{canary} {hashed}\n",
    )

    faults: list[str] = []
    unreachable: list[str] = []
    inside = [listen for listen in spec.listen if _outside_address(host, listen.address) is None]
    answered = False

    def ask(state: Any, host: Any) -> bool:
        nonlocal answered
        trusted = roots
        if isinstance(spec.tls, TlsInternal):
            trusted = (host.get_fact(Command, f"cat {INTERNAL_ROOT}") or "").encode() or None
        for listen in spec.listen:
            address = _outside_address(host, listen.address)
            if address is None:
                continue
            patience = 15 if isinstance(spec.tls, TlsInternal | TlsOwn | TlsOff) else 120
            answers = probe.ask(spec, listen, address, key, trusted, patience)
            faults.extend(answers.faults)
            answered = answered or answers.engine_answered
            if answers.unreachable is not None:
                unreachable.append(answers.unreachable)
                inside.append(listen)
        return True

    yield FunctionCommand(ask, (), {})

    if faults:
        sentence = f"gpuwright: the new configuration was taken back: {'; '.join(faults)}"
        yield StringCommand("sh", "-c", shlex.quote(f"{CONFIG} restore; echo {shlex.quote(sentence)} >&2; exit 1"))
        return
    if inside:
        # Loopback, or a network that this controller is not let into: the same questions from the node itself.
        requests, codes = probe.curl(spec, inside, key)
        yield StringCommand(
            "sh",
            "-c",
            shlex.quote(f"{CONFIG} probe {shlex.quote(codes)} || {{ {CONFIG} restore; exit 1; }}"),
            _stdin=requests,
        )
    for place in unreachable:
        logger.warning(f"{host.print_prefix}not reached from this controller: {place}; asked from the node itself")
    if not answered and not inside:
        logger.info(f"{host.print_prefix}the gateway is right; no engine is ready behind it yet (503)")
    yield StringCommand(CONFIG, "keep")
