"""What the blocking and the asyncio clients share: arguments, connection, questions before an inference. It
is all written once, as coroutines. What they wait for is called by ``_call``, which blocks in the blocking
clients, so that their coroutines run to the end at once (``sync.run``).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Final, Self, TypeAlias

from gpuserve.client.config import ClientModelConfig, parse_model_config
from gpuserve.client.display import client_html, client_text
from gpuserve.client.exceptions import ClientClosedError, ClientValueError
from gpuserve.client.failures import inference_error, is_refusal, model_not_ready, server_not_ready
from gpuserve.client.library import Library, library
from gpuserve.client.request_builder import Arrays, RequestBuilder
from gpuserve.client.settings import ClientSettings
from gpuserve.client.url import GRPC, ServerUrl

#: The parameters, or the headers, of a call.
Values: TypeAlias = Mapping[str, str | int | bool] | None

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
#: One question may take this long, so that a connection that hangs does not use up the whole wait, and
#: this short, so that the last one has a chance.
_LONGEST_QUESTION_S: Final = 10.0
_SHORTEST_QUESTION_S: Final = 0.1
#: The longest that the question may take why a model is not ready.
_WHY_S: Final = 1.0


class Wait:
    """One wait of ``timeout_s`` seconds. ``error`` is what the last question met if it had no answer."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.error: Exception | None = None
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def question_s(self) -> float:
        return min(max(self._deadline - self._clock(), _SHORTEST_QUESTION_S), _LONGEST_QUESTION_S)

    def pause_s(self) -> float | None:
        """How long to pause before the next question; None: the time is up. Pauses grow."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            return None
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return min(pause, remaining)


class AnyClient(ABC):
    """What a client of any kind is, as the model for a new one.

    ``settings`` are the checked arguments of its constructor; ``known_config`` is the configuration of its
    model, None where the server has not been asked yet.
    """

    settings: ClientSettings
    known_config: ClientModelConfig | None

    def same_arguments(self) -> dict[str, Any]:
        """The arguments for a client of the same model, which does not ask again what this one knows."""
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
        model_name: the model.
        model_version: its version; None is the newest.
        lazy_init: False waits for the model in the constructor (with asyncio, on entering ``async with``),
            instead of at the first use.
        init_timeout_s: seconds to wait for the model, 300 where None.
        inference_timeout_s: seconds that an inference may take, 60 where None.
        model_config: the model's configuration, where it is known; otherwise the server is asked, once.
        ensure_model_is_ready: whether the first use waits for the model.
        access_token: shown to the server with every call.

    Raises:
        ClientValueError: an argument is wrong; ClientInvalidUrlError where it is the URL.
    """

    #: Whether each response of a decoupled model may take for ever.
    _patient: ClassVar[bool] = False
    #: Responses of decoupled models come over gRPC only.
    _grpc_only: ClassVar[bool] = False
    _aio: ClassVar[bool] = False

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
            raise ClientValueError(
                f"{type(self).__name__} is only supported for grpc protocol, got {self.settings.url}"
            )
        self.known_config = model_config
        self._lazy = lazy_init
        self._waits = ensure_model_is_ready
        self._connection_made: Any = None
        self._builder: RequestBuilder | None = None
        self._closed = False
        self._begin()

    def __repr__(self) -> str:
        return client_text(type(self).__name__, self.settings)

    def _repr_html_(self) -> str:
        return client_html(type(self).__name__, self.settings, self.known_config)

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        """A client of the same model with connections of its own. What the other knows is not asked again."""
        return cls(**existing_client.same_arguments())

    def _begin(self) -> None:
        """The last step of the constructor, for what one kind of client does besides."""

    @abstractmethod
    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Call what may have to wait, and wait for it in the way of this kind of client."""

    @cached_property
    def _library(self) -> Library:
        return library(self.settings.url, aio=self._aio)

    def _connection(self) -> Any:
        """The tritonclient that inferences go through; with asyncio it belongs to the running loop."""
        self._check_open()
        if self._connection_made is None:
            self._connection_made = self._library.connect(
                self.settings.url, self.settings.inference_timeout_s
            )
        return self._connection_made

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError(f"{type(self).__name__} is closed")

    # ---- what is asked of the server -------------------------------------------------------

    @property
    def _response_timeout_s(self) -> float | None:
        """How long each response of a decoupled model may take; None: for ever."""
        return None if self._patient else self.settings.inference_timeout_s

    async def _infer(self, *call: Any, sample: bool) -> Arrays:
        requests = await self._requests()
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

    async def _requests(self) -> RequestBuilder:
        """What makes the requests, once the model is known to be there."""
        if self._builder is None:
            self._check_open()
            if self._waits:
                await self._wait_for_model(self.settings.init_timeout_s)
            if self.known_config is None:
                self.known_config = await self._ask_config()
            self._builder = RequestBuilder(self.settings, self.known_config, self._library.module)
        return self._builder

    async def _ask_config(self) -> ClientModelConfig:
        more = {"as_json": True} if self.settings.url.protocol == GRPC else {}
        document = await self._order("get_model_config", *self._model, **more)
        return parse_model_config(document.get("config", document), self.settings.model_version)

    @property
    def _model(self) -> tuple[str, str]:
        return self.settings.model_name, self.settings.model_version

    async def _order(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of tritonclient whose failure is that of an inference."""
        timeout_s = self.settings.inference_timeout_s
        try:
            return await self._ask(method, *args, timeout_s=timeout_s, **named)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error

    async def _wait_for_server(self, timeout_s: float) -> None:
        wait = await self._wait("is_server_ready", timeout_s=timeout_s)
        if wait is not None:
            raise server_not_ready(wait.error)

    async def _wait_for_model(self, timeout_s: float) -> None:
        wait = await self._wait("is_model_ready", *self._model, timeout_s=timeout_s)
        if wait is None:
            return
        if wait.error is not None:
            raise server_not_ready(wait.error)
        try:
            await self._ask("get_model_config", *self._model, timeout_s=_WHY_S)
        except self._library.errors as error:
            raise model_not_ready(self.settings.shown, error) from error
        raise model_not_ready(self.settings.shown, None)

    async def _wait(self, method: str, *args: Any, timeout_s: float) -> Wait | None:
        """Ask until the answer is yes; otherwise return the wait that is over."""
        wait = Wait(timeout_s)
        while True:
            try:
                if await self._ask(method, *args, timeout_s=wait.question_s):
                    return None
                wait.error = None
            except self._library.errors as error:
                if is_refusal(error):
                    raise inference_error(error, timeout_s) from error
                wait.error = error
            pause_s = wait.pause_s()
            if pause_s is None:
                return wait
            await self._call(asyncio.sleep if self._aio else time.sleep, pause_s)

    async def _ask(self, method: str, *args: Any, timeout_s: float, **named: Any) -> Any:
        """Call a small method of tritonclient. Over HTTP a connection has one timeout for all its calls, so
        that the small ones, which have others, get a connection of their own.
        """
        self._check_open()
        named["headers"] = self.settings.headers()
        if self._library.timeout_a_call:
            ask = getattr(self._connection(), method)
            return await self._call(ask, *args, client_timeout=timeout_s, **named)
        connection = self._library.connect(self.settings.url, timeout_s)
        try:
            return await self._call(getattr(connection, method), *args, **named)
        finally:
            await self._call(connection.close)
