"""Names of hosts and files, as people write them."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path


def is_ip_address(text: str) -> bool:
    """An IPv4 or IPv6 address, without port or network."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_host_name(text: str) -> bool:
    """A DNS name or an IP address, without port or wildcard."""
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    only_numbers = re.fullmatch(r"[\d.]+", text) is not None  # an address with a mistake in it, not a name
    is_name = len(text) <= 253 and not only_numbers and re.fullmatch(rf"{label}(\.{label})*", text) is not None
    return is_name or is_ip_address(text)


def exists(text: str | Path) -> bool:
    """Whether something has that name; a name that nothing can have is not there either."""
    try:
        return Path(text).exists()
    except OSError:
        return False


def is_placeholder(name: str) -> bool:
    """Names that RFC 2606 keeps for examples; shipped node files use them where only the site knows the name."""
    return re.search(r"(^|\.)example(\.(com|net|org))?$", name.lower()) is not None
