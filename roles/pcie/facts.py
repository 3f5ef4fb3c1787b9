"""What this role reads from a node: every PCI function with its way to the root, the IOMMU's state, and ACS control words.

All of it from sysfs; ACS alone is in no file there and comes from setpci. The kernel's log is not asked: it says
"Translated" with the IOMMU off (gpu-node.md 0.5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpuwright.render import static
from gpuwright.snapshot import Section, register
from roles.pcie.spec import IommuMode

if TYPE_CHECKING:  # the node's description is composed of the roles' own parts, so it imports this package
    from gpuwright.spec.node import Accelerators, Hardware

# Request redirect, completion redirect, egress control: what `pci=disable_acs_redir` clears (gpu-node.md 2.2).
REDIRECT = 0x2C

_BRIDGE = "0604"

# One line per observation; "END" says that the script came to its end. A fork per attribute and function would take
# seconds on a server with hundreds of functions: find, grep and awk read one kind each.
_SCRIPT = r"""
sys=@SYS@
[ -d "$sys/bus" ] || exit 1
echo "U $(id -u)"
units=0 groups=0
for unit in "$sys"/class/iommu/*; do
  if [ -e "$unit" ]; then echo "I ${unit##*/}"; units=$((units + 1)); fi
done
for group in "$sys"/kernel/iommu_groups/*; do
  [ -d "$group" ] || continue
  type=
  if [ -r "$group/type" ]; then read -r type <"$group/type" || true; fi
  echo "T ${group##*/} ${type:-unknown}"
  groups=$((groups + 1))
done
# None of both is an answer of its own: the IOMMU is off.
echo "N $units $groups"
# Whoever holds a device of VFIO has it open, whatever the program is called.
if [ -e "$sys/class/misc/vfio" ] || [ -d "$sys/class/vfio" ] || [ -d "$sys/class/vfio-dev" ]; then
  find @PROC@/[0-9]*/fd -lname '/dev/vfio/*' -printf '%h\n' 2>/dev/null | sort -u | while IFS= read -r fd; do
    read -r name <"${fd%/fd}/comm" && echo "H $name"
  done
fi
if ! cd "$sys/bus/pci/devices" 2>/dev/null; then echo END; exit 0; fi
find . -maxdepth 1 -type l -printf 'P %f %l\n'
find ./*/driver ./*/iommu_group ./*/physfn -maxdepth 0 -printf 'L %h %f %l\n' 2>/dev/null
grep -sH . ./*/class ./*/vendor ./*/device ./*/numa_node ./*/current_link_width ./*/max_link_width \
  ./*/current_link_speed ./*/max_link_speed | sed 's|^[.]/|A |'
# The six regions of the function itself; further lines are its ROM, those of virtual functions and of bridge windows.
awk 'FNR <= 6 && $2 != "0x0000000000000000" {split(FILENAME, path, "/"); print "R", path[2], FNR - 1, $1, $2, $3}' \
  ./*/resource
for bridge in *; do
  if ! read -r class <"$bridge/class"; then continue; fi
  case $class in 0x0604*) echo "C $bridge $(acs_word "$bridge")" ;; esac
