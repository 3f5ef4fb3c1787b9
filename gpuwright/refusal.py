"""How a command that runs on the controller says no: one sentence, in red, and its host's run ends.

An exception there would be printed by pyinfra with its traceback, whatever it says.
"""

from __future__ import annotations

from typing import Any

from pyinfra import logger
from pyinfra.api import FunctionCommand


def say_no(state: Any, host: Any, sentence: str) -> bool:
    """Say why not, and fail: what a function of `FunctionCommand` returns."""
    host.log_styled(sentence, fg="red", log_func=logger.error)
    return False


def refusal(sentence: str) -> FunctionCommand:
    """A command that fails its host with one sentence."""
    return FunctionCommand(say_no, (sentence,), {})
