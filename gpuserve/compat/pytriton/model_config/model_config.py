"""``ModelConfig`` at PyTriton's import path."""

from __future__ import annotations

from gpuserve.model.declaration import DynamicBatcher, ModelConfig, ModelWarmup

__all__ = ["DynamicBatcher", "ModelConfig", "ModelWarmup"]
