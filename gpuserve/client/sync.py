"""``ModelClient``: one inference after the other, each call waits for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuserve.client.failures import inference_error
from gpuserve.client.inputs import Arrays
from gpuserve.client.library import library
from gpuserve.client.sync_base import SyncClient
from gpuserve.client.url import ServerUrl


class ModelClient(SyncClient):
    """A blocking client of one model, over HTTP or gRPC; ``SyncClient`` says what the arguments are.

    ``parameters`` reach the model, but for ``priority`` and ``timeout`` (microseconds), which the server
    reads: the level of the request, and how long it may take. ``headers`` are sent along.
    """

    def infer_sample(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
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
        return self._infer(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> Arrays:
        """Infer a batch; axis 0 of every input and output is the batch. Otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return self._infer(inputs, named_inputs, parameters, headers, sample=False)

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

    def _infer(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        sample: bool,
    ) -> Arrays:
        connection = self._connection()
        requests = self._requests()
        requests.check_kind(decoupled=False, sample=sample)
        arguments = requests.arguments(inputs, named, parameters, headers, sample=sample)
        timeout_s = self.settings.inference_timeout_s
        if self._library.timeout_a_call:
            arguments["client_timeout"] = timeout_s
        try:
            result = connection.infer(**arguments)
        except self._library.errors as error:
            raise inference_error(error, timeout_s) from error
        return requests.arrays(result, sample=sample)
