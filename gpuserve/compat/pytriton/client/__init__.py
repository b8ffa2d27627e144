"""gpuserve's clients under PyTriton's names, with PyTriton's behaviour where that differs."""

from __future__ import annotations

from typing import Any

import gpuserve.client

__all__ = [
    "AsyncioDecoupledModelClient", "AsyncioModelClient", "DecoupledModelClient", "FuturesModelClient",
    "ModelClient",
]  # fmt: skip


class ModelClient(gpuserve.client.ModelClient):
    """PyTriton's ``ModelClient``."""

    _as_pytriton = True

    @property
    def _general_client(self) -> Any:
        """The tritonclient, which programs pass to ``pytriton.client.utils`` by this name."""
        return self._connection()


class FuturesModelClient(gpuserve.client.FuturesModelClient):
    """PyTriton's ``FuturesModelClient``."""

    _client_class = ModelClient


class AsyncioModelClient(gpuserve.client.AsyncioModelClient):
    """PyTriton's ``AsyncioModelClient``."""

    _as_pytriton = True


class DecoupledModelClient(gpuserve.client.DecoupledModelClient):
    """PyTriton's ``DecoupledModelClient``."""

    _as_pytriton = True


class AsyncioDecoupledModelClient(gpuserve.client.AsyncioDecoupledModelClient):
    """PyTriton's ``AsyncioDecoupledModelClient``."""

    _as_pytriton = True
