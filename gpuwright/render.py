"""One Jinja2 environment for every template; an undefined name is an error, never an empty string."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import jinja2

REPOSITORY = Path(__file__).resolve().parent.parent

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(REPOSITORY / "templates"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,
)
_environment.filters["shell"] = shlex.quote


def template(name: str, /, **values: Any) -> bytes:
    """Render ``templates/<name>`` (as in ``engine/etc/systemd/system/engine.service.j2``).

    Raises jinja2.UndefinedError for a missing value, jinja2.TemplateNotFound for a missing file.
    """
    return _environment.get_template(name).render(**values).encode()


def static(name: str) -> bytes:
    """The bytes of ``files/<name>`` (as in ``engine/usr/local/lib/gpuwright/engine-run``)."""
    return (REPOSITORY / "files" / name).read_bytes()
