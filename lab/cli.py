"""``gpuwright lab``: throwaway hosts and machines."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from lab import gpus as cards
from lab import hosts, machine_hardware, machine_image, machines, repository, roster
from lab import images as recipes
from lab.command import LabError
from lab.debian import RELEASES
from lab.hosts import Host
from lab.machines import Machine
from lab.progress import step
from lab.server import Server


class _Lab(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LabError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Lab)
def lab() -> None:
    """Throwaway servers to try everything on: blank Debian hosts, booted here in seconds, and machines with their own kernel."""


@lab.command()
@click.option("--hosts", "count", type=click.IntRange(1, 50), default=1, show_default=True, help="how many")
@click.option("--release", type=click.Choice(RELEASES), default="trixie", show_default=True, help="Debian 13 or 12")
@click.option("--names", help="names instead of lab-1, lab-2, …; separated by commas")
@click.option(
    "--machine", help="a virtual machine of this name instead: own kernel, GRUB, NUMA, PCIe; boots in a minute or two"
)
@click.option(
    "--kind",
    type=click.Choice(sorted(machine_hardware.KINDS)),
    help=f"the machine's hardware, hbm by default. {'. '.join(f'{kind}: {title}' for kind, title in machine_hardware.KIND_TITLES.items())}",
)
@click.option(
    "--image",
    type=click.Choice(sorted(machine_image.VARIANTS)),
    help="the machine's disk; provisioned, the default, has the packages that roles install, because apt takes minutes under emulation",
)
@click.option("--blank", is_flag=True, help="have them blank, even those that exist")
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def up(
    count: int,
    release: str,
    names: str | None,
    machine: str | None,
    kind: str | None,
    image: str | None,
    blank: bool,
    as_json: bool,
) -> None:
    """Boot hosts, or a machine. One that exists keeps its disk."""
    started = time.monotonic()
    if machine is None:
        if kind or image:
            raise LabError("--kind and --image are of machines; name one with --machine NAME")
        wanted = names.split(",") if names else [f"lab-{number}" for number in range(1, count + 1)]
        _show(hosts.up(wanted, release, blank=blank), as_json)
    else:
        if names:
            raise LabError("--names is of hosts and --machine of machines; give one of them")
        wanted = [machine]
        _show(machines.up(wanted, kind, image, release, blank=blank), as_json)
    if not as_json:
        click.echo(f"up in {time.monotonic() - started:.1f} s; enter with: gpuwright lab ssh {wanted[0]}", err=True)


@lab.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def list_(as_json: bool) -> None:
    """Show hosts and machines."""
    _show(roster.known(), as_json)


@lab.command()
@click.argument("name")
def ssh(name: str) -> None:
    """Enter a host or machine as root."""
    argv = roster.find(name).ssh_argv()
    sys.stdout.flush()
    os.execvp(argv[0], argv)


@lab.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(name: str, command: tuple[str, ...]) -> None:
    """Run a command on a host or machine as root; its exit status is ours."""
    argv = [*roster.find(name).ssh_argv(), shlex.join(command)]
    sys.stdout.flush()
    os.execvp(argv[0], argv)


@lab.command()
@click.argument("name")
@click.option("--cut", is_flag=True, help="cut the power instead of shutting down first")
def reboot(name: str, cut: bool) -> None:
    """Reboot a host or machine; returns when it is up again."""
    host = roster.find(name)
    with step(f"Rebooting {name}"):
        if cut:
            host.power_cycle()
        else:
            host.reboot()


@lab.command()
@click.argument("name", required=False)
def reset(name: str | None) -> None:
    """Make a host or machine (or all of them) blank again."""
    for host in [roster.find(name)] if name else roster.known():
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
@click.option("--publish", "added", multiple=True, metavar="RELEASE", help="offer this release as well")
@click.option("--withdraw", "removed", multiple=True, metavar="RELEASE", help="offer it no longer")
@click.option("--json", "as_json", is_flag=True, help="print what a program would read")
def packages(added: tuple[str, ...], removed: tuple[str, ...], as_json: bool) -> None:
    """Offer stand-ins of NVIDIA's and Docker's packages on http://repository.lab; without options, show what there is."""
    if removed:
        repository.withdraw(*removed)
    if added:
        repository.publish(*added)
    offered = {name.partition("/")[0]: name for name in repository.published()}
    if as_json:
        content = {"offered": sorted(offered.values()), "known": repository.known(), "key": str(repository.key_file())}
        click.echo(json.dumps(content, indent=2))
        return
    for name in repository.known():
        click.echo(f"{offered.get(name, name)}\t{'offered' if name in offered else '-'}")


@lab.command()
@click.argument("name")
@click.option("--count", type=click.IntRange(0, 16), default=4, show_default=True, help="how many cards")
@click.option("--model", type=click.Choice(sorted(cards.MODELS)), default="rtx-pro-6000", show_default=True)
@click.option("--nvswitches", type=click.IntRange(0, 8), default=0, show_default=True, help="how many NVSwitches")
def gpus(name: str, count: int, model: str, nvswitches: int) -> None:
    """Let a host pretend to have GPUs (stand-ins: nothing computes). Its driver comes from `packages`, with apt."""
    host = roster.find(name)
    if not isinstance(host, Host):
        raise LabError(f"{name} is a machine, whose cards are devices of its own; only hosts pretend to have GPUs")
    cards.plug(host, cards.cards(name, count, model), nvswitches=nvswitches)
    click.echo(f"{name}: {count} x {cards.MODELS[model].name} (stand-ins), {cards.FIXTURE}", err=True)


@lab.command()
@click.argument("names", nargs=-1)
def down(names: tuple[str, ...]) -> None:
    """Take hosts and machines away; without names all of them, with bridge, proxy and registry. Caches stay."""
    if names:
        for host in [roster.find(name) for name in names]:
            host.destroy()
        return
    with step("Taking the lab down"):
        gone = roster.down()
    click.echo(f"gone: {', '.join(gone) or 'nothing was up'}", err=True)


def describe(server: Server) -> dict[str, Any]:
    """A host or machine as JSON: what a program needs to reach it."""
    described = {
        "name": server.name,
        "kind": server.kind,
        "release": server.release,
        "address": server.address,
        "running": server.running,
        "ssh": {
            "user": "root",
            "port": server.port,
            "key": str(server.ssh_key),
            "known_hosts": str(server.known_hosts),
        },
    }
    if isinstance(server, Host):
        described["namespace"] = server.namespace
    if isinstance(server, Machine):
        described |= {"hardware": server.hardware, "image": server.image}
    return described


def _show(servers: Sequence[Server], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([describe(server) for server in servers], indent=2))
        return
    if not servers:
        click.echo("the lab has no hosts; start with: gpuwright lab up", err=True)
        return
    rows = [(server.name, _place(server), server.release, "running" if server.running else "off") for server in servers]
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return
    table = Table("name", "address", "release", "state", box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _place(server: Server) -> str:
    return server.address if server.port == 22 else f"{server.address}:{server.port}"
