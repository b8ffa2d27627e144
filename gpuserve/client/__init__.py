"""Clients, each of one model, of gpuserve and other v2 servers. Public names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuserve.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from gpuserve.client.client_config import ClientModelConfig
    from gpuserve.client.decoupled_clients import AsyncioDecoupledModelClient, DecoupledModelClient
    from gpuserve.client.exceptions import (
        ClientClosedError,
        ClientError,
        ClientInferenceServerError,
        ClientInvalidUrlError,
        ClientModelDoesntSupportBatchingError,
        ClientModelUnavailableError,
        ClientQueueFullError,
        ClientTimeoutError,
        ClientValueError,
    )
    from gpuserve.client.futures_client import FuturesModelClient
    from gpuserve.client.model_clients import AsyncioModelClient, ModelClient

__all__ = [
    "AsyncioDecoupledModelClient", "AsyncioModelClient", "ClientClosedError", "ClientError",
    "ClientInferenceServerError", "ClientInvalidUrlError", "ClientModelConfig",
    "ClientModelDoesntSupportBatchingError", "ClientModelUnavailableError", "ClientQueueFullError",
    "ClientTimeoutError", "ClientValueError", "DecoupledModelClient", "FuturesModelClient", "ModelClient",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gpuserve.client.client_config": "ClientModelConfig",
        "gpuserve.client.decoupled_clients": "AsyncioDecoupledModelClient DecoupledModelClient",
        "gpuserve.client.exceptions": " ".join(one for one in __all__ if one.endswith("Error")),
        "gpuserve.client.futures_client": "FuturesModelClient",
        "gpuserve.client.model_clients": "AsyncioModelClient ModelClient",
    },
)
