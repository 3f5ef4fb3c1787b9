"""Where this machine's apt gets Debian from, so that the lab's hosts get it from the same place."""

from __future__ import annotations

from dataclasses import dataclass

from lab.command import LabError, run

RELEASES = ("trixie", "bookworm")


@dataclass(frozen=True)
class Mirror:
    """Base addresses of Debian's main archive and of its security archive."""

    main: str
    security: str
    settings: str  # apt.conf lines about trust in the mirror's dates, as this machine has them

    def sources(self, release: str) -> str:
        """An apt sources.list for a release."""
        return (
            f"deb {self.main} {release} main\n"
            f"deb {self.main} {release}-updates main\n"
            f"deb {self.security} {release}-security main\n"
        )


def mirror() -> Mirror:
    """Read the mirrors out of apt's own view of its sources. Raises LabError where apt has no Debian archive."""
    found = _archives()
    if "Debian" not in found:
        run(["apt-get", "update"], timeout=300)
        found = _archives()
    if "Debian" not in found:
        raise LabError("apt of this machine knows no Debian archive, and the lab's hosts are installed from one")
    main = found["Debian"]
    dump = run(["apt-config", "dump", "--format", "%F %v%n", "Acquire"]).stdout.splitlines()
    dates = [
        line.split(" ", 1) for line in dump if line.startswith(("Acquire::Check-Valid-Until ", "Acquire::Check-Date "))
    ]
    return Mirror(
        main=_through_proxy(main),
        security=_through_proxy(found.get("Debian-Security", f"{main}-security")),
        settings="".join(f'{name} "{value}";\n' for name, value in dates),
    )


def upstream_proxy() -> str:
    """The proxy this machine's apt goes through to http mirrors, "" for none: the lab's own proxy goes there, too."""
    said = run(["apt-config", "dump", "--format", "%v%n", "Acquire::http::Proxy"]).stdout.splitlines()
    return said[0] if said and said[0].startswith("http") else ""


def _archives() -> dict[str, str]:
    fields = "$(ORIGIN)|$(LABEL)|$(REPO_URI)"
    found: dict[str, str] = {}
    for line in run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]).stdout.splitlines():
        origin, label, address = line.split("|", 2)
        if origin == "Debian" and label in ("Debian", "Debian-Security"):
            found.setdefault(label, address.rstrip("/"))
    return found


def _through_proxy(address: str) -> str:
    # apt-cacher-ng caches an https mirror only when asked for it in this form (its manual, "Access to HTTPS").
    return address.replace("https://", "http://HTTPS///", 1)
