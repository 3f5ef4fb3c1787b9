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
from gpuwright.watched import Watched

# Nothing asks, because nobody is there to answer; needrestart must never restart Docker or an engine on its own
# (security.md 5, item 13). Whoever takes the lock after `FREE` saw it free is waited for a minute more.
APT = (
    "DEBIAN_FRONTEND=noninteractive APT_LISTCHANGES_FRONTEND=none NEEDRESTART_MODE=l NEEDRESTART_SUSPEND=1 apt-get -y "
    "-o DPkg::Lock::Timeout=60 -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "
    "-o APT::Install-Recommends=false"
)

# What a power cut left of dpkg's work. apt does not end it: it refuses ("dpkg was interrupted"), fails on the package that
# dpkg wants laid down again, or leaves that one as it is and returns 0 (apt 3.0, Debian 13). What dpkg cannot configure,
# the command after this names. The script driver-change has the same for itself.
FINISH = rf"""
DEBIAN_FRONTEND=noninteractive dpkg --force-confdef --force-confold --configure -a </dev/null
broken=$(dpkg-query -W -f '${{db:Status-Eflag}} ${{binary:Package}}\n' | sed -n 's/^reinstreq //p')
[ -z "$broken" ] || {APT} --allow-change-held-packages --allow-downgrades --reinstall install $broken
"""

# apt waits for a lock in silence, and `apt-get update` not at all. Whoever has a lock has its file open. A boot's own
# apt-daily takes it minutes after the machine came up, just when a new machine is provisioned.
FREE = r"""
limit=$1 every=$2 waited=0
while :; do
  holder=
  for open in $(find /proc/[0-9]*/fd -maxdepth 1 \( -lname /var/lib/dpkg/lock-frontend -o -lname /var/lib/dpkg/lock \
    -o -lname /var/lib/apt/lists/lock -o -lname /var/cache/apt/archives/lock \) 2>/dev/null); do
    # A container's file of that name is another file.
    [ "$open" -ef "$(readlink "$open")" ] || continue
    holder=${open#/proc/} holder=${holder%%/*}
    break
  done
  [ -n "$holder" ] || exit 0
  who="process $holder ($(tr '\0' ' ' <"/proc/$holder/cmdline" 2>/dev/null | cut -c 1-120))"
  if [ "$waited" -ge "$limit" ]; then
    echo "gpuwright: $who on $(uname -n) has had apt locked for $waited s; wait until it is done, or end it, and run this again" >&2
    exit 1
  fi
  echo "apt is locked by $who; waiting, up to $limit s, $waited s so far"
  sleep "$every"
  waited=$((waited + every))
done
"""


@operation()
def installed(packages: Sequence[str], refresh: bool = False) -> Generator[StringCommand, None, None]:
    """Install what is missing of `packages`, without recommended extras and without touching what is there.

    + packages: names, or ``name=version``; one call per role
    + refresh: the package lists are renewed even if nothing is missing (a new source was just added)

    What dpkg left unfinished because the power went is finished first.
    Another process that has apt locked is named, and waited for up to ten minutes with a line every 15 seconds.
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
    lists = f"{APT} -q update"
    install = f"{APT} --allow-change-held-packages --allow-downgrades install {shlex.join(missing)}"
    yield Watched("sh", "-c", shlex.quote(FREE), "sh", "600", "15")
    yield StringCommand("sh", "-c", shlex.quote(f"{lists} && {{ {FINISH}}} && {install}" if missing else lists))
