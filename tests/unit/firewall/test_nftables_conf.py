"""What nftables.service runs: the real script, with /etc below a temporary folder and a STAND-IN for nft that keeps what it is told."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuwright.audit.control import Outcome
from gpuwright.render import static
from gpuwright.snapshot import Snapshot
from roles.firewall import checks
from roles.firewall.facts import SITE

SCRIPT = static("firewall/usr/local/lib/gpuwright/nftables-conf").decode()
TABLE = "table inet site {\n\tchain input {\n\t\ttcp dport 8003 counter drop\n\t}\n}\n"


class Etc:
    """A node's /etc."""

    def __init__(self, root: Path) -> None:
        self.root = root / "etc"
        self.root.mkdir()
        self.told = root / "told"
        self.script = root / "nftables-conf"
        self.script.write_text(SCRIPT.replace("/etc/", f"{self.root}/"))
        nft = root / "nft"
        nft.write_text(f"#!/bin/sh\ncat >{self.told}\n")
        nft.chmod(0o755)

    def write(self, text: str, name: str = "nftables.conf") -> None:
        file = self.root / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace("/etc/", f"{self.root}/"))

    def run(self, action: str) -> subprocess.CompletedProcess[str]:
        self.told.unlink(missing_ok=True)
        return subprocess.run(
            ["sh", self.script, action],
            env={"PATH": f"{self.root.parent}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )

    def statements(self, action: str = "load") -> list[str]:
        """What nft was told, without blanks that mean nothing."""
        done = self.run(action)
        assert done.returncode == 0, done.stderr
        return [" ".join(line.split()) for line in self.told.read_text().splitlines() if line.strip()]


@pytest.fixture
def etc(tmp_path: Path) -> Etc:
    return Etc(tmp_path)


def emptied(*tables: str) -> list[str]:
    return [f"{verb} {table}" for table in tables for verb in ("table", "delete table")]


SITE_TABLE = ["table inet site {", "chain input {", "tcp dport 8003 counter drop", "}", "}"]

SHAPES = {
    "as Debian has it": ("#!/usr/sbin/nft -f\n\nflush ruleset\n\n" + TABLE, ["inet site"], SITE_TABLE),
    "a comment behind the flush": ("flush ruleset # all of it\n" + TABLE, ["inet site"], SITE_TABLE),
    "a flush of one family": ("flush\truleset  inet;\n" + TABLE, ["inet site"], SITE_TABLE),
    "on one line with a table": ("flush ruleset; " + TABLE, ["inet site"], SITE_TABLE),
    "a table behind a definition": ("define door = { 1, 2 }; " + TABLE, ["inet site"], ["define door = { 1, 2 } ; " + SITE_TABLE[0], *SITE_TABLE[1:]]),
    "a table made and deleted first": ("table inet site\ndelete table inet site\n" + TABLE, ["inet site"], ["table inet site", "delete table inet site", *SITE_TABLE]),
    "on two lines": ("flush \\\n  ruleset\ntable \\\n inet site { }\n", ["inet site"], ["table inet site { }"]),
    "without a family": ("add table own\nadd chain own c\n", ["ip own"], ["add table own", "add chain own c"]),
    "words that only look like it": (
        'table inet site {\n chain c {\n # flush ruleset; table ip nat {\n accept comment "; flush ruleset; } table ip nat {"\n }\n}\n',
        ["inet site"],
        ["table inet site {", "chain c {", 'accept comment "; flush ruleset; } table ip nat {"', "}", "}"],
    ),
    "includes, one in a block": (
        'include "/etc/n/*.nft"; include "n/one.rules"\ntable inet site {\n include "/etc/n/inside"\n}\ninclude "/etc/none/*"\n',
        ["ip more", "ip6 one", "inet site"],
        ["table ip more { }", "table ip6 one { }", "table inet site {", "chain inside { }", "}"],
    ),
    "nothing but a flush": ("flush ruleset", [], []),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_flush_goes_and_the_sites_tables_are_replaced(etc, shape):
    text, tables, rest = SHAPES[shape]
    etc.write(text)
    etc.write("flush ruleset # here, too\ntable ip more { }\n", "n/a.nft")
    etc.write("table ip6 one { }\n", "n/one.rules")
    etc.write("chain inside { }\n", "n/inside")
    assert etc.statements() == [*emptied(*tables), *rest]
    assert etc.statements("unload") == emptied(*tables)
    assert etc.run("check").stdout == ""


SHARED = "is a table of iptables or Docker, whose rules would go with it"
OURS = "inet gpuwright is a table of gpuwright"

REFUSED = {
    "table ip nat {\n chain postrouting { }\n}\n": f"ip nat {SHARED}",
    "flush ruleset; table filter { }": f"ip filter {SHARED}",
    "add rule ip6 filter INPUT tcp dport 22 accept\n": f"ip6 filter {SHARED}",
    "add ip nat POSTROUTING accept\n": f"ip nat {SHARED}",
    "destroy table ip nat\n": f"ip nat {SHARED}",
    "flush chain ip filter DOCKER-USER\n": f"ip filter {SHARED}",
    "delete table ip docker-bridges\n": f"ip docker-bridges {SHARED}",
    'include "/etc/n/nat"\n': f"ip nat {SHARED}",
    "delete table inet gpuwright\n": OURS,
    "flush chain inet gpuwright_engines output\n": "inet gpuwright_engines is a table of gpuwright",
    'include "/etc/nftables.conf"\n': "nftables.conf includes itself",
    'include "/etc/absent"\n': "absent cannot be read",
    'include "./near"\n': "includes ./near; only whole names",
    'include "/etc/$(touch x)"\n': "only whole names",
    'table inet site { } # fine\ninclude "n\n': "has a quote that does not end in its line",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_would_take_others_rules_along_is_refused_and_nothing_is_loaded(etc, text):
    etc.write("table ip nat { }\n", "n/nat")
    etc.write(text)
    done = etc.run("load")
    assert done.returncode == 1
    assert REFUSED[text] in done.stderr
    assert done.stderr.startswith("nftables-conf: ")
    assert not etc.told.exists()
    found = etc.run("check")
    assert found.returncode == 0
    assert REFUSED[text] in found.stdout


def test_a_file_that_is_refused_still_lets_go_of_the_sites_tables(etc):
    etc.write("table ip nat { }\n" + TABLE)
    assert etc.statements("unload") == emptied("inet site")


def test_what_nft_does_not_understand_is_for_nft_to_name(etc):
    etc.write(TABLE + "table inet site {\n chain broken")
    assert etc.statements()[-2:] == ["table inet site {", "chain broken"]


def test_no_file_is_no_fault_before_it_is_loaded(etc):
    assert (etc.run("check").returncode, etc.run("check").stdout) == (0, "")
    assert "nftables.conf cannot be read" in etc.run("load").stderr


# --- the audit --------------------------------------------------------------------------------------------------------


def _seen(*commands: str, site: str = "") -> Snapshot:
    return Snapshot({checks.OTHERS.name: (0, "\n".join(f"nftables {c}" for c in commands)), SITE.name: (0, site)})


OWN = "Start /usr/local/lib/gpuwright/nftables-conf load"


def test_the_audit_knows_what_the_script_does_not_load():
    [control] = [c for c in checks.CONTROLS if c.id == "GPW-FIRE-005"]
    assert set(control.observed) == {checks.OTHERS, SITE}

    def red(*commands: str, site: str = "") -> str:
        verdict = control.predicate(_seen(*commands, site=site), None)
        return "" if verdict.outcome is Outcome.PASS else verdict.actual

    assert red(OWN, "Reload /usr/sbin/nft -f /etc/gpuwright/firewall/table.nft") == ""
    assert "/etc/nftables.conf: ip nat is" in red(OWN, site="ip nat is a table of iptables")
    assert "ExecStart=: /usr/sbin/nft -f /etc/nftables.conf" in red("Start /usr/sbin/nft -f /etc/nftables.conf")
    assert "Exec" in red(OWN, "Reload /usr/sbin/nft -f /etc/site.nft")
    assert "Exec" in red(OWN, "Stop /usr/sbin/nft flush ruleset")
