"""What this role reads from a node: the driver in the kernel, in user space and in packages, the cards, CDI, and what runs beside it.

Each part is read where it takes effect: the module's version and options from the driver itself (the parameter files in sysfs
read empty while options are active, gpu-node.md 2.3), the library's through nvidia-smi, the specification's from the files that
Docker reads. Parts that are missing are missing here; only an answer of another shape is "could not look".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuwright.snapshot import Section, register

CARD_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "memory.total",
    "compute_cap",
    "power.limit",
    "power.default_limit",
    "power.min_limit",
    "power.max_limit",
    "persistence_mode",
    "mig.mode.current",
    "mig.mode.pending",
    "ecc.mode.current",
)
UNITS = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-cdi-refresh", "nvidia-cdi-refresh.path")
STATE = "/var/lib/gpuwright/nvidia"
CARDS = f"{STATE}/cards"
"""The cards of the node as they were last complete, one "index uuid bus" a line: a card that is gone is told by it."""
CDI_KIND = "nvidia.com/gpu"

# One line per observation, "name base64", so that any content survives. nvidia-smi stalls at times, on one host in one of
# twelve calls for over two seconds (gpu-node.md 4.1), and it loads the module when it is missing: it is asked only if a module
# is there. What it prints on failure is kept: that sentence is the finding.
_SCRIPT = rf"""
put() {{ printf '%s ' "$1"; base64 -w0; echo; }}
cd /
for file in version params; do [ ! -r proc/driver/nvidia/$file ] || put module.$file <proc/driver/nvidia/$file; done
for file in sys/module/nvidia_uvm/parameters/uvm_disable_hmm; do [ ! -r $file ] || put uvm.hmm <$file; done
if command -v nvidia-smi >/dev/null; then
  echo yes | put smi.there
  if [ -e proc/driver/nvidia/version ]; then
    answer=$(timeout 12 nvidia-smi --query-gpu={",".join(CARD_FIELDS)} --format=csv,noheader,nounits 2>&1); status=$?
    printf '%s\n%s\n' "$status" "$answer" | put smi.cards
    nvidia-smi --version 2>/dev/null | put smi.version
  fi
fi
for device in sys/bus/pci/devices/*; do
  # No program per device: a server of eight cards has some hundred.
  read -r vendor 2>/dev/null <"$device/vendor" && [ "$vendor" = 0x10de ] || continue
  driver=$(readlink "$device/driver") || driver=-
  printf '%s %s %s\n' "${{device##*/}}" "$(cat "$device/class")" "${{driver##*/}}"
done | put pci
for path in proc/driver/nvidia-nvswitch/devices/*; do [ -e "$path" ] && echo "${{path##*/}}"; done | put switches
if command -v dpkg-query >/dev/null; then
  dpkg-query -W -f '${{db:Status-Want}} ${{db:Status-Status}} ${{Package}} ${{Version}}\n' '*nvidia*' '*cuda*' dkms 2>/dev/null |
    grep -v ' not-installed ' | put packages
fi
for kernel in lib/modules/*/; do
  name=${{kernel%/}} name=${{name##*/}}
  # A folder that a removed kernel left behind holds built modules and nothing else.
  [ -e "${{kernel}}modules.order" ] || [ -d "${{kernel}}kernel" ] || continue
  headers=no
  if [ -e "${{kernel}}build" ]; then
    headers=yes
  elif apt-cache show --no-all-versions "linux-headers-$(printf %s "$name" | tr 'A-Z_' 'a-z-')" >/dev/null 2>&1; then
    headers=offered
  fi
  version=$(modinfo -k "$name" -F version nvidia 2>/dev/null | head -n 1) signer=$(modinfo -k "$name" -F signer nvidia 2>/dev/null | head -n 1)
  printf '%s\t%s\t%s\t%s\n' "$name" "$headers" "$version" "$signer"
done | put kernels
uname -r | put running
if command -v mokutil >/dev/null; then
  mokutil --sb-state 2>&1 | put secure-boot
