"""How a model is declared: gpuserve's own classes, whose names and defaults are PyTriton's."""

from __future__ import annotations

from gpuserve.client.config import DeviceKind
from gpuserve.model.declaration import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction

__all__ = ["DeviceKind", "DynamicBatcher", "ModelConfig", "QueuePolicy", "Tensor", "TimeoutAction"]
