"""What this role can change where pyinfra has no operation."""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_host

from gpuwright import snapshot
from roles.base.facts import RUNNING

_REREAD = r"""
systemctl daemon-reload || exit 1
now=$(systemctl show --property=DefaultLimitCORE --value)
[ "$now" = 0 ] || {
  echo "gpuwright: systemd still starts units with LimitCORE=$now; a file read after zz-gpuwright.conf says so:" >&2
  grep -rl '^ *DefaultLimitCORE' /etc/systemd/system.conf.d /run/systemd/system.conf.d /usr/lib/systemd/system.conf.d 2>/dev/null | sed 's/^/gpuwright:   /' >&2
  exit 1
}
"""


@operation()
def core_limit() -> Generator[StringCommand, None, None]:
    """Have systemd read the limit that its drop-in gives to units without one; what runs keeps its own until its next start."""
    host = ctx_host.get()
    try:
        now = snapshot.read(host).read(RUNNING).core_limit
    except snapshot.CouldNotLook:
        now = ""
    if now == "0":
        host.noop("systemd starts units without leave to dump core")
        return
    snapshot.forget(host)
    yield StringCommand("sh", "-c", shlex.quote(_REREAD))
