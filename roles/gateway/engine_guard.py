"""The engine guard: an nftables table that leaves accounts of the node no way to its engines but the gateway.

An engine asks nobody for a key. vLLM's ``--api-key`` guards a part of its paths and SGLang's leaves others open (docs/hardening.md), and either would have to be kept from the process list; the kernel knows who asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
CLIENTS = "/etc/gpuwright/engine-guard/clients"
LOADER = "/usr/local/lib/gpuwright/engine-guard"
EVERYBODY = "*"
UNIT = "gpuwright-engine-guard.service"


def wanted(local_clients: Mapping[str, str] | None, profile: Profile) -> bool:
    """Whether a node has it: as its node file says (``*`` lets everybody through), else as its profile does."""
    return profile == "strict" if local_clients is None else EVERYBODY not in local_clients


def clients(local_clients: Mapping[str, str] | None, gateway: str) -> tuple[str, ...]:
    """Accounts that reach engines beside root, `gateway` being the gateway's."""
    return (gateway, *sorted(local_clients or ()))


def rules(engines: Sequence[Upstream]) -> bytes:
    """The file that is loaded, for the `engines` of a node (at least one)."""
    ports = sorted(engine.port for engine in engines)
    return template("gateway/etc/gpuwright/engine-guard/table.nft.j2", ports=ports)


def known(accounts: Sequence[str]) -> Validate:
    """Refuses a node that has not all of them."""
    return Validate(
        f'for account in {" ".join(accounts)}; do id -u "$account" >/dev/null 2>&1 || '
        '{ echo "gateway.local_clients: this node has no account $account; make it first, or take it out" >&2; exit 1; }; done'
    )


def files(engines: Sequence[Upstream], accounts: Sequence[str]) -> list[File]:
    """Rules, clients, what loads them, its unit, and what loads them again after nftables.service has flushed them."""
    unit, drop_in = f"/etc/systemd/system/{UNIT}", "/etc/systemd/system/nftables.service.d/gpuwright-gateway.conf"
    return [
        File(PATH, rules(engines)),
        File(CLIENTS, "".join(f"{account}\n" for account in accounts).encode()),
        File(LOADER, static(f"gateway{LOADER}"), "0755"),
        File(unit, template(f"gateway{unit}.j2", sandbox=sandbox.engine_guard().lines())),
        File(drop_in, static(f"gateway{drop_in}")),
    ]


# --- what the kernel has --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """The table as the kernel has it, and as it would have it from the files on the node."""

    sha256: str  # of the rules, empty for none
    clients: tuple[str, ...]
    live: Table | None
    wanted: Table | None

    @property
    def differences(self) -> list[str]:
        """One sentence per chain that differs; empty when they are alike."""
        return differences(TABLE, self.live, self.wanted)


def _parse(text: str) -> Tables:
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        tag, _, rest = line.partition(" ")
        said.setdefault(tag, []).append(rest)
    [sha256], [live], [made] = (said.get(tag, [""]) for tag in ("rules", "live", "made"))
    return Tables(sha256, tuple(said.get("client", [])), parse(live), parse(made))


# In a network namespace that is gone with the question: every version of nft prints rules in a form of its own.
TABLES = register(
    Section(
        "gateway-engine-guard",
        f"""
sha256sum {PATH} 2>/dev/null | sed 's/ .*//; s/^/rules /'
sed 's/^/client /' {CLIENTS} 2>/dev/null
nft -j list table {TABLE} 2>/dev/null | sed 's/^/live /'
[ ! -e {PATH} ] || unshare --net sh -c '{LOADER} && nft -j list table {TABLE}' 2>/dev/null | sed 's/^/made /'
exit 0
""",
        _parse,
    )
)


def stale(seen: Snapshot) -> list[str]:
    """For `units.running`: the unit, when what is loaded is not what the file says."""
    return [UNIT] if seen.read(TABLES).differences else []
