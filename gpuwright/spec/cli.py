"""``gpuwright check``, ``pin`` and ``trust``: everything about an inventory that needs no deploy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpuwright.spec import fleet, pins, resolve, trust
from gpuwright.spec.fault import Fault, relative, report
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.secret import Secret, SecretError
from gpuwright.spec.secret import resolve as look_up

_INVENTORY = click.argument("inventory", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="for programs")


def read(inventory: Path) -> fleet.Collected:
    """What an inventory describes, with its faults; a path that is no Python file is a fault too."""
    if not inventory.is_file():
        collected = fleet.Collected(inventory)
        collected.faults.append(Fault(str(inventory), 0, "", "", "is not a file; name one such as inventory/prod.py"))
        return collected
    return fleet.collect(inventory)


@click.command()
@_INVENTORY
@_JSON
@click.option(
    "--allow-unfinished",
    is_flag=True,
    help="accept what only the site can fill in: pins and example host names (to test node files)",
)
def check(inventory: Path, as_json: bool, allow_unfinished: bool) -> None:
    """Validate an inventory and its node files, without contacting anything.

    Exit status: 0 everything is right, 1 something is not.
    """
    collected = read(inventory)
    wrong = [fault for fault in collected.faults if not (fault.unfinished and allow_unfinished)]
    if as_json:
        click.echo(json.dumps(_as_json(collected, wrong), indent=2))
    elif wrong:
        click.echo(report(wrong), err=True)
    else:
        _print(collected)
    raise SystemExit(1 if wrong else 0)


def _as_json(collected: fleet.Collected, wrong: list[Fault]) -> dict[str, Any]:
    return {
        "inventory": relative(collected.file),
        "ok": not wrong,
        "hosts": {
            host: {"node": relative(collected.node_files[host]), **_summary(spec)}
            for host, spec in collected.specs.items()
        },
        "faults": [
            {
                "file": fault.file,
                "line": fault.line or None,
                "path": fault.path or None,
                "seen": fault.seen or None,
                "sentence": fault.sentence,
                "unfinished": fault.unfinished,
            }
            for fault in sorted(set(collected.faults))
        ],
    }


def _summary(spec: NodeSpec) -> dict[str, Any]:
    engines = spec.engine.engines if spec.engine else {}
    items = spec.models.items if spec.models else {}
    return {
        "summary": spec.summary,
        "roles": list(spec.roles),
        "engines": {
            name: {
                "kind": engine.settings.kind,
                "model": engine.model,
                "gpus": list(engine.gpus),
                "image": engine.image.reference if engine.image.digest else None,
                "qualification": engine.qualification,
            }
            for name, engine in engines.items()
        },
        "models": {name: f"{model.repo}@{model.commit}" if model.commit else None for name, model in items.items()},
    }


def _print(collected: fleet.Collected) -> None:
    rows = []
    for host, spec in collected.specs.items():
        engines = spec.engine.engines if spec.engine else {}
        items = spec.models.items if spec.models else {}
        wanted = len(collected.wanted[host])
        open_ = len(list(pins.wanted(spec)))
        rows.append(
            (
                host,
                relative(collected.node_files[host]),
                "engines: " + (", ".join(f"{name} ({e.settings.kind})" for name, e in engines.items()) or "none"),
                "models: " + (", ".join(model.repo for model in items.values()) or "none"),
                f"pins: {wanted - open_} of {wanted}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    hosts = len(rows)
    click.echo(f"{hosts} host{'s' if hosts != 1 else ''} described without a fault; no host was contacted.")
    strangers = [host for host, data in _over_ssh(collected) if not _has_key(host, data)]
    if strangers:
        command = f"gpuwright trust {relative(collected.file)}"
        click.echo(f"No host key is recorded for {', '.join(strangers)}; before the first deploy run: {command}")


def _has_key(host: str, data: dict[str, Any]) -> bool:
    """A hint only: an SSH configuration may lead to another name, which only a connection finds out."""
    name = trust.known_name(data.get("ssh_hostname", host), data.get("ssh_port", 22))
    return data["ssh_strict_host_key_checking"] != "yes" or trust.is_recorded(name, Path(data["ssh_known_hosts_file"]))


@click.command()
@_INVENTORY
@click.option("--only", multiple=True, metavar="KEY", help="an image, model or release as the report names it")
@_JSON
def pin(inventory: Path, only: tuple[str, ...], as_json: bool) -> None:
    """Resolve the tags, branches and releases of an inventory, and record them in its lock file.

    Nothing is written when one of them cannot be resolved. Exit status: 0 the lock file is right, 1 it is not.
    """
    collected = _sound(inventory)
    if collected.known is None or (lock_file := collected.known.file) is None:
        raise click.ClickException(f"{relative(collected.file)} gives its pins itself; there is no lock file to write")
    wanted: dict[tuple[pins.Section, str], NodeSpec] = {}
    for host, items in collected.wanted.items():
        for item in items:
            wanted.setdefault((item.section, item.key), collected.specs[host])
    if unknown := set(only) - {key for _, key in wanted}:
        named = ", ".join(sorted(key for _, key in wanted)) or "nothing"
        raise click.ClickException(f"{', '.join(sorted(unknown))}: not what this inventory pins; it pins {named}")
    new = {section: dict(entries) for section, entries in collected.known.lock.model_dump(mode="json").items()}
    lines: list[dict[str, Any]] = []
    failed: list[str] = []
    for (section, key), spec in wanted.items():
        if only and key not in only:
            continue
        if not as_json:
            click.echo(f"asking about {key} …", err=True)
        try:
            value = _resolve(section, key, spec)
        except resolve.CannotResolve as error:
            failed.append(f"{key}: {error}")
            continue
        lines.append({"section": section, "key": key, "old": new[section].get(key), "new": value})
        new[section][key] = value
    changed = [line for line in lines if line["old"] != line["new"]]
    if changed and not failed:
        pins.write(pins.Lock.model_validate(new), lock_file)
    name = relative(lock_file)
    if as_json:
        click.echo(json.dumps({"lock": name, "written": bool(changed and not failed), "pins": lines, "failed": failed}))
    else:
        for line in lines:
            click.echo(_change(line))
        for sentence in failed:
            click.echo(sentence, err=True)
        unchanged = f"{name} was not changed" if failed else f"{name} was right already"
        click.echo(f"{name} written: review and commit it" if changed and not failed else unchanged, err=bool(failed))
    raise SystemExit(1 if failed else 0)


def _change(line: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        return "nothing" if value is None else value["sha256"] if isinstance(value, dict) else str(value)

    if line["old"] == line["new"]:
        return f"{line['key']}: {short(line['new'])} (unchanged)"
    return f"{line['key']}: {short(line['old'])} -> {short(line['new'])}"


def _resolve(section: pins.Section, key: str, spec: NodeSpec) -> Any:
    architecture = "amd64" if spec.hardware.architecture == "x86_64" else "arm64"
    if section == "images":
        repository, _, tag = key.rpartition(":")
        registries = spec.containers.registries if spec.containers else ()
        ca = next((Path(r.ca) for r in registries if r.host == repository.split("/")[0]), None)
        return resolve.image_digest(repository, tag, architecture, ca)
    if section == "models":
        assert spec.models is not None
        repo, _, revision = key.partition("@")
        ca = Path(spec.models.hub_ca) if spec.models.hub_ca else None
        return resolve.model_commit(spec.models.hub, repo, revision, ca, _token(spec))
    assert spec.gateway is not None
    url, sha256 = resolve.caddy_binary(spec.gateway.caddy.version, architecture, spec.gateway.caddy.url)
    return {"url": url, "sha256": sha256}


def _token(spec: NodeSpec) -> Secret | None:
    if spec.models is None or spec.models.token is None:
        return None
    try:
        return look_up(spec.models.token, "models.token")
    except SecretError as error:
        raise resolve.CannotResolve(str(error)) from None


def _sound(inventory: Path) -> fleet.Collected:
    """The inventory, or its report and exit status 1; what is merely unfinished does not stop it."""
    collected = read(inventory)
    if wrong := [fault for fault in collected.faults if not fault.unfinished]:
        click.echo(report(wrong), err=True)
        raise SystemExit(1)
    return collected


@click.command("trust")
@_INVENTORY
@click.option("--yes", is_flag=True, help="record without asking; the fingerprints are printed all the same")
@click.option("--replace", is_flag=True, help="record changed keys too: the machine was rebuilt, and you know it")
def trust_(inventory: Path, yes: bool, replace: bool) -> None:
    """Record the SSH host keys of an inventory's hosts: the first contact.

    Compare the fingerprints with what the machines print themselves (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`).
    Deploys and audits accept no other key. Exit status: 0 every host is known, 1 one is not.
    """
    collected = _sound(inventory)
    failed = False
    by_file: dict[Path, list[trust.HostKey]] = {}
    for host, data in _over_ssh(collected):
        known = Path(data["ssh_known_hosts_file"])
        try:
            keys = trust.compared(trust.scan(data.get("ssh_hostname", host), data.get("ssh_port", 22)), known)
        except trust.CannotLook as error:
            click.echo(f"{host}: {error}", err=True)
            failed = True
            continue
        for key in keys:
            click.echo(f"{host}  {key.kind}  {key.fingerprint}  {key.state}")
        changed = any(key.state == "changed" for key in keys)
        if changed and not replace:
            click.echo(
                f"{host}: its key is not the one in {relative(known)}. Rebuilt? Then run this again with --replace. "
                "Otherwise somebody else answers in its place.",
                err=True,
            )
            failed = True
            continue
        by_file.setdefault(known, []).extend(key for key in keys if changed or key.state != "known")
    news = sum(map(len, by_file.values()))
    if news and not yes and not _agreed(news):
        click.echo("nothing was recorded", err=True)
        raise SystemExit(1)
    for known, keys in by_file.items():
        if keys:
            trust.record(keys, known)
            click.echo(f"{len(keys)} key{'s' if len(keys) != 1 else ''} recorded in {relative(known)}")
    raise SystemExit(1 if failed else 0)


def _over_ssh(collected: fleet.Collected) -> Iterator[tuple[str, dict[str, Any]]]:
    for host, data in collected.hosts.items():
        if not host.startswith("@"):
            yield host, data


def _agreed(news: int) -> bool:
    if not sys.stdin.isatty():
        click.echo("nobody is here to look at the fingerprints; compare them and run again with --yes", err=True)
        return False
    return click.confirm(f"Record {news} key{'s' if news != 1 else ''}?")
