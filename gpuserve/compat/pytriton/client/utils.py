"""Queries and waits by a caller's own tritonclient, a blocking one or one for asyncio."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tritonclient.utils import InferenceServerException

from gpuserve.client.client_base import ReadinessWait, tritonclient_library
from gpuserve.client.client_config import ClientModelConfig, parse_model_config
from gpuserve.client.client_settings import DEFAULT_GRPC_PORT as DEFAULT_GRPC_PORT  # noqa: PLC0414 - exported
from gpuserve.client.client_settings import DEFAULT_HTTP_PORT as DEFAULT_HTTP_PORT  # noqa: PLC0414
from gpuserve.client.client_settings import DEFAULT_INFERENCE_TIMEOUT_S, ServerUrl
from gpuserve.client.exceptions import model_not_ready, server_not_ready
from gpuserve.client.model_clients import run_blocking

LATEST_MODEL_VERSION: Final = "<latest>"
DEFAULT_SERVER_TIMEOUT_S: Final = 60.0
DEFAULT_MODEL_TIMEOUT_S: Final = 300.0
DEFAULT_TIMEOUT_S: Final = 60.0
FAILURES: Final = (InferenceServerException, OSError)
NotReady: TypeAlias = Callable[[Exception | None], Exception]


class ModelState(enum.Enum):
    """The state of a model in a server's index."""

    UNAVAILABLE = "UNAVAILABLE"
    READY = "READY"
    LOADING = "LOADING"
    UNLOADING = "UNLOADING"


class TritonUrl(NamedTuple):
    """The parts of a server's URL."""

    scheme: str
    hostname: str
    port: int

    @classmethod
    def from_url(cls, url: str) -> TritonUrl:
        """Return the parts of ``[grpc|http]://host[:port]``; raise PyTritonClientInvalidUrlError."""
        parsed = ServerUrl.parse(url)
        return cls(parsed.protocol, parsed.host, parsed.port)

    @property
    def with_scheme(self) -> str:
        return f"{self.scheme}://{self.without_scheme}"

    @property
    def without_scheme(self) -> str:
        return ServerUrl(self.scheme, self.hostname, self.port).address


def create_client_from_url(url: str, network_timeout_s: float | None = None) -> Any:
    """Return a tritonclient of the server, which the caller closes; raise PyTritonClientInvalidUrlError."""
    address = ServerUrl.parse(url)
    timeout_s = DEFAULT_INFERENCE_TIMEOUT_S if network_timeout_s is None else network_timeout_s
    return tritonclient_library(address).connect(address, timeout_s)


