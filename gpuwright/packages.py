"""Distribution packages, as a set.

pyinfra's apt.packages reads the package list once per call, and with `cache_time` reports a change on every day that
has no change; here the list comes from the snapshot and apt is asked only when something is missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Sequence

from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot

# needrestart must never restart Docker or an engine on its own, nor ask (security.md 5, item 13).
APT = (
    "DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l NEEDRESTART_SUSPEND=1 apt-get -y -o DPkg::Lock::Timeout=300 "
    "-o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold -o APT::Install-Recommends=false"
)


@operation()
def installed(packages: Sequence[str], refresh: bool = False) -> Generator[StringCommand, None, None]:
    """Install what is missing of `packages`, without recommended extras and without touching what is there.

    + packages: names, or ``name=version``; one call per role
    + refresh: the package lists are renewed even if nothing is missing (a new source was just added)
    """
    host = ctx_host.get()
    try:
        present = snapshot.read(host).read(snapshot.PACKAGES)
    except snapshot.CouldNotLook:
        present = {}
    missing = []
    for package in packages:
        name, _, version = package.partition("=")
        if name not in present or (version and present[name] != version):
            missing.append(package)
    if not missing and not refresh:
        host.noop(f"{len(packages)} packages are installed")
        return
    snapshot.forget(host)
    install = (
        f" && {APT} --allow-change-held-packages --allow-downgrades install {shlex.join(missing)}" if missing else ""
    )
    yield StringCommand("sh", "-c", shlex.quote(f"{APT} -q update{install}"))
