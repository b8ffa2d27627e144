"""Responses of a ``model.py``: ``InferenceResponse``, the sender that sends responses while or after
``execute`` runs, and the queue from the sending threads to the worker.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from gpuserve.backends.python_backend.errors import TritonError, TritonModelException, TritonRequestError
from gpuserve.backends.python_backend.model_server import worker_context
from gpuserve.backends.python_backend.tensors import Tensor, tensor_named
from gpuserve_worker.inference.inference_request import PARAMETER, Request, Response, StreamStep, is_parameter
from gpuserve_worker.inference.outputs import OutputError

TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1


class InferenceResponse:
    """The outputs of one request, or an error in their place."""

    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        for tensor in output_tensors:
            if tensor is None:
                raise TritonModelException("Output tensor for inference response should not be empty.")
            if type(tensor) is not Tensor:
                raise TypeError(
                    "the output_tensors of an InferenceResponse are pb_utils.Tensor objects, but one is "
                    f"{type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(
                "the error of an InferenceResponse is a pb_utils.TritonError, but "
                f"{type(error).__name__} was given"
            )
        self._output_tensors = output_tensors
        self._error = error
        self._parameters = checked_parameters(parameters) if parameters else None

    def output_tensors(self) -> list[Tensor]:
        return list(self._output_tensors)

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """Return the parameters by name, as JSON."""
        return parameters_json(self._parameters)

    def __repr__(self) -> str:
        return f"InferenceResponse({list(self._output_tensors)}, {self._error})"


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output of this name, or None if the response has none."""
    return tensor_named(inference_response._output_tensors, name)


def to_worker_answer(response: InferenceResponse, declared: Collection[str]) -> Any:
    """Convert a response to the worker's form: the declared outputs, or an error. Outputs that the model does
    not declare are dropped. The result is an ``OutputError`` if no declared output is left.
    """
    if response._error is not None:
        return TritonRequestError(response._error)
    tensors = response._output_tensors
    outputs = {tensor._name: tensor._value for tensor in tensors if tensor._name in declared}
    if tensors and not outputs:
        return OutputError(
            f"the response has the output {tensors[0]._name!r}, which the configuration of the model does "
            f"not declare: expected {', '.join(map(repr, declared))}"
        )
    return outputs if response._parameters is None else Response(outputs, response._parameters)


def checked_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters. Raise ``TritonModelException`` if a protocol cannot carry one of them."""
    given = dict(parameters)
    for key, value in given.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | float | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/float/str, found type {type(value)}"
            )
        if not is_parameter(value):
            raise TritonModelException(f"parameter {key!r}: expected {PARAMETER}, given {value!r:.64}")
    return given


def parameters_json(parameters: Mapping[str, Any] | None) -> str:
    return json.dumps(parameters) if parameters else "{}"


def is_request_cancelled(request: Request) -> bool:
    """Return whether a request's client has left, after receiving what the busy worker has not yet."""
    if not request.cancelled:
        worker_context().calls.poll()
    return request.cancelled


class InferenceResponseSender:
    """The sender of one request's responses, for any thread, also after ``execute`` has returned. The request
    ends if its sender is deleted before the final response.
    """

    __slots__ = ("__weakref__", "_closed", "_lock", "_position", "_queue", "_request", "_sent")

    def __init__(self, queue: BatchResponseQueue, position: int, request: Request) -> None:
        self._queue = queue
        self._position = position
        self._request = request
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL if the response is the last
        one. Without a response, send that flag alone.
        """
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._check_arguments(response, flags)
        answer = None if response is None else to_worker_answer(response, self._queue.declared)
        with self._lock:
            self._check_state(response is not None)
            self._closed = final
            self._sent += response is not None
            self._queue.put(self._position, answer, final=final)

    def is_cancelled(self) -> bool:
        """Return whether the client of the request has left."""
        return is_request_cancelled(self._request)

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless the request has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(self._position, error, final=True)

    def _check_arguments(self, response: Any, flags: int) -> None:
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response. Unsupported flag provided: {flags!r}, expected 0 or "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(
                f"send() takes a pb_utils.InferenceResponse, but {type(response).__name__} was given"
            )

    def _check_state(self, has_response: bool) -> None:
        if not self._queue.decoupled and has_response and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if not (self._queue.decoupled or has_response or self._sent):
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                "response."
            )

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        self._closed = True
        answer: OutputError | None = None
        if self._queue.decoupled:
            answer = OutputError(
                "the model deleted the response sender of a request before its final response"
            )
        elif not self._sent:
            answer = OutputError("execute returned no response for a request, and none was sent")
        self._queue.put(self._position, answer, final=True)


class BatchResponseQueue:
    """The responses of one batch, from the threads that send them to the one that gives them to the worker.

    The queue keeps the order of each request's responses. ``wake`` is called, in any thread, when there is a
    response for a receiver that found none. ``declared`` are the names of the model's outputs. ``is_used`` is
    true once a response was sent or a request was rescheduled, so that returned responses alone are not the
    answer.
    """

    def __init__(
        self, requests: int, declared: Collection[str], wake: Callable[[], object], *, decoupled: bool
    ) -> None:
        self.declared = declared
        self.decoupled = decoupled
        self.is_used = False
        # Reentrant, because a sender may be deleted, and so end its request, in any line, also in those
        # below.
        self._lock = threading.RLock()
        self._wake = wake
        self._count = self._unfinished = requests
        self._sent: dict[int, deque[Any]] = {}
        self._is_awaited = False
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, position: int, answer: Any, *, final: bool) -> None:
        """Queue a response, or None for no response, of a request. ``final`` ends the request."""
        with self._lock:
            if self._is_closed:
                return
            self.is_used = True
            if answer is not None or (final and self._count > 1):
                self._sent.setdefault(position, deque()).append((answer, final))
            self._unfinished -= final
            wakes, self._is_awaited = self._is_awaited, False
        if wakes:
            self._wake()

    def fail(self, error: BaseException) -> bool:
        """End the unfinished requests with an error. Return False if there are none."""
        with self._lock:
            if not self._unfinished or self._is_closed:
                return False
            self._error = error
            self._unfinished = 0
            wakes, self._is_awaited = self._is_awaited, False
        if wakes:
            self._wake()
        return True

    def next_step(self) -> StreamStep | None:
        """Return the next response of each request that has one, with None for the others.

        The step is empty if every request has ended. Return None if nothing is queued yet. Raise the error
        that ``fail`` was called with.
        """
        with self._lock:
            if self._sent:
                return self._dequeue_step()
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return StreamStep(())
            self._is_awaited = True
            return None

    def all_answers(self) -> list[Any] | None:
        """Return the one response of each request, or None if some have not ended. Raise as ``next_step``."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return self._dequeue_step()
            self._is_awaited = True
            return None

    def close(self) -> None:
        """Drop all responses, because nobody receives them any more."""
        with self._lock:
            self._is_closed = True
            self._sent = {}

    def _dequeue_step(self) -> StreamStep:
        step: list[Any] = [None] * self._count
        last = []
        for position, answers in list(self._sent.items()):
            step[position], final = answers.popleft()
            if final:
                last.append(position)
            if not answers:
                del self._sent[position]
        return StreamStep(step, tuple(last))
