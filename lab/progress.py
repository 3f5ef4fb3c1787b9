"""Progress on standard error: a spinner on a terminal, plain lines when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def step(title: str) -> Iterator[None]:
    """Say that something takes a while, and afterwards how long it took (when it was more than a moment)."""
    started = time.monotonic()
    if sys.stderr.isatty():
        console = Console(stderr=True, highlight=False)
        with console.status(f"{title} …"):
            yield
        console.print(f"[green]✓[/green] {title}  [dim]{time.monotonic() - started:.1f} s[/dim]")
        return
    print(f"lab: {title} …", file=sys.stderr, flush=True)
    yield
    if time.monotonic() - started > 2:
        print(f"lab: {title}: done, {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
