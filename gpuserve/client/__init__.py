"""Clients, each of one model, of gpuserve and other v2 servers. Public names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "AsyncioDecoupledModelClient": "decoupled_clients",
    "AsyncioModelClient": "model_clients",
    "ClientModelConfig": "client_config",
    "DecoupledModelClient": "decoupled_clients",
    "FuturesModelClient": "futures_client",
    "ModelClient": "model_clients",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'exceptions')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
