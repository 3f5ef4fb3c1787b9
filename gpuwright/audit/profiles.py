"""What each profile sets, as tables for people: ``python -m gpuwright.audit.profiles docs/hardening.md`` renews that page's part.

The tables are those from which files and controls are made, so the page cannot say anything else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from gpuwright.audit import references as ref
from gpuwright.audit.catalogue import evidence
from gpuwright.hardening import PROFILES, LeftOut, Setting, from_cis1, in_strict
from gpuwright.spec.base import Profile
from roles.access import keys, sshd
from roles.access.spec import AccessSpec
from roles.base import auditing
from roles.base import hardening as base
from roles.gateway import engine_guard
from roles.kernel import hardening as kernel

BEGIN, END = "<!-- profiles: begin -->", "<!-- profiles: end -->"


ASKED: tuple[Setting, ...] = (
    Setting(
        "role `access`",
        from_cis1("the node file has it"),
        "these profiles say how people log in",
        "whoever `access.users` does not name",
        "none: who leaves logins to sshd wants baseline",
        ref.SSH_WHO.only(),
    ),
    Setting(
        "role `kernel`",
        from_cis1("the node file has it"),
        "these profiles set sysctls and keep modules out",
        "what the tables of sysctls and modules say",
        "none: who leaves the kernel as it is wants baseline; `kernel.sysctls` and `kernel.kept_modules` name single ones",
        ref.KERNEL_PROTECTION,
    ),
    Setting(
        "role `firewall`",
        from_cis1("the node file has it"),
        "what these profiles promise ends at a port that anybody reaches",
        "who reaches a port that `firewall` does not open to them",
        "none: who wants open ports wants baseline; `firewall` opens what is needed",
        ref.PACKET_FILTER,
    ),
    Setting(
        "`console: true`",
        in_strict("the node file says so"),
        "who closes this much needs another way in",
        "nothing; it is a word of somebody who knows the machine",
        "none: without a console, server-cis1",
        ref.References(none="catalogues ask what a console lets in, not that there is one"),
    ),
)
"""What gpuwright/spec/rules/hardening.py refuses a node file without."""


def _each(value: Callable[[Profile], str | None]) -> tuple[str | None, str | None, str | None]:
    baseline, cis1, strict = (value(profile) for profile in PROFILES)
    return baseline, cis1, strict


OF_GATEWAY: tuple[Setting, ...] = (
    Setting(
        "the gateway is the only way to engines",
        _each(lambda profile: "root and the gateway's account" if engine_guard.wanted(None, profile) else None),
        "an engine asks nobody for a key, so that a program on the node is past keys, path list and access log",
        "programs of the site that ask engines on loopback or by their containers' addresses, a metrics agent for one",
        "`gateway.local_clients` names accounts with a reason each, `*` for all of them",
        ref.KEYS_AUTHENTICATE,
    ),
)


def of_access() -> Iterable[Setting]:
    """sshd's keywords and algorithms, who may log in, and how strong keys are."""
    deviation = sshd.KEYWORDS[-1].waiver
    for keyword in sshd.KEYWORDS:
        yield Setting(
            f"`{keyword.name}`",
            keyword.values,
            keyword.reason,
            keyword.may_break,
            keyword.waiver,
            keyword.references,
        )
    for name in (*sshd.ALGORITHMS, "HostKeyAlgorithms"):
        yield Setting(
            f"`{name}`",
            _each(partial(_offered, name)),
            "what is offered is what an attacker in the middle can choose; of these, what the host's OpenSSH has",
            "clients that know none of them",
            deviation,
            ref.SSH_ALGORITHMS.only(*sshd.ALGORITHM_CIS.get(name, ())),
        )
    yield Setting(
        "`AllowUsers`",
        _each(lambda profile: "the accounts of the node file" if sshd.only_users(_ANYBODY, profile) else None),
        "every further account is a way in that nobody watches",
        "whoever `access.users` does not name",
        "`access.only_users: false`",
        ref.SSH_WHO,
    )
    yield Setting(
        "RSA keys, of users and of the host",
        _each(lambda profile: f"at least {keys.SMALLEST_RSA[profile]} bits"),
        "a short key can be computed",
        "users with a shorter key are refused; a shorter host key is deleted, and who knows the node by it learns another",
        "none: a key of another kind is one command (`ssh-keygen -t ed25519`), and both can be had for a while",
        ref.SSH_ALGORITHMS.only(),
    )
    yield Setting(
        "ECDSA host keys",
        _each(lambda p: "deleted" if sshd.is_weak(sshd.HostKey("", "ECDSA", 256), p, keys.SMALLEST_RSA) else None),
        "every signature needs a good random number; one bad one gives the key away",
        "who knows the node by this key alone learns its ed25519 key",
        "none: the ed25519 key is there first, so let clients learn that one in server-cis1",
        ref.SSH_ALGORITHMS.only(),
    )


# What only the profile decides.
_ANYBODY = AccessSpec.model_construct(users={})


def _offered(keyword: str, profile: Profile) -> str:
    return ", ".join(sshd.allowed(profile)[keyword])


def page() -> str:
    """Markdown: one table per kind of setting, and what is left out."""
    parts = [
        ("The node in general (role `base`)", base.SETTINGS),
        ("What the kernel's audit records (role `base`)", auditing.SETTINGS),
        ("Kernel settings (role `kernel`, sysctl)", _quoted(kernel.SYSCTLS)),
        ("Kernel modules (role `kernel`)", _quoted(kernel.MODULES)),
        ("Who logs in, and how (role `access`)", tuple(of_access())),
        ("Who reaches engines (role `gateway`)", OF_GATEWAY),
        ("What the node file must have besides", ASKED),
    ]
    text = "\n".join(f"### {title}\n\n{_table(settings)}" for title, settings in parts)
    return f"{text}\n### What no profile sets, and why\n\n{_left_out((*kernel.LEFT_OUT, *auditing.LEFT_OUT))}"


def _quoted(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    return tuple(
        Setting(f"`{one.name}`", one.values, one.reason, one.may_break, one.waiver, one.references) for one in settings
    )


def _table(settings: tuple[Setting, ...]) -> str:
    waivers = {setting.waiver for setting in settings}
    same = len(waivers) == 1 and not settings[0].waiver.startswith("none:")
    head = ["setting", "baseline", "server-cis1", "strict", "why", "what it may break"]
    head += ["evidence for"] if same else ["how to waive it", "evidence for"]
    rows = [
        [
            setting.name,
            *(value or "-" for value in setting.values),
            setting.reason,
            setting.may_break,
            *(() if same else (setting.waiver,)),
            evidence(setting.references) or "-",
        ]
        for setting in settings
    ]
    before = f"To waive one: {waivers.pop()}.\n\n" if same else ""
    return before + _markdown(head, rows)


def _left_out(settings: tuple[LeftOut, ...]) -> str:
    return _markdown(
        ["setting", "what it breaks", "instead"], [[one.name, one.breaks, one.instead] for one in settings]
    )


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def renewed(text: str) -> str:
    """A page with its part between the marks as the tables are now. Raises ValueError where it has no such part."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN} and one {END}")
    return re.sub(f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{page()}\n{END}", text)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text()))
