"""The clients at PyTriton's import path."""

from __future__ import annotations

from gpuserve.compat.pytriton.client.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)

__all__ = [
    "AsyncioDecoupledModelClient", "AsyncioModelClient", "DecoupledModelClient", "FuturesModelClient",
    "ModelClient",
]  # fmt: skip