done
echo END
"""


def script(root: str = "") -> str:
    """POSIX sh that prints what `parse` reads; `root` is empty on a node, and a directory in tests."""
    text = _SCRIPT.replace("@SYS@", f"{root}/sys").replace("@PROC@", f"{root}/proc")
    return static("pcie/usr/local/lib/gpuwright/acs-word").decode() + text


# Why a control word could not be read, by what the script says.
_UNREAD = {
    "tool": "setpci is not installed (package pciutils)",
    "denied": "only root may read its configuration space",
    "unreachable": "the kernel has no access to its extended configuration space",
    "silent": "it does not answer; it may be powered down",
}


@dataclass(frozen=True)
class Acs:
    """The ACS control word of one bridge; without a word, either there is no such capability or nobody could look."""

    word: int | None = None
    unread: str | None = None
    """Why it could not be looked at; None where it was."""

    @property
    def redirects(self) -> bool | None:
        """Whether peers below the bridge are sent up to the root. None: could not look."""
        if self.unread:
            return None
        return bool((self.word or 0) & REDIRECT)

    def __str__(self) -> str:
        if self.unread:
            return f"could not look: {self.unread}"
        return "no ACS" if self.word is None else f"0x{self.word:04x}"


@dataclass(frozen=True)
class Function:
    """One PCI function. None is what sysfs does not say."""

    address: str
    """``0000:41:00.0``."""
    upstream: tuple[str, ...]
    """The functions above it, from the root port down; none where it sits on a root bus."""
    kind: str
    """Base class and subclass, ``0604``."""
    vendor: str
    device: str
    numa_node: int | None
    driver: str | None
    group: int | None
    """Its IOMMU group."""
    virtual: bool
    """A virtual function of another one (SR-IOV)."""
    width: int | None
    """Lanes of its link now."""
    max_width: int | None
    speed: str | None
    """Of its link now. At rest it is the slowest there is, so it says nothing (gpu-node.md 2.3)."""
    max_speed: str | None
    regions: dict[int, int] = field(default_factory=dict)
    """Memory regions (BARs) by number, in bytes."""

    @property
    def aperture(self) -> int:
        """The largest memory region in bytes: what nvidia-smi calls BAR1. 256 MiB is Resizable BAR off."""
        return max(self.regions.values(), default=0)


@dataclass(frozen=True)
class Iommu:
    """What the IOMMU does with some functions, and how that is known."""

    mode: IommuMode | Literal["mixed", "unknown"]
    evidence: str


@dataclass(frozen=True)
class Topology:
    """Every PCI function of a node, and what stands between them."""

    functions: dict[str, Function]
    units: tuple[str, ...]
    """The IOMMUs that are on."""
    groups: dict[int, str]
    """IOMMU group to the type of its default domain: identity, DMA, DMA-FQ, …"""
    acs: dict[str, Acs]
    """Of every bridge from PCI to PCI, by its address."""
    vfio_holders: tuple[str, ...] | None
    """Programs that have a device of VFIO open. None: only root can tell."""

    def accelerators(self, told_by: Accelerators) -> tuple[Function, ...]:
        """The accelerators in the order of their addresses. Virtual functions are parts of one, and not counted."""
        return tuple(
            function
            for function in sorted(self.functions.values(), key=lambda f: f.address)
            if function.vendor == told_by.vendor and function.kind in told_by.classes and not function.virtual
        )

    def paths(self, accelerators: tuple[Function, ...]) -> tuple[str, ...]:
        """Every bridge between one of these functions and its root, each once."""
        above = {address for function in accelerators for address in function.upstream}
        return tuple(address for address in sorted(above) if address in self.acs)

    def iommu(self, accelerators: tuple[Function, ...]) -> Iommu:
        """What the IOMMU does with these functions, from their groups; without any, it is unknown."""
        if not self.units and not self.groups:
            return Iommu("off", "no IOMMU in /sys/class/iommu and no group in /sys/kernel/iommu_groups")
        if not accelerators:
            return Iommu("unknown", "there is no accelerator to judge by")
        said: dict[str, list[str]] = {}
        for function in accelerators:
            kind = "no group" if function.group is None else self.groups.get(function.group, "unknown")
            said.setdefault(kind, []).append(function.address)
        evidence = "; ".join(f"{kind}: {', '.join(addresses)}" for kind, addresses in said.items())
        if said.keys() == {"identity"}:
            return Iommu("pt", evidence)
        if said.keys() <= {"DMA", "DMA-FQ"}:
            return Iommu("translated", evidence)
        return Iommu("unknown" if "unknown" in said else "mixed", evidence)

    @property
    def vfio_guests(self) -> tuple[str, ...]:
        """What says that this host gives devices to guests; empty where nothing does."""
        bound = [f"{f.address} is bound to {f.driver}" for f in self.functions.values() if "vfio" in (f.driver or "")]
        return (*sorted(bound), *(f"{name} holds a device of VFIO" for name in self.vfio_holders or ()))


def expected(hardware: Hardware) -> int:
    """How many accelerators the node file says there are."""
    return hardware.gpus.count if hardware.accelerators.count is None else hardware.accelerators.count


_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT_BUS = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MEMORY = 0x200  # IORESOURCE_MEM


def parse(text: str) -> Topology:
    """What the script prints, typed. Raises ValueError for an answer that is not whole or of another shape."""
    lines = text.splitlines()
    if not lines or lines.pop() != "END":
        raise ValueError("the answer is cut off")
    root = False
    paths: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, dict[str, str]] = {}
    links: dict[str, dict[str, str]] = {}
    regions: dict[str, dict[int, int]] = {}
    groups: dict[int, str] = {}
    acs: dict[str, Acs] = {}
    units, holders = [], []
    counted = ""
    for line in lines:
        tag, _, rest = line.partition(" ")
        if tag == "U":
            root = rest == "0"
        elif tag == "I":
            units.append(rest)
        elif tag == "H":
            holders.append(rest)
        elif tag == "N":
            counted = rest
        elif tag == "T":
            group, _, kind = rest.partition(" ")
            groups[int(group)] = kind
        elif tag == "P":
            address, _, target = rest.partition(" ")
            paths[address] = _above(address, target)
        elif tag == "L":
            address, name, target = rest.removeprefix("./").split(" ", 2)
            links.setdefault(address, {})[name] = target.rpartition("/")[2]
        elif tag == "A":
            address, _, said = rest.partition("/")
            name, _, value = said.partition(":")
            attributes.setdefault(address, {})[name] = value
        elif tag == "R":
            address, number, start, end, flags = rest.split()
            if int(flags, 16) & _MEMORY:
                regions.setdefault(address, {})[int(number)] = int(end, 16) - int(start, 16) + 1
        elif tag == "C":
            address, _, said = rest.partition(" ")
            acs[address] = _acs(said)
        else:
            raise ValueError(f"{line!r} is no line of this answer")
    functions = {
        address: Function(
            address,
            above,
            kind=_code(said["class"], 6)[:4],
            vendor=_code(said["vendor"], 4),
            device=_code(said["device"], 4),
            numa_node=_number(said.get("numa_node"), below=0),
            driver=links.get(address, {}).get("driver"),
            group=_number(links.get(address, {}).get("iommu_group")),
            virtual="physfn" in links.get(address, {}),
            width=_lanes(said.get("current_link_width")),
            max_width=_lanes(said.get("max_link_width")),
            speed=_speed(said.get("current_link_speed")),
            max_speed=_speed(said.get("max_link_speed")),
            regions=regions.get(address, {}),
        )
        for address, above in paths.items()
        for said in [attributes[address]]
    }
    if counted != f"{len(units)} {len(groups)}":
        raise ValueError("IOMMUs or groups are missing")
    if acs.keys() != {f.address for f in functions.values() if f.kind == _BRIDGE}:
        raise ValueError("the bridges are others than those whose ACS is told")
    if unknown := sorted({above for path in paths.values() for above in path} - functions.keys()):
        raise ValueError(f"nothing is said of {unknown[0]}, which is above others")
    vfio_holders = tuple(sorted(set(holders))) if root else None
    return Topology(functions, tuple(sorted(units)), groups, acs, vfio_holders)


def _acs(said: str) -> Acs:
    if said in ("none", "conventional"):
        return Acs()
    if said in _UNREAD:
        return Acs(unread=_UNREAD[said])
    match = re.fullmatch(r"word ([0-9a-f]{4})", said)
    if not match:
        raise ValueError(f"{said!r} is no control word")
    # A device that does not answer reads as all ones.
    return Acs(unread=_UNREAD["silent"]) if match[1] == "ffff" else Acs(int(match[1], 16))


def _above(address: str, target: str) -> tuple[str, ...]:
    """The functions that ``…/pci0000:00/0000:00:01.0/0000:01:00.0`` leads over. A controller can have a root bus below it."""
    parts = target.split("/")
    start = next((index for index, part in enumerate(parts) if _ROOT_BUS.fullmatch(part)), len(parts))
    *above, last = [part for part in parts[start:] if not _ROOT_BUS.fullmatch(part)] or [""]
    if last != address or not all(_ADDRESS.fullmatch(part) for part in (*above, last)):
        raise ValueError(f"{address} lies in {target}")
    return tuple(above)


def _code(text: str, digits: int) -> str:
    """``0x10de`` without its beginning."""
    if not re.fullmatch(rf"0x[0-9a-f]{{{digits}}}", text):
        raise ValueError(f"{text!r} is no code of PCI")
    return text.removeprefix("0x")


def _number(text: str | None, below: int | None = None) -> int | None:
    """None where sysfs says nothing, or a value under `below` ("-1": no NUMA node)."""
    if text is None:
        return None
    value = int(text)
    return None if below is not None and value < below else value


def _lanes(text: str | None) -> int | None:
    # 0: no link; 255: the function does not say.
    return None if text in (None, "0", "255") else int(text or "0")


def _speed(text: str | None) -> str | None:
    return None if text is None or text.startswith("Unknown") else text.removesuffix(" PCIe")


TOPOLOGY = register(Section("pcie", script(), parse))
