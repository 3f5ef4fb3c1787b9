"""What role `kernel` promises."""

from __future__ import annotations

from gpuwright.audit.control import Control

CONTROLS: tuple[Control, ...] = ()
