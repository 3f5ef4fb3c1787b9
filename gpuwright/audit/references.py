"""Which catalogue entries a control is technical evidence for.

Ids are facts of the public catalogues; the subjects are our own words. Catalogue versions: CIS Debian 12 1.1.0, CIS
Ubuntu 24.04 1.0.0, CIS Docker 1.6.0, NIST SP 800-171 revisions 2 and 3, CMMC 2.13 level 2, BSI IT-Grundschutz Edition
2023. A passing control supports a requirement and never fulfils one alone; `inferred` means that the link is our
judgement and has to be reviewed before a claim is printed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class References:
    """Ids by catalogue, and whether the link is our own judgement; `none` is why no catalogue has any."""

    subject: str = ""
    cis_debian12: tuple[str, ...] = ()
    cis_ubuntu2404: tuple[str, ...] = ()
    cis_docker: tuple[str, ...] = ()
    nist_r2: tuple[str, ...] = ()
    nist_r3: tuple[str, ...] = ()
    cmmc: tuple[str, ...] = ()
    bsi: tuple[str, ...] = ()
    inferred: bool = True
    none: str = ""

    def only(self, *cis: str) -> References:
        """For one setting of this subject: of the ids of CIS these alone. The other catalogues are not that fine.

        Raises ValueError for an id that the subject does not have.
        """
        if strange := set(cis) - {*self.cis_debian12, *self.cis_ubuntu2404, *self.cis_docker}:
            raise ValueError(f"{self.subject}: has no id {', '.join(sorted(strange))}")
        return replace(
            self,
            cis_debian12=tuple(one for one in self.cis_debian12 if one in cis),
            cis_ubuntu2404=tuple(one for one in self.cis_ubuntu2404 if one in cis),
            cis_docker=tuple(one for one in self.cis_docker if one in cis),
        )

    @property
    def ids(self) -> dict[str, list[str]]:
        """Catalogue name to ids; catalogues without one are left out."""
        names = {
            "cis-debian-12": self.cis_debian12,
            "cis-ubuntu-24.04": self.cis_ubuntu2404,
            "cis-docker": self.cis_docker,
            "nist-800-171-r2": self.nist_r2,
            "nist-800-171-r3": self.nist_r3,
            "cmmc-l2": self.cmmc,
            "bsi-it-grundschutz": self.bsi,
        }
        return {name: list(ids) for name, ids in names.items() if ids}


# An operational promise that no catalogue speaks of.
NONE = References()

ACCOUNTS = References(
    "accounts: one uid 0, no blank hash, unique ids",
    cis_debian12=("5.4.2.1", "7.2.2", "7.2.5", "7.2.7"),
    cis_ubuntu2404=("5.4.2.1", "7.2.2", "7.2.5", "7.2.7"),
    nist_r2=("3.1.1", "3.1.5", "3.5.1", "3.5.2"),
    nist_r3=("03.01.01", "03.01.05", "03.05.01"),
    cmmc=("AC.L2-3.1.1", "AC.L2-3.1.5", "IA.L2-3.5.1", "IA.L2-3.5.2"),
    bsi=("SYS.1.3.A2", "ORP.4.A9"),
    inferred=True,
)
SSH_ROOT = References(
    "ssh: root login refused",
    cis_debian12=("5.1.20",),
    cis_ubuntu2404=("5.1.20",),
    nist_r2=("3.1.1", "3.1.5"),
    nist_r3=("03.01.01", "03.01.05"),
    cmmc=("AC.L2-3.1.1", "AC.L2-3.1.5"),
    bsi=("OPS.1.1.2.A5", "SYS.1.3.A8"),
    inferred=False,
)
SSH_EMPTY_PASSWORDS = References(
    "ssh: empty passwords refused",
    cis_debian12=("5.1.19",),
    cis_ubuntu2404=("5.1.19",),
    nist_r2=("3.1.1", "3.1.5"),
    nist_r3=("03.01.01", "03.01.05"),
    cmmc=("AC.L2-3.1.1", "AC.L2-3.1.5"),
    bsi=("SYS.1.3.A8",),
    inferred=False,
)
SSH_KEYS_ONLY = References(
    "ssh: keys only, no password or keyboard-interactive login",
    nist_r2=("3.5.2", "3.5.4"),
    nist_r3=("03.05.01", "03.05.04"),
    cmmc=("IA.L2-3.5.2", "IA.L2-3.5.4"),
    bsi=("SYS.1.3.A8", "SYS.1.1.A2"),
    inferred=True,
)
# The catalogues ask for keys or for good passwords; that there is none at the console either is our own step further.
LOCAL_PASSWORDS = References(
    "accounts: no password at the console either",
    nist_r2=("3.5.2",),
    nist_r3=("03.05.01",),
    cmmc=("IA.L2-3.5.2",),
    bsi=("SYS.1.1.A2",),
    inferred=True,
)
SSH_ALGORITHMS = References(
    "ssh: ciphers, key exchange, MACs",
    cis_debian12=("5.1.6", "5.1.12", "5.1.15"),
    cis_ubuntu2404=("5.1.6", "5.1.12", "5.1.15"),
    nist_r2=("3.1.13", "3.13.8"),
    nist_r3=("03.13.08",),
    cmmc=("AC.L2-3.1.13", "SC.L2-3.13.8"),
    bsi=("SYS.1.3.A8", "CON.1.A1"),
    inferred=False,
)
SSH_LOG = References(
    "ssh: the log names the key",
    cis_debian12=("5.1.14",),
    cis_ubuntu2404=("5.1.14",),
    nist_r2=("3.3.2",),
    nist_r3=("03.03.02",),
    cmmc=("AU.L2-3.3.2",),
    bsi=("OPS.1.1.2.A5",),
    inferred=True,
)
SSH_LIMITS = References(
    "ssh: MaxAuthTries, LoginGraceTime, MaxStartups, MaxSessions",
    cis_debian12=("5.1.16", "5.1.13", "5.1.18", "5.1.17"),
    cis_ubuntu2404=("5.1.16", "5.1.13", "5.1.18", "5.1.17"),
    nist_r2=("3.1.8",),
    nist_r3=("03.01.08",),
    cmmc=("AC.L2-3.1.8",),
    inferred=True,
)
SSH_WHO = References(
    "ssh: who may log in (AllowGroups)",
    cis_debian12=("5.1.4",),
    cis_ubuntu2404=("5.1.4",),
    nist_r2=("3.1.1", "3.1.2", "3.1.12"),
    nist_r3=("03.01.01", "03.01.02", "03.01.12"),
    cmmc=("AC.L2-3.1.1", "AC.L2-3.1.2", "AC.L2-3.1.12"),
    bsi=("ORP.4.A6",),
    inferred=True,
)
SSH_FORWARDING = References(
    "ssh: forwarding off (optional)",
    cis_debian12=("5.1.8",),
    cis_ubuntu2404=("5.1.8",),
    nist_r2=("3.1.12", "3.4.6"),
    nist_r3=("03.01.12", "03.04.06"),
    cmmc=("AC.L2-3.1.12", "CM.L2-3.4.6"),
    inferred=True,
)
SSH_IDLE = References(
    "ssh: idle sessions end",
    cis_debian12=("5.1.7",),
    cis_ubuntu2404=("5.1.7",),
    nist_r2=("3.1.11",),
    nist_r3=("03.01.11",),
    cmmc=("AC.L2-3.1.11",),
    inferred=False,
)
SSH_TRUST = References(
    "ssh: host trust, Kerberos, rhosts, user environment off",
    cis_debian12=("5.1.9", "5.1.10", "5.1.11", "5.1.21"),
    cis_ubuntu2404=("5.1.9", "5.1.10", "5.1.11", "5.1.21"),
    nist_r2=("3.1.12",),
    nist_r3=("03.01.12",),
    cmmc=("AC.L2-3.1.12",),
    inferred=False,
)
# 5.1.3 is not claimed: the public halves are nobody's secret, and nobody looks at them.
SSH_FILES = References(
    "ssh: host key and sshd_config modes",
    cis_debian12=("5.1.1", "5.1.2"),
    cis_ubuntu2404=("5.1.1", "5.1.2"),
    nist_r2=("3.1.13", "3.13.10"),
    nist_r3=("03.13.08", "03.13.10"),
    cmmc=("AC.L2-3.1.13", "SC.L2-3.13.10"),
    bsi=("CON.1.A4",),
    inferred=False,
)
# 1.6.2 and 1.6.3, /etc/issue and /etc/issue.net, are not claimed: they stay the site's.
SSH_BANNER = References(
    "remote login notice",
    cis_debian12=("5.1.5",),
    cis_ubuntu2404=("5.1.5",),
    nist_r2=("3.1.9",),
    nist_r3=("03.01.09",),
    cmmc=("AC.L2-3.1.9",),
    inferred=False,
)
# 5.2.3 and 5.2.4 are not claimed: the log is the journal, and deploys have no password to type.
SUDO = References(
    "sudo: pty",
    cis_debian12=("5.2.2",),
    cis_ubuntu2404=("5.2.2",),
    nist_r2=("3.1.7",),
    nist_r3=("03.01.07",),
    cmmc=("AC.L2-3.1.7",),
    bsi=("OPS.1.1.2.A5", "OPS.1.1.2.A28"),
    inferred=True,
)
NAMED_ADMINISTRATORS = References(
    "accounts: named administrators, no shared login",
    nist_r2=("3.3.2", "3.5.1"),
    nist_r3=("03.03.02", "03.05.01"),
    cmmc=("AU.L2-3.3.2", "IA.L2-3.5.1"),
    bsi=("OPS.1.1.2.A5", "ORP.4.A1"),
    inferred=True,
)
JOURNAL = References(
    "journald: persistent, compressed, capped",
    cis_debian12=("6.1.1.1", "6.1.1.3", "6.1.2.3", "6.1.2.4"),
    cis_ubuntu2404=("6.1.1.1", "6.1.1.3", "6.1.2.3", "6.1.2.4"),
    nist_r2=("3.3.1", "3.3.8"),
    nist_r3=("03.03.03", "03.03.08"),
    cmmc=("AU.L2-3.3.1", "AU.L2-3.3.8"),
    bsi=("SYS.1.1.A10", "SYS.1.6.A7", "OPS.1.1.5.A3"),
    inferred=True,
)
# 2.3.2.1, 2.3.3.1 and 2.3.3.2, the servers' names and chrony's user, are not claimed: they are the site's.
CLOCK = References(
    "one clock daemon, which runs",
    cis_debian12=("2.3.1.1", "2.3.2.2", "2.3.3.3"),
    cis_ubuntu2404=("2.3.1.1", "2.3.2.2", "2.3.3.3"),
    nist_r2=("3.3.7",),
    nist_r3=("03.03.07",),
    cmmc=("AU.L2-3.3.7",),
    bsi=("OPS.1.1.5.A4", "OPS.1.2.6.A7"),
    inferred=False,
)
UPDATES = References(
    "updates: security origin, unattended, GPU stack held back",
    cis_debian12=("1.2.2.1",),
    cis_ubuntu2404=("1.2.2.1",),
    cis_docker=("1.2.2",),
    nist_r2=("3.14.1", "3.11.3"),
    nist_r3=("03.14.01", "03.11.02"),
    cmmc=("SI.L2-3.14.1", "RA.L2-3.11.3"),
    bsi=("OPS.1.1.3.A3", "OPS.1.1.3.A15"),
    inferred=True,
)
FILE_MODES = References(
    "files: account databases, world-writable, orphaned, setuid",
    cis_debian12=("7.1.1", "7.1.3", "7.1.5", "7.1.7", "7.1.11", "7.1.12", "7.1.13"),
    cis_ubuntu2404=("7.1.1", "7.1.3", "7.1.5", "7.1.7", "7.1.11", "7.1.12", "7.1.13"),
    nist_r2=("3.1.5", "3.4.5"),
    nist_r3=("03.01.05", "03.04.05"),
    cmmc=("AC.L2-3.1.5", "CM.L2-3.4.5"),
    bsi=("ORP.4.A7",),
    inferred=True,
)
CORE_DUMPS = References(
    "no core dumps",
    cis_debian12=("1.5.3",),
    cis_ubuntu2404=("1.5.3", "1.5.5"),
    nist_r2=("3.13.4",),
    nist_r3=("03.13.04",),
    cmmc=("SC.L2-3.13.4",),
    bsi=("SYS.1.3.A14",),
    inferred=True,
)
BASELINE = References(
    "baseline record and drift report",
    cis_docker=("1.2.1",),
    nist_r2=("3.4.1", "3.4.2"),
    nist_r3=("03.04.01", "03.04.02"),
    cmmc=("CM.L2-3.4.1", "CM.L2-3.4.2"),
    bsi=("SYS.1.1.A16", "OPS.1.1.7.A11", "OPS.1.1.1.A5", "OPS.1.1.1.A8"),
    inferred=False,
)
PACKET_FILTER = References(
    "packet filter: default deny, own table",
    cis_debian12=("4.3.8", "4.3.5", "4.3.9", "4.3.10"),
    cis_ubuntu2404=("4.3.8", "4.3.5", "4.3.9", "4.3.10"),
    cis_docker=("2.4",),
    nist_r2=("3.13.1", "3.13.6"),
    nist_r3=("03.13.01", "03.13.06"),
    cmmc=("SC.L2-3.13.1", "SC.L2-3.13.6"),
    bsi=("SYS.1.1.A19", "NET.3.2.A2", "NET.3.2.A3"),
    inferred=False,
)
EGRESS = References(
    "packet filter: egress allow-list",
    cis_debian12=("4.3.7",),
    cis_ubuntu2404=("4.3.7",),
    nist_r2=("3.1.3", "3.13.6"),
    nist_r3=("03.01.03", "03.13.06"),
    cmmc=("AC.L2-3.1.3", "SC.L2-3.13.6"),
    bsi=("NET.3.2.A2",),
    inferred=True,
)
LISTENERS = References(
    "listeners: only expected ports on expected addresses",
    cis_debian12=("2.1.22",),
    cis_ubuntu2404=("2.1.22",),
    cis_docker=("5.9", "5.14"),
    nist_r2=("3.4.7", "3.13.1"),
    nist_r3=("03.04.06", "03.13.01"),
    cmmc=("CM.L2-3.4.7", "SC.L2-3.13.1"),
    bsi=("SYS.1.1.A6", "APP.3.1.A12"),
    inferred=True,
)
MAINTENANCE = References(
    "maintenance window, drain before change",
    cis_docker=("2.15",),
    nist_r2=("3.4.4",),
    nist_r3=("03.04.04",),
    cmmc=("CM.L2-3.4.4",),
    bsi=("OPS.1.1.2.A25",),
    inferred=True,
)
DAEMON = References(
    "docker daemon: live restore, no userland proxy",
    cis_docker=("2.15", "2.16"),
    inferred=False,
)
DAEMON_FILES = References(
    "docker daemon: settings files owned by root",
    cis_docker=("3.1", "3.2", "3.3", "3.4", "3.5", "3.6", "3.17", "3.18", "3.23", "3.24"),
    nist_r2=("3.4.5",),
    nist_r3=("03.04.05",),
    cmmc=("CM.L2-3.4.5",),
    inferred=True,
)
DOCKER_ACCESS = References(
    "container: API socket not mounted, docker group empty",
    cis_docker=("5.32", "1.1.2", "3.15", "3.16"),
    nist_r2=("3.1.5",),
    nist_r3=("03.01.05",),
    cmmc=("AC.L2-3.1.5",),
    bsi=("SYS.1.6.A3",),
    inferred=True,
)
CONTAINER_LOGS = References(
    "container: logs kept outside",
    cis_docker=("2.13", "2.3"),
    nist_r2=("3.3.1",),
    nist_r3=("03.03.03",),
    cmmc=("AU.L2-3.3.1",),
    bsi=("SYS.1.6.A7",),
    inferred=True,
)
CONTAINER_PRIVILEGE = References(
    "container: no privileged flag, capabilities dropped, no-new-privileges",
    cis_docker=("5.5", "5.4", "5.26", "2.14"),
    nist_r2=("3.1.5", "3.4.6"),
    nist_r3=("03.01.05", "03.04.06"),
    cmmc=("AC.L2-3.1.5", "CM.L2-3.4.6"),
    bsi=("SYS.1.6.A17", "SYS.1.6.A21"),
    inferred=True,
)
CONTAINER_FILTERS = References(
    "container: seccomp and AppArmor filters active",
    cis_docker=("5.22", "5.2"),
    nist_r2=("3.4.6",),
    nist_r3=("03.04.06",),
    cmmc=("CM.L2-3.4.6",),
    bsi=("SYS.1.6.A21", "SYS.1.3.A16"),
    inferred=True,
)
CONTAINER_USER = References(
    "container: unprivileged user",
    cis_docker=("4.1", "2.9"),
    nist_r2=("3.1.5", "3.4.6"),
    nist_r3=("03.01.05", "03.04.06"),
    cmmc=("AC.L2-3.1.5", "CM.L2-3.4.6"),
    bsi=("SYS.1.6.A17", "SYS.1.6.A18"),
    inferred=True,
)
CONTAINER_ROOT = References(
    "container: read-only root, writable paths named",
    cis_docker=("5.13", "5.6"),
    nist_r2=("3.4.6",),
    nist_r3=("03.04.06",),
    cmmc=("CM.L2-3.4.6",),
    bsi=("SYS.1.6.A23", "SYS.1.6.A19"),
    inferred=True,
)
CONTAINER_CAPS = References(
    "container: memory, CPU, process caps",
    cis_docker=("5.11", "5.12", "5.29"),
    bsi=("SYS.1.6.A15",),
    inferred=False,
)
CONTAINER_NETWORK = References(
    "container: own network, no host namespaces",
    cis_docker=("5.10", "5.16", "5.17", "5.21", "5.30", "5.31", "2.2"),
    nist_r2=("3.13.1", "3.13.4"),
    nist_r3=("03.13.01", "03.13.04"),
    cmmc=("SC.L2-3.13.1", "SC.L2-3.13.4"),
    bsi=("SYS.1.6.A3",),
    inferred=True,
)
CONTAINER_DEVICES = References(
    "container: device nodes limited to the GPUs used",
    cis_docker=("5.18",),
    nist_r2=("3.1.5",),
    nist_r3=("03.01.05",),
    cmmc=("AC.L2-3.1.5",),
    bsi=("SYS.1.6.A19",),
    inferred=True,
)
CONTAINER_RESTARTS = References(
    "container: health probe, bounded restarts",
    cis_docker=("4.6", "5.27", "5.15"),
    bsi=("SYS.1.6.A3", "SYS.1.1.A23"),
    inferred=True,
)
IMAGE = References(
    "container: image pinned by digest, known origin",
    cis_docker=("4.2", "2.5"),
    nist_r2=("3.4.8", "3.14.1"),
    nist_r3=("03.04.08", "03.17.03"),
    cmmc=("CM.L2-3.4.8", "SI.L2-3.14.1"),
    bsi=("SYS.1.6.A6", "SYS.1.6.A12", "OPS.1.1.3.A10"),
    inferred=True,
)
WEIGHTS = References(
    "weights: origin, checksum, no pickle code",
    cis_docker=("4.12",),
    nist_r2=("3.4.8", "3.14.2"),
    nist_r3=("03.04.08", "03.14.02", "03.17.03"),
    cmmc=("CM.L2-3.4.8", "SI.L2-3.14.2"),
    bsi=("OPS.1.1.3.A10", "CON.8.A20"),
    inferred=True,
)
WEIGHTS_READ_ONLY = References(
    "weights: read-only for the engine",
    cis_docker=("5.6",),
    nist_r2=("3.1.5",),
    nist_r3=("03.01.05",),
    cmmc=("AC.L2-3.1.5",),
    bsi=("SYS.1.6.A19",),
    inferred=True,
)
SECRETS = References(
    "secrets: kept out of images, env, argv, repository",
    cis_docker=("4.10",),
    nist_r2=("3.5.10", "3.13.10"),
    nist_r3=("03.05.12", "03.13.10"),
    cmmc=("IA.L2-3.5.10", "SC.L2-3.13.10"),
    bsi=("SYS.1.6.A8",),
    inferred=True,
)
HUB_TOKEN = References(
    "secrets: engine never sees the hub token",
    nist_r2=("3.1.5",),
    nist_r3=("03.01.05",),
    cmmc=("AC.L2-3.1.5",),
    bsi=("SYS.1.6.A8",),
    inferred=True,
)
KEYS_AUTHENTICATE = References(
    "API keys: every caller authenticated",
    nist_r2=("3.1.1", "3.5.1", "3.5.2"),
    nist_r3=("03.01.01", "03.05.01", "03.05.02"),
    cmmc=("AC.L2-3.1.1", "IA.L2-3.5.1", "IA.L2-3.5.2"),
    bsi=("APP.3.1.A1", "ORP.4.A9"),
    inferred=True,
)
KEYS_HASHED = References(
    "API keys: hashed at rest",
    nist_r2=("3.5.10",),
    nist_r3=("03.05.07",),
    cmmc=("IA.L2-3.5.10",),
    bsi=("APP.3.1.A14", "APP.3.2.A5"),
    inferred=True,
)
API_PATHS = References(
    "API: only the needed paths and methods",
    nist_r2=("3.1.2", "3.4.6", "3.4.7"),
    nist_r3=("03.01.02", "03.04.06"),
    cmmc=("AC.L2-3.1.2", "CM.L2-3.4.6", "CM.L2-3.4.7"),
    bsi=("APP.3.1.A12",),
    inferred=True,
)
ACCESS_LOG = References(
    "access log with key identity, no prompt content",
    nist_r2=("3.3.1", "3.3.2"),
    nist_r3=("03.03.01", "03.03.02", "03.03.03"),
    cmmc=("AU.L2-3.3.1", "AU.L2-3.3.2"),
    bsi=("APP.3.2.A4", "OPS.1.1.5.A3", "OPS.1.1.5.A5"),
    inferred=True,
)
ADMIN_CLOSED = References(
    "admin interface of gateway and engine closed",
    cis_docker=("2.7",),
    nist_r2=("3.1.2", "3.13.3"),
    nist_r3=("03.01.02",),
    cmmc=("AC.L2-3.1.2", "SC.L2-3.13.3"),
    bsi=("APP.3.1.A12",),
    inferred=True,
)
TLS = References(
    "TLS at the gateway",
    nist_r2=("3.13.8",),
    nist_r3=("03.13.08",),
    cmmc=("SC.L2-3.13.8",),
    bsi=("APP.3.2.A11",),
    inferred=False,
)
TLS_KEYS = References(
    "TLS keys and certificates: mode, expiry, renewal",
    cis_docker=("3.13", "3.14"),
    nist_r2=("3.13.10",),
    nist_r3=("03.13.10",),
    cmmc=("SC.L2-3.13.10",),
    bsi=("CON.1.A4",),
    inferred=True,
)
EVIDENCE = References(
    "incident path (who is told, evidence kept)",
    nist_r2=("3.6.1", "3.6.2"),
    nist_r3=("03.06.01", "03.06.02", "03.06.05"),
    cmmc=("IR.L2-3.6.1", "IR.L2-3.6.2"),
    bsi=("DER.1.A3", "SYS.1.6.A22"),
    inferred=True,
)
ADVISORIES = References(
    "vulnerability advisories (OS, engine, gateway, driver) and scan",
    cis_docker=("4.4",),
    nist_r2=("3.11.2", "3.14.3"),
    nist_r3=("03.11.02", "03.14.03"),
    cmmc=("RA.L2-3.11.2", "SI.L2-3.14.3"),
    bsi=("OPS.1.1.1.A10", "OPS.1.1.1.A20"),
    inferred=False,
)
KERNEL_PROTECTION = References(
    "unneeded services and protections of the kernel",
    nist_r2=("3.4.2",),
    nist_r3=("03.04.02",),
    cmmc=("CM.L2-3.4.2",),
    bsi=("SYS.1.3.A14",),
    inferred=True,
)
KERNEL_MEMORY = References(
    "ASLR, ptrace_scope 1, no dumps of privileged programs",
    cis_debian12=("1.5.1", "1.5.2", "1.5.3"),
    cis_ubuntu2404=("1.5.1", "1.5.2", "1.5.3"),
    bsi=("SYS.1.3.A4", "SYS.1.3.A14"),
    inferred=True,
)
ASLR = References(
    "ASLR",
    cis_debian12=("1.5.1",),
    cis_ubuntu2404=("1.5.1",),
    bsi=("SYS.1.3.A4",),
    inferred=False,
)
PTRACE = References(
    "ptrace_scope 1",
    cis_debian12=("1.5.2",),
    cis_ubuntu2404=("1.5.2",),
    bsi=("SYS.1.3.A4",),
    inferred=True,
)
KERNEL_POINTERS = References(
    "kernel pointers and dmesg hidden",
    nist_r2=("3.1.5",),
    nist_r3=("03.01.05",),
    cmmc=("AC.L2-3.1.5",),
    bsi=("SYS.1.3.A14",),
    inferred=True,
)
# 3.3.7 is not claimed: it asks for rp_filter 1, and nodes with several networks have 2 (see roles/kernel/hardening.py).
KERNEL_NETWORK = References(
    "rp_filter, redirects, source routes, SYN cookies",
    cis_debian12=("3.3.2", "3.3.3", "3.3.4", "3.3.5", "3.3.6", "3.3.8", "3.3.10"),
    cis_ubuntu2404=("3.3.2", "3.3.3", "3.3.4", "3.3.5", "3.3.6", "3.3.8", "3.3.10"),
    nist_r2=("3.13.1",),
    nist_r3=("03.13.01",),
    cmmc=("SC.L2-3.13.1",),
    bsi=("NET.3.2.A19",),
    inferred=True,
)
KERNEL_MODULES = References(
    "unneeded kernel modules blocked",
    cis_debian12=(
        "1.1.1.1",
        "1.1.1.2",
        "1.1.1.3",
        "1.1.1.4",
        "1.1.1.5",
        "1.1.1.8",
        "1.1.1.9",
        *("3.2.1", "3.2.2", "3.2.3", "3.2.4"),
    ),
    cis_ubuntu2404=(
        "1.1.1.1",
        "1.1.1.2",
        "1.1.1.3",
        "1.1.1.4",
        "1.1.1.5",
        "1.1.1.8",
        "1.1.1.9",
        *("3.2.1", "3.2.2", "3.2.3", "3.2.4"),
    ),
    nist_r2=("3.4.6", "3.4.7"),
    nist_r3=("03.04.06",),
    cmmc=("CM.L2-3.4.6", "CM.L2-3.4.7"),
    bsi=("SYS.1.1.A6",),
)
KERNEL_MARTIANS = References(
    "martians logged",
    cis_debian12=("3.3.9",),
    cis_ubuntu2404=("3.3.9",),
    nist_r2=("3.13.1",),
    nist_r3=("03.13.01",),
    cmmc=("SC.L2-3.13.1",),
    bsi=("NET.3.2.A19",),
)
KERNEL_USB = References(
    "usb-storage blocked",
    cis_debian12=("1.1.1.9",),
    cis_ubuntu2404=("1.1.1.9",),
    nist_r2=("3.1.21", "3.8.7"),
    nist_r3=("03.01.20", "03.08.07"),
    cmmc=("AC.L2-3.1.21", "MP.L2-3.8.7"),
    bsi=("SYS.1.1.A5", "SYS.1.3.A3"),
)
RADIO = References(
    "radio devices off",
    cis_debian12=("3.1.2", "3.1.3"),
    cis_ubuntu2404=("3.1.2", "3.1.3"),
    nist_r2=("3.1.16",),
    nist_r3=("03.01.16",),
    cmmc=("AC.L2-3.1.16",),
    bsi=("SYS.1.1.A6",),
    inferred=False,
)
# 1.3.1.2, the words of the command line, is not claimed: the distributions' kernels have AppArmor on without them.
APPARMOR = References(
    "AppArmor on, container profile loaded",
    cis_debian12=("1.3.1.1", "1.3.1.3"),
    cis_ubuntu2404=("1.3.1.1", "1.3.1.3"),
    cis_docker=("5.2",),
    bsi=("SYS.1.3.A10", "SYS.1.1.A37"),
    inferred=False,
)
# Of the disk only the cap is claimed: 6.2.2.3 would halt a node that serves, 6.2.2.2 would fill its disk.
AUDIT_ON = References(
    "auditd: installed, on, its log capped",
    cis_debian12=("6.2.1.1", "6.2.1.2", "6.2.2.1"),
    cis_ubuntu2404=("6.2.1.1", "6.2.1.2", "6.2.2.1"),
    nist_r2=("3.3.1", "3.3.2"),
    nist_r3=("03.03.01", "03.03.02", "03.03.03"),
    cmmc=("AU.L2-3.3.1", "AU.L2-3.3.2"),
    bsi=("SYS.1.1.A10", "OPS.1.1.5.A3"),
    inferred=False,
)
AUDIT_RULES = References(
    "auditd: rules (accounts, sudoers, clock, modules, network, MAC)",
    cis_debian12=("6.2.3.1", "6.2.3.2", "6.2.3.4", "6.2.3.5", "6.2.3.8", "6.2.3.14", "6.2.3.19"),
    cis_ubuntu2404=("6.2.3.1", "6.2.3.2", "6.2.3.4", "6.2.3.5", "6.2.3.8", "6.2.3.14", "6.2.3.19"),
    nist_r2=("3.1.7", "3.3.1"),
    nist_r3=("03.01.07", "03.03.01", "03.03.03"),
    cmmc=("AC.L2-3.1.7", "AU.L2-3.3.1"),
    bsi=("SYS.1.1.A10", "OPS.1.1.2.A28", "SYS.1.3.A6"),
    inferred=False,
)
AUDIT_DOCKER = References(
    "auditd: rules for docker and containerd paths, gateway key file",
    cis_docker=("1.1.3", "1.1.6", "1.1.7", "1.1.9", "1.1.11", "1.1.12", "1.1.14", "1.1.18"),
    nist_r2=("3.3.1",),
    nist_r3=("03.03.01", "03.03.03"),
    cmmc=("AU.L2-3.3.1",),
    bsi=("SYS.1.1.A10", "OPS.1.1.2.A28"),
)
AUDIT_STRICT = References(
    "auditd: rules (mounts, records of logins)",
    cis_debian12=("6.2.3.10", "6.2.3.11", "6.2.3.12"),
    cis_ubuntu2404=("6.2.3.10", "6.2.3.11", "6.2.3.12"),
    nist_r2=("3.3.1",),
    nist_r3=("03.03.01", "03.03.03"),
    cmmc=("AU.L2-3.3.1",),
    bsi=("SYS.1.1.A10",),
)
AUDIT_LOCKED = References(
    "auditd: rules locked, on from boot",
    cis_debian12=("6.2.1.3", "6.2.1.4", "6.2.3.20"),
    cis_ubuntu2404=("6.2.1.3", "6.2.1.4", "6.2.3.20"),
    nist_r2=("3.3.1", "3.3.9", "3.4.3"),
    nist_r3=("03.03.08", "03.04.03"),
    cmmc=("AU.L2-3.3.1", "AU.L2-3.3.9", "CM.L2-3.4.3"),
    bsi=("OPS.1.1.5.A10",),
)
# 6.2.4.3 is not claimed: whose group the records are is not looked at, only that it does not write them.
AUDIT_FILES = References(
    "auditd: records guarded",
    cis_debian12=("6.2.4.1", "6.2.4.2", "6.2.4.4"),
    cis_ubuntu2404=("6.2.4.1", "6.2.4.2", "6.2.4.4"),
    nist_r2=("3.3.8", "3.3.9"),
    nist_r3=("03.03.08",),
    cmmc=("AU.L2-3.3.8", "AU.L2-3.3.9"),
    bsi=("OPS.1.1.5.A10",),
)
AUDIT_LOSS = References(
    "auditd: a record that is lost is known",
    nist_r2=("3.3.1", "3.3.4"),
    nist_r3=("03.03.03", "03.03.04"),
    cmmc=("AU.L2-3.3.1", "AU.L2-3.3.4"),
    bsi=("OPS.1.1.5.A3",),
)