else
  # The firmware's own variable, after four bytes of attributes; not there without UEFI, and not in a container.
  for file in sys/firmware/efi/efivars/SecureBoot-8be4df61-*; do
    [ ! -r "$file" ] || od -An -tu1 -j4 -N1 "$file" | sed 's/ *1/SecureBoot enabled/; s/ *0/SecureBoot disabled/' | put secure-boot
  done
fi
# Enrolled is not yet trusted: what counts is the kernel's own rings (deepin kernel#2144, pop-os linux#447).
if command -v keyctl >/dev/null; then
  for ring in .builtin_trusted_keys .secondary_trusted_keys .machine; do keyctl list "%:$ring" 2>/dev/null; done | put keys
fi
for file in etc/cdi/*.yaml etc/cdi/*.yml etc/cdi/*.json run/cdi/*.yaml run/cdi/*.yml run/cdi/*.json; do
  [ ! -f "$file" ] || {{ printf '/%s\n' "$file"; head -c 1000000 "$file"; }} | put cdi
done
if [ -d run/systemd/system ]; then
  systemctl show {" ".join(unit if "." in unit else f"{unit}.service" for unit in UNITS)} \
    --property=Id,LoadState,UnitFileState,ActiveState,Result 2>/dev/null | put units
fi
! command -v nv-fabricmanager >/dev/null || nv-fabricmanager --version 2>&1 | put fabric.version
# Only NVIDIA's .run file brings it (packages leave it out).
! command -v nvidia-uninstall >/dev/null || command -v nvidia-uninstall | put runfile
! command -v nvidia-ctk >/dev/null || nvidia-ctk --version 2>&1 | put toolkit.version
[ ! -e .{CARDS} ] || put cards.known <.{CARDS}
for file in change/from change/to rejected downloaded; do
  [ ! -e .{STATE}/$file ] || put "state.${{file##*/}}" <.{STATE}/$file
done
exit 0
"""


@dataclass(frozen=True)
class Module:
    """The driver in the kernel."""

    version: str
    open: bool  # the open kernel modules: Blackwell has no others
    params: dict[str, str]  # as the driver prints them, without quotes
    hmm_disabled: bool | None  # of nvidia_uvm; None: not loaded


@dataclass(frozen=True)
class Card:
    """One GPU as nvidia-smi has it. Power in watts, memory in MiB; None where the card does not say ("[N/A]")."""

    index: int
    uuid: str
    bus: str
    name: str
    memory: int | None
    compute_capability: str
    power: float | None
    power_default: float | None
    power_min: float | None
    power_max: float | None
    persistence: bool | None
    mig: bool | None
    mig_pending: bool | None
    ecc: bool | None


@dataclass(frozen=True)
class Device:
    """A PCI function of NVIDIA's and the driver bound to it."""

    address: str
    pci_class: str
    driver: str | None

    @property
    def gpu(self) -> bool:
        """A VGA or 3D controller."""
        return self.pci_class[:6] in ("0x0300", "0x0302")

    @property
    def switch(self) -> bool:
        """An NVSwitch (bridge, other): the only reason for a fabric manager (gpu-node.md 4.1)."""
        return self.pci_class[:6] == "0x0680"


@dataclass(frozen=True)
class Package:
    """An installed (or half installed) package."""

    name: str
    version: str
    held: bool
    status: str  # dpkg's: installed, half-configured, config-files, …

    @property
    def driver(self) -> str:
        """The driver release in its version: 580.95.05 of 580.95.05-1 and of 580.95.05-0ubuntu0.24.04.1; "" for others."""
        match = re.match(r"(\d{3,}\.\d+(?:\.\d+)?)-", self.version)
        return match[1] if match else ""


@dataclass(frozen=True)
class Kernel:
    """An installed kernel and the module that is there for it."""

    release: str
    headers: bool
    module: str  # version of nvidia.ko, "" for none
    signer: str
    offered: bool = False  # its headers are not installed, and apt has them


