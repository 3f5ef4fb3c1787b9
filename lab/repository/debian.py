"""Stand-ins for what Debian itself would bring: a kernel, and security updates, in an origin that counts as Debian's security archive.

Versions are beyond any that Debian has, so that they are upgrades on every day this runs.
"""

from __future__ import annotations

import re

from lab.repository.package import File, Package, architecture

RELEASE = f"9.99.9+deb13-{architecture()}"
_VERSION = "9.99.9-1"


def kernel(release: str = RELEASE, version: str = _VERSION) -> list[Package]:
    """A kernel that boots nowhere: image and headers of one release, and the packages that pull in the newest."""
    run_hooks = '#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n[ ! -d /etc/kernel/{0} ] || run-parts --arg={1} /etc/kernel/{0}\n'
    text = b"a stand-in of gpuwright's lab\n"
    # A package's name allows less than uname does (Debian policy 5.6.1).
    named = re.sub(r"[^a-z0-9.+-]", "-", release.lower())
    found = [
        Package(
            f"linux-image-{named}",
            version,
            f"Linux {release}",
            section="kernel",
            relations={"Depends": "kmod"},
            files={f"boot/vmlinuz-{release}": File(text), f"usr/lib/modules/{release}/modules.order": File()},
            scripts={"postinst": run_hooks.format("postinst.d", release)},
        ),
        Package(
            f"linux-headers-{named}",
            version,
            f"Headers of Linux {release}",
            section="kernel",
            files={
                f"usr/src/linux-headers-{release}/Makefile": File(text),
                f"usr/lib/modules/{release}/build": File(link=f"/usr/src/linux-headers-{release}"),
            },
            scripts={"postinst": run_hooks.format("header_postinst.d", release)},
        ),
    ]
    for kind in ("image", "headers"):
        found.append(
            Package(
                f"linux-{kind}-{architecture()}",
                version,
                f"newest Linux {kind}",
                section="kernel",
                relations={"Depends": f"linux-{kind}-{named} (= {version})"},
            )
        )
    return found


def update(version: str) -> list[Package]:
    """A harmless package with a file that tells its version: an update of it is one that must come through."""
    return [
        Package(
            "gpuwright-lab-harmless",
            version,
            "a package to be updated",
            section="misc",
            all=True,
            files={"usr/share/gpuwright-lab/harmless": File(f"{version}\n".encode())},
        )
    ]
