"""Questions to a server by a tritonclient of one's own, blocking. ``asyncio_utils.py`` has the others."""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from tritonclient.utils import InferenceServerException

from gpuserve.client.base import Wait
from gpuserve.client.config import ClientModelConfig, parse_model_config
from gpuserve.client.failures import model_not_ready, server_not_ready
from gpuserve.client.library import library
from gpuserve.client.settings import DEFAULT_INFERENCE_TIMEOUT_S
from gpuserve.client.sync import run
from gpuserve.client.url import DEFAULT_GRPC_PORT as DEFAULT_GRPC_PORT  # noqa: PLC0414 - exported
from gpuserve.client.url import DEFAULT_HTTP_PORT as DEFAULT_HTTP_PORT  # noqa: PLC0414
from gpuserve.client.url import ServerUrl

LATEST_MODEL_VERSION: Final = "<latest>"
DEFAULT_SERVER_TIMEOUT_S: Final = 60.0
DEFAULT_MODEL_TIMEOUT_S: Final = 300.0
#: What a question meets that is not answered.
FAILURES: Final = (InferenceServerException, OSError)
NotReady: TypeAlias = Callable[[Exception | None], Exception]


class ModelState(enum.Enum):
    """What a server's index says of a model."""

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
        """The parts of ``[grpc|http]://host[:port]``.

        Raises:
            PyTritonClientInvalidUrlError: it is no such URL.
        """
        parsed = ServerUrl.parse(url)
        return cls(parsed.protocol, parsed.host, parsed.port)

    @property
    def with_scheme(self) -> str:
        """The URL as ``scheme://host:port``."""
        return f"{self.scheme}://{self.without_scheme}"

    @property
    def without_scheme(self) -> str:
        """The URL as ``host:port``, without a scheme."""
        return ServerUrl(self.scheme, self.hostname, self.port).address


def create_client_from_url(url: str, network_timeout_s: float | None = None) -> Any:
    """A tritonclient of the server at ``url``, which is the caller's to close.

    Raises:
        PyTritonClientInvalidUrlError: it is no URL of a server.
    """
    address = ServerUrl.parse(url)
    timeout_s = DEFAULT_INFERENCE_TIMEOUT_S if network_timeout_s is None else network_timeout_s
    return library(address).connect(address, timeout_s)


def wait_for_server_ready(
    client: Any, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
) -> None:
    """Wait until the server is ready, 60 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    ask = partial(client.is_server_ready, headers=headers)
    _wait(ask, timeout_s or DEFAULT_SERVER_TIMEOUT_S, server_not_ready)


def wait_for_model_ready(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Wait until a model is ready, 300 seconds where ``timeout_s`` is None.

    Raises:
        PyTritonClientTimeoutError: it is not, in that time.
    """
    ask = partial(client.is_model_ready, model_name, model_version or "", headers=headers)
    _wait(ask, timeout_s or DEFAULT_MODEL_TIMEOUT_S, not_ready_of(model_name, model_version))


def get_model_state(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ModelState:
    """What the server's index says of a model; UNAVAILABLE where it is not in it."""
    index = client.get_model_repository_index(headers=headers)
    return state_in(parse_index(index), model_name, model_version)


def get_model_config(
    client: Any,
    model_name: str,
    model_version: str | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> ClientModelConfig:
    """A model's configuration, once it is ready.

    Raises:
        PyTritonClientTimeoutError: it is not ready in time.
    """
    wait_for_model_ready(client, model_name, model_version, timeout_s, headers)
    told = client.get_model_config(model_name, model_version or "", headers=headers)
    return parse_config(told, model_version)


def parse_http_response(models: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], ModelState]:
    """The states in a server's index as HTTP tells it, by name and version."""
    return {(one["name"], one["version"]): _state(one.get("state")) for one in models if one.get("version")}


def parse_grpc_response(models: Iterable[Any]) -> dict[tuple[str, str], ModelState]:
    """The states in a server's index as gRPC tells it, by name and version."""
    return {(one.name, one.version): _state(one.state) for one in models if one.version}


# ---- for asyncio_utils ----------------------------------------------------------------------


def not_ready_of(model_name: str, model_version: str | None) -> NotReady:
    """What is raised where the wait for a model is over."""
    return partial(model_not_ready, f"{model_name}/{model_version or LATEST_MODEL_VERSION}")


def parse_index(index: Any) -> dict[tuple[str, str], ModelState]:
    """The states in a server's index, of either protocol."""
    return parse_grpc_response(index.models) if hasattr(index, "models") else parse_http_response(index)


def state_in(
    states: Mapping[tuple[str, str], ModelState], model_name: str, model_version: str | None
) -> ModelState:
    """The state of a model; without a version, that of its highest one."""
    versions = [version for name, version in states if name == model_name]
    version = model_version or max(versions, key=int, default="")
    return states.get((model_name, version), ModelState.UNAVAILABLE)


def parse_config(answer: Any, model_version: str | None) -> ClientModelConfig:
    """A model's configuration as a server of either protocol tells it."""
    if hasattr(answer, "config"):
        from google.protobuf import json_format  # type: ignore[import-untyped]

        answer = json_format.MessageToDict(answer.config, preserving_proto_field_name=True)
    return parse_model_config(answer, model_version or "")


async def wait_until(
    ask: Callable[[], Awaitable[bool]],
    timeout_s: float,
    not_ready: NotReady,
    sleep: Callable[[float], Awaitable[None]],
    failures: tuple[type[Exception], ...],
) -> None:
    """Ask until the answer is yes; after ``timeout_s`` seconds raise ``not_ready`` of the last failure."""
    wait = Wait(timeout_s)
    while True:
        try:
            if await ask():
                return
            wait.error = None
        except failures as error:
            wait.error = error
        pause_s = wait.pause_s()
        if pause_s is None:
            raise not_ready(wait.error)
        await sleep(pause_s)


def _state(word: str | None) -> ModelState:
    """A server that has just begun to load a model says nothing of it."""
    return ModelState(word) if word else ModelState.LOADING


def _wait(ask: Callable[[], bool], timeout_s: float, not_ready: NotReady) -> None:
    async def asked() -> bool:
        return ask()

    async def sleep(pause_s: float) -> None:
        time.sleep(pause_s)  # noqa: ASYNC251 - no loop runs it

    run(wait_until(asked, timeout_s, not_ready, sleep, FAILURES))
