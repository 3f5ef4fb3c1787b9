"""How the units that we ship are confined: one base table, and for each unit what differs from it and why.

Roles render their units with `Confined.lines`; the audit compares what systemd runs with `of_node`. Every key here is
one that systemd 249 knows (Ubuntu 22.04); systemd.exec(5), systemd.resource-control(5).
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a node file is made of the roles' parts, whose units are rendered with this
    from gpuwright.spec.node import NodeSpec

BASE = {
    # --- who it is
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "UMask": "0077",
    # A core holds prompts, keys and weights.
    "LimitCORE": "0",
    # --- what it sees and may write
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "PrivateIPC": "yes",
    "ProtectProc": "invisible",
    "ProcSubset": "pid",
    "ReadWritePaths": "",
    # --- whom it talks to
    "PrivateNetwork": "yes",
    "IPAddressDeny": "any",
    "RestrictAddressFamilies": "AF_UNIX",
    # --- what it asks of the kernel
    "ProtectClock": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectControlGroups": "yes",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "MemoryDenyWriteExecute": "yes",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service ~@privileged ~@resources",
    "SystemCallErrorNumber": "EPERM",
}
"""Key to value. An empty value is what systemd has by itself, but for the capabilities: there it is none at all."""

# Nothing to say where a list is empty: this one is only ever filled.
_FILLED = ("ReadWritePaths",)


@dataclass(frozen=True)
class Deviation:
    """Values other than the base table's, and the reason, which stands in the unit above them; None is what systemd has by itself."""

    reason: str
    values: Mapping[str, str | None]


