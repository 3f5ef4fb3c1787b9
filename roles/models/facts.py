"""What the weights of a node look like: complete, damaged, on their way, and what their jobs last said."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gpuwright.snapshot import Section, register

USER = "gpuwright-models"


@dataclass(frozen=True)
class Stored:
    """One model as it is on the node."""

    name: str
    repo: str
    commit: str
    manifest: bool
    """Written last, so all files were verified once."""
    files: int
    bytes: int
    suspect: tuple[str, ...]
    """Files whose size or time stamp is not the manifest's any more, with what differs."""
    state: str
    """starting, waiting, fetching, verified, stopped or failed; "" when no job has run since the boot."""
    sentence: str
    """The last thing its job said."""
    settings: str
    """sha256 of the settings that job ran with."""
    active: str
    sub: str
    """ActiveState and SubState of its unit."""

    def complete(self, settings: str) -> bool:
        """Nothing to do: verified, unchanged since, by a job with these settings."""
        return (
            self.manifest
            and not self.suspect
            and (self.active, self.sub) == ("active", "exited")
            and (self.state, self.settings) == ("verified", settings)
        )

    def on_the_way(self, settings: str) -> bool:
        """A job with these settings works on it right now."""
        return self.active == "activating" and self.sub != "auto-restart" and self.settings == settings


@dataclass(frozen=True)
class Models:
    """All models of a node, and the stores they lie in."""

    user: bool
    """The system user of the jobs exists."""
    stores: dict[str, str]
    """Path to "mode owner"."""
    by_name: dict[str, Stored]


def _parse(text: str) -> Models:
    user, stores, checked, units = False, {}, {}, {}
    for line in text.splitlines():
        tag, _, rest = line.partition(" ")
        if tag == "user":
            user = True
        elif tag == "store":
            mode, owner, path = rest.split(" ", 2)
            stores[path] = f"{mode} {owner}"
        elif tag == "unit":
            name, active, sub = rest.split(" ")
            units[name] = (active, sub)
        elif tag == "model":
            found = json.loads(rest)
            checked[found["name"]] = found
    by_name = {}
    for name, found in checked.items():
        status = found["status"] or {}
        by_name[name] = Stored(
            name=name,
            repo=found["repo"],
            commit=found["commit"],
            manifest=found["manifest"],
            files=found["files"],
            bytes=found["bytes"],
            suspect=tuple(found["suspect"]),
            state=status.get("state", ""),
            sentence=status.get("sentence", ""),
            settings=status.get("settings", ""),
            active=units.get(name, ("inactive", "dead"))[0],
            sub=units.get(name, ("inactive", "dead"))[1],
        )
    return Models(user, stores, by_name)


# Sizes and time stamps only: every byte is read by gpuwright-model-verify@NAME.service.
MODELS = register(
    Section(
        "models",
        rf"""
! id -u {USER} >/dev/null 2>&1 || echo user
for settings in /etc/gpuwright/models/*.conf; do
  [ -e "$settings" ] || exit 0
  name=${{settings##*/}} name=${{name%.conf}}
  printf 'model '
  /usr/local/lib/gpuwright/model-fetch --check "$settings" || exit 1
  stat -c 'store %a %U %n' -- "$(sed -n 's/^store=//p' "$settings")" 2>/dev/null
  printf 'unit %s %s\n' "$name" "$(systemctl show --value --property=ActiveState,SubState "gpuwright-model-$name.service" |
    tr -s '\n' ' ' | sed 's/ $//')"
done
exit 0
""",
        _parse,
    )
)
