"""What the blocking and the asyncio clients share: arguments, connection, questions before an inference.

A conversation with the server is a generator of ``Question`` and ``Pause``, which does no I/O: ``sync`` and
``aio`` run it, each in its own way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from gpuserve.client.config import ClientModelConfig, parse_model_config
from gpuserve.client.exceptions import ClientClosedError
from gpuserve.client.failures import inference_error, is_refusal, model_not_ready, server_not_ready
from gpuserve.client.library import Library
from gpuserve.client.request_builder import RequestBuilder
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


class Question(NamedTuple):
    """A small call of tritonclient: the name of its method, and the arguments."""

    method: str
    args: tuple[Any, ...]
    timeout_s: float
    more: Mapping[str, Any] = {}


class Pause(NamedTuple):
    """A time to wait before the next question."""

    seconds: float


Found = TypeVar("Found")
#: Yields questions and pauses, is sent the answers or thrown the library's errors, and returns what it found.
Steps: TypeAlias = Generator[Question | Pause, Any, Found]


class Wait:
    """One wait of ``timeout_s`` seconds. ``error`` is what the last question met if it had no answer."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.error: Exception | None = None
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._pause_s = _FIRST_PAUSE_S

    @property
    def question_s(self) -> float:
        """How long the next question may take, in seconds."""
        return min(max(self._deadline - self._clock(), _SHORTEST_QUESTION_S), _LONGEST_QUESTION_S)

    def pause_s(self) -> float | None:
        """How long to pause before the next question; None: the time is up. Pauses grow."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            return None
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return min(pause, remaining)


class AnyClient(Protocol):
    """A client of any kind, as the model for a new one."""

    @property
    def settings(self) -> ClientSettings:
        """The checked arguments of its constructor."""

    @property
    def known_config(self) -> ClientModelConfig | None:
        """The configuration of its model; None where the server has not been asked yet."""


def same_arguments(client: AnyClient) -> dict[str, Any]:
    """The arguments for a client of the same model, which does not ask again what this one knows."""
    settings = client.settings
    return {
        "url": settings.url,
        "model_name": settings.model_name,
        "model_version": settings.model_version or None,
        "init_timeout_s": settings.init_timeout_s,
        "inference_timeout_s": settings.inference_timeout_s,
        "model_config": client.known_config,
        "ensure_model_is_ready": client.known_config is None,
        "access_token": settings.access_token,
    }


class ModelClientBase:
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

    def __init__(
        self,
        url: str | ServerUrl,
        model_name: str,
        model_version: str | None = None,
        *,
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
        self._check_url(self.settings.url)
        self.known_config = model_config
        self._lazy = lazy_init
        self._waits = ensure_model_is_ready
        self._library_made: Library | None = None
        self._connection_made: Any = None
        self._builder: RequestBuilder | None = None
        self._closed = False
        self._begin()

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        """A client of the same model with connections of its own. What the other knows is not asked again."""
        return cls(**same_arguments(existing_client))

    def _begin(self) -> None:
        """The last step of the constructor, for what one kind of client does besides."""

    def _check_url(self, url: ServerUrl) -> None:
        """A client for one protocol only refuses the others here."""

    def _load_library(self) -> Library:
        raise NotImplementedError

    @property
    def _library(self) -> Library:
        if self._library_made is None:
            self._library_made = self._load_library()
        return self._library_made

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

    # ---- what is asked, as steps ----------------------------------------------------------

    @property
    def _model(self) -> tuple[str, str]:
        return self.settings.model_name, self.settings.model_version

    def _build_steps(self) -> Steps[RequestBuilder]:
        """Find the model and its configuration."""
        if self._waits:
            yield from self._model_steps(self.settings.init_timeout_s)
        if self.known_config is None:
            more = {"as_json": True} if self.settings.url.protocol == GRPC else {}
            document = yield from self._order_steps("get_model_config", *self._model, **more)
            document = document.get("config", document)
            self.known_config = parse_model_config(document, self.settings.model_version)
        return RequestBuilder(self.settings, self.known_config, self._library.module)

    def _order_steps(self, method: str, *args: Any, **more: Any) -> Steps[Any]:
        """Call a method of tritonclient whose failure is that of an inference."""
        timeout_s = self.settings.inference_timeout_s
        try:
            return (yield Question(method, args, timeout_s, more))
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error

    def _server_steps(self, timeout_s: float) -> Steps[None]:
        """Wait until the server is ready."""
        wait = yield from self._wait_steps("is_server_ready", timeout_s=timeout_s)
        if wait is not None:
            raise server_not_ready(wait.error)

    def _model_steps(self, timeout_s: float) -> Steps[None]:
        """Wait until the model is ready."""
        wait = yield from self._wait_steps("is_model_ready", *self._model, timeout_s=timeout_s)
        if wait is None:
            return
        if wait.error is not None:
            raise server_not_ready(wait.error)
        try:
            yield Question("get_model_config", self._model, _WHY_S)
        except self._library.errors as error:
            raise model_not_ready(self.settings.shown, error) from error
        raise model_not_ready(self.settings.shown, None)

    def _wait_steps(self, method: str, *args: Any, timeout_s: float) -> Steps[Wait | None]:
        """Ask until the answer is yes; otherwise return the wait that is over."""
        wait = Wait(timeout_s)
        while True:
            try:
                if (yield Question(method, args, wait.question_s)):
                    return None
                wait.error = None
            except self._library.errors as error:
                if is_refusal(error):
                    raise inference_error(error, timeout_s) from error
                wait.error = error
            pause_s = wait.pause_s()
            if pause_s is None:
                return wait
            yield Pause(pause_s)
