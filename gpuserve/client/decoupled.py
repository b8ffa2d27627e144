"""The clients of decoupled models, over gRPC: the responses of an inference as a generator. The blocking
client has one stream, which serves one inference after the other. It is given up when an inference did not
come to its end (what is still on its way would be taken for the next one's) and when the headers change,
which belong to it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, Final

from gpuserve.client.aio import AsyncioClient
from gpuserve.client.base import Values
from gpuserve.client.exceptions import ClientInferenceServerError, ClientTimeoutError
from gpuserve.client.failures import inference_error
from gpuserve.client.request_builder import Arrays, RequestBuilder
from gpuserve.client.sync import SyncClient, run

_FINAL: Final = "triton_final_response"
#: How long a server may take to end a stream whose last response it has sent.
_END_S: Final = 1.0

#: The results and the errors of one stream, as they come.
Answers = queue.SimpleQueue[tuple[Any, Exception | None]]


class DecoupledModelClient(SyncClient):
    """A blocking client of one decoupled model, over gRPC; ``ModelClientBase`` says what the arguments are.

    ``inference_timeout_s`` is how long each response may take. The next inference begins after the last
    response of the one before, or after its generator was closed. ``close()`` ends the one that runs, from
    any thread.
    """

    _grpc_only = True

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Generator[Arrays, None, None]:
        """Infer one sample: the responses as they come. The request is sent by this call; closing the
        generator takes it back.

        Raises:
            ClientValueError, ClientClosedError: see ``ModelClient.infer_sample``.
            ClientInferenceServerError: another inference is in progress; while responses are read, the
                server refused or the model failed.
            ClientTimeoutError: a response did not come in time, or the model did not get ready.
        """
        return self._start(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> Generator[Arrays, None, None]:
        """Infer a batch; otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return self._start(inputs, named_inputs, parameters, headers, sample=False)

    def close(self) -> None:
        """Close the connections; an inference that runs ends with a ClientClosedError."""
        self._closed = True
        self._stop_stream()
        super().close()

    def _begin(self) -> None:
        self._turn = threading.Lock()
        self._stream_lock = threading.Lock()
        self._answers: Answers | None = None
        self._stream_headers: dict[str, str] | None = None
        super()._begin()

    def _start(self, *call: Any, sample: bool) -> Generator[Arrays, None, None]:
        self._check_open()
        requests = run(self._requests())
        arguments = requests.arguments(*call, decoupled=True, sample=sample)
        responses = self._responses(requests, arguments, sample)
        next(responses)
        return responses

    def _responses(
        self, requests: RequestBuilder, arguments: dict[str, Any], sample: bool
    ) -> Generator[Arrays, None, None]:
        """First, without meaning, when the request is sent; then what comes. A generator that has begun is
        closed when nobody holds it any more, and one that has not is not.
        """
        if not self._turn.acquire(blocking=False):
            raise ClientInferenceServerError("Inference is already in progress")
        final = False
        try:
            answers = self._send(arguments)
            yield Arrays()
            while not final:
                result = self._next(answers)
                final = is_final(result)
                if not (final and is_empty(result)):
                    yield requests.arrays(result, sample=sample)
        finally:
            if not final:
                self._stop_stream()
            self._turn.release()

    def _next(self, answers: Answers) -> Any:
        timeout_s = self._response_timeout_s
        try:
            result, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise no_response(self.settings.shown, timeout_s) from None
        if error is not None:
            self._check_open()
            raise inference_error(error, timeout_s) from error
        return result

    # ---- the stream -----------------------------------------------------------------------

    def _send(self, arguments: dict[str, Any]) -> Answers:
        headers = arguments.pop("headers")
        answers = self._answers
        if answers is None or headers != self._stream_headers or not answers.empty():
            self._stop_stream()
            answers = self._start_stream(headers)
        try:
            self._connection().async_stream_infer(enable_empty_final_response=True, **arguments)
        except self._library.errors as error:
            raise inference_error(error, self.settings.inference_timeout_s) from error
        return answers

    def _start_stream(self, headers: dict[str, str] | None) -> Answers:
        answers: Answers = queue.SimpleQueue()

        def put(result: Any, error: Exception | None) -> None:
            answers.put((result, error))

        with self._stream_lock:
            self._connection().start_stream(put, headers=headers)
            self._answers, self._stream_headers = answers, headers
        return answers

    def _stop_stream(self) -> None:
        with self._stream_lock:
            connection = self._connection_made
            if self._answers is None or connection is None:
                return
            self._answers = None
            stream = connection._stream
            connection.stop_stream(cancel_requests=True)
            # grpc's thread that takes the requests waits in this queue, and tritonclient leaves it there.
            waiting = getattr(stream, "_request_queue", None)
            if waiting is not None:
                waiting.put(None)