@dataclass(frozen=True)
class Confined:
    """One unit of a node, by its name, with what differs from the base table."""

    unit: str
    deviations: tuple[Deviation, ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """Every key of the base table that is set in this unit, with its value."""
        changed = {key: value for deviation in self.deviations for key, value in deviation.values.items()}
        return {key: value for key, value in (BASE | changed).items() if value is not None}

    def lines(self) -> str:
        """The lines of the unit's ``[Service]`` section."""
        changed = {key for deviation in self.deviations for key in deviation.values}
        text = [
            "# Confined by the base table of gpuwright/sandbox.py. What differs from it comes first, each with its reason."
        ]
        for deviation in self.deviations:
            unset = [key for key, value in deviation.values.items() if value is None]
            reason = deviation.reason + (f" Not set: {', '.join(unset)}." if unset else "")
            text += [f"# {line}" for line in textwrap.wrap(reason, 118)]
            text += itertools.chain.from_iterable(_lines(key, value) for key, value in deviation.values.items())
        text += itertools.chain.from_iterable(_lines(key, BASE[key]) for key in BASE if key not in changed)
        return "\n".join(text)


def _lines(key: str, value: str | None) -> Iterable[str]:
    if value is None or (not value and key in _FILLED):
        return ()
    if key == "SystemCallFilter":  # a line that takes away begins with ~, and order counts
        return [f"{key}={part}" for part in value.split()]
    return (f"{key}={value}",)


# --- the units of each role -----------------------------------------------------------------------------------------


_NO_NAMESPACE = {
    "ProtectSystem": "no",
    "ProtectHome": "no",
    "PrivateTmp": "no",
    "PrivateDevices": "no",
    "PrivateIPC": "no",
    "ProtectProc": "default",
    "ProcSubset": "all",
    "ProtectHostname": "no",
    "ProtectKernelTunables": "no",
    "ProtectKernelModules": "no",
    "ProtectKernelLogs": "no",
    "ProtectControlGroups": "no",
}
"""No file systems of its own: what these do beyond it, capabilities and system calls do, too."""


def guard() -> Confined:
    """The lock-out guard: the one that has to work when nothing else does."""
    return Confined(
        "gpuwright-guard.service",
        (
            Deviation(
                "It puts files back wherever a role had changed them, early at boot and on a machine in any state: a mount"
                " namespace that cannot be made must not keep the old state away.",
                _NO_NAMESPACE,
            ),
            Deviation(
                "It loads the packet filter as it was and asks systemd to reload what reads the files.",
                {
                    "CapabilityBoundingSet": "CAP_DAC_OVERRIDE CAP_NET_ADMIN",
                    "RestrictAddressFamilies": "AF_NETLINK AF_UNIX",
                    "PrivateNetwork": "no",
                },
            ),
        ),
    )


def gpu_faults() -> Confined:
    """What keeps the kernel's reports of GPU faults."""
    return Confined(
        "gpuwright-gpu-faults.service",
        (Deviation("journalctl reads the id of this boot below /proc/sys.", {"ProcSubset": "all"}),),
    )


_PACKET_FILTER = Deviation(
    "It loads nftables rules of this machine's own network.",
    {
        "CapabilityBoundingSet": "CAP_NET_ADMIN",
        "RestrictAddressFamilies": "AF_NETLINK AF_UNIX",
        "PrivateNetwork": "no",
    },
)


def firewall() -> Confined:
    """What loads the packet filter."""
    early = Deviation("It runs before /tmp is there, and needs none.", {"PrivateTmp": "no"})
    return Confined("gpuwright-firewall.service", (_PACKET_FILTER, early))


def neighbour_guard() -> Confined:
    """What keeps neighbours from containers where Docker does not."""
    return Confined("gpuwright-neighbour-guard.service", (_PACKET_FILTER,))


_CONFIGURATION_SPACE = "The kernel shows the capabilities of PCI devices, and takes changes, from CAP_SYS_ADMIN only."


def acs() -> Confined:
    """What clears ACS redirect on bridges."""
    return Confined(
        "gpuwright-acs.service",
        (
            Deviation(_CONFIGURATION_SPACE, {"CapabilityBoundingSet": "CAP_SYS_ADMIN"}),
            Deviation("The configuration space is written below /sys.", {"ProtectKernelTunables": "no"}),
            Deviation(
                "udevadm asks for kernel events by netlink, and looks at /proc.",
                {"RestrictAddressFamilies": "AF_NETLINK AF_UNIX", "ProcSubset": "all"},
            ),
        ),
    )


# nvidia-smi 580.159.04 answered on an H200 under the engine's capabilities and system calls, without memory that is both
# written and executed: -L, the queries of pre-start, topo -m, -q -x.
_CARDS = Deviation(
    "nvidia-smi opens /dev/nvidia*, and makes the nodes where they are missing. The list of devices that ProtectClock= brings"
    " would shut them out; the clock is out of reach without its capability and its system calls.",
    {"PrivateDevices": "no", "ProtectClock": "no"},
)


def p2p() -> Confined:
    """What judges P2P: Docker's client and nvidia-smi; the probe itself is a container."""
    return Confined(
        "gpuwright-p2p.service",
        (
            _CARDS,
            Deviation(_CONFIGURATION_SPACE, {"CapabilityBoundingSet": "CAP_MKNOD CAP_SYS_ADMIN"}),
            Deviation(
                "Topology and driver are read from all of /proc.", {"ProcSubset": "all", "ProtectProc": "default"}
            ),
            Deviation("Verdicts are kept here.", {"ReadWritePaths": "/var/lib/gpuwright"}),
        ),
    )


def gpu_settings() -> Confined:
    """What sets power limit and MIG mode of the cards."""
    return Confined(
        "gpuwright-gpu-settings.service",
        (
            _CARDS,
            Deviation(
                "The driver takes settings from CAP_SYS_ADMIN only.",
                {"CapabilityBoundingSet": "CAP_MKNOD CAP_SYS_ADMIN"},
            ),
            Deviation(
                "NVIDIA's tools keep what they like below /run and /var, and read /proc/driver; setting a card was not tried without.",
                {"ProtectSystem": "full", "ProcSubset": "all"},
            ),
        ),
    )


_KEPT_BY_A_PACKAGE_MANAGER = ("LimitCORE", "LockPersonality", "RestrictRealtime", "ReadWritePaths")


def driver_settle() -> Confined:
    """What verifies a changed driver, or puts the previous one back: apt, dpkg and DKMS, and whatever packages' scripts do."""
    return Confined(
        "gpuwright-driver-settle.service",
        (
            Deviation(
                "It installs packages: their scripts make accounts, set-user-id programs, device nodes and initramfs images, load"
                " modules, and reload systemd. What may not be done by them is not known before.",
                {key: None for key in BASE if key not in _KEPT_BY_A_PACKAGE_MANAGER},
            ),
        ),
    )


def image(name: str, archive: str | None) -> Confined:
    """The job that brings an engine's image: Docker's client, which reads an archive itself and asks Docker for the rest.

    + archive: where the image comes from a file, its path
    """
    deviations = [
        Deviation("root's logins at registries lie in /root/.docker.", {"ProtectHome": "read-only"}),
    ]
    if archive:
        deviations.append(
            Deviation("The archive may be anybody's file.", {"CapabilityBoundingSet": "CAP_DAC_READ_SEARCH"})
        )
    deviations += _temporary(archive)
    return Confined(f"gpuwright-image-{name}.service", tuple(deviations))


def engine(name: str, gpus: bool, judged: bool, drops_cache: bool, weights: str) -> Confined:
    """An engine's scripts: Docker's client and what looks after the container. The container has limits of its own.

    + gpus: whether it has any
    + judged: whether a verdict on P2P is read at every start
    + drops_cache: whether the page cache is dropped where HBM is system memory
    + weights: the store they lie in
    """
    capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SYS_RESOURCE"]
    capabilities += ["CAP_MKNOD"] if gpus else []
    capabilities += ["CAP_SYS_ADMIN"] if judged else []
    deviations = [
        Deviation(
            "It gives the engine's user its cache and clears old ones, signals the container's process when Docker does not, and"
            f" tries the limits that the container gets.{' The word of a PCI bridge is shown to CAP_SYS_ADMIN only.' if judged else ''}",
            {
                "CapabilityBoundingSet": " ".join(sorted(capabilities)),
                "SystemCallFilter": "@system-service ~@privileged ~@resources @chown",
            },
        ),
        Deviation(
            "It follows the container's process and reads memory by node.",
            {"ProtectProc": "default", "ProcSubset": "all"},
        ),
        Deviation(
            "It asks the engine on loopback, and Docker has made that the container's own address before a list of addresses is"
            " compared with it.",
            {
                "PrivateNetwork": "no",
                "IPAddressDeny": "",
                "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
            },
        ),
        Deviation(
            f"Evidence, releases and caches{'; the page cache is dropped' if drops_cache else ''}. The gateway reads what is ready.",
            {
                "ReadWritePaths": "/var/lib/gpuwright" + (" /proc/sys/vm/drop_caches" if drops_cache else ""),
                "UMask": "0022",
            },
        ),
    ]
    if gpus:
        deviations.append(_CARDS)
    deviations += [*_home(weights), *_temporary(weights)]
    return Confined(f"gpuwright-engine-{name}.service", tuple(deviations))


def model(name: str, store: str, source: str | None) -> Confined:
    """A download job, under an account of its own that can write nothing but the store. It parses what a hub answers.

    + source: where weights are copied from a directory, its path
    """
    online = Deviation(
        "It fetches from a hub.",
        {
            "PrivateNetwork": "no",
            "IPAddressDeny": "",
            "RestrictAddressFamilies": "AF_INET AF_INET6 AF_NETLINK AF_UNIX",
        },
    )
    return Confined(f"gpuwright-model-{name}.service", (*_weights(store, source), *(() if source else (online,))))


def verification(store: str) -> Confined:
    """The job that reads every byte of a model again."""
    return Confined("gpuwright-model-verify@.service", _weights(store, None))


def gateway(low_port: bool) -> Confined:
    """Caddy, under an account of its own.

    + low_port: whether it listens below 1024
    """
    deviations = [
        Deviation(
            "It serves the network, and asks engines on loopback.",
            {
                "PrivateNetwork": "no",
                "IPAddressDeny": "",
                "RestrictAddressFamilies": "AF_INET AF_INET6 AF_NETLINK AF_UNIX",
            },
        ),
        Deviation("Go reads the length of its accept queue from /proc/sys.", {"ProcSubset": "all"}),
    ]
    if low_port:
        deviations.append(Deviation("A port below 1024.", {"CapabilityBoundingSet": "CAP_NET_BIND_SERVICE"}))
    return Confined("gpuwright-gateway.service", tuple(deviations))


def engine_guard() -> Confined:
    """What keeps accounts of the node from its engines."""
    return Confined("gpuwright-engine-guard.service", (_PACKET_FILTER,))


def _weights(store: str, source: str | None) -> tuple[Deviation, ...]:
    written = Deviation(
        "Weights are written here, and read by the engine's user.", {"ReadWritePaths": store, "UMask": "0022"}
    )
    return (written, *_home(store, source), *_temporary(store, source))


def _home(*paths: str | None) -> list[Deviation]:
    """Where a path lies in somebody's home, homes are seen, and not changed."""
    if not any(path and f"{path}/".startswith(("/home/", "/root/", "/run/user/")) for path in paths):
        return []
    return [Deviation("The node file names a path in a home.", {"ProtectHome": "read-only"})]


def _temporary(*paths: str | None) -> list[Deviation]:
    if not any(path and f"{path}/".startswith(("/tmp/", "/var/tmp/")) for path in paths):
        return []
    return [Deviation("The node file names a path among temporary files.", {"PrivateTmp": "no"})]


# --- all units of a node --------------------------------------------------------------------------------------------


def of_node(spec: NodeSpec) -> tuple[Confined, ...]:
    """Every unit that a node may have by its node file; a container has no ``gpuwright-acs.service``, and a Docker that
    keeps neighbours away itself no ``gpuwright-neighbour-guard.service``, and ``gateway.local_clients`` decides about
    ``gpuwright-engine-guard.service``."""
    from gpuwright.peers import judged_engines

    found = [guard(), gpu_faults()]
    if spec.firewall:
        found.append(firewall())
    elif spec.containers:
        found.append(neighbour_guard())
    if spec.pcie and spec.pcie.acs_redirect == "cleared":
        found.append(acs())
    if spec.nvidia:
        found += [driver_settle(), gpu_settings()]
    judged = judged_engines(spec)
    if judged:
        found.append(p2p())
    if spec.models:
        found += [model(name, spec.models.store, one.source) for name, one in spec.models.items.items()]
        found.append(verification(spec.models.store))
    if spec.engine and spec.models:
        drops = spec.engine.page_cache_drop == "auto"
        for name, one in spec.engine.engines.items():
            found.append(image(name, one.image.archive))
            found.append(engine(name, bool(one.gpus), name in judged, drops, spec.models.store))
    if spec.gateway:
        found.append(gateway(any(listen.port < 1024 for listen in spec.gateway.listen)))
        found.append(engine_guard())
    return tuple(found)
