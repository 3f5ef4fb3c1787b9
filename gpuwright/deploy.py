"""``gpuwright deploy``: pyinfra's own run, with an exit status a program can read and a closing table.

pyinfra alone reports success for a dry run with changes and for an interrupted run (pyinfra.md section 1).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from pyinfra import logger
from rich.console import Console
from rich.table import Table

from gpuwright import boot, guard, snapshot
from gpuwright.render import REPOSITORY

DONE, FAILED, PENDING, INTERRUPTED = 0, 1, 2, 130


_REPORT = "GPUWRIGHT_REPORT"


def announce(host: Any, barrier: boot.Barrier) -> None:
    """Called once per host by deploy.py: says what the lock-out guard did, that a reboot is needed and why, and tells the
    wrapper which hosts take part.

    + barrier: what all roles ask of the kernel, and whether this run may reboot for it
    """
    guard.announce(host)
    seen = snapshot.read(host)
    try:
        reasons, noticed = boot.pending(seen, barrier.wanted), boot.noticed(seen)
    except snapshot.CouldNotLook as error:
        reasons, noticed = (), ()
        logger.warning(f"{host.print_prefix}whether a reboot is needed cannot be seen: {error}")
    if reasons:
        then = (
            "this run drains the engines and reboots it, once"
            if barrier.reboots
            else "this run does not reboot it (kernel.reboot: never), and starts and replaces no engine until that was done"
        )
        logger.warning(f"{host.print_prefix}reboot needed, because {'; '.join(reasons)}: {then}")
    if noticed:
        logger.warning(f"{host.print_prefix}a reboot would be good, because {'; '.join(noticed)}; nothing waits for it")
    report(host, (*reasons, *noticed))


def report(host: Any, reasons: Sequence[str]) -> None:
    """Tell the wrapper why a host needs a reboot now; what is told last counts."""
    if to := os.environ.get(_REPORT):
        with Path(to).open("a") as lines:
            lines.write(json.dumps({"host": host.name, "reboot": list(reasons)}) + "\n")


def count(payload: dict[str, Any], hosts: Iterable[str]) -> dict[str, dict[str, int]]:
    """Per host: operations that changed (or would), and that failed. `payload` is pyinfra's ``--json`` document."""
    counts = {name: {"changed": 0, "failed": 0} for name in hosts}
    results = payload["results"]
    for entry in results["operations"] if results else payload["plan"]:
        changed = entry["success"] if results else entry["hosts_with_change"] + entry["hosts_with_conditional_change"]
        for key, names in (("changed", changed), ("failed", entry.get("error", []))):
            for name in names:
                counts.setdefault(name, {"changed": 0, "failed": 0})[key] += 1
    if results:
        failed = results["failed_hosts"]
        for name in failed:
            counts.setdefault(name, {"changed": 0, "failed": 0})
        # An operation that a failed host never reached is listed as an error of that host; one failure is what happened.
        for name, entry in counts.items():
            entry["failed"] = int(name in failed or entry["failed"] > 0)
    return counts


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--dry", is_flag=True, help="Say what would change; exit status 2 when something would.")
@click.option("--json", "as_json", is_flag=True, help="The closing table as JSON on standard output.")
@click.argument("inventory", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def deploy(dry: bool, as_json: bool, inventory: str, arguments: tuple[str, ...]) -> None:
    """Run `pyinfra INVENTORY deploy.py`; further ARGUMENTS (`--limit gpu-01`, `-v`, `--diff`) go to pyinfra as they are.

    Exit status: 0 nothing left to do, 1 something failed, 2 a dry run with changes pending, 130 interrupted.
    """
    if not Path(inventory).is_file():
        raise click.ClickException(f"there is no inventory {inventory}; the ones here are inventory/*.py")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.jsonl"
        command = [sys.executable, "-m", "pyinfra", "--json", "--dry" if dry else "-y", *arguments, inventory]
        process = subprocess.Popen(
            [*command, str(REPOSITORY / "deploy.py")],
            stdout=subprocess.PIPE,
            env=os.environ | {_REPORT: str(report)},
        )
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            click.echo("interrupted: the next run finishes what this one began", err=True)
            sys.exit(INTERRUPTED)
        seen = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if process.returncode in (-signal.SIGINT, INTERRUPTED):
        sys.exit(INTERRUPTED)
    reboots = {entry["host"]: entry["reboot"] for entry in seen}
    try:
        payload = json.loads(output)
    except ValueError:
        # pyinfra has said why on standard error: a refused inventory, no host reached.
        sys.stderr.write(output.decode(errors="replace"))
        sys.exit(FAILED)
    seconds = round(time.monotonic() - started, 1)
    rows = [
        {
            "host": name,
            **counts,
            "reboot_needed": bool(reboots.get(name)),
            "reboot_because": reboots.get(name, []),
            "seconds": seconds,
        }
        for name, counts in sorted(count(payload, reboots).items())
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        table = Table("host", "would change" if dry else "changed", "failed", "reboot needed", "seconds")
        for row in rows:
            table.add_row(
                row["host"],
                str(row["changed"]),
                str(row["failed"]),
                "yes" if row["reboot_needed"] else "no",
                str(seconds),
            )
        Console().print(table)
    if process.returncode or any(row["failed"] for row in rows):
        sys.exit(FAILED)
    sys.exit(PENDING if dry and any(row["changed"] for row in rows) else DONE)
