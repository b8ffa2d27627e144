"""A model's configuration as clients see it."""

from __future__ import annotations

from gpuserve.client.config import ClientModelConfig as TritonModelConfig
from gpuserve.client.config import ResponseCache, TensorSpec

__all__ = ["ResponseCache", "TensorSpec", "TritonModelConfig"]
