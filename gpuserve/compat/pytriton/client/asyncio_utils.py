"""Questions to a server by a tritonclient of one's own, with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpuserve.client.config import ClientModelConfig
from gpuserve.client.failures import server_not_ready
from gpuserve.compat.pytriton.client.utils import (
    FAILURES,
    ModelState,
    NotReady,
    not_ready_of,
    parse_config,
    parse_index,
    state_in,
    wait_until,
)

DEFAULT_TIMEOUT_S: Final = 60.0


async def asyncio_get_model_state(
    client: Any, model_name: str, model_version: str | None = None
) -> ModelState:
    """What the server's index says of a model; UNAVAILABLE where it is not in it."""
    return state_in(parse_index(await client.get_model_repository_index()), model_name, model_version)


async def asyncio_get_model_config(
    client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> ClientModelConfig:
    """A model's configuration, once it is ready.

    Raises:
        PyTritonClientTimeoutError: it is not ready in time.
    """
    await asyncio_wait_for_model_ready(client, model_name, model_version, timeout_s)
    return parse_config(await client.get_model_config(model_name, model_version or ""), model_version)


async def asyncio_wait_for_server_ready(
    asyncio_client: Any, sleep_time_s: float | None = None, timeout_s: float | None = None
) -> None:
    """Wait until the server is ready, 60 seconds where ``timeout_s`` is None. ``sleep_time_s`` is accepted:
    how often to ask is known better here.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    await _wait(asyncio_client.is_server_ready, timeout_s, server_not_ready)


async def asyncio_wait_for_model_status_loaded(
    asyncio_client: Any,
    model_name: str,
    sleep_time_s: float | None = None,
    model_version: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Wait until the server's index says READY of a model, 60 seconds where ``timeout_s`` is None.
    ``sleep_time_s`` is accepted: how often to ask is known better here.

    Raises:
        PyTritonClientTimeoutError: it does not, in that time.
    """

    async def is_loaded() -> bool:
        return await asyncio_get_model_state(asyncio_client, model_name, model_version) is ModelState.READY

    await _wait(is_loaded, timeout_s, not_ready_of(model_name, model_version))


async def asyncio_wait_for_model_ready(
    asyncio_client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> None:
    """Wait until a model is ready, 60 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    ask = partial(asyncio_client.is_model_ready, model_name, model_version or "")
    await _wait(ask, timeout_s, not_ready_of(model_name, model_version))


async def _wait(ask: Callable[[], Awaitable[bool]], timeout_s: float | None, not_ready: NotReady) -> None:
    failures: tuple[type[Exception], ...] = FAILURES
    with suppress(ImportError):  # without it there is no asyncio client over HTTP
        from aiohttp import ClientError

        failures += (ClientError,)
    await wait_until(ask, timeout_s or DEFAULT_TIMEOUT_S, not_ready, asyncio.sleep, failures)
