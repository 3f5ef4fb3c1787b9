"""What role `pcie` promises."""

from __future__ import annotations

from gpuwright.audit.control import Control

CONTROLS: tuple[Control, ...] = ()
