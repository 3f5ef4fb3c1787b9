"""What each profile sets, as tables for people: ``python -m gpuwright.audit.profiles docs/hardening.md`` renews that page's part.

The tables are those from which files and controls are made, so the page cannot say anything else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from gpuwright.audit.catalogue import evidence
from gpuwright.audit.references import References
from gpuwright.hardening import LeftOut, Setting
from roles.access import sshd
from roles.base import auditing
from roles.base import hardening as base
from roles.kernel import hardening as kernel

BEGIN, END = "<!-- profiles: begin -->", "<!-- profiles: end -->"


def of_access() -> Iterable[Setting]:
    """sshd's keywords; their table has ids of CIS alone."""
    for keyword in sshd.KEYWORDS:
        references = References(keyword.name, cis_debian12=keyword.cis, cis_ubuntu2404=keyword.cis, inferred=False)
        yield Setting(
            f"`{keyword.name}`",
            keyword.values,
            keyword.reason,
            keyword.may_break,
            "`access.deviations` names it with a reason",
            references,
        )


def page() -> str:
    """Markdown: one table per kind of setting, and what is left out."""
    parts = [
        ("The node in general (role `base`)", base.SETTINGS),
        ("What the kernel's audit records (role `base`)", auditing.SETTINGS),
        ("Kernel settings (role `kernel`, sysctl)", _quoted(kernel.SYSCTLS)),
        ("Kernel modules (role `kernel`)", _quoted(kernel.MODULES)),
        ("sshd (role `access`)", tuple(of_access())),
    ]
    text = "\n".join(f"### {title}\n\n{_table(settings)}" for title, settings in parts)
    return f"{text}\n### What no profile sets, and why\n\n{_left_out((*kernel.LEFT_OUT, *auditing.LEFT_OUT))}"


def _quoted(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    return tuple(
        Setting(f"`{one.name}`", one.values, one.reason, one.may_break, one.waiver, one.references) for one in settings
    )


def _table(settings: tuple[Setting, ...]) -> str:
    waivers = {setting.waiver for setting in settings}
    same = len(waivers) == 1
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
