"""What ``lspci -vvv`` prints, read without guessing.

A field is there, or it could not be read; nothing is made of a line that is missing. ACS is the trap: endpoints print
``ARICap: … ACS-`` and error registers ``ACSViol``, and without root lspci prints no capability at all (gpu-node.md 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from roles.pcie.captured import CannotTell, is_clean, lines

# Bits of the ACS control register (pci_regs.h, PCI_ACS_*), by lspci's names.
ACS_BITS = {
    "SrcValid": 0x01,
    "TransBlk": 0x02,
    "ReqRedir": 0x04,
    "CmpltRedir": 0x08,
    "UpstreamFwd": 0x10,
    "EgressCtrl": 0x20,
    "DirectTrans": 0x40,
}

_HEADER = re.compile(r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (\S.*)")
_REGION = re.compile(
    r"\tRegion (\d): Memory at [0-9a-f]+ \((?:32|64)-bit, (?:non-)?prefetchable\).* \[size=(\d+)([KMGT]?)\]"
)
_PORT = re.compile(
    r"\tCapabilities: \[[0-9a-f]+\] Express \(v\d\) (Root Port|Upstream Port|Downstream Port|(?:Legacy |Root Complex Integrated )?Endpoint)\b.*"
)
_WIDTH = re.compile(
    r"\t\tLnkSta:\tSpeed ([\d.]+GT/s)(?: \((ok|downgraded)\))?, Width x(\d+)(?: \((?:ok|downgraded)\))?"
)
_DRIVER = re.compile(r"\tKernel driver in use: ([\w-]+)")
_NODE = re.compile(r"\tNUMA node: (\d+)")
# Every function has each of these at most once; twice means that the line between two functions is gone.
_ONCE = (
    "\tControl: ",
    "\tStatus: ",
    "\tNUMA node: ",
    "\tKernel driver in use: ",
    "\tBus: ",
    "\t\tACSCtl:",
    "\t\tLnkSta:",
)


@dataclass(frozen=True)
class Function:
    """One PCI function as far as the text tells; None is "cannot tell"."""

    address: str
    title: str
    port: str | None = None
    """``Root Port``, ``Upstream Port``, ``Downstream Port``, ``Legacy Endpoint``, …"""
    acs: int | None = None
    """The ACS control word. None is never "off": see `redirects`."""
    regions: dict[int, int] = field(default_factory=dict)
    """Memory regions by number, in bytes; those of virtual functions are not among them."""
    width: int | None = None
    """Lanes of the link now. Its speed says nothing at rest (gpu-node.md 2.3)."""
    numa_node: int | None = None
    driver: str | None = None
    denied: bool = False
    """lspci was not allowed to read the capabilities: it was not run as root."""
    shows_no_acs: bool = False
    """Its lines are there to the end, and no ACS is among them."""

    @property
    def is_bridge(self) -> bool:
        """A bridge from PCI to PCI."""
        return self.title.startswith("PCI bridge")

    @property
    def redirects(self) -> bool | None:
        """Whether the bridge sends traffic of peers up to the root. None: cannot tell.

        The upstream port of a switch has no redirect of its own (PCI Express 7.7.11); any other bridge that shows no ACS
        may have it in lines that are not here.
        """
        if self.acs is not None:
            return bool(self.acs & (ACS_BITS["ReqRedir"] | ACS_BITS["CmpltRedir"] | ACS_BITS["EgressCtrl"]))
        return False if self.port == "Upstream Port" and self.shows_no_acs else None


def functions(text: str | bytes, addresses: Iterable[str]) -> dict[str, Function]:
    """Every function that the text describes, by its full address (``0000:01:00.0``).

    `addresses` are the functions there are, as sysfs lists them. A listing that lacks one, or has another, has lost
    lines somewhere: what it says of a neighbour may then be the lost one's. Raises CannotTell for such a text.
    """
    found: dict[str, Function] = {}
    for block, ended in _blocks(lines(text)):
        function = _function(block, ended)
        if function.address in found:
            raise CannotTell(f"{function.address} is described twice")
        found[function.address] = function
    wanted = {full(address) for address in addresses}
    if missing := sorted(wanted - found.keys()):
        raise CannotTell(f"nothing is said of {', '.join(missing)}")
    if strange := sorted(found.keys() - wanted):
        raise CannotTell(f"there is no {', '.join(strange)} here")
    if not found:
        raise CannotTell("no line names a PCI function")
    return found


def full(address: str) -> str:
    """With the domain, which lspci leaves out where there is one only."""
    return address if address.count(":") == 2 else f"0000:{address}"


def _blocks(text: list[str]) -> list[tuple[list[str], bool]]:
    """The lines of each function, and whether the empty line after them is there: without it more may be missing.

    Lines whose function is not known belong to none.
    """
    blocks: list[tuple[list[str], bool]] = []
    current: list[str] | None = None

    def close(ended: bool) -> None:
        if current is not None:
            blocks.append((current, ended))

    for line in text:
        # Older captures and pastes have spaces instead of tabs.
        line = re.sub(r"^( {8})+", lambda match: "\t" * (len(match[0]) // 8), line)
        if not line.strip():
            close(ended=True)
            current = None
        elif line[0].isspace():
            if current is not None:
                current.append(line)
        else:
            close(ended=False)
            # A line of another program, or a damaged first line: what follows is nobody's.
            current = [line] if _HEADER.fullmatch(line) and is_clean(line) else None
    close(ended=False)
    return blocks


def _function(block: list[str], ended: bool) -> Function:
    header = _HEADER.fullmatch(block[0])
    assert header
    address, title = full(header[1]), header[2]
    if any(sum(line.startswith(start) for line in block) > 1 for start in _ONCE):
        return Function(address, title)
    denied = any("<access denied>" in line for line in block)
    # Inside the SR-IOV capability regions are those of virtual functions, and not the function's own.
    own = [line for line in block if line.startswith("\t") and not line.startswith("\t\t")]
    regions = {int(match[1]): _bytes(match[2], match[3]) for line in own if (match := _REGION.fullmatch(line))}
    width = _first(_WIDTH, block, 3)
    node = _first(_NODE, block, 1)
    return Function(
        address,
        title,
        port=_first(_PORT, block, 1),
        acs=_acs(block),
        regions=regions,
        width=int(width) if width else None,
        numa_node=int(node) if node else None,
        driver=_first(_DRIVER, block, 1),
        denied=denied,
        shows_no_acs=ended
        and not denied
        and all(is_clean(line) for line in block)
        and not any("ACSC" in line or "Access Control Services" in line for line in block),
    )


def _first(pattern: re.Pattern[str], block: list[str], group: int) -> str | None:
    return next((match[group] for line in block if (match := pattern.fullmatch(line))), None)


def _bytes(number: str, unit: str) -> int:
    return int(number) * 1024 ** " KMGT".index(unit or " ")


def _acs(block: list[str]) -> int | None:
    """The control word, of a line that names every bit once and nothing that is no bit."""
    for line in block:
        if not line.startswith("\t\tACSCtl:"):
            continue
        tokens = line.removeprefix("\t\tACSCtl:").split()
        bits = {token[:-1]: token[-1] for token in tokens}
        if len(bits) != len(tokens) or bits.keys() != ACS_BITS.keys() or not set(bits.values()) <= {"+", "-"}:
            return None
        return sum(ACS_BITS[name] for name, sign in bits.items() if sign == "+")
    return None
