"""``gpuwright …``: what pyinfra and pytest lack. Each group of commands lives in the room it is about."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    # command: module and attribute; imported on use, so that one broken room never takes the others down
    "check": "gpuwright.spec.cli:check",
    "pin": "gpuwright.spec.cli:pin",
    "trust": "gpuwright.spec.cli:trust_",
    "key": "roles.gateway.cli:key",
    "deploy": "gpuwright.deploy:deploy",
    "driver": "roles.nvidia.cli:driver",
    "lab": "lab.cli:lab",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpuwright")
def main() -> None:
    """Keep GPU servers what their node files say: authenticated, audited LLM endpoints."""
