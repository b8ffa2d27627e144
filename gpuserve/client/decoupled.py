"""``DecoupledModelClient``: the responses of a decoupled model as a generator, one inference at a time.

One stream serves one inference after the other. It is given up when an inference did not come to its end
(what is still on its way would be taken for the next one's) and when the headers change, which belong to it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Mapping
from typing import Any

from gpuserve.client.exceptions import ClientInferenceServerError
from gpuserve.client.failures import inference_error
from gpuserve.client.inputs import Arrays
from gpuserve.client.request_builder import RequestBuilder
from gpuserve.client.streaming import check_grpc, is_empty, is_final, no_response
from gpuserve.client.sync_base import SyncClient
from gpuserve.client.url import ServerUrl

Answers = queue.SimpleQueue[tuple[Any, Exception | None]]


class DecoupledModelClient(SyncClient):
    """A blocking client of one decoupled model, over gRPC; ``SyncClient`` says what the arguments are.

    ``inference_timeout_s`` is how long each response may take. The next inference begins after the last
    response of the one before, or after its generator was closed. ``close()`` ends the one that runs, from
    any thread.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        self._turn = threading.Lock()
        self._stream_lock = threading.Lock()
        self._answers: Answers | None = None
        self._stream_headers: dict[str, str] | None = None
        super().__init__(*args, **more)

    def infer_sample(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> Generator[Arrays, None, None]:
        """Infer one sample: the responses as they come. The request is sent by this call; closing the
        generator takes it back.

        Raises:
            ClientValueError, ClientClosedError: see ``ModelClient.infer_sample``.
            ClientInferenceServerError: another inference is in progress; while responses are read, the
                server refused or the model failed.
            ClientTimeoutError: a response did not come in time, or the model did not get ready.
        """
        return self._infer(inputs, named_inputs, parameters, headers, sample=True)

    def infer_batch(
        self,
        *inputs: Any,
        parameters: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: Any,
    ) -> Generator[Arrays, None, None]:
        """Infer a batch; otherwise as ``infer_sample``.

        Raises:
            ClientModelDoesntSupportBatchingError: the model does not batch.
        """
        return self._infer(inputs, named_inputs, parameters, headers, sample=False)

    def close(self) -> None:
        """Close the connections; an inference that runs ends with a ClientClosedError."""
        self._closed = True
        self._stop_stream()
        super().close()

    def _check_url(self, url: ServerUrl) -> None:
        check_grpc(url, type(self).__name__)

    def _infer(
        self,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        parameters: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
        *,
        sample: bool,
    ) -> Generator[Arrays, None, None]:
        self._check_open()
        requests = self._requests()
        requests.check_kind(decoupled=True, sample=sample)
        arguments = requests.arguments(inputs, named, parameters, headers, sample=sample)
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
            yield {}
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
        timeout_s = self.settings.inference_timeout_s
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
