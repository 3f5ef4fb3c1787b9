"""``gpuwright key …``: API keys by name. The key is shown once; the repository holds its hash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import click

from roles.gateway import keys as store

_FILE = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=store.KEYS_FILE,
    show_default=True,
    help="the file of key names and hashes",
)
_NOTE = click.option("--note", help="whose key it is and what for; kept in the file")


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except store.KeyFileError as error:
        raise click.ClickException(str(error)) from None


@click.group()
def key() -> None:
    """API keys: add, rotate, revoke, list. Nodes follow at the next deploy."""


def _show(entry: store.ApiKey, text: str, path: Path, then: str) -> None:
    # The key alone on standard output, so that it can be piped into a password manager; the rest for people.
    click.echo(f"{entry.id}: shown once, stored nowhere. {path} holds its hash; commit it and deploy. {then}", err=True)
    click.echo(text)


@key.command()
@click.argument("name")
@_NOTE
@_FILE
def add(name: str, note: str | None, path: Path) -> None:
    """Make the first key for NAME and show it, once."""
    with _one_sentence():
        with store.edit(path) as keys:
            entry, text = store.add(keys, name, note)
        _show(entry, text, path, "")


@key.command()
@click.argument("name")
@_NOTE
@_FILE
def rotate(name: str, note: str | None, path: Path) -> None:
    """Make the next key for NAME and show it, once. Older ones stay valid until they are revoked."""
    with _one_sentence():
        with store.edit(path) as keys:
            older = [key.id for key in keys if key.name == name and key.hash]
            entry, text = store.rotate(keys, name, note)
        then = f"Still valid: {', '.join(older)}; later: " + " && ".join(f"gpuwright key revoke {old}" for old in older)
        _show(entry, text, path, then)


@key.command()
@click.argument("name")
@_FILE
def revoke(name: str, path: Path) -> None:
    """Revoke all keys of NAME, or one generation: NAME-01."""
    with _one_sentence():
        with store.edit(path) as keys:
            revoked = store.revoke(keys, name)
        for entry in revoked:
            click.echo(
                f"{entry.id}: revoked. Nodes refuse it after the next deploy; streams that run end by themselves."
            )


@key.command("list")
@click.option("--json", "as_json", is_flag=True, help="for programs")
@_FILE
def list_(as_json: bool, path: Path) -> None:
    """Names, dates and notes; no hashes."""
    with _one_sentence():
        keys = store.load(path)
    rows = [
        {
            "id": entry.id,
            "name": entry.name,
            "created": entry.created.isoformat(),
            "revoked": entry.revoked.isoformat() if entry.revoked else None,
            "note": entry.note,
        }
        for entry in keys
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo(f"{path} has no keys; the first one: gpuwright key add NAME")
    else:
        for entry in keys:
            state = f"revoked {entry.revoked}" if entry.revoked else "valid"
            click.echo(f"{entry.id:<24} {state:<19} created {entry.created}  {entry.note or ''}".rstrip())
