"""Login accounts of a node: whether a password opens them, and whether a group makes them root."""

from __future__ import annotations

from dataclasses import dataclass

ROOT_BY = ("disk", "docker", "incus-admin", "libvirt", "lxd")
"""Groups whose members are root by other means: they write disks, or start containers and machines with root's rights."""
SUDO_BY = ("admin", "sudo", "wheel")
"""Groups that sudoers of distributions make root (Debian and Ubuntu: sudo; older Ubuntu: admin; others: wheel)."""


@dataclass(frozen=True)
class LoginAccount:
    """An account with a shell: "usable", "empty" or "none" for its password, and those of its groups that are told above."""

    name: str
    password: str
    groups: tuple[str, ...] = ()

    @property
    def root_by(self) -> tuple[str, ...]:
        """Of its groups those that are root."""
        return tuple(group for group in self.groups if group in ROOT_BY)

    @property
    def sudo_by(self) -> tuple[str, ...]:
        """Of its groups those that sudo knows."""
        return tuple(group for group in self.groups if group in SUDO_BY)


# Passwords as crypt(5) has them: what starts with ! or * matches none. A hash may stand in passwd itself (pwunconv(8)).
SCRIPT = rf"""
{{ getent shadow; echo --; getent group; echo --; getent passwd; }} | awk -F: '
  $0 == "--" {{part++; next}}
  part == 0 {{hash[$1] = $2; next}}
  part == 1 {{
    if ($1 !~ /^({"|".join((*ROOT_BY, *SUDO_BY))})$/) next
    group[$3] = $1
    count = split($4, names, ",")
    for (i = 1; i <= count; i++) groups[names[i]] = groups[names[i]] "," $1
    next
  }}
  $7 !~ /(nologin|false|sync|shutdown|halt)$/ {{
    word = $2 == "x" ? ($1 in hash ? hash[$1] : "*") : $2
    if ($4 in group) groups[$1] = groups[$1] "," group[$4]
    printf "login\t%s\t%s\t%s\n", $1, word == "" ? "empty" : word ~ /^[!*]/ ? "none" : "usable", substr(groups[$1], 2)
  }}'
"""
"""sh that prints a line for each: ``login``, name, password, groups joined by commas; tabs between. Only root reads hashes."""


def parse(text: str) -> tuple[LoginAccount, ...]:
    """What the script prints, typed. Raises ValueError where there is no account at all: root is always one."""
    rows = [line.split("\t") for line in text.splitlines() if line.startswith("login\t")]
    if not rows:
        raise ValueError("no login account was seen, and root is one")
    return tuple(
        LoginAccount(name, password, tuple(sorted({group for group in groups.split(",") if group})))
        for _, name, password, groups in rows
    )
