"""What the GPU half reads from a node: the toolkit's packages, the CDI specifications, what the driver has, reloads of systemd.

Cheap enough for every run: the cards come from the driver's own files, nvidia-smi is not asked.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from gpuwright.snapshot import Section, register

PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
KIND = "nvidia.com/gpu"
SPECIFICATION = "/run/cdi/nvidia.yaml"
"""Where the toolkit's refresh unit keeps it (as /var/run/cdi/nvidia.yaml, which is the same file)."""
SERVICE = "nvidia-cdi-refresh.service"
PATH = "nvidia-cdi-refresh.path"

# Of a specification only what is judged leaves the node: kind, device names, and which driver's libraries it hands in. They are
# found by pattern, in YAML and in JSON, so that a file that is cut short or written by hand still shows them.
_SCRIPT = rf"""
put() {{ printf '%s ' "$1"; base64 -w0; echo; }}
cd /
[ ! -r proc/driver/nvidia/version ] || put module <proc/driver/nvidia/version
sed -n 's/^GPU UUID:[[:space:]]*//p' proc/driver/nvidia/gpus/*/information 2>/dev/null | put cards
dpkg-query -W -f '${{db:Status-Want}} ${{db:Status-Status}} ${{Package}} ${{Version}}\n' {" ".join(PACKAGES)} 2>/dev/null | put packages
! command -v nvidia-ctk >/dev/null || nvidia-ctk --version 2>&1 | put toolkit
for file in etc/cdi/*.yaml etc/cdi/*.yml etc/cdi/*.json run/cdi/*.yaml run/cdi/*.yml run/cdi/*.json; do
  [ -f "$file" ] || continue
  {{
    printf '/%s\n' "$file"
    grep -oE '(^|[^A-Za-z])"?kind"?[[:space:]]*:[[:space:]]*["'\'']?[A-Za-z0-9./_-]+' "$file" | sed 's/^/K /' | head -n 1
    grep -oE '(^|[^A-Za-z])"?name"?[[:space:]]*:[[:space:]]*["'\'']?[A-Za-z0-9:._-]+' "$file" | sed 's/^/N /'
    grep -oE '\.so\.[0-9]{{3,}}\.[0-9]+(\.[0-9]+)?' "$file" | sort -u | sed 's/^/L /'
  }} | put cdi
done
if [ -d run/systemd/system ]; then
  systemctl show {SERVICE} {PATH} --property=Id,LoadState,UnitFileState,ActiveState,Result | put units
  systemctl show --property=UnitsLoadTimestampMonotonic --value | put reloaded
fi
exit 0
"""


@dataclass(frozen=True)
class Package:
    """One of the toolkit's packages."""

    version: str
    held: bool
    installed: bool  # False: half installed, or its settings only


@dataclass(frozen=True)
class Specification:
    """A CDI file with NVIDIA's GPUs in it."""

    path: str
    devices: tuple[str, ...]
    drivers: tuple[str, ...]  # the releases whose libraries it hands in

    @property
    def uuids(self) -> tuple[str, ...]:
        """Its devices that are cards by their UUID."""
        return tuple(name for name in self.devices if name.startswith("GPU-"))


@dataclass(frozen=True)
class Unit:
    """One of the refresh units; ``loaded`` False: there is none."""

    loaded: bool
    enabled: bool
    active: str
    result: str


@dataclass(frozen=True)
class GpuContainers:
    """The whole of it on one node. A blank host has nothing of it."""

    module: str  # version of the loaded driver, "" for none
    cards: tuple[str, ...]  # UUIDs that the driver knows; empty where it does not say
    packages: dict[str, Package]
    toolkit: str  # what nvidia-ctk says of itself, "" where there is none
    specifications: tuple[Specification, ...]
    units: dict[str, Unit]
    reloaded: str  # when systemd last read its units, on its own clock; "" unknown (systemd before 250)


def parse(text: str) -> GpuContainers:
    """What the script prints, typed. Raises ValueError for an answer of another shape."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, encoded = line.partition(" ")
        said.setdefault(name, []).append(base64.b64decode(encoded, validate=True).decode(errors="replace"))

    def one(name: str) -> str:
        return said.get(name, [""])[0]

    packages = {}
    for line in one("packages").splitlines():
        want, status, name, version = line.split()
        if status not in ("not-installed", "config-files"):
            packages[name] = Package(version, want == "hold", status == "installed")
    # A card that was never opened has no UUID yet: "GPU-????????-????-????-????-????????????".
    cards = tuple(uuid for uuid in one("cards").split() if re.fullmatch(r"GPU-[0-9A-Fa-f-]+", uuid))
    found = [_specification(content) for content in said.get("cdi", [])]
    return GpuContainers(
        module=_found(r"NVRM version: .*?Kernel Module(?: for \S+)?\s+(\d[\d.]*)", one("module")),
        cards=cards,
        packages=packages,
        toolkit=_found(r"version v?(\d+\.\d+\.\d+)", one("toolkit")),
        specifications=tuple(specification for specification in found if specification),
        units=_units(one("units")),
        reloaded=one("reloaded").strip(),
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _specification(text: str) -> Specification | None:
    path, *lines = text.splitlines()
    values: dict[str, list[str]] = {"K": [], "N": [], "L": []}
    for line in lines:
        tag, _, rest = line.partition(" ")
        values[tag].append(rest)
    kinds = [re.split(r":\s*[\"']?", value, maxsplit=1)[1] for value in values["K"]]
    if kinds != [KIND]:
        return None
    names = dict.fromkeys(re.split(r":\s*[\"']?", value, maxsplit=1)[1] for value in values["N"])
    return Specification(path, tuple(names), tuple(value.removeprefix(".so.") for value in values["L"]))


def _units(text: str) -> dict[str, Unit]:
    found = {}
    for block in text.strip().split("\n\n"):
        seen = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if seen:
            found[seen["Id"]] = Unit(
                seen["LoadState"] == "loaded",
                seen.get("UnitFileState", "").startswith("enabled"),
                seen["ActiveState"],
                seen.get("Result", ""),
            )
    return found


GPUS = register(Section("containers-gpus", _SCRIPT, parse))
