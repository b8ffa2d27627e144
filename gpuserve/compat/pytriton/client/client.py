"""gpuserve's clients under PyTriton's names. As there, decoupled responses have no time limit."""

from __future__ import annotations

from typing import Any

import gpuserve.client
from gpuserve.client import AsyncioModelClient, FuturesModelClient

__all__ = [
    "AsyncioDecoupledModelClient", "AsyncioModelClient", "DecoupledModelClient", "FuturesModelClient",
    "ModelClient",
]  # fmt: skip


class ModelClient(gpuserve.client.ModelClient):
    """The same as ``gpuserve.client.ModelClient``."""

    @property
    def _general_client(self) -> Any:
        """The tritonclient, which programs pass to ``pytriton.client.utils`` by this name."""
        return self._connection()


class DecoupledModelClient(gpuserve.client.DecoupledModelClient):
    """``gpuserve.client.DecoupledModelClient`` without a time limit for responses."""

    _patient = True


class AsyncioDecoupledModelClient(gpuserve.client.AsyncioDecoupledModelClient):
    """``gpuserve.client.AsyncioDecoupledModelClient`` without a time limit for responses."""

    _patient = True
