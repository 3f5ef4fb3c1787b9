"""``gpuwright lab``: throwaway hosts."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lab import hosts as rooms
from lab import images as recipes
from lab.command import LabError
from lab.debian import RELEASES
from lab.hosts import Host
from lab.progress import step


class _Lab(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LabError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Lab)
def lab() -> None:
    """Throwaway hosts to try everything on: blank Debian machines, booted here in seconds."""


@lab.command()
@click.option("--hosts", "count", type=click.IntRange(1, 50), default=1, show_default=True, help="how many")
@click.option("--release", type=click.Choice(RELEASES), default="trixie", show_default=True, help="Debian 13 or 12")
@click.option("--names", help="names instead of lab-1, lab-2, …; separated by commas")
@click.option("--blank", is_flag=True, help="have them blank, even those that exist")
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def up(count: int, release: str, names: str | None, blank: bool, as_json: bool) -> None:
    """Boot hosts. One that exists keeps its disk."""
    wanted = names.split(",") if names else [f"lab-{number}" for number in range(1, count + 1)]
    started = time.monotonic()
    _show(rooms.up(wanted, release, blank=blank), as_json)
    if not as_json:
        click.echo(f"up in {time.monotonic() - started:.1f} s; enter with: gpuwright lab ssh {wanted[0]}", err=True)


@lab.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def list_(as_json: bool) -> None:
    """Show the hosts."""
    _show(rooms.known(), as_json)


@lab.command()
@click.argument("name")
def ssh(name: str) -> None:
    """Enter a host as root."""
    argv = rooms.find(name).ssh_argv()
    sys.stdout.flush()
    os.execvp(argv[0], argv)


@lab.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(name: str, command: tuple[str, ...]) -> None:
    """Run a command on a host as root; its exit status is ours."""
    argv = [*rooms.find(name).ssh_argv(), shlex.join(command)]
    sys.stdout.flush()
    os.execvp(argv[0], argv)


@lab.command()
@click.argument("name")
@click.option("--cut", is_flag=True, help="cut the power instead of shutting down first")
def reboot(name: str, cut: bool) -> None:
    """Reboot a host; returns when it is up again."""
    host = rooms.find(name)
    with step(f"Rebooting {name}"):
        if cut:
            host.power_cycle()
        else:
            host.reboot()


@lab.command()
@click.argument("name", required=False)
def reset(name: str | None) -> None:
    """Make a host (or all of them) blank again."""
    for host in [rooms.find(name)] if name else rooms.known():
        host.reset()


@lab.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(recipes.RECIPES)))
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def images(names: tuple[str, ...], as_json: bool) -> None:
    """Build engine images, push them to the lab's registry and print them by digest. Default: sim."""
    made = [recipes.build(name) for name in names or ("sim",)]
    if as_json:
        click.echo(json.dumps([asdict(image) for image in made], indent=2))
        return
    for image in made:
        click.echo(f"{image.reference}\t{image.title}")


@lab.command()
@click.argument("names", nargs=-1)
def down(names: tuple[str, ...]) -> None:
    """Take hosts away; without names all of them, with bridge, proxy and registry. Caches stay."""
    if names:
        for host in [rooms.find(name) for name in names]:
            host.destroy()
        return
    with step("Taking the lab down"):
        gone = rooms.down()
    click.echo(f"gone: {', '.join(gone) or 'nothing was up'}", err=True)


def describe(host: Host) -> dict[str, Any]:
    """A host as JSON: what a program needs to reach it."""
    return {
        "name": host.name,
        "release": host.release,
        "address": host.address,
        "running": host.running,
        "ssh": {"user": "root", "key": str(host.ssh_key), "known_hosts": str(host.known_hosts)},
        "namespace": host.namespace,
    }


def _show(hosts: list[Host], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([describe(host) for host in hosts], indent=2))
        return
    if not hosts:
        click.echo("the lab has no hosts; start with: gpuwright lab up", err=True)
        return
    if not sys.stdout.isatty():
        for host in hosts:
            click.echo(f"{host.name}\t{host.address}\t{host.release}\t{'running' if host.running else 'off'}")
        return
    table = Table("host", "address", "release", "state", box=None)
    for host in hosts:
        table.add_row(host.name, host.address, host.release, "running" if host.running else "off")
    Console().print(table)
