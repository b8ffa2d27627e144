"""The blocking clients: ``SyncClient``, and ``ModelClient``, whose calls wait for their answers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from gpuserve.client.base import ModelClientBase, Values
from gpuserve.client.config import ClientModelConfig
from gpuserve.client.library import library
from gpuserve.client.request_builder import Arrays
from gpuserve.client.url import ServerUrl

Found = TypeVar("Found")


def run(coroutine: Coroutine[Any, Any, Found]) -> Found:
    """Run a coroutine to its end that never waits, because all that it calls blocks instead."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        found: Found = end.value
        return found
    raise RuntimeError("a blocking client has to wait for an event loop")


class SyncClient(ModelClientBase):
    """A blocking client of one model; ``ModelClientBase`` says what the arguments are.

    Not for several threads at once, but for ``close()``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Using the client afterwards is a ClientClosedError."""
        self._closed = True
        if self._connection_made is not None:
            self._connection_made.close()
            self._connection_made = None

    @property
    def model_config(self) -> ClientModelConfig:
        """The model's configuration; waits for the model at first.

        Raises:
            ClientTimeoutError, ClientModelUnavailableError: see ``wait_for_model``.
        """
        return run(self._requests()).config

    @property
    def is_batching_supported(self) -> bool:
        """Whether the model batches, so that ``infer_batch`` is possible."""
        return run(self._requests()).batches

    def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready.

        Raises:
            ClientTimeoutError: it is not, in that time.
        """
        run(self._wait_for_server(timeout_s))

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Raises:
            ClientTimeoutError: it is not, in that time. ClientModelUnavailableError: the server answers and
                has no such model.
        """
        run(self._wait_for_model(timeout_s))

    def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Have the server load the model, with a configuration as JSON and files where given.

        Raises:
            ClientInferenceServerError: the server refuses. ClientTimeoutError: it does not answer in time.
        """
        more = {} if files is None else {"files": dict(files)}
        run(self._order("load_model", self.settings.model_name, config=config, **more))
        self._builder = self.known_config = None  # it may have changed

    def unload_model(self) -> None:
        """Have the server unload the model; raises as ``load_model``."""
        run(self._order("unload_model", self.settings.model_name))

    def _begin(self) -> None:
        if not self._lazy:
            try:
                run(self._requests())
            except BaseException:
                self.close()
                raise

    async def _call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named)


class ModelClient(SyncClient):
    """A blocking client of one model, over HTTP or gRPC; ``ModelClientBase`` says what the arguments are.

    ``parameters`` reach the model, but for ``priority`` and ``timeout`` (microseconds), which the server
    reads: the level of the request, and how long it may take. ``headers`` are sent along.
    """

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer one sample. Where the model batches, the batch axis is added to the inputs and taken from
        the outputs.

        Inputs are arrays, by position in the order in which the model declares them, or by name.

        Raises:
            ClientValueError: the inputs, parameters or headers are wrong; nothing was sent.
            ClientInferenceServerError: the server refused, or the model failed.
            ClientTimeoutError: no answer came in time, or the model did not get ready.
            ClientClosedError: the client is closed.
        """
        return run(self._infer(inputs, named_inputs, parameters, headers, sample=True))

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Arrays:
        """Infer a batch; axis 0 of every input and output is the batch. Otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return run(self._infer(inputs, named_inputs, parameters, headers, sample=False))

    def create_client_from_url(self, url: str, network_timeout_s: float | None = None) -> Any:
        """A tritonclient of the server at ``url``, which is the caller's to close.

        Raises:
            ClientInvalidUrlError: it is no URL of a server.
        """
        timeout_s = self.settings.inference_timeout_s if network_timeout_s is None else network_timeout_s
        address = ServerUrl.parse(url)
        return library(address).connect(address, timeout_s)

    def get_lib(self) -> Any:
        """The tritonclient module that this client is built on."""
        return self._library.module
