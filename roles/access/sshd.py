"""What sshd shall do, per profile and with the reason: one table, from which the drop-in, the checks and the page are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuwright.audit import references as ref
from gpuwright.audit.references import References
from gpuwright.hardening import PROFILES
from gpuwright.render import template
from gpuwright.spec.base import Profile
from roles.access.spec import AccessSpec

DROP_IN = "/etc/ssh/sshd_config.d/00-gpuwright.conf"
KEYS = "/etc/ssh/authorized_keys.d"
EXPECTED = "/etc/gpuwright/access/sshd.expected"
BANNER = "/etc/gpuwright/access/banner"


@dataclass(frozen=True)
class Keyword:
    """One keyword of sshd_config.

    `values` are those of the three profiles, None where sshd is left as it is. A keyword that may stand in a Match block is
    set there: see `drop_in`.
    """

    name: str
    values: tuple[str | None, str | None, str | None]
    reason: str
    may_break: str
    references: References
    in_match: bool = True
    waiver: str = "`access.deviations` names it with a reason"

    def value(self, profile: Profile) -> str | None:
        """The profile's."""
        return self.values[PROFILES.index(profile)]


def _all(value: str) -> tuple[str, str, str]:
    return (value, value, value)


KEYWORDS: tuple[Keyword, ...] = (
    Keyword(
        "PasswordAuthentication",
        _all("no"),
        "passwords are guessed all day; the first value wins, and cloud-init writes one (cloud-init issue 5934)",
        "logins by password; name the account in access.password_users",
        ref.SSH_KEYS_ONLY,
        waiver="`access.password_users` names the account with a reason",
    ),
    Keyword(
        "KbdInteractiveAuthentication",
        _all("no"),
        "PAM asks for the same password under this name",
        "a second factor asked for through PAM: a deviation",
        ref.SSH_KEYS_ONLY,
    ),
    Keyword(
        "PermitEmptyPasswords",
        _all("no"),
        "an account without a password is nobody's",
        "nothing",
        ref.SSH_EMPTY_PASSWORDS,
    ),
    Keyword("PubkeyAuthentication", _all("yes"), "keys are the way in", "nothing", ref.SSH_KEYS_ONLY),
    Keyword(
        "PermitRootLogin",
        ("prohibit-password", "no", "no"),
        "who did it is only known where everybody has an account (CIS asks for the no of server-cis1)",
        "whoever logs in as root, deploys included: give them an account with sudo first",
        ref.SSH_ROOT,
    ),
    Keyword(
        "HostbasedAuthentication",
        _all("no"),
        "another machine's word is no proof of a person",
        "nothing",
        ref.SSH_TRUST.only("5.1.10"),
    ),
    Keyword(
        "IgnoreRhosts",
        _all("yes"),
        "a file in a home must not name machines to trust",
        "nothing",
        ref.SSH_TRUST.only("5.1.11"),
        in_match=False,
    ),
    Keyword(
        "PermitUserEnvironment",
        _all("no"),
        "a user could load a library of theirs into the login",
        "~/.ssh/environment",
        ref.SSH_TRUST.only("5.1.21"),
        in_match=False,
    ),
    Keyword(
        "GSSAPIAuthentication",
        (None, "no", "no"),
        "Kerberos would be a second way in",
        "logins by Kerberos",
        ref.SSH_TRUST.only("5.1.9"),
    ),
    Keyword(
        "TrustedUserCAKeys",
        (None, "none", "none"),
        "whoever has that key makes logins for every account",
        "logins by certificate: a deviation names the authority's file",
        ref.SSH_KEYS_ONLY,
    ),
    Keyword(
        "StrictModes",
        _all("yes"),
        "keys that others can write are not the user's",
        "nothing",
        References(none="no catalogue asks for it; sshd does so by itself, and here it is held"),
        in_match=False,
    ),
    Keyword("X11Forwarding", _all("no"), "a server has no windows", "ssh -X", ref.SSH_FORWARDING.only()),
    Keyword("LogLevel", _all("VERBOSE"), "the log names the key that logged in", "nothing", ref.SSH_LOG),
    Keyword(
        "LoginGraceTime",
        _all("60"),
        "unfinished logins hold a slot",
        "a second factor that takes longer",
        ref.SSH_LIMITS.only("5.1.13"),
        in_match=False,
    ),
    Keyword(
        "MaxStartups",
        (None, "10:30:60", "10:30:60"),
        "unfinished logins are limited early",
        "more than ten connections starting at once; deploys and audits open two per node",
        ref.SSH_LIMITS.only("5.1.18"),
        in_match=False,
    ),
    Keyword(
        "MaxAuthTries",
        (None, "4", "4"),
        "each connection gets few guesses",
        "agents that offer more than four keys: IdentitiesOnly yes",
        ref.SSH_LIMITS.only("5.1.16"),
    ),
    Keyword(
        "MaxSessions",
        (None, "10", "10"),
        "sessions per connection are limited",
        "nothing",
        ref.SSH_LIMITS.only("5.1.17"),
    ),
    Keyword(
        "ClientAliveInterval",
        (None, "60", "60"),
        "a connection whose other end is gone ends",
        "nothing: a client answers by itself, however long a command runs",
        ref.SSH_IDLE,
    ),
    Keyword("ClientAliveCountMax", (None, "3", "3"), "after three minutes without an answer", "nothing", ref.SSH_IDLE),
    Keyword(
        "DisableForwarding",
        (None, None, "yes"),
        "a login is no way around the firewall",
        "ssh -L to an engine on loopback, ssh -J over this node",
        ref.SSH_FORWARDING,
    ),
    Keyword(
        "AuthorizedKeysCommand",
        (None, "none", "none"),
        "keys come from the node file alone",
        "keys from a directory service",
        ref.NAMED_ADMINISTRATORS,
    ),
)
BANNER_KEYWORD = Keyword(
    "Banner", _all(BANNER), "who connects is told what this machine is for", "nothing", ref.SSH_BANNER
)
BY_NAME = {keyword.name.lower(): keyword for keyword in (*KEYWORDS, BANNER_KEYWORD)}