@dataclass(frozen=True)
class Specification:
    """A CDI file with NVIDIA's GPUs in it."""

    path: str
    devices: tuple[str, ...]
    driver: str  # the release whose libraries it hands in, "" if it names none

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if name.startswith("GPU-"))


@dataclass(frozen=True)
class Unit:
    """A systemd unit; ``loaded`` False: there is none."""

    loaded: bool
    enabled: bool
    active: str
    result: str


@dataclass(frozen=True)
class Exchange:
    """What a change of the driver left on the node: see the script driver-change."""

    before: str = ""  # the release that a change under way began with, "" for none under way
    wanted: str = ""  # and the one it leads to
    rejected: tuple[str, ...] = ()  # releases that did not verify here, each with its reason: "595.58.03 2026-… why"
    downloaded: str = ""  # the release whose packages lie ready


@dataclass(frozen=True)
class Nvidia:
    """The whole of it on one node."""

    module: Module | None
    smi: bool  # the program is installed
    cards: tuple[Card, ...]
    smi_failed: str | None  # its sentence when it could not list the cards
    library: str  # "580.95" of NVML, as nvidia-smi has it; "" unknown
    devices: tuple[Device, ...]
    nvswitches: int
    packages: dict[str, Package]
    kernels: tuple[Kernel, ...]
    running_kernel: str
    secure_boot: bool | None  # None: cannot tell
    specifications: tuple[Specification, ...]
    units: dict[str, Unit] | None  # None: no systemd runs here
    fabric_manager: str  # version of the program, "" if it is not installed
    toolkit: str  # version of nvidia-ctk, "" if it is not installed
    known: tuple[tuple[int, str, str], ...] = ()  # index, UUID and bus of the cards when they were last complete
    exchange: Exchange = Exchange()
    runfile: str = ""  # the program that takes such a driver away, "" where it came in packages
    trusted: str | None = None  # the keys that the kernel takes modules of, as keyctl lists them; None: cannot tell


