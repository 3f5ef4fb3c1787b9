"""``gpuwright driver``: what this machine's driver is and whether it fits together, and what a line of a log means.

Reads only, and on this machine: no node file, no connection and no systemd is needed. What cannot be told is said so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape

from gpuwright import snapshot
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import Result, judge_all
from gpuwright.snapshot import SYSTEM, CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec
from roles.nvidia import diagnosis, equality
from roles.nvidia.checks import CONTROLS
from roles.nvidia.facts import NVIDIA, Nvidia
from roles.nvidia.spec import DriverVersion

_STYLE = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.ERROR: "yellow", Outcome.MANUAL: "yellow"}
_SAID = {Outcome.ERROR: "cannot tell"}


def look() -> Snapshot:
    """What the controls of this role ask, answered by this machine."""
    sections: dict[str, Section[Any]] = {SYSTEM.name: SYSTEM}
    for control in CONTROLS:
        sections.update({section.name: section for section in control.observed})
    done = subprocess.run(
        ["sh", "-c", snapshot.script(list(sections.values()))], capture_output=True, text=True, timeout=120, check=False
    )
    return snapshot.parse(done.stdout)


def described(seen: Nvidia | None, version: str | None) -> NodeSpec:
    """A node file for a machine that has none: the driver is somebody else's, and all cards that PCI has are wanted."""
    gpus = sum(device.gpu for device in seen.devices) or len(seen.cards) if seen else 0
    part: dict[str, Any] = {"source": "vendor", "persistence": False}
    if version is not None:
        part["version"] = version
    hardware = {"gpus": {"count": gpus}}
    return NodeSpec.model_validate({"gpuwright": 1, "summary": "this machine", "hardware": hardware, "nvidia": part})


def _release(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else TypeAdapter(DriverVersion).validate_python(value)
    except ValidationError:
        raise click.BadParameter(
            f"seen: {value!r}; expected: a release of the driver as nvidia-smi prints it, as in 580.95.05"
        ) from None


@click.command()
@click.option("--version", callback=_release, help="the release that is expected; without it, whichever is loaded")
@click.option(
    "--diagnose",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="explain what the lines of a log mean (journal, kernel log, apt's history); - is standard input",
)
@click.option("--json", "as_json", is_flag=True, help="for programs")
def driver(version: str | None, logs: tuple[str, ...], as_json: bool) -> None:
    """This machine's NVIDIA driver: what is there, whether it fits together, what the logs say. Changes nothing.

    Exit status: 0 nothing wrong was seen, 1 something is.
    """
    if logs:
        _diagnose(logs, as_json)
        return
    answers = look()
    try:
        seen, why = answers.read(NVIDIA), ""
    except CouldNotLook as error:
        seen, why = None, str(error)
    results = judge_all(CONTROLS, answers, described(seen, version))
    if as_json:
        click.echo(json.dumps(_document(seen, why, results), indent=2))
    else:
        _print(seen, why, results)
    sys.exit(1 if any(result.outcome is Outcome.FAIL for result in results) else 0)


def _document(seen: Nvidia | None, why: str, results: list[Result]) -> dict[str, Any]:
    return {
        "could_not_look": why or None,
        "facts": asdict(seen) if seen else None,
        "findings": [asdict(finding) for finding in equality.findings(seen)] if seen else [],
        "controls": [
            {
                "id": result.control.id,
                "outcome": result.outcome.value,
                "expected": result.verdict.expected,
                "actual": result.verdict.actual,
            }
            for result in results
        ],
    }


def _print(seen: Nvidia | None, why: str, results: list[Result]) -> None:
    out = Console(highlight=False, soft_wrap=True)
    if seen is None:
        out.print(f"the driver cannot be looked at: {escape(why)}")
    else:
        for name, value in _facts(seen):
            out.print(f"{name:<16} {escape(value)}")
        for card in seen.cards:
            power = "power limit unknown" if card.power is None else f"{card.power:g} W of {card.power_max or 0:g} W"
            out.print(
                f"card {card.index:<11} {escape(f'{card.uuid} {card.bus} {card.name}, {card.memory} MiB, {power}')}"
            )
        for finding in equality.findings(seen):
            out.print(
                f"[red]{finding.kind}[/]: {escape(f'{finding.seen}; expected: {finding.expected}; do: {finding.remedy}')}"
            )
    for result in results:
        style = _STYLE.get(result.outcome, "dim")
        word = _SAID.get(result.outcome, result.outcome.value)
        # A line each, never folded: it is read by people and by grep.
        out.print(f"{result.control.id}  [{style}]{word:<14}[/]  {escape(result.verdict.actual)}")


def _facts(seen: Nvidia) -> list[tuple[str, str]]:
    module = (
        f"{seen.module.version}, {'open' if seen.module.open else 'NVIDIA own'} modules"
        if seen.module
        else "none loaded"
    )
    kernels = ", ".join(
        f"{kernel.release}{' (runs)' if kernel.release == seen.running_kernel else ''}: {kernel.module or 'no module'}"
        for kernel in seen.kernels
    )
    boot = {True: "on", False: "off", None: "the firmware tells nothing: no UEFI, or a container"}[seen.secure_boot]
    return [
        ("module", module),
        ("library", seen.library or seen.smi_failed or ("unknown" if seen.smi else "nvidia-smi is not installed")),
        ("packages", f"{equality.release(seen) or 'none'} ({len(equality.every_driver_package(seen))} packages)"),
        ("kernels", kernels or f"none installed here ({seen.running_kernel} runs)"),
        ("Secure Boot", boot),
        ("toolkit", seen.toolkit or "none"),
        (
            "CDI",
            ", ".join(f"{one.path} ({one.driver or 'no library'})" for one in seen.specifications)
            or "no specification",
        ),
        ("NVSwitches", f"{seen.nvswitches}, fabric manager {seen.fabric_manager or 'none'}"),
        ("systemd", "runs" if seen.units is not None else "does not run: what units do cannot be told"),
    ]


def _diagnose(logs: tuple[str, ...], as_json: bool) -> None:
    found, moved = [], []
    for name in logs:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(errors="replace")
        found += diagnosis.diagnoses(text.splitlines())
        moved += diagnosis.moves(text)
    if as_json:
        click.echo(
            json.dumps({"lines": [asdict(one) for one in found], "moves": [asdict(one) for one in moved]}, indent=2)
        )
        return
    for one in found:
        click.echo(f"{one.line}\n  {one.kind}: {one.meaning}\n  do: {one.remedy}")
    for move in moved:
        by = "by itself (unattended-upgrades)" if move.unattended else f"by {move.by or 'an unknown command'}"
        click.echo(f"{move.package} {move.before} -> {move.after}, {move.when}, {by}\n  do: {diagnosis.MOVED}")
    if not found and not moved:
        click.echo("nothing in it is known")
