"""gpuserve's clients under PyTriton's names. As there, decoupled responses have no time limit, a request whose
generator is dropped unread runs to its end, and parameters with the protocol's own names are refused.
"""

from __future__ import annotations

from typing import Any

import gpuserve.client

__all__ = [
    "AsyncioDecoupledModelClient", "AsyncioModelClient", "DecoupledModelClient", "FuturesModelClient",
    "ModelClient",
]  # fmt: skip


class ModelClient(gpuserve.client.ModelClient):
    """PyTriton's ``ModelClient``."""

    _reserved = True

    @property
    def _general_client(self) -> Any:
        """The tritonclient, which programs pass to ``pytriton.client.utils`` by this name."""
        return self._connection()


class FuturesModelClient(gpuserve.client.FuturesModelClient):
    """PyTriton's ``FuturesModelClient``."""

    _client_class = ModelClient


class AsyncioModelClient(gpuserve.client.AsyncioModelClient):
    """PyTriton's ``AsyncioModelClient``."""

    _reserved = True


class DecoupledModelClient(gpuserve.client.DecoupledModelClient):
    """PyTriton's ``DecoupledModelClient``."""

    _patient = _reserved = _runs_unread = True


class AsyncioDecoupledModelClient(gpuserve.client.AsyncioDecoupledModelClient):
    """PyTriton's ``AsyncioDecoupledModelClient``."""

    _patient = _reserved = True