def wait_for_server_ready(
    client: Any, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Wait, 60 seconds by default, until the server is ready; raise PyTritonClientTimeoutError."""
    poll = partial(client.is_server_ready, headers=headers)
    _wait(poll, timeout_s or DEFAULT_SERVER_TIMEOUT_S, server_not_ready)


def wait_for_model_ready(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait, 300 seconds by default, until a model is ready; raise PyTritonClientTimeoutError."""
    poll = partial(client.is_model_ready, model_name, model_version or "", headers=headers)
    _wait(poll, timeout_s or DEFAULT_MODEL_TIMEOUT_S, _not_ready_error(model_name, model_version))


def get_model_state(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ModelState:
    """Return the state of a model in the server's index, UNAVAILABLE if the model is not in the index."""
    index = client.get_model_repository_index(headers=headers)
    return state_in(parse_index(index), model_name, model_version)


def get_model_config(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> ClientModelConfig:
    """Return a ready model's configuration; raise PyTritonClientTimeoutError."""
    wait_for_model_ready(client, model_name, model_version, timeout_s, headers)
    answer = client.get_model_config(model_name, model_version or "", headers=headers)
    return parse_config(answer, model_version)


async def asyncio_get_model_state(
    client: Any, model_name: str, model_version: str | None = None
) -> ModelState:
    """Return the state of a model like ``get_model_state``."""
    return state_in(parse_index(await client.get_model_repository_index()), model_name, model_version)


async def asyncio_get_model_config(
    client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> ClientModelConfig:
    """Return a ready model's configuration; raise PyTritonClientTimeoutError."""
    await asyncio_wait_for_model_ready(client, model_name, model_version, timeout_s)
    return parse_config(await client.get_model_config(model_name, model_version or ""), model_version)


async def asyncio_wait_for_server_ready(
    asyncio_client: Any, sleep_time_s: float | None = None, timeout_s: float | None = None
) -> None:
    """Wait until the server is ready, as ``wait_for_server_ready``; ``sleep_time_s`` is ignored."""
    await _wait_in_loop(asyncio_client.is_server_ready, timeout_s, server_not_ready)


async def asyncio_wait_for_model_status_loaded(
    asyncio_client: Any,
    model_name: str,
    sleep_time_s: float | None = None,
    model_version: str | None = None,
    timeout_s: float | None = None,
) -> None:
    """Wait until the index has a model as READY, 60 seconds by default; ``sleep_time_s`` is ignored."""

    async def is_loaded() -> bool:
        return await asyncio_get_model_state(asyncio_client, model_name, model_version) is ModelState.READY

    await _wait_in_loop(is_loaded, timeout_s, _not_ready_error(model_name, model_version))


async def asyncio_wait_for_model_ready(
    asyncio_client: Any, model_name: str, model_version: str | None = None, timeout_s: float | None = None
) -> None:
    """Wait, 60 seconds by default, until a model is ready; raise PyTritonClientTimeoutError."""
    poll = partial(asyncio_client.is_model_ready, model_name, model_version or "")
    await _wait_in_loop(poll, timeout_s, _not_ready_error(model_name, model_version))


def parse_http_response(models: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], ModelState]:
    """Return the states in a server's index over HTTP, by name and version."""
    return {(one["name"], one["version"]): _state(one.get("state")) for one in models if one.get("version")}


def parse_grpc_response(models: Iterable[Any]) -> dict[tuple[str, str], ModelState]:
    """Return the states in a server's index over gRPC, by name and version."""
    return {(one.name, one.version): _state(one.state) for one in models if one.version}


def _not_ready_error(model_name: str, model_version: str | None) -> NotReady:
    return partial(model_not_ready, f"{model_name}/{model_version or LATEST_MODEL_VERSION}")


def parse_index(index: Any) -> dict[tuple[str, str], ModelState]:
    """Return the states in a server's index, of either protocol."""
    return parse_grpc_response(index.models) if hasattr(index, "models") else parse_http_response(index)


def state_in(
    states: Mapping[tuple[str, str], ModelState], model_name: str, model_version: str | None
) -> ModelState:
    """Return the state of a model, or of its highest version."""
    versions = [version for name, version in states if name == model_name]
    version = model_version or max(versions, key=int, default="")
    return states.get((model_name, version), ModelState.UNAVAILABLE)


def parse_config(answer: Any, model_version: str | None) -> ClientModelConfig:
    """Return the model configuration in a server's answer, of either protocol."""
    if hasattr(answer, "config"):
        from google.protobuf import json_format  # type: ignore[import-untyped]

        answer = json_format.MessageToDict(answer.config, preserving_proto_field_name=True)
    return parse_model_config(answer, model_version or "")


async def wait_until(
    poll: Callable[[], Awaitable[bool]],
    timeout_s: float,
    not_ready: NotReady,
    sleep: Callable[[float], Awaitable[None]],
    failures: tuple[type[Exception], ...],
) -> None:
    """Poll until the answer is true. Raise ``not_ready`` of the last failure after ``timeout_s`` seconds."""
    wait = ReadinessWait(timeout_s)
    while True:
        try:
            if await poll():
                return
            wait.error = None
        except failures as error:
            wait.error = error
        pause_s = wait.pause_s()
        if pause_s is None:
            raise not_ready(wait.error)
        await sleep(pause_s)


def _state(word: str | None) -> ModelState:
    """Return the state of a word in an index. A server that has just started to load a model sends none."""
    return ModelState(word) if word else ModelState.LOADING


def _wait(poll: Callable[[], bool], timeout_s: float, not_ready: NotReady) -> None:
    async def poll_now() -> bool:
        return poll()

    async def sleep(pause_s: float) -> None:
        time.sleep(pause_s)  # noqa: ASYNC251 - no loop runs it

    run_blocking(wait_until(poll_now, timeout_s, not_ready, sleep, FAILURES))


async def _wait_in_loop(
    poll: Callable[[], Awaitable[bool]], timeout_s: float | None, not_ready: NotReady
) -> None:
    failures: tuple[type[Exception], ...] = FAILURES
    with suppress(ImportError):  # without aiohttp there is no asyncio client over HTTP
        from aiohttp import ClientError

        failures += (ClientError,)
    await wait_until(poll, timeout_s or DEFAULT_TIMEOUT_S, not_ready, asyncio.sleep, failures)
