"""The model configuration that clients see, at PyTriton's import path."""

from __future__ import annotations

from gpuserve.client.client_config import ClientModelConfig as TritonModelConfig
from gpuserve.client.client_config import ResponseCache, TensorSpec

__all__ = ["ResponseCache", "TensorSpec", "TritonModelConfig"]
