"""The blocking and the asyncio client: ``ModelClient``, ``AsyncioModelClient``, and their bases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from gpuserve.client.client_base import ModelClientBase, Values, tritonclient_library
from gpuserve.client.client_config import ClientModelConfig
from gpuserve.client.client_settings import ServerUrl
from gpuserve.client.request_builder import Arrays, RequestBuilder

Result = TypeVar("Result")


def run_blocking(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits, because every function that it awaits blocks."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: Result = end.value
        return found
    raise RuntimeError("a blocking client has to wait for an event loop")


class SyncClient(ModelClientBase):
    """A blocking client of one model; ``ModelClientBase`` describes the arguments. Threads must not share a
    client, except for ``close()``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Later calls raise ClientClosedError."""
        self._closed = True
        if self._open_connection is not None:
            self._open_connection.close()
            self._open_connection = None

    @property
    def model_config(self) -> ClientModelConfig:
        """The model's configuration. The first access waits for the model, as ``wait_for_model``."""
        return run_blocking(self._request_builder()).config

    @property
    def is_batching_supported(self) -> bool:
        """True if the model batches, so that ``infer_batch`` is possible."""
        return run_blocking(self._request_builder()).batches

    def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready; raise ClientTimeoutError if it is not ready in time."""
        run_blocking(self._wait_for_server(timeout_s))

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready; raise ClientTimeoutError, or ClientModelUnavailableError if the
        server answers and has no such model.
        """
        run_blocking(self._wait_for_model(timeout_s))

    def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Let the server load the model, optionally with a configuration as JSON and files by name; raise
        ClientInferenceServerError if the server refuses, ClientTimeoutError without an answer.
        """
        more = {} if files is None else {"files": dict(files)}
        run_blocking(self._request("load_model", self.settings.model_name, config=config, **more))
        self._builder = self.known_config = None  # loading may change the configuration

    def unload_model(self) -> None:
        """Let the server unload the model. Raise as ``load_model``."""
        run_blocking(self._request("unload_model", self.settings.model_name))

    def _finish_init(self) -> None:
        if not self._lazy:
            try:
                run_blocking(self._request_builder())
            except BaseException:
                self.close()
                raise

    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named)


class ModelClient(SyncClient):
    """A blocking client of one model, over HTTP or gRPC; ``ModelClientBase`` describes the arguments.

    ``parameters`` reach the model, except for ``priority`` and ``timeout`` (microseconds), which the server
    reads: the request's priority level and its time limit. ``headers`` are sent along.
    """

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer one sample and return the outputs by name.

        If the model batches, the batch axis is added to the inputs and removed from the outputs.

        Args:
            inputs: Arrays in the order in which the model declares its inputs.
            parameters: Parameters of the request.
            headers: Headers of the request.
            named_inputs: Arrays by name, in place of ``inputs``.

        Raises:
            ClientValueError: if the inputs, parameters or headers are wrong. Nothing was sent.
            ClientInferenceServerError: if the server refused, or the model failed.
            ClientTimeoutError: if no answer came in time, or the model did not become ready.
            ClientClosedError: if the client is closed.
        """
        return run_blocking(self._infer(inputs, named_inputs, parameters, headers, sample=True))

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer a batch: axis 0 of every input and output is the batch. Otherwise as ``infer_sample``; raise
        ClientModelDoesntSupportBatchingError if the model does not batch.
        """
        return run_blocking(self._infer(inputs, named_inputs, parameters, headers, sample=False))

    def create_client_from_url(self, url: str, network_timeout_s: float | None = None) -> Any:
        """Return a tritonclient of a server, which the caller closes; raise ClientInvalidUrlError."""
        timeout_s = self.settings.inference_timeout_s if network_timeout_s is None else network_timeout_s
        address = ServerUrl.parse(url)
        return tritonclient_library(address).connect(address, timeout_s)

    def get_lib(self) -> Any:
        """Return the tritonclient module that this client is built on."""
        return self._library.module


class AsyncioClient(ModelClientBase):
    """An asyncio client of one model; ``ModelClientBase`` describes the arguments. The client belongs to one
    event loop. Any number of tasks may share the client.
    """

    _aio = True

    def _finish_init(self) -> None:
        self._building = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if not self._lazy:
            try:
                await self._request_builder()
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Later calls raise ClientClosedError."""
        self._closed = True
        connection, self._open_connection = self._open_connection, None
        if connection is not None:
            await connection.close()

    @property
    def model_config(self) -> Awaitable[ClientModelConfig]:
        """The model's configuration, as an awaitable; otherwise as ``ModelClient.model_config``."""
        return self._config()

    async def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready, as ``ModelClient.wait_for_server``."""
        await self._wait_for_server(timeout_s)

    async def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready, as ``ModelClient.wait_for_model``."""
        await self._wait_for_model(timeout_s)

    async def _config(self) -> ClientModelConfig:
        return (await self._request_builder()).config

    async def _request_builder(self) -> RequestBuilder:
        """Return the request builder. Concurrent tasks wait for the first one to create it."""
        if self._builder is None:
            async with self._building:
                return await super()._request_builder()
        return self._builder

    async def _call(self, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
        return await function(*args, **named)


class AsyncioModelClient(AsyncioClient):
    """An asyncio client of one model, over HTTP or gRPC. ``ModelClientBase`` describes the arguments,
    ``ModelClient`` the parameters and headers.
    """

    async def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer one sample, as ``ModelClient.infer_sample``."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=True)

    async def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer a batch, as ``ModelClient.infer_batch``."""
        return await self._infer(inputs, named_inputs, parameters, headers, sample=False)
