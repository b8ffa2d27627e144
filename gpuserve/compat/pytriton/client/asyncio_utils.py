"""Questions to a server by a tritonclient of one's own, with asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gpuserve.client.base import Wait
from gpuserve.client.config import ClientModelConfig
from gpuserve.client.failures import model_not_ready, server_not_ready
from gpuserve.compat.pytriton.client.utils import (
    FAILURES,
    ModelState,
    parse_config,
    parse_index,
    shown,
    state_in,
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


async def asyncio_wait_for_server_ready(client: Any, timeout_s: float | None = None) -> None:
    """Wait until the server is ready, 60 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    wait = await _wait(client.is_server_ready, timeout_s or DEFAULT_TIMEOUT_S)
    if wait is not None:
        raise server_not_ready(wait.error)


async def asyncio_wait_for_model_status_loaded(
    client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> None:
    """Wait until the server's index says READY of a model, 60 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it does not, in that time.
    """

    async def is_loaded() -> bool:
        return await asyncio_get_model_state(client, model_name, model_version) is ModelState.READY

    wait = await _wait(is_loaded, timeout_s or DEFAULT_TIMEOUT_S)
    if wait is not None:
        raise model_not_ready(shown(model_name, model_version), wait.error)


async def asyncio_wait_for_model_ready(
    client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> None:
    """Wait until a model is ready, 60 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    version = model_version or ""
    wait = await _wait(client.is_model_ready, timeout_s or DEFAULT_TIMEOUT_S, model_name, version)
    if wait is not None:
        raise model_not_ready(shown(model_name, model_version), wait.error)


async def _wait(ask: Any, timeout_s: float, *args: Any) -> Wait | None:
    """Ask until the answer is yes; otherwise the wait that is over."""
    wait = Wait(timeout_s)
    failures = _failures()
    while True:
        try:
            if await ask(*args):
                return None
            wait.error = None
        except failures as error:
            wait.error = error
        pause_s = wait.pause_s()
        if pause_s is None:
            return wait
        await asyncio.sleep(pause_s)


def _failures() -> tuple[type[Exception], ...]:
    """What a question meets that is not answered."""
    try:
        import aiohttp
    except ImportError:  # then there is no asyncio client over HTTP
        return FAILURES
    return (*FAILURES, aiohttp.ClientError)
