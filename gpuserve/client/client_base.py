"""The common base of all clients: arguments, the connection by tritonclient, and polling of the server.

Every method is a coroutine, written once. It awaits only through ``_call``, which blocks in the blocking
clients, so that their coroutines run to the end at once (``run_blocking``).
"""

from __future__ import annotations

import asyncio
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeAlias

from gpuserve.api.notebook_html import line, table
from gpuserve.client.client_config import ClientModelConfig, parse_model_config
from gpuserve.client.client_settings import GRPC, ClientSettings, ServerUrl
from gpuserve.client.exceptions import (
    ClientClosedError,
    ClientValueError,
    inference_error,
    is_access_refused,
    model_not_ready,
    server_not_ready,
)
from gpuserve.client.request_builder import Arrays, RequestBuilder
from gpuserve.core.suggestions import explained
from gpuserve_worker.protocol.tensor import datatype_of

Values: TypeAlias = Mapping[str, str | int | float | bool] | None

_MIN_PAUSE_S: Final = 0.02
_MAX_PAUSE_S: Final = 1.0
#: Limits of the time-out of one poll: a hanging connection must not use up the whole wait, and the last poll
#: needs enough time.
_MAX_POLL_S: Final = 10.0
_MIN_POLL_S: Final = 0.1
_REASON_TIMEOUT_S: Final = 1.0


class ReadinessWait:
    """A wait with growing pauses. ``error`` is the failure of the last poll, if any."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.error: Exception | None = None
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._pause_s = _MIN_PAUSE_S

    @property
    def poll_timeout_s(self) -> float:
        return min(max(self._deadline - self._clock(), _MIN_POLL_S), _MAX_POLL_S)

    def pause_s(self) -> float | None:
        """Return the pause before the next poll, or None if the time is up. Pauses grow."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            return None
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _MAX_PAUSE_S)
        return min(pause, remaining)


class AnyClient(ABC):
    """A client of any kind, as the template of a new client. ``settings`` are the checked arguments,
    ``known_config`` is the model's configuration, or None if the server has not been asked yet.
    """

    settings: ClientSettings
    known_config: ClientModelConfig | None

    def same_arguments(self) -> dict[str, Any]:
        """Return the arguments for a client of the same model that does not repeat requests of this one."""
        settings = self.settings
        return {
            "url": settings.url,
            "model_name": settings.model_name,
            "model_version": settings.model_version or None,
            "init_timeout_s": settings.init_timeout_s,
            "inference_timeout_s": settings.inference_timeout_s,
            "model_config": self.known_config,
            "ensure_model_is_ready": self.known_config is None,
            "access_token": settings.access_token,
        }


