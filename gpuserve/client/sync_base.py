"""What the blocking clients share: the connection, the wait for the model, its configuration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from gpuserve.client.config import ClientModelConfig, parse_model_config
from gpuserve.client.exceptions import ClientClosedError
from gpuserve.client.failures import inference_error, is_refusal, model_not_ready, server_not_ready
from gpuserve.client.library import Library, library
from gpuserve.client.request_builder import RequestBuilder
from gpuserve.client.settings import ClientSettings
from gpuserve.client.url import GRPC, ServerUrl
from gpuserve.client.waiting import Wait

#: The longest that the question may take why a model is not ready.
WHY_S = 1.0


class AnyClient(Protocol):
    """A client of any kind, as the model for a new one."""

    @property
    def settings(self) -> ClientSettings:
        """What it was told."""

    @property
    def known_config(self) -> ClientModelConfig | None:
        """What it knows of its model without asking."""


class SyncClient:
    """A blocking client of one model. Not for several threads at once, but for ``close()``.

    Args:
        url: ``[http|https|grpc|grpcs://]host[:port]``, HTTP without a scheme.
        model_name: the model.
        model_version: its version; None is the newest.
        lazy_init: False waits for the model in the constructor instead of at the first use.
        init_timeout_s: seconds to wait for the model, 300 where None.
        inference_timeout_s: seconds that an inference may take, 60 where None.
        model_config: the model's configuration, where it is known; otherwise the server is asked.
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
        self._waits = ensure_model_is_ready
        self._library_made: Library | None = None
        self._connection_made: Any = None
        self._builder: RequestBuilder | None = None
        self._closed = False
        if not lazy_init:
            try:
                self._requests()
            except BaseException:
                self.close()
                raise

    @classmethod
    def from_existing_client(cls, existing_client: AnyClient) -> Self:
        """A client of the same model with connections of its own. What the other knows is not asked again."""
        settings = existing_client.settings
        return cls(
            settings.url,
            settings.model_name,
            settings.model_version or None,
            init_timeout_s=settings.init_timeout_s,
            inference_timeout_s=settings.inference_timeout_s,
            model_config=existing_client.known_config,
            ensure_model_is_ready=existing_client.known_config is None,
            access_token=settings.access_token,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Using the client afterwards is a ClientClosedError."""
        self._closed = True
        if self._connection_made is not None:
            self._connection_made.close()
            self._connection_made = None

    # ---- the model ------------------------------------------------------------------------

    @property
    def model_config(self) -> ClientModelConfig:
        """The model's configuration; waits for the model at first.

        Raises:
            ClientTimeoutError, ClientModelUnavailableError: see ``wait_for_model``.
        """
        return self._requests().config

    @property
    def is_batching_supported(self) -> bool:
        """Whether the model batches, so that ``infer_batch`` is possible."""
        return self._requests().batches

    def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready.

        Raises:
            ClientTimeoutError: it is not, in that time.
        """
        wait = self._wait("is_server_ready", timeout_s=timeout_s)
        if wait is not None:
            raise server_not_ready(wait.error)

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Raises:
            ClientTimeoutError: it is not, in that time. ClientModelUnavailableError: the server answers and
                has no such model.
        """
        settings = self.settings
        model = (settings.model_name, settings.model_version)
        wait = self._wait("is_model_ready", *model, timeout_s=timeout_s)
        if wait is None:
            return
        if wait.error is not None:
            raise server_not_ready(wait.error)
        try:
            self._ask("get_model_config", *model, timeout_s=WHY_S)
        except self._library.errors as error:
            raise model_not_ready(settings.shown, error) from error
        raise model_not_ready(settings.shown, None)

    def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Have the server load the model, with a configuration as JSON and files where given.

        Raises:
            ClientInferenceServerError: the server refuses. ClientTimeoutError: it does not answer in time.
        """
        more = {} if files is None else {"files": dict(files)}
        self._order("load_model", self.settings.model_name, config=config, **more)
        self._builder = self.known_config = None  # it may have changed

    def unload_model(self) -> None:
        """Have the server unload the model; raises as ``load_model``."""
        self._order("unload_model", self.settings.model_name)

    # ---- for the clients ------------------------------------------------------------------

    def _check_url(self, url: ServerUrl) -> None:
        """A client for one protocol only refuses the others here."""

    @property
    def _library(self) -> Library:
        if self._library_made is None:
            self._library_made = library(self.settings.url)
        return self._library_made

    def _connection(self) -> Any:
        """The tritonclient that inferences go through."""
        self._check_open()
        if self._connection_made is None:
            self._connection_made = self._library.connect(
                self.settings.url, self.settings.inference_timeout_s
            )
        return self._connection_made

    def _requests(self) -> RequestBuilder:
        """What makes the requests, once the model is known to be there."""
        if self._builder is None:
            self._check_open()
            if self._waits:
                self.wait_for_model(self.settings.init_timeout_s)
            if self.known_config is None:
                self.known_config = self._fetch_config()
            self._builder = RequestBuilder(self.settings, self.known_config, self._library.module)
        return self._builder

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError(f"{type(self).__name__} is closed")

    # ---- the small calls ------------------------------------------------------------------

    def _fetch_config(self) -> ClientModelConfig:
        settings = self.settings
        more = {"as_json": True} if settings.url.protocol == GRPC else {}
        document = self._order("get_model_config", settings.model_name, settings.model_version, **more)
        return parse_model_config(document.get("config", document), settings.model_version)

    def _order(self, method: str, *args: Any, **more: Any) -> Any:
        timeout_s = self.settings.inference_timeout_s
        try:
            return self._ask(method, *args, timeout_s=timeout_s, **more)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error

    def _wait(self, method: str, *args: Any, timeout_s: float) -> Wait | None:
        """Ask until the answer is yes; otherwise the wait that is over."""
        wait = Wait(timeout_s)
        while True:
            try:
                if self._ask(method, *args, timeout_s=wait.question_s):
                    return None
                wait.error = None
            except self._library.errors as error:
                if is_refusal(error):
                    raise inference_error(error, timeout_s) from error
                wait.error = error
            pause_s = wait.pause_s()
            if pause_s is None:
                return wait
            time.sleep(pause_s)

    def _ask(self, method: str, *args: Any, timeout_s: float, **more: Any) -> Any:
        """Call a small method of tritonclient. Over HTTP a connection has one timeout for all its calls, so
        that the small ones, which have others, get a connection of their own.
        """
        headers = self.settings.headers()
        self._check_open()
        if self._library.timeout_a_call:
            ask = getattr(self._connection(), method)
            return ask(*args, headers=headers, client_timeout=timeout_s, **more)
        with self._library.connect(self.settings.url, timeout_s) as connection:
            return getattr(connection, method)(*args, headers=headers, **more)