# Best first; what a host's OpenSSH does not offer is left out (`ssh -Q`), so that one list fits 8.9 to 10.x.
# Sources: CIS 5.1.6, 5.1.12, 5.1.15 (what must not be there), BSI TR-02102-4. paramiko, which pyinfra connects with, has
# curve25519-sha256@libssh.org, aes*-ctr, aes*-gcm@openssh.com and hmac-sha2-*: they are in every profile.
_KEX = (
    "mlkem768x25519-sha256",
    "sntrup761x25519-sha512",
    "sntrup761x25519-sha512@openssh.com",
    "curve25519-sha256",
    "curve25519-sha256@libssh.org",
)
_KEX_OLDER = ("diffie-hellman-group16-sha512", "diffie-hellman-group18-sha512", "diffie-hellman-group-exchange-sha256")
_KEX_NIST = ("ecdh-sha2-nistp521", "ecdh-sha2-nistp384", "ecdh-sha2-nistp256")
_CIPHERS = ("chacha20-poly1305@openssh.com", "aes256-gcm@openssh.com", "aes128-gcm@openssh.com")
_CIPHERS_OLDER = ("aes256-ctr", "aes192-ctr", "aes128-ctr")
_MACS = ("hmac-sha2-512-etm@openssh.com", "hmac-sha2-256-etm@openssh.com", "umac-128-etm@openssh.com")
_MACS_OLDER = ("hmac-sha2-512", "hmac-sha2-256")
_ED25519 = ("ssh-ed25519-cert-v01@openssh.com", "ssh-ed25519")
_SK = (
    "sk-ssh-ed25519-cert-v01@openssh.com",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256-cert-v01@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
)
_RSA = ("rsa-sha2-512-cert-v01@openssh.com", "rsa-sha2-256-cert-v01@openssh.com", "rsa-sha2-512", "rsa-sha2-256")
_ECDSA = tuple(f"ecdsa-sha2-nistp{bits}{end}" for bits in (521, 384, 256) for end in ("-cert-v01@openssh.com", ""))

ALGORITHMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "KexAlgorithms": (_KEX + _KEX_OLDER + _KEX_NIST, _KEX + _KEX_OLDER + _KEX_NIST, _KEX + _KEX_OLDER),
    "Ciphers": (_CIPHERS + _CIPHERS_OLDER,) * 3,
    "MACs": (_MACS + _MACS_OLDER, _MACS + _MACS_OLDER, _MACS),
    "PubkeyAcceptedAlgorithms": (_ED25519 + _SK + _ECDSA + _RSA,) * 3,
}
# By the type of a host key, as `ssh-keygen -l` names it.
_HOST_KEY_ALGORITHMS = {"ED25519": _ED25519, "ECDSA": _ECDSA, "RSA": _RSA}
ALGORITHM_CIS: dict[str, tuple[str, ...]] = {"KexAlgorithms": ("5.1.12",), "Ciphers": ("5.1.6",), "MACs": ("5.1.15",)}
"""What CIS has of these; of keys' types it says nothing."""
QUERIES = {
    "KexAlgorithms": "kex",
    "Ciphers": "cipher",
    "MACs": "mac",
    "PubkeyAcceptedAlgorithms": "key-sig",
    "HostKeyAlgorithms": "key-sig",
}
"""What to ask ``ssh -Q`` for a keyword."""


@dataclass(frozen=True)
class HostKey:
    """A host key of a node: its file, its type as ssh-keygen names it (RSA, ED25519, ECDSA, DSA), its bits."""

    path: str
    type: str
    bits: int


ADDRESSES = r"""{
	printf '127.0.0.1\n192.0.2.1\n'
	# Those that Match blocks name; of a network or a pattern one that fits (10.0.* has 10.0.1.1).
	sed -nE 's/^[[:space:]]*[Mm][Aa][Tt][Cc][Hh][[:space:]].*[Aa][Dd][Dd][Rr][Ee][Ss][Ss][[:space:]=]+"?([^"[:space:]]+).*/\1/p' \
		"$configuration/sshd_config" "$configuration"/sshd_config.d/*.conf 2>/dev/null | tr ',' '\n' | sed 's#^!##; s#/.*##; s/[*?]/1/g' |
		awk '/^[0-9.]+$/ {for (parts = split($0, _, "."); parts < 4; parts++) $0 = $0 ".1"} /^[0-9a-fA-F.:]+$/'
} | sort -u"""
"""Shell: the addresses to ask sshd about, a line each; ``$configuration`` is a directory with sshd_config and sshd_config.d.
access-sshd-check has the same lines, because what a deploy refuses an audit must see."""


def allowed(profile: Profile) -> dict[str, tuple[str, ...]]:
    """Keyword to what may be offered, best first; of host keys whatever the profile keeps, a node may have fewer kinds."""
    found = {keyword: lists[PROFILES.index(profile)] for keyword, lists in ALGORITHMS.items()}
    kept = (kind for kind in _HOST_KEY_ALGORITHMS if kind != "ECDSA" or profile != "strict")
    found["HostKeyAlgorithms"] = tuple(name for kind in kept for name in _HOST_KEY_ALGORITHMS[kind])
    return found


def is_weak(key: HostKey, profile: Profile, smallest_rsa: Mapping[Profile, int]) -> bool:
    """DSA and small RSA keys everywhere; ECDSA, which needs a good random number for every signature, in strict."""
    if key.type == "ED25519":
        return False
    if key.type == "RSA":
        return key.bits < smallest_rsa[profile]
    return key.type != "ECDSA" or profile == "strict"


def keywords(spec: AccessSpec, profile: Profile) -> dict[str, str]:
    """Keyword to value, deviations included; algorithms and host keys apart."""
    found = {keyword.name: keyword.value(profile) for keyword in KEYWORDS}
    if spec.banner is not None:
        found["Banner"] = BANNER
    found |= {name: deviation.value for name, deviation in spec.deviations.items() if name.lower() in BY_NAME}
    return {name: value for name, value in found.items() if value is not None}


