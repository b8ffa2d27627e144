"""``InferenceResponseSender``: the responses of one request, sent when they are ready and from any thread,
also after ``execute`` has returned. Where they go is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Final, Protocol

from gpuserve.python_backend.errors import TritonModelException
from gpuserve.python_backend.model_file import context
from gpuserve.python_backend.responses import InferenceResponse, answer_of
from gpuserve_worker.calling.outputs import OutputError
from gpuserve_worker.calling.request import Request

TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1


class Outlet(Protocol):
    """Where the responses of one batch go. One that is not ``decoupled`` takes one a request. ``is_used``
    says that not all is as usual: something was sent, or a request is to come again. ``declared`` are the
    names of the outputs.
    """

    decoupled: bool
    is_used: bool
    declared: Collection[str]

    def put(self, position: int, answer: Any, *, final: bool) -> None:
        """Pass on a response of the request at a position, None for none; ``final``: its last. Any thread."""


def has_left(origin: Request) -> bool:
    """Whether the client of a request has gone. Where nobody reads what the server says while ``execute``
    runs, it is read now.
    """
    if not origin.cancelled:
        context().calls.look()
    return origin.cancelled


class InferenceResponseSender:
    """Sends the responses of one request. One that dies before the last is sent ends its request."""

    __slots__ = ("__weakref__", "_closed", "_lock", "_origin", "_outlet", "_position", "_sent")

    def __init__(self, outlet: Outlet, position: int, origin: Request) -> None:
        self._outlet = outlet
        self._position = position
        self._origin = origin
        self._lock = threading.Lock()
        self._sent = 0
        self._closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL where it is the last one, or
        that flag alone where no response is left to be sent.
        """
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._check(response, flags)
        answer = None if response is None else answer_of(response, self._outlet.declared)
        with self._lock:
            self._check_state(response is not None)
            self._closed = final
            self._sent += response is not None
            self._outlet.put(self._position, answer, final=final)

    def is_cancelled(self) -> bool:
        """Whether the client of the request has gone."""
        return has_left(self._origin)

    def fail(self, error: Exception) -> None:
        """End the request with an error, if it has not ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._outlet.put(self._position, error, final=True)

    def _check(self, response: Any, flags: int) -> None:
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
        if not self._outlet.decoupled and has_response and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if not (self._outlet.decoupled or has_response or self._sent):
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                "response."
            )

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        self._closed = True
        answer: OutputError | None = None
        if self._outlet.decoupled:
            answer = OutputError(
                "the model let go of the response sender of a request before its final response"
            )
        elif not self._sent:
            answer = OutputError("execute returned no response for a request, and none was sent")
        self._outlet.put(self._position, answer, final=True)
