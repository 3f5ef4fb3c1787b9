"""The engine guard: an nftables table that leaves accounts of the node no way to its engines but the gateway.

An engine asks nobody for a key. vLLM's ``--api-key`` guards a part of its paths and SGLang's leaves others open (DESIGN
section 4; docs/hardening.md), and either would have to be kept from the process list; the kernel knows who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuwright import sandbox
from gpuwright.atomic import File, Validate
from gpuwright.nftables import Table, differences, parse
from gpuwright.render import static, template
from gpuwright.snapshot import Section, Snapshot, register
from gpuwright.spec.base import Profile
from gpuwright.upstreams import Upstream

TABLE = "inet gpuwright_engines"
PATH = "/etc/gpuwright/engine-guard/table.nft"
UNIT = "gpuwright-engine-guard.service"


def wanted(only_way_in: bool | None, profile: Profile) -> bool:
    """Whether a node has it: as its node file says, else as its profile does."""
    return profile == "strict" if only_way_in is None else only_way_in


def rules(engines: Sequence[Upstream], accounts: Sequence[str]) -> bytes:
    """The file that is loaded.

    + engines: those of the node, at least one
    + accounts: who reaches them beside root
    """
    return template(
        "gateway/etc/gpuwright/engine-guard/table.nft.j2",
        ports=sorted(engine.port for engine in engines),
        # Quoted: a name may be a word of nft's.
        allowed=", ".join(f'"{name}"' for name in ("root", *accounts)),
    )


def known(accounts: Sequence[str]) -> Validate:
    """Refuses a node that has not all of them: nft would not load a rule that names one, nor any other of the file."""
    return Validate(
        f'for account in {" ".join(accounts)}; do id -u "$account" >/dev/null 2>&1 || '
        '{ echo "gateway.local_clients: this node has no account $account; make it first, or take it out" >&2; exit 1; }; done'
    )


def files(engines: Sequence[Upstream], accounts: Sequence[str]) -> list[File]:
    """Rules, unit, and what loads them again after nftables.service has flushed them."""
    unit, drop_in = f"/etc/systemd/system/{UNIT}", "/etc/systemd/system/nftables.service.d/gpuwright-gateway.conf"
    return [
        File(PATH, rules(engines, accounts)),
        File(unit, template(f"gateway{unit}.j2", sandbox=sandbox.engine_guard().lines())),
        File(drop_in, static(f"gateway{drop_in}")),
    ]


# --- what the kernel has --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """The table as the kernel has it, and as it would have it from the file on the node."""

    sha256: str  # of the file, empty for none
    live: Table | None
    wanted: Table | None

    @property
    def differences(self) -> list[str]:
        """One sentence per chain that differs; empty when they are alike."""
        return differences(TABLE, self.live, self.wanted)


def _parse(text: str) -> Tables:
    sha256, live, made = text.split("\n--\n")
    return Tables(sha256.strip(), parse(live), parse(made))


# In a network namespace that is gone with the question: every version of nft prints rules in a form of its own.
TABLES = register(
    Section(
        "gateway-engine-guard",
        f"""
sha256sum {PATH} 2>/dev/null | cut -d' ' -f1
echo; echo --
nft -j list table {TABLE} 2>/dev/null
echo; echo --
[ ! -e {PATH} ] || unshare --net sh -c 'nft -f {PATH} && nft -j list table {TABLE}' 2>/dev/null
exit 0
""",
        _parse,
    )
)


def stale(seen: Snapshot) -> list[str]:
    """For `units.running`: the unit, when what is loaded is not what the file says."""
    return [UNIT] if seen.read(TABLES).differences else []