def auditors(spec: AccessSpec) -> list[str]:
    """Accounts that may look and do nothing else."""
    return [name for name, user in spec.users.items() if user.sudo == "audit"]


def only_users(spec: AccessSpec, profile: Profile) -> bool:
    """Whether nobody else may log in."""
    return profile != "baseline" if spec.only_users is None else spec.only_users


def algorithms(
    spec: AccessSpec, profile: Profile, offered: Mapping[str, Iterable[str]], host_keys: Iterable[HostKey]
) -> dict[str, str]:
    """Keyword to a list of what the host's OpenSSH offers, best first.

    `offered` is what ``ssh -Q`` lists, by keyword. Raises ValueError for a keyword of whose list nothing is offered.
    """
    types = {key.type for key in host_keys}
    wanted = allowed(profile)
    wanted["HostKeyAlgorithms"] = tuple(
        name for kind, names in _HOST_KEY_ALGORITHMS.items() if kind in types for name in names
    )
    found = {}
    for keyword, names in wanted.items():
        there = set(offered.get(keyword, ()))
        chosen = [name for name in names if name in there]
        if not chosen:
            raise ValueError(
                f"of what {keyword} may be in profile {profile}, this OpenSSH has nothing: {', '.join(names)}"
            )
        found[keyword] = ",".join(chosen)
    deviating = {name: deviation.value for name, deviation in spec.deviations.items() if name in found}
    return {name: value for name, value in (found | deviating).items() if value is not None}


def drop_in(
    spec: AccessSpec, profile: Profile, offered: Mapping[str, Iterable[str]], host_keys: Iterable[HostKey]
) -> bytes:
    """The file that sorts first. `host_keys` are those to offer.

    Of a keyword outside Match the first value wins; inside, that of the first block that fits, over all values outside.
    So a block ``Match all`` in the first file overrules the blocks of every other file (seen with OpenSSH 9.2 and 10.0),
    and lists of names such as AllowUsers, which add up outside, are ours alone there.
    """
    host_keys = list(host_keys)
    values = [(BY_NAME[name.lower()], value) for name, value in keywords(spec, profile).items()]
    return template(
        "access/etc/ssh/sshd_config.d/00-gpuwright.conf.j2",
        profile=profile,
        outside=[(keyword, value) for keyword, value in values if not keyword.in_match],
        inside=[(keyword, value) for keyword, value in values if keyword.in_match],
        algorithms=algorithms(spec, profile, offered, host_keys),
        host_keys=host_keys,
        users=list(spec.users),
        auditors=auditors(spec),
        password_users=spec.password_users,
        only_users=only_users(spec, profile),
        keys=KEYS,
        deviations={name.lower(): deviation for name, deviation in spec.deviations.items()},
    )


# sshd -T has its own words for some values.
AS_PRINTED = {"prohibit-password": "without-password"}


def expected(
    spec: AccessSpec, profile: Profile, offered: Mapping[str, Iterable[str]], host_keys: Iterable[HostKey]
) -> list[tuple[str, str, str]]:
    """What ``sshd -T -C user=…`` has to say: (user, keyword in lower case, value); user ``*`` is every login account."""
    lines = [
        ("*", name.lower(), AS_PRINTED.get(value, value))
        for name, value in {**keywords(spec, profile), **algorithms(spec, profile, offered, host_keys)}.items()
        if name != "PasswordAuthentication"
    ]
    password = keywords(spec, profile).get("PasswordAuthentication")
    if password is not None:
        lines.append(("*", "passwordauthentication", password))
        lines += [(user, "passwordauthentication", "yes") for user in spec.password_users]
    lines += [(user, "disableforwarding", "yes") for user in auditors(spec)]
    lines += [(user, "authorizedkeysfile", f"{KEYS}/%u") for user in spec.users]
    if only_users(spec, profile):
        lines.append(("*", "allowusers", " ".join(spec.users)))
    return lines
