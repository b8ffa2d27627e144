"""``Tensor`` at PyTriton's import path."""

from __future__ import annotations

from gpuserve.model.declaration import Tensor

__all__ = ["Tensor"]
