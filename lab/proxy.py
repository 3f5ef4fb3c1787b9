"""Debian's apt-cacher-ng on the lab's bridge: the only way out of a lab host, and a second boot needs no mirror."""

from __future__ import annotations

from lab import debian
from lab.network import Segment
from lab.paths import CACHE, make_private, state
from lab.service import Service

PORT = 3143  # not Debian's 3142: a system-wide instance may hold that


def address(segment: Segment) -> str:
    return f"http://{segment.gateway}:{PORT}"


def start(segment: Segment) -> None:
    """Start the proxy. No Remap lines: names of mirrors come from the hosts' sources, so from this machine's apt."""
    directory = make_private(state() / "services" / "apt-proxy")
    cache = CACHE / f"apt-{segment.number}"
    cache.mkdir(parents=True, exist_ok=True)
    etc = directory / "etc"
    etc.mkdir(exist_ok=True)
    upstream = debian.upstream_proxy()
    (etc / "acng.conf").write_text(
        f"CacheDir: {cache}\n"
        f"LogDir: {directory}\n"
        f"SocketPath: {directory}/socket\n"
        "SupportDir: /usr/lib/apt-cacher-ng\n"
        f"Port: {PORT}\n"
        f"BindAddress: {segment.gateway}\n"
        "ForeGround: 1\n"
        # Package lists younger than this are not asked for again, in seconds.
        "FreshIndexMaxAge: 21600\n"
        "ExThreshold: 30\n" + (f"Proxy: {upstream}\n" if upstream else "")
    )
    Service("apt-proxy", ["apt-cacher-ng", "-c", str(etc)], segment.gateway, PORT).start()
