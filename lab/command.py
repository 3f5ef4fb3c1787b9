"""Commands on the machine that runs the lab, and the lab's one kind of error."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence


class LabError(Exception):
    """The lab cannot go on. The message is one sentence for the user: what was seen, and what to do."""


def run(
    argv: Sequence[str],
    *,
    stdin: str | None = None,
    check: bool = True,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its result as text; LabError when it fails (``check``), is missing or takes longer than
    ``timeout`` seconds."""
    try:
        result = subprocess.run(
            list(argv),
            # An empty input when none is given: ssh and apt would otherwise eat the caller's.
            input=stdin or "",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=env,
        )
    except FileNotFoundError:
        raise LabError(f"{argv[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{shlex.join(argv)} had not ended after {timeout:.0f} s") from None
    if check and result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip() or "it said nothing").splitlines()
        raise LabError(f"{shlex.join(argv)} ended with status {result.returncode}: {' | '.join(said[-4:])}")
    return result
