"""Two judges of hardening that were not written here, as Debian packages them, and what docs/hardening.md has of their words.

Lynis on every release. OpenSCAP with the guides of ComplianceAsCode on Debian 12: Debian's package has none for Debian 13.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

from trial import Trial

from gpuwright.render import REPOSITORY

PAGE = REPOSITORY / "docs/hardening.md"
RELEASES = {"trixie": "Debian 13", "bookworm": "Debian 12"}
STAGES = ("blank", "baseline", "server-cis1", "strict")
# Lynis's tests that ask a kernel, its modules and its boot loader, which a lab host does not have; as one group of ours, because
# Lynis takes one name and no blanks.
MACHINE = "of_a_machine"
_OF_A_MACHINE = "boot_services kernel kernel_hardening storage usb networking accounting mac_frameworks hardening"
GUIDES = {
    "standard": "Standard System Security Profile",
    "anssi_bp28_minimal": "ANSSI BP-028, minimal",
    "anssi_bp28_intermediary": "ANSSI BP-028, intermediary",
    "anssi_bp28_enhanced": "ANSSI BP-028, enhanced",
}
_CONTENT = "/opt/guides/usr/share/xml/scap/ssg/content/ssg-debian12-ds.xml"
_PROFILE = "xccdf_org.ssgproject.content_profile_"

INSTALL = "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && apt-get -qq -y --no-install-recommends install "
# The guides for Debian 12 come with Debian 13's package: without a word in the host's own sources.
INSTALL_GUIDES = (
    INSTALL
    + """openscap-scanner >/dev/null 2>&1 && mkdir -p /opt/guides/lists/partial && cd /opt/guides &&
sed 's/bookworm/trixie/g' /etc/apt/sources.list >sources &&
o="-o Dir::Etc::SourceList=/opt/guides/sources -o Dir::Etc::SourceParts=- -o Dir::State::Lists=/opt/guides/lists" &&
apt-get -qq $o update && apt-get -qq $o download ssg-debian && dpkg -x ssg-debian_*.deb . && rm -r lists"""
)


def console(node: Trial, command: str, timeout: float = 600) -> str:
    """As somebody at the machine's console: no network, no sshd, whoever may still log in."""
    argv = ["nsenter", "--all", "--target", str(node.host._init()), "sh", "-c", command]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-1000:]}"
    return done.stdout


@dataclass
class Lynis:
    """One run: its hardening index, and what it said, as ``ID`` and sentence."""

    index: int
    text: str
    warnings: set[tuple[str, str]] = field(default_factory=set)
    suggestions: set[tuple[str, str]] = field(default_factory=set)

    @property
    def figure(self) -> str:
        """As a cell of the page has it."""
        return f"{self.index} ({len(self.warnings)} warnings, {len(self.suggestions)} suggestions)"

    @property
    def findings(self) -> set[tuple[str, str]]:
        """Both kinds."""
        return self.warnings | self.suggestions


def report(text: str) -> Lynis:
    """What Lynis wrote to its report. Raises ValueError for one that has no index."""
    index = re.search(r"^hardening_index=(\d+)$", text, re.M)
    if not index:
        raise ValueError("no hardening_index")
    found = Lynis(int(index[1]), text)
    for kind, entry in re.findall(r"^(warning|suggestion)\[\]=(.*)$", text, re.M):
        key, sentence, detail = [*entry.split("|"), "", ""][:3]
        said = sentence if detail in ("", "-") else f"{sentence} ({detail})"
        {"warning": found.warnings, "suggestion": found.suggestions}[kind].add((key, said.replace("|", "/")))
    return found


def lynis(sh: Callable[[str], str], group: str = "") -> Lynis:
    """What Lynis says now; `sh` runs a command there as root, and gives what it prints. `group`: of tests, all if none is named."""
    chosen = f"--no-plugins --tests-from-group {group}" if group else ""
    sh(f"rm -f /var/log/lynis*; lynis audit system --quick --no-colors --quiet {chosen} >/dev/null 2>&1; true")
    return report(sh("cat /var/log/lynis-report.dat"))


def add_group(sh: Callable[[str], str]) -> None:
    """Make `MACHINE` a group that Lynis knows; it reads files of root alone."""
    lines = "".join(f". /usr/share/lynis/include/tests_{group}\n" for group in _OF_A_MACHINE.split())
    sh(f"umask 077; printf '{lines}' >/usr/share/lynis/include/tests_{MACHINE}")


@dataclass(frozen=True)
class Guide:
    """One guide: the score that OpenSCAP computes (0 to 100), and how its rules came out."""

    score: float
    passed: int
    failed: tuple[str, ...]


def openscap(node: Trial) -> dict[str, Guide]:
    """What the guides say of the host now."""
    found = {}
    for name in GUIDES:
        command = (
            f"oscap xccdf eval --profile {_PROFILE}{name} --results /opt/guides/results.xml {_CONTENT} 2>/dev/null"
        )
        said = console(node, f"{command}; [ $? -ne 1 ] && grep -o '<score[^>]*>[0-9.]*' /opt/guides/results.xml")
        rules = re.findall(r"^Rule\s+(\S+)\n(?:.*\n)*?Result\s+(\w+)", said, re.M)
        assert len(rules) > 10, said[-1000:]
        short = [(rule.removeprefix("xccdf_org.ssgproject.content_rule_"), result) for rule, result in rules]
        found[name] = Guide(
            float(said.rsplit(">", 1)[1]),
            sum(result == "pass" for _, result in short),
            tuple(sorted(rule for rule, result in short if result == "fail")),
        )
    return found


# --- what the page has ----------------------------------------------------------------------------------------------


def section(name: str) -> str:
    """What stands between the page's marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    page = PAGE.read_text()
    assert begin in page and end in page, f"{PAGE} has no marks {name}"
    return page.partition(begin)[2].partition(end)[0]


def rows(name: str) -> list[list[str]]:
    """The cells of the table between those marks, without its head."""
    found = [line for line in section(name).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found[2:]]


def figures(name: str) -> dict[str, dict[str, float]]:
    """First cell to stage to figure; cells may say more behind it, and `-` is none yet."""
    found: dict[str, dict[str, float]] = {}
    for first, *cells in rows(name):
        known = [(stage, re.match(r"[\d.]+", cell)) for stage, cell in zip(STAGES, cells, strict=True)]
        found[first] = {stage: float(match[0]) for stage, match in known if match}
    return found