def parse(text: str) -> Nvidia:
    """What the script prints, typed. Raises ValueError for an answer of another shape."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, encoded = line.partition(" ")
        said.setdefault(name, []).append(base64.b64decode(encoded, validate=True).decode(errors="replace"))

    def one(name: str) -> str:
        return said.get(name, [""])[0]

    status, _, answer = one("smi.cards").partition("\n")
    failed = status not in ("", "0")
    devices = tuple(Device(at, kind, None if by == "-" else by) for at, kind, by in _rows(one("pci"), 3))
    switches = set(one("switches").split()) | {device.address for device in devices if device.switch}
    specifications = [_specification(content) for content in said.get("cdi", [])]
    return Nvidia(
        module=_module(one("module.version"), one("module.params"), one("uvm.hmm"))
        if "module.version" in said
        else None,
        smi="smi.there" in said,
        cards=() if failed else tuple(_card(line) for line in answer.splitlines() if line.strip()),
        smi_failed=_first_sentence(answer, status) if failed else None,
        library=_found(r"NVML version\s*:\s*([\d.]+)", one("smi.version"))
        or _found(r"library version: ([\d.]+)", answer),
        devices=devices,
        nvswitches=len(switches),
        packages={
            name: Package(name, version, want == "hold", state)
            for want, state, name, version in _rows(one("packages"), 4)
        },
        kernels=tuple(_kernel(line) for line in one("kernels").splitlines() if line),
        running_kernel=one("running").strip(),
        secure_boot={"enabled": True, "disabled": False}.get(_found(r"SecureBoot (\w+)", one("secure-boot"))),
        runfile=one("runfile").strip(),
        trusted=one("keys") if "keys" in said else None,
        specifications=tuple(found for found in specifications if found is not None),
        units=_units(one("units")) if "units" in said else None,
        fabric_manager=_found(r"(\d{3,}\.[\d.]*\d)", one("fabric.version")),
        toolkit=_found(r"version v?(\d+\.\d+\.\d+)", one("toolkit.version")),
        known=tuple((int(index), uuid, bus) for index, uuid, bus in _rows(one("cards.known"), 3)),
        exchange=Exchange(
            before=one("state.from").strip(),
            wanted=one("state.to").strip(),
            rejected=tuple(one("state.rejected").splitlines()),
            downloaded=one("state.downloaded").strip(),
        ),
    )


def _rows(text: str, width: int) -> Sequence[list[str]]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if any(len(row) != width for row in rows):
        raise ValueError(f"rows of {width} fields were expected")
    return rows


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _first_sentence(answer: str, status: str) -> str:
    if status in ("124", "137"):
        return "nvidia-smi did not answer within 12 s"
    return next(
        (line.strip() for line in answer.splitlines() if line.strip()), f"nvidia-smi ended with status {status}"
    )


def _module(version: str, params: str, hmm: str) -> Module:
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (…)", and
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Fri …" for the proprietary one
    match = re.search(r"NVRM version: .*?Kernel Module(?: for \S+)?\s+(\d[\d.]*)", version)
    if match is None:
        raise ValueError(f"/proc/driver/nvidia/version says {version.splitlines()[:1]}")
    pairs = (line.partition(": ") for line in params.splitlines() if ": " in line)
    return Module(
        version=match[1],
        open="Open Kernel Module" in version,
        params={name: value.strip().strip('"') for name, _, value in pairs},
        hmm_disabled={"Y": True, "1": True, "N": False, "0": False}.get(hmm.strip()),
    )


def _card(line: str) -> Card:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(CARD_FIELDS) or not fields[0].isdecimal():
        raise ValueError(f"nvidia-smi lists a GPU as {line!r}")
    seen = dict(zip(CARD_FIELDS, fields, strict=True))

    def number(name: str) -> float | None:
        return float(seen[name]) if re.fullmatch(r"\d+(\.\d+)?", seen[name]) else None

    def switch(name: str) -> bool | None:
        return {"Enabled": True, "Disabled": False}.get(seen[name])

    memory = number("memory.total")
    return Card(
        index=int(seen["index"]),
        uuid=seen["uuid"],
        bus=seen["pci.bus_id"],
        name=seen["name"],
        memory=None if memory is None else int(memory),
        compute_capability=seen["compute_cap"],
        power=number("power.limit"),
        power_default=number("power.default_limit"),
        power_min=number("power.min_limit"),
        power_max=number("power.max_limit"),
        persistence=switch("persistence_mode"),
        mig=switch("mig.mode.current"),
        mig_pending=switch("mig.mode.pending"),
        ecc=switch("ecc.mode.current"),
    )


def _kernel(line: str) -> Kernel:
    release, headers, version, signer = line.split("\t")
    return Kernel(release, headers == "yes", version, signer, headers == "offered")


def _specification(text: str) -> Specification | None:
    """A CDI file by what Docker would take from it, in YAML or JSON; None for other vendors' devices.

    Read by pattern, not by a parser: a file that is cut short or written by hand still shows which driver it hands in.
    """
    path, _, content = text.partition("\n")
    if _found(r"""["']?kind["']?\s*:\s*["']?([\w./-]+)""", content) != CDI_KIND:
        return None
    # The devices' names only: hooks and mounts below them have paths and arguments.
    names = re.findall(r"""(?m)^\s*(?:-\s+|\{?\s*)["']?name["']?\s*:\s*["']?([\w.:-]+)""", content)
    return Specification(path, tuple(dict.fromkeys(names)), _found(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)\b", content))


def _units(text: str) -> dict[str, Unit]:
    found = {}
    for block in text.strip().split("\n\n"):
        seen = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if seen:
            found[seen["Id"].removesuffix(".service")] = Unit(
                loaded=seen["LoadState"] == "loaded",
                enabled=seen.get("UnitFileState", "").startswith("enabled"),
                active=seen["ActiveState"],
                result=seen.get("Result", ""),
            )
    return found


NVIDIA = register(Section("nvidia", _SCRIPT, parse))