class ModelClientBase(AnyClient):
    """A client of one model.

    Args:
        url: ``[http|https|grpc|grpcs://]host[:port]``, HTTP without a scheme.
        model_name: Name of the model.
        model_version: Version of the model, the newest if None.
        lazy_init: If False, wait for the model in the constructor (with asyncio, on entering ``async with``)
            and not at the first use.
        init_timeout_s: Seconds to wait for the model, 300 if None.
        inference_timeout_s: Time limit of an inference in seconds, 60 if None.
        model_config: The model's configuration. If None, the server is asked once.
        ensure_model_is_ready: Whether the first use waits for the model.
        access_token: Access token that is sent with every call.

    Raises:
        ClientValueError: if an argument is wrong; ClientInvalidUrlError if it is the URL.
    """

    #: Whether the client does as PyTriton's: the protocol's own names are refused in ``parameters``, the
    #: first use waits for a model of unknown configuration, responses of a decoupled model have no time
    #: limit, and a request whose generator is dropped unread runs to its end.
    _as_pytriton: ClassVar[bool] = False
    _grpc_only: ClassVar[bool] = False
    _aio: ClassVar[bool] = False

    @explained
    def __init__(
        self,
        url: str | ServerUrl,
        model_name: str,
        model_version: str | None = None,
        lazy_init: bool = True,
        init_timeout_s: float | None = None,
        inference_timeout_s: float | None = None,
        model_config: ClientModelConfig | None = None,
        ensure_model_is_ready: bool = True,
        access_token: str | None = None,
    ) -> None:
        self.settings = ClientSettings.checked(
            url, model_name, model_version, init_timeout_s, inference_timeout_s, access_token
        )
        if self._grpc_only and self.settings.url.protocol != GRPC:
            kind = type(self).__name__
            raise ClientValueError(f"{kind} is only supported for grpc protocol, got {self.settings.url}")
        self.known_config = model_config
        self._lazy = lazy_init
        self._waits = ensure_model_is_ready or (self._as_pytriton and model_config is None)
        self._open_connection: Any = None
        self._builder: RequestBuilder | None = None
        self._closed = False
        self._finish_init()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.settings.shown} at {self.settings.url}>"

    def _repr_html_(self) -> str:
        head = line(type(self).__name__, f"of {self.settings.shown} at {self.settings.url}")
        if (config := self.known_config) is None:
            return head
        rows = []
        for title, tensors in (("input", config.inputs), ("output", config.outputs)):
            for one in tensors or ():
                datatype = datatype_of(one.dtype) + (", optional" if one.optional else "")
                rows.append((title, one.name, datatype, str(list(one.shape))))
        return head + table(("", "name", "datatype", "shape"), rows)

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        """Return a client of the same model and known configuration, with own connections."""
        return cls(**existing_client.same_arguments())

    def _finish_init(self) -> None:
        """Do the last steps of the constructor of a kind of client."""

    @abstractmethod
    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call a function that may wait, and wait in the way of this kind of client."""

    @cached_property
    def _library(self) -> TritonclientLibrary:
        return tritonclient_library(self.settings.url, aio=self._aio)

    def _connection(self) -> Any:
        """Return the tritonclient of inferences. With asyncio, it belongs to the running loop."""
        self._check_open()
        if self._open_connection is None:
            timeout_s = self.settings.inference_timeout_s
            self._open_connection = self._library.connect(self.settings.url, timeout_s)
        return self._open_connection

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError(f"{type(self).__name__} is closed")

    @property
    def _response_timeout_s(self) -> float | None:
        return None if self._as_pytriton else self.settings.inference_timeout_s

    async def _infer(self, *call: Any, sample: bool) -> Arrays:
        requests = await self._request_builder()
        connection = self._connection()
        arguments = requests.arguments(*call, decoupled=False, sample=sample)
        timeout_s = self.settings.inference_timeout_s
        if self._library.timeout_a_call:
            arguments["client_timeout"] = timeout_s
        try:
            result = await self._call(connection.infer, **arguments)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error
        return requests.arrays(result, sample=sample)

    async def _request_builder(self) -> RequestBuilder:
        """Return the request builder. The first call waits for the model and reads its configuration."""
        if self._builder is None:
            self._check_open()
            if self._waits:
                await self._wait_for_model(self.settings.init_timeout_s)
            if self.known_config is None:
                more = {"as_json": True} if self.settings.url.protocol == GRPC else {}
                found = await self._request("get_model_config", *self._model, **more)
                version = self.settings.model_version
                self.known_config = parse_model_config(found.get("config", found), version)
            library = self._library.module
            self._builder = RequestBuilder(
                self.settings, self.known_config, library, reserved=self._as_pytriton
            )
        return self._builder

    @property
    def _model(self) -> tuple[str, str]:
        return self.settings.model_name, self.settings.model_version

    async def _request(self, method: str, *args: Any, **named: Any) -> Any:
        timeout_s = self.settings.inference_timeout_s
        try:
            return await self._short_request(method, *args, timeout_s=timeout_s, **named)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error

    async def _wait_for_server(self, timeout_s: float) -> None:
        if wait := await self._poll("is_server_ready", timeout_s=timeout_s):
            raise server_not_ready(wait.error)

    async def _wait_for_model(self, timeout_s: float) -> None:
        wait = await self._poll("is_model_ready", *self._model, timeout_s=timeout_s)
        if wait is None:
            return
        if wait.error is not None:
            raise server_not_ready(wait.error)
        try:
            await self._short_request("get_model_config", *self._model, timeout_s=_REASON_TIMEOUT_S)
        except self._library.errors as error:
            raise model_not_ready(self.settings.shown, error) from error
        raise model_not_ready(self.settings.shown, None)

    async def _poll(self, method: str, *args: Any, timeout_s: float) -> ReadinessWait | None:
        """Poll until the answer is true. Return None, or the wait that has timed out."""
        wait = ReadinessWait(timeout_s)
        while True:
            try:
                if await self._short_request(method, *args, timeout_s=wait.poll_timeout_s):
                    return None
                wait.error = None
            except self._library.errors as error:
                if is_access_refused(error):
                    raise inference_error(error, timeout_s) from error
                wait.error = error
            pause_s = wait.pause_s()
            if pause_s is None:
                return wait
            await self._call(asyncio.sleep if self._aio else time.sleep, pause_s)

    async def _short_request(self, method: str, *args: Any, timeout_s: float, **named: Any) -> Any:
        """Call a short method of tritonclient. Over HTTP a connection has one time-out for all its calls.
        Short calls have other time-outs, so they get a connection of their own.
        """
        self._check_open()
        named["headers"] = self.settings.headers()
        if self._library.timeout_a_call:
            function = getattr(self._connection(), method)
            return await self._call(function, *args, client_timeout=timeout_s, **named)
        connection = self._library.connect(self.settings.url, timeout_s)
        try:
            return await self._call(getattr(connection, method), *args, **named)
        finally:
            await self._call(connection.close)


_INT32_MAX: Final = 2**31 - 1
#: A restarted server, or a new name, is found within a second; grpc's own limit is minutes.
_CHANNEL_ARGS: Final = [
    ("grpc.max_send_message_length", _INT32_MAX),
    ("grpc.max_receive_message_length", _INT32_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
]


class TritonclientLibrary(NamedTuple):
    """One of the four kinds of tritonclient: its ``module``, how to ``connect`` with a time-out in seconds,
    and the ``errors`` of failed calls. ``timeout_a_call``: each call has a time-out of its own.
    """

    module: Any
    connect: Callable[[ServerUrl, float], Any]
    errors: tuple[type[Exception], ...]
    timeout_a_call: bool


def tritonclient_library(url: ServerUrl, *, aio: bool = False) -> TritonclientLibrary:
    """Return the tritonclient for the protocol of ``url``, blocking or with asyncio."""
    is_grpc = url.protocol == GRPC
    errors: tuple[type[Exception], ...]
    try:
        if is_grpc:
            import grpc

            errors = (grpc.RpcError,)
        elif aio:
            import ssl

            import aiohttp

            errors = (OSError, aiohttp.ClientError)
        else:
            import gevent.ssl
            from geventhttpclient.response import HTTPParseError

            errors = (OSError, HTTPParseError)
        module = importlib.import_module(f"tritonclient.{url.protocol}{'.aio' if aio else ''}")
    except ImportError as error:
        if is_grpc:
            raise
        text = f"a client over HTTP needs more packages: pip install 'gpuserve[client]' ({error})"
        raise ImportError(text) from error
    from tritonclient.utils import InferenceServerException

    def connect(url: ServerUrl, timeout_s: float) -> Any:
        options: dict[str, Any] = {"connection_timeout": timeout_s, "network_timeout": timeout_s}
        if is_grpc:
            options = {"channel_args": _CHANNEL_ARGS}
        elif aio:
            context = ssl.create_default_context() if url.tls else None
            options = {"conn_timeout": timeout_s, "conn_limit": 0, "ssl_context": context}
        else:
            options["ssl_context_factory"] = gevent.ssl.create_default_context
        return module.InferenceServerClient(url.address, ssl=url.tls, **options)

    return TritonclientLibrary(module, connect, (InferenceServerException, *errors), is_grpc)
