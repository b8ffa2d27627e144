"""``ModelConfig`` where PyTriton has it."""

from __future__ import annotations

from gpuserve.declare.model import DynamicBatcher, ModelConfig, ModelWarmup

__all__ = ["DynamicBatcher", "ModelConfig", "ModelWarmup"]
