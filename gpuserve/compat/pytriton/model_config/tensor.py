"""``Tensor`` where PyTriton has it."""

from __future__ import annotations

from gpuserve.declare.model import Tensor

__all__ = ["Tensor"]
