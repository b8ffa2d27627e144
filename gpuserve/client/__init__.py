"""Clients of a gpuserve server, and of every other server of the v2 protocol that tells a model's
configuration: one model each, built on tritonclient. The public names, imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuserve.client.aio import AsyncioModelClient
    from gpuserve.client.config import ClientModelConfig
    from gpuserve.client.decoupled import AsyncioDecoupledModelClient, DecoupledModelClient
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
    from gpuserve.client.futures import FuturesModelClient
    from gpuserve.client.sync import ModelClient

__all__ = [
    "AsyncioDecoupledModelClient",
    "AsyncioModelClient",
    "ClientClosedError",
    "ClientError",
    "ClientInferenceServerError",
    "ClientInvalidUrlError",
    "ClientModelConfig",
    "ClientModelDoesntSupportBatchingError",
    "ClientModelUnavailableError",
    "ClientQueueFullError",
    "ClientTimeoutError",
    "ClientValueError",
    "DecoupledModelClient",
    "FuturesModelClient",
    "ModelClient",
]

_HOMES = {
    "AsyncioDecoupledModelClient": "decoupled",
    "AsyncioModelClient": "aio",
    "ClientModelConfig": "config",
    "DecoupledModelClient": "decoupled",
    "FuturesModelClient": "futures",
    "ModelClient": "sync",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'exceptions')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
