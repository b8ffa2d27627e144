"""The clients of decoupled models, over gRPC: the responses of an inference as a generator.

The blocking client has one stream for one inference after the other. The stream is closed if an inference did
not end, because its late responses would belong to the next inference, and if the headers change, because
they belong to the stream.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, Final

from gpuserve.client.client_base import Values
from gpuserve.client.exceptions import ClientInferenceServerError, ClientTimeoutError, inference_error
from gpuserve.client.model_clients import AsyncioClient, SyncClient, run_blocking
from gpuserve.client.request_builder import Arrays, RequestBuilder

_FINAL: Final = "triton_final_response"
#: Time limit for the server to end a stream after the last response, in seconds.
_END_S: Final = 1.0

StreamResults = queue.SimpleQueue[tuple[Any, Exception | None]]


class DecoupledModelClient(SyncClient):
    """A blocking client of one decoupled model, over gRPC; ``ModelClientBase`` describes the arguments.

    ``inference_timeout_s`` is the time limit of each response. An inference may start after the last response
    of the inference before, or after its generator was closed. ``close()`` ends a running inference, from any
    thread.
    """

    _grpc_only = True

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Generator[Arrays, None, None]:
        """Infer one sample, and return a generator of the responses as they come.

        The call sends the request. Closing the generator cancels the request.

        Raises:
            ClientValueError, ClientClosedError: as ``ModelClient.infer_sample``.
            ClientInferenceServerError: if another inference is in progress; or, from the generator, if the
                server refused or the model failed.
            ClientTimeoutError: if a response did not come in time, or the model did not become ready.
        """
        return self._start(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Generator[Arrays, None, None]:
        """Infer a batch, as ``infer_sample``; raise ClientModelDoesntSupportBatchingError without batches."""
        return self._start(inputs, named_inputs, parameters, headers, sample=False)

    def close(self) -> None:
        """Close the connections. A running inference raises ClientClosedError."""
        self._closed = True
        self._stop_stream()
        super().close()

    def _finish_init(self) -> None:
        self._in_progress = threading.Lock()
        self._stream_lock = threading.Lock()
        self._results: StreamResults | None = None
        #: Keeps a generator that nobody has read from being deleted, which would cancel its request.
        self._unread: Generator[Arrays, None, None] | None = None
        self._stream_headers: dict[str, str] | None = None
        super()._finish_init()

    def _start(self, *call: Any, sample: bool) -> Generator[Arrays, None, None]:
        self._check_open()
        requests = run_blocking(self._request_builder())
        arguments = requests.arguments(*call, decoupled=True, sample=sample)
        responses = self._responses(requests, arguments, sample)
        next(responses)
        self._unread = responses if self._as_pytriton else None
        return responses

    def _responses(
        self, requests: RequestBuilder, arguments: dict[str, Any], sample: bool
    ) -> Generator[Arrays, None, None]:
        """Yield an empty value when the request is sent, and then the responses. The first value starts the
        generator, because only a started generator is closed when it is deleted.
        """
        if not self._in_progress.acquire(blocking=False):
            raise ClientInferenceServerError("Inference is already in progress")
        final = False
        try:
            results = self._send(arguments)
            yield Arrays()
            self._unread = None
            while not final:
                result = self._next_result(results)
                final = is_final(result)
                if not final or result.get_response().outputs:  # an empty final response only marks the end
                    yield requests.arrays(result, sample=sample)
        finally:
            if not final:
                self._stop_stream()
            self._in_progress.release()

    def _next_result(self, results: StreamResults) -> Any:
        timeout_s = self._response_timeout_s
        try:
            result, error = results.get(timeout=timeout_s)
        except queue.Empty:
            raise response_timeout(self.settings.shown, timeout_s) from None
        if error is not None:
            self._check_open()
            raise inference_error(error, timeout_s) from error
        return result

    def _send(self, arguments: dict[str, Any]) -> StreamResults:
        headers = arguments.pop("headers")
        results = self._results
        if results is None or headers != self._stream_headers or not results.empty():
            self._stop_stream()
            found = results = queue.SimpleQueue()
            with self._stream_lock:
                self._connection().start_stream(
                    lambda result, error: found.put((result, error)), headers=headers
                )
                self._results, self._stream_headers = results, headers
        try:
            self._connection().async_stream_infer(enable_empty_final_response=True, **arguments)
        except self._library.errors as error:
            raise inference_error(error, self.settings.inference_timeout_s) from error
        return results

    def _stop_stream(self) -> None:
        with self._stream_lock:
            connection = self._open_connection
            if self._results is None or connection is None:
                return
            self._results = None
            stream = connection._stream
            connection.stop_stream(cancel_requests=True)
            # grpc's thread for requests waits on this queue, and tritonclient never ends the thread.
            waiting = getattr(stream, "_request_queue", None)
            if waiting is not None:
                waiting.put(None)


class AsyncioDecoupledModelClient(AsyncioClient):
    """An asyncio client of one decoupled model, over gRPC; ``ModelClientBase`` describes the arguments.
    ``inference_timeout_s`` is the time limit of each response.
    """

    _grpc_only = True

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> AsyncGenerator[Arrays, None]:
        """Infer one sample, as ``DecoupledModelClient.infer_sample``."""
        return self._responses(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> AsyncGenerator[Arrays, None]:
        """Infer a batch, as ``DecoupledModelClient.infer_batch``."""
        return self._responses(inputs, named_inputs, parameters, headers, sample=False)

    async def _responses(self, *call: Any, sample: bool) -> AsyncGenerator[Arrays, None]:
        requests = await self._request_builder()
        connection = self._connection()
        arguments = requests.arguments(*call, decoupled=True, sample=sample)
        metadata = arguments.pop("headers")

        async def requests_of_stream() -> AsyncIterator[dict[str, Any]]:
            yield arguments

        stream = connection.stream_infer(requests_of_stream(), headers=metadata)
        final = False
        try:
            while not final:
                result = await self._next_result(stream)
                if result is None:
                    return
                final = is_final(result)
                if not final or result.get_response().outputs:  # as above
                    yield requests.arrays(result, sample=sample)
        finally:
            if not final:
                stream.cancel()  # has no effect on an ended stream
            # What grpc has left to do would outlive the event loop.
            rest = asyncio.ensure_future(stream.__anext__())
            await asyncio.wait({rest}, timeout=_END_S)
            if not rest.done():
                stream.cancel()
            elif not rest.cancelled():
                rest.exception()  # marks the error as retrieved

    async def _next_result(self, stream: Any) -> Any:
        """Return the next result, or None at the end; raise ClientTimeoutError if it is late."""
        timeout_s = self._response_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result, error = await anext(stream)
        except StopAsyncIteration:
            return None
        except TimeoutError as late:
            raise response_timeout(self.settings.shown, timeout_s) from late
        except self._library.errors as failed:
            self._check_open()
            raise inference_error(failed, timeout_s) from failed
        if error is not None:
            raise inference_error(error, timeout_s)
        return result


def is_final(result: Any) -> bool:
    parameters = result.get_response().parameters
    return _FINAL in parameters and bool(parameters[_FINAL].bool_param)


def response_timeout(model: str, timeout_s: float | None) -> ClientTimeoutError:
    return ClientTimeoutError(
        f"Timeout occurred while waiting for the next response of {model}. Timeout: {timeout_s} s"
    )
