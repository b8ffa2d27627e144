"""``WorkerModels``: a configuration behind a real server on free local ports, used over gRPC."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from gpuserve.api.server import Server
from gpuserve.client.decoupled_clients import is_final
from gpuserve.config.settings.server import NO_CONTROL, POLL, ServerSettings
from gpuserve.model.rules import by_name
from gpuserve.model.spec import ModelSpec
from gpuserve.testing.local_requests import LocalRequest, Outputs, input_arrays
from gpuserve_worker.inference.model_calls import ModelCallError
from gpuserve_worker.protocol.tensor import BF16, datatype_of

_FINAL: Final = "triton_final_response"
#: Settings of a test's server: loopback interface, free ports, neither TLS nor access tokens.
_LOCAL_SETTINGS: Final[dict[str, Any]] = {
    "host": "127.0.0.1",
    "grpc_host": None,
    "metrics_host": None,
    "http_port": 0,
    "grpc_port": 0,
    "metrics_port": 0,
    "health_port": None,
    "tls_certfile": None,
    "tls_keyfile": None,
    "tls_client_ca": None,
    "restricted_endpoints": (),
    "access_token": None,
    "access_rules": (),
}


class WorkerModels:
    """Models in worker processes. ``addresses`` are for any client."""

    def __init__(self, settings: ServerSettings, specs: Sequence[ModelSpec]) -> None:
        if settings.model_control == POLL:  # a server in a program has no files to poll
            settings = dataclasses.replace(settings, model_control=NO_CONTROL)
        self._server = Server(dataclasses.replace(settings, **_LOCAL_SETTINGS))
        for one in specs:
            self._server.add(one)
        self._specs = by_name(specs)
        self._client: Any = None

    @property
    def addresses(self) -> dict[str, str]:
        return self._server.addresses

    def open(self) -> None:
        """Start the server. Raise StartupError if a model cannot be loaded; then no process is left."""
        self._server.run()
        self._client = self._connect()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._server.stop()

    def infer(self, model: str, version: str, requests: Sequence[LocalRequest]) -> list[Outputs]:
        """Return the outputs for requests that are sent together. Raise the first ModelCallError."""
        answers = [queue.SimpleQueue[tuple[Any, Any]]() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self._client.async_infer(
                callback=lambda result, error, to=answer: to.put((result, error)),
                **self._arguments(model, version, request),
            )
        return [_outputs(*one.get()) for one in answers]

    def stream(self, model: str, version: str, request: LocalRequest) -> Iterator[Outputs]:
        """Yield the responses to a request as they come. Raise ModelCallError."""
        answers = queue.SimpleQueue[tuple[Any, Any]]()
        client = self._connect()
        client.start_stream(lambda result, error: answers.put((result, error)))
        stream = client._stream
        try:
            arguments = self._arguments(model, version, request)
            client.async_stream_infer(enable_empty_final_response=True, **arguments)
            final = False
            while not final:
                result, error = answers.get()
                final = error is None and is_final(result)
                if not (final and not result.get_response().outputs):
                    yield _outputs(result, error)
        finally:
            client.stop_stream(cancel_requests=True)
            # grpc's thread for requests waits on this queue, and tritonclient never ends the thread.
            stream._request_queue.put(None)
            client.close()

    def _connect(self) -> Any:
        from tritonclient.grpc import InferenceServerClient  # imports grpc, which local models do not need

        return InferenceServerClient(self.addresses["grpc"])

    def _arguments(self, model: str, version: str, request: LocalRequest) -> dict[str, Any]:
        from tritonclient.grpc import InferInput, InferRequestedOutput

        arrays = {name: np.asarray(value) for name, value in request.inputs.items()}
        if known := self._specs.get(model):  # the server reports an unknown model
            arrays = input_arrays(known[-1], request.inputs)
        inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), datatype := datatype_of(array.dtype))
            inputs.append(tensor.set_data_from_numpy(array.astype(np.float32) if datatype == BF16 else array))
        arguments: dict[str, Any] = {
            "model_name": model,
            "model_version": version,
            "inputs": inputs,
            "outputs": [InferRequestedOutput(name) for name in request.requested_outputs] or None,
            "request_id": request.request_id,
            "parameters": dict(request.parameters) or None,
        }
        if request.sequence is not None:
            keys = ("sequence_id", "sequence_start", "sequence_end")
            arguments |= zip(keys, request.sequence, strict=True)
        if request.timeout_s:
            arguments["timeout"] = int(request.timeout_s * 1e6)
        return arguments


def _outputs(result: Any, error: Any) -> Outputs:
    if error is not None:
        code = str(error.status() or "INTERNAL").removeprefix("StatusCode.")
        raise ModelCallError(code, error.message())
    response = result.get_response()
    parameters = {
        key: getattr(one, one.WhichOneof("parameter_choice"))
        for key, one in response.parameters.items()
        if key != _FINAL
    }
    return Outputs({one.name: result.as_numpy(one.name) for one in response.outputs}, parameters)
