"""gpuserve's clients, which have PyTriton's names, and its patience: it waits for the next response of a
decoupled model as long as that takes, whatever ``inference_timeout_s`` is.
"""

from __future__ import annotations

from typing import Any

import gpuserve.client
from gpuserve.client import AsyncioModelClient, FuturesModelClient

__all__ = [
    "AsyncioDecoupledModelClient",
    "AsyncioModelClient",
    "DecoupledModelClient",
    "FuturesModelClient",
    "ModelClient",
]


class ModelClient(gpuserve.client.ModelClient):
    """As ``gpuserve.client.ModelClient``."""

    @property
    def _general_client(self) -> Any:
        """The tritonclient, which programs give to ``pytriton.client.utils`` by this name."""
        return self._connection()


class DecoupledModelClient(gpuserve.client.DecoupledModelClient):
    """As ``gpuserve.client.DecoupledModelClient``, but a response may take as long as it likes."""

    _patient = True


class AsyncioDecoupledModelClient(gpuserve.client.AsyncioDecoupledModelClient):
    """As ``gpuserve.client.AsyncioDecoupledModelClient``, but a response may take as long as it likes."""

    _patient = True
