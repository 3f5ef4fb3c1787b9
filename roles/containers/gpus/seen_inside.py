"""Which GPUs a running container was given, and which it sees: asked inside it, because nothing outside shows the loss.

A container of --gpus loses its GPUs when systemd reads its units again, and goes on running without them
(nvidia-container-toolkit#48). nvidia-smi comes into every container with the GPUs themselves.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from gpuwright.snapshot import Section

LIMIT = 60
"""Seconds for one container: starting nvidia-smi in it, and eight cards that answer one after the other."""

# sh has no pipefail: what a command says is kept first, so that its failure is a failure of the whole. One line per container,
# asked side by side: with a driver that hangs, each takes the whole limit. A line is short enough to be written at once (PIPE_BUF).
SCRIPT = r"""
set -f
command -v docker >/dev/null || exit 0
ids=$(docker container ls --quiet --no-trunc) || exit 1
[ -n "$ids" ] || exit 0
found=$(docker container inspect $ids) || exit 1
printf '%s' "$found" | jq -c '.[] | select(.HostConfig.DeviceRequests // [] | length > 0) | {
    id: .Id, name: (.Name | ltrimstr("/")), engine: (.Config.Labels["gpuwright.engine"] // ""),
    requests: [.HostConfig.DeviceRequests[] | {driver: .Driver, ids: (.DeviceIDs // [])}]}' |
  xargs -r -d '\n' -n 1 -P 16 sh -c '
    id=$(printf "%s" "$1" | jq -r .id)
    answer=$(timeout @LIMIT@ docker exec "$id" nvidia-smi -L 2>&1); status=$?
    printf "%s" "$1" | jq -c --arg answer "$answer" --argjson status "$status" \
      "del(.id) + {status: \$status, answer: \$answer[0:2000]}"' sh
""".replace("@LIMIT@", str(LIMIT))


@dataclass(frozen=True)
class Container:
    """One running container that was given GPUs."""

    name: str
    engine: str  # of gpuwright's, "" for somebody else's
    status: int  # of nvidia-smi in it
    answer: str
    requests: tuple[dict[str, Any], ...]

    @property
    def by_flag(self) -> bool:
        """Whether it was given some by --gpus (or another driver than CDI)."""
        return any(request["driver"] != "cdi" for request in self.requests)

    @property
    def given(self) -> tuple[str, ...]:
        """The UUIDs it was given through CDI."""
        ids = [entry for request in self.requests for entry in request["ids"]]
        return tuple(
            match[1] for entry in ids if (match := re.fullmatch(r"nvidia\.com/gpu=(GPU-[0-9A-Fa-f-]+)", entry))
        )

    @property
    def seen(self) -> tuple[str, ...]:
        """The UUIDs that nvidia-smi lists in it."""
        return tuple(re.findall(r"UUID: (GPU-[0-9A-Fa-f-]+)\)", self.answer))

    @property
    def fault(self) -> str:
        """What is wrong, with what to do; "" when it sees what it was given, or has no nvidia-smi to ask."""
        again = f"restart it (systemctl restart gpuwright-engine-{self.engine})" if self.engine else "start it again"
        if self.status in (126, 127):
            return ""
        if self.status in (124, 137):
            return f"nvidia-smi does not answer in it within {LIMIT} s; look at journalctl -k | grep -i xid"
        if self.status:
            words = self.answer.splitlines()[0] if self.answer.strip() else f"status {self.status}"
            remedy = (
                again
                if not self.by_flag
                else f"{again} with CDI devices (--device nvidia.com/gpu=UUID) instead of --gpus"
            )
            return f"its GPUs are gone ({words}); {remedy}"
        missing = [uuid for uuid in self.given if uuid not in self.seen]
        return f"it does not see {', '.join(missing)}; {again}" if missing else ""


def parse(text: str) -> list[Container]:
    """In the order of their names. Raises ValueError for lines of another shape."""
    found = [
        Container(one["name"], one["engine"], one["status"], one["answer"], tuple(one["requests"]))
        for one in map(json.loads, text.splitlines())
    ]
    return sorted(found, key=lambda container: container.name)


INSIDE = Section("audit-gpus-inside", SCRIPT, parse)
