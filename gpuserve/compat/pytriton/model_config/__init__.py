"""Declarations of models: gpuserve's own classes, whose names and defaults are PyTriton's."""

from __future__ import annotations

from gpuserve.client.client_config import ClientModelConfig as TritonModelConfig
from gpuserve.client.client_config import DeviceKind, ResponseCache, TensorSpec
from gpuserve.model.declaration import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction

__all__ = [
    "DeviceKind", "DynamicBatcher", "ModelConfig", "QueuePolicy", "ResponseCache", "Tensor", "TensorSpec",
    "TimeoutAction", "TritonModelConfig",
]  # fmt: skip
