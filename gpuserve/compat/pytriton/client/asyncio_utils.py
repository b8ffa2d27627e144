"""Queries and waits by a caller's own asyncio tritonclient."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from gpuserve.client.client_config import ClientModelConfig
from gpuserve.client.exceptions import server_not_ready
from gpuserve.compat.pytriton.client.utils import (
    FAILURES,
    ModelState,
    NotReady,
    not_ready_error,
    parse_config,
    parse_index,
    state_in,
    wait_until,
)

DEFAULT_TIMEOUT_S: Final = 60.0


async def asyncio_get_model_state(
    client: Any, model_name: str, model_version: str | None = None
) -> ModelState:
    """Return the state of a model in the server's index, UNAVAILABLE if the model is not in the index."""
    return state_in(parse_index(await client.get_model_repository_index()), model_name, model_version)


async def asyncio_get_model_config(
    client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> ClientModelConfig:
    """Wait until a model is ready and return its configuration.

    Raises:
        PyTritonClientTimeoutError: if the model is not ready in time.
    """
    await asyncio_wait_for_model_ready(client, model_name, model_version, timeout_s)
    return parse_config(await client.get_model_config(model_name, model_version or ""), model_version)


async def asyncio_wait_for_server_ready(
    asyncio_client: Any, sleep_time_s: float | None = None, timeout_s: float | None = None
) -> None:
    """Wait until the server is ready.

    Args:
        asyncio_client: An asyncio tritonclient.
        sleep_time_s: Accepted and ignored; the intervals between polls grow from 20 ms to 1 s.
        timeout_s: Seconds to wait, 60 if None.

    Raises:
        PyTritonClientTimeoutError: if the server is not ready in time.
    """
    await _wait(asyncio_client.is_server_ready, timeout_s, server_not_ready)


async def asyncio_wait_for_model_status_loaded(
    asyncio_client: Any,
    model_name: str,
    sleep_time_s: float | None = None,
    model_version: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Wait until the server's index has a model as READY.

    Args:
        asyncio_client: An asyncio tritonclient.
        model_name: Name of the model.
        sleep_time_s: Accepted and ignored; the intervals between polls grow from 20 ms to 1 s.
        model_version: Version of the model, the highest if None.
        timeout_s: Seconds to wait, 60 if None.

    Raises:
        PyTritonClientTimeoutError: if the model is not READY in time.
    """

    async def is_loaded() -> bool:
        return await asyncio_get_model_state(asyncio_client, model_name, model_version) is ModelState.READY

    await _wait(is_loaded, timeout_s, not_ready_error(model_name, model_version))


async def asyncio_wait_for_model_ready(
    asyncio_client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> None:
    """Wait until a model is ready, 60 seconds if ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: if the model is not ready in time.
    """
    poll = partial(asyncio_client.is_model_ready, model_name, model_version or "")
    await _wait(poll, timeout_s, not_ready_error(model_name, model_version))


async def _wait(poll: Callable[[], Awaitable[bool]], timeout_s: float | None, not_ready: NotReady) -> None:
    failures: tuple[type[Exception], ...] = FAILURES
    with suppress(ImportError):  # without aiohttp there is no asyncio client over HTTP
        from aiohttp import ClientError

        failures += (ClientError,)
    await wait_until(poll, timeout_s or DEFAULT_TIMEOUT_S, not_ready, asyncio.sleep, failures)
