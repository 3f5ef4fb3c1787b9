"""Commands whose output is shown while they run: what takes minutes must not look like a hang (seed 2)."""

from __future__ import annotations

from typing import Any

from pyinfra.api import StringCommand
from pyinfra.connectors.util import CommandOutput


class Watched(StringCommand):
    """A remote command that prints as it goes."""

    def execute(self, state: Any, host: Any, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        """As StringCommand's, but printing. The output is not handed on: it was shown already."""
        connector_arguments.update(self.connector_arguments)
        status, _ = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        return status, CommandOutput([])
