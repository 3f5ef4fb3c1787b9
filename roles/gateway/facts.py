"""What the gateway is and does now, seen from the running process."""

from __future__ import annotations

import base64
import datetime
from dataclasses import dataclass
from typing import Literal

from gpuwright.snapshot import Section, register

PROPERTIES = (
    "User,NoNewPrivileges,CapabilityBoundingSet,AmbientCapabilities,ProtectSystem,ProtectHome,ProtectKernelTunables,"
    "ProtectKernelModules,PrivateDevices,PrivateTmp,RestrictNamespaces,MemoryDenyWriteExecute,LimitCORE,UMask,"
    "TimeoutStopUSec,ExecStart"
)


@dataclass(frozen=True)
class Listener:
    """One listening TCP socket of the gateway's process."""

    address: str
    port: int


@dataclass(frozen=True)
class Certificate:
    """A leaf certificate on the node, as PEM; dates are read on the controller, nodes need no openssl."""

    path: str
    pem: bytes

    @property
    def expires(self) -> datetime.datetime:
        """End of validity. Raises ValueError when this is no certificate."""
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.pem).not_valid_after_utc


@dataclass(frozen=True)
class GatewayState:
    """Every field but the first few is about the running process; None where nothing runs."""

    user_exists: bool
    identity_on_disk: str | None
    tls_on_disk: Literal["internal", "own", "acme", "off"] | None
    ready: frozenset[str]
    """Engines whose gate says ready."""
    unit: dict[str, str]
    modes: dict[str, str]
    """"<octal mode> <user> <group>" of the files and folders that hold secrets or logs."""
    certificates: tuple[Certificate, ...]
    pid: int | None = None
    identity_running: str | None = None
    loaded: str | None = None
    """sha256 of the configuration as Caddy itself gives it."""
    loaded_when_right: str | None = None
    """The same, noted when a deploy last found all answers right."""
    unit_running: str | None = None
    """Which unit file the process was started from."""
    exe: str | None = None
    exe_is_on_disk: bool = False
    """The process runs the very file that lies there now (its sha256 is in section `owned`); then the next two are None,
    because hashing 50 MB costs more than all the rest of a snapshot."""
    exe_sha256: str | None = None
    exe_version: str | None = None
    listeners: tuple[Listener, ...] = ()


def _tls(text: str | None) -> Literal["internal", "own", "acme", "off"] | None:
    return text if text in ("internal", "own", "acme", "off") else None  # type: ignore[return-value]


def _parse(text: str) -> GatewayState:
    single: dict[str, str] = {}
    ready: set[str] = set()
    unit: dict[str, str] = {}
    modes: dict[str, str] = {}
    listeners: list[Listener] = []
    certificates: list[Certificate] = []
    for line in text.splitlines():
        tag, _, value = line.partition(" ")
        if tag == "ready":
            ready.add(value)
        elif tag == "unit":
            name, _, setting = value.partition("=")
            unit[name] = setting
        elif tag == "mode":
            mode, user, group, path = value.split(" ", 3)
            modes[path] = f"{mode.rjust(4, '0')} {user} {group}"
        elif tag == "listen":
            address, _, port = value.rpartition(":")
            listeners.append(Listener(address.strip("[]"), int(port)))
        elif tag == "certificate":
            encoded, path = value.split(" ", 1)
            certificates.append(Certificate(path, base64.b64decode(encoded)))
        else:
            single[tag] = value
    return GatewayState(
        user_exists=single.get("user") == "yes",
        identity_on_disk=single.get("identity_on_disk"),
        tls_on_disk=_tls(single.get("tls")),
        ready=frozenset(ready),
        unit=unit,
        modes=modes,
        certificates=tuple(certificates),
        pid=int(single["pid"]) if "pid" in single else None,
        identity_running=single.get("identity_running"),
        loaded=single.get("loaded"),
        loaded_when_right=single.get("loaded_when_right"),
        unit_running=single.get("unit_running"),
        exe=single.get("exe"),
        exe_is_on_disk=single.get("exe_is_on_disk") == "yes",
        exe_sha256=single.get("exe_sha256"),
        exe_version=single.get("exe_version"),
        listeners=tuple(sorted(set(listeners), key=lambda listener: (listener.port, listener.address))),
    )


# An identity that cannot be read although a process is there is an answer too: it is not the wanted one.
GATEWAY = register(
    Section(
        "gateway",
        r"""
unit=gpuwright-gateway.service
caddy=/usr/local/lib/gpuwright/caddy
! id -u gpuwright-gateway >/dev/null 2>&1 || echo user yes
file=/etc/gpuwright/gateway/Caddyfile
if [ -r "$file" ]; then
  sed -n 's/^[[:space:]]*respond "\([0-9a-f]\{32\}\).*/identity_on_disk \1/p; s/^# TLS: \([a-z]*\)$/tls \1/p' "$file"
fi
ls /run/gpuwright/ready 2>/dev/null | sed 's/^/ready /'
stat -c 'mode %a %U %G %n' /etc/gpuwright/gateway/* /var/lib/gpuwright-gateway /var/log/gpuwright-gateway \
  /var/log/gpuwright-gateway/access.log /run/gpuwright-gateway /run/gpuwright-gateway/*.sock 2>/dev/null
{ echo /etc/gpuwright/gateway/tls.crt; find /var/lib/gpuwright-gateway -name '*.crt' 2>/dev/null; } | while read -r path; do
  [ ! -r "$path" ] || printf 'certificate %s %s\n' "$(sed '/END CERTIFICATE/q' "$path" | base64 -w0)" "$path"
done
systemctl show --property=PROPERTIES "$unit" | sed 's/^/unit /'
pid=$(systemctl show --property=MainPID --value "$unit")
[ "${pid:-0}" -gt 0 ] && [ -e "/proc/$pid/exe" ] || exit 0
echo "pid $pid"
tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^GPUWRIGHT_UNIT=/unit_running /p'
echo "exe $(readlink "/proc/$pid/exe")"
if [ "$(stat -L -c %d:%i "/proc/$pid/exe")" = "$(stat -c %d:%i "$caddy" 2>/dev/null)" ]; then
  echo exe_is_on_disk yes
else
  echo "exe_sha256 $(sha256sum <"/proc/$pid/exe" | cut -d ' ' -f 1)"
  echo "exe_version $("/proc/$pid/exe" version 2>/dev/null | cut -d ' ' -f 1)"
fi
echo "identity_running $(curl -s --max-time 5 --unix-socket /run/gpuwright-gateway/identity.sock http://gateway-identity/ || true)"
echo "loaded $(curl -s --max-time 5 --unix-socket /run/gpuwright-gateway/admin.sock http://gateway/config/ | sha256sum |
  cut -d ' ' -f 1)"
[ ! -r /var/lib/gpuwright/gateway-good/loaded ] || echo "loaded_when_right $(cat /var/lib/gpuwright/gateway-good/loaded)"
ss -Hltnp | sed -n "s/^LISTEN *[0-9]* *[0-9]* *\([^ ]*\) .*pid=$pid,.*/listen \1/p"
exit 0
""".replace("PROPERTIES", PROPERTIES),
        _parse,
    )
)
