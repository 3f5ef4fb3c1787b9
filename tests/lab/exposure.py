"""How exposed systemd calls our units, and the figures that docs/hardening.md has of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuwright import sandbox
from gpuwright.render import REPOSITORY

PAGE = REPOSITORY / "docs/hardening.md"
BEGIN, END = "<!-- exposure: begin -->\n", "<!-- exposure: end -->"
RELEASES = {"trixie": "Debian 13", "bookworm": "Debian 12"}
_HEAD = f"| unit | {' | '.join(RELEASES.values())} | what differs from the base table, and why |\n| --- | --- | --- | --- |\n"

# One of each kind: names are those of a lab host.
ROWS = (
    ("gpuwright-guard.service", sandbox.guard()),
    ("gpuwright-gpu-faults.service", sandbox.gpu_faults()),
    ("gpuwright-firewall.service", sandbox.firewall()),
    ("gpuwright-neighbour-guard.service", sandbox.neighbour_guard()),
    ("gpuwright-acs.service", sandbox.acs()),
    ("gpuwright-p2p.service", sandbox.p2p()),
    ("gpuwright-gpu-settings.service", sandbox.gpu_settings()),
    ("gpuwright-driver-settle.service", sandbox.driver_settle()),
    ("gpuwright-model-NAME.service", sandbox.model("NAME", "/srv/models", None)),
    ("gpuwright-model-verify@.service", sandbox.verification("/srv/models")),
    ("gpuwright-image-NAME.service", sandbox.image("NAME", None)),
    ("gpuwright-engine-NAME.service", sandbox.engine("NAME", True, True, True, "/srv/models")),
    ("gpuwright-engine-guard.service", sandbox.engine_guard()),
    ("gpuwright-gateway.service", sandbox.gateway(low_port=True)),
)


def recorded(page: str) -> dict[str, dict[str, float]]:
    """Unit to release to figure, as the page has them; a release without one is left out."""
    found: dict[str, dict[str, float]] = {}
    table = page.partition(BEGIN)[2].partition(END)[0]
    for line in table.splitlines():
        match = re.match(r"\| `(gpuwright-[^`]+)` \|((?: [\d.-]+ \|)+)", line)
        if match:
            cells = [cell.strip() for cell in match[2].strip(" |").split("|")]
            figures = zip(RELEASES, cells, strict=True)
            found[match[1]] = {release: float(cell) for release, cell in figures if cell != "-"}
    return found


def table(figures: dict[str, dict[str, float]]) -> str:
    """The table of the page with these figures."""
    return _HEAD + "".join(_row(name, confined, figures.get(name, {})) for name, confined in ROWS)


def _row(name: str, confined: sandbox.Confined, figures: dict[str, float]) -> str:
    cells = " | ".join(f"{figures[release]:.1f}" if release in figures else "-" for release in RELEASES)
    return f"| `{name}` | {cells} | {_differences(confined.deviations)} |\n"


def _differences(deviations: Iterable[sandbox.Deviation]) -> str:
    parts = []
    for one in deviations:
        values = [f"`{key}={value}`" for key, value in one.values.items() if value is not None]
        unset = [f"`{key}`" for key, value in one.values.items() if value is None]
        parts.append(" ".join([one.reason, ", ".join(values), *([f"Not set: {', '.join(unset)}."] if unset else [])]))
    return "<br>".join(parts).replace("|", "\\|") or "nothing"