class AsyncioDecoupledModelClient(AsyncioClient):
    """An asyncio client of one decoupled model, over gRPC; ``ModelClientBase`` says what the arguments are.

    ``inference_timeout_s`` is how long each response may take.
    """

    _grpc_only = True

    def infer_sample(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> AsyncGenerator[Arrays, None]:
        """Infer one sample: the responses as they come. Closing the generator takes the request back.

        Raises:
            ClientValueError, ClientInferenceServerError, ClientClosedError: see ``ModelClient.infer_sample``.
            ClientTimeoutError: a response did not come in time, or the model did not get ready.
        """
        return self._responses(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self, *inputs: Any, parameters: Values = None, headers: Values = None, **named_inputs: Any
    ) -> AsyncGenerator[Arrays, None]:
        """Infer a batch; otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return self._responses(inputs, named_inputs, parameters, headers, sample=False)

    async def _responses(self, *call: Any, sample: bool) -> AsyncGenerator[Arrays, None]:
        requests = await self._requests()
        connection = self._connection()
        arguments = requests.arguments(*call, decoupled=True, sample=sample)
        metadata = arguments.pop("headers")
        stream = connection.stream_infer(_only(arguments), headers=metadata)
        final = False
        try:
            while not final:
                result = await self._next(stream)
                if result is None:
                    return
                final = is_final(result)
                if not (final and is_empty(result)):
                    yield requests.arrays(result, sample=sample)
        finally:
            if not final:
                stream.cancel()  # does nothing to a stream that has ended
            await _end(stream)

    async def _next(self, stream: Any) -> Any:
        """The next result, None at the end of the stream. Raises ClientTimeoutError: it does not come in
        time; ClientInferenceServerError: it is an error.
        """
        timeout_s = self._response_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                result, error = await anext(stream)
        except StopAsyncIteration:
            return None
        except TimeoutError as late:
            raise no_response(self.settings.shown, timeout_s) from late
        except self._library.errors as failed:
            self._check_open()
            raise inference_error(failed, timeout_s) from failed
        if error is not None:
            raise inference_error(error, timeout_s)
        return result


async def _end(stream: Any) -> None:
    """Wait until grpc is done with the stream: what it still had to do would outlive the event loop."""
    rest = asyncio.ensure_future(stream.__anext__())
    await asyncio.wait({rest}, timeout=_END_S)
    if not rest.done():
        stream.cancel()
    elif not rest.cancelled():
        rest.exception()  # which is nobody's


async def _only(arguments: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield arguments


def is_final(result: Any) -> bool:
    parameters = result.get_response().parameters
    return _FINAL in parameters and bool(parameters[_FINAL].bool_param)


def is_empty(result: Any) -> bool:
    """Whether a response has no outputs. A final one without outputs only says that it was the end."""
    return not result.get_response().outputs


def no_response(model: str, timeout_s: float | None) -> ClientTimeoutError:
    return ClientTimeoutError(
        f"Timeout occurred while waiting for the next response of {model}. Timeout: {timeout_s} s"
    )
