"""``InferenceRequest``: a request that a ``model.py`` receives, or makes to another model of its server."""

from __future__ import annotations

import enum
import operator
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from gpuserve.backends.python_backend.errors import TritonModelException, text_of, to_triton_error
from gpuserve.backends.python_backend.model_server import served_triton_model, worker_context
from gpuserve.backends.python_backend.responses import (
    BatchResponseQueue,
    InferenceResponse,
    InferenceResponseSender,
    checked_parameters,
    is_request_cancelled,
    parameters_json,
)
from gpuserve.backends.python_backend.tensors import Tensor, arrays_of, received_tensor
from gpuserve_worker.inference.inference_request import Request
from gpuserve_worker.inference.model_calls import (
    CallReply,
    ModelCall,
    ModelCallError,
    OutgoingCalls,
    call_request,
)

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
_US: Final = 1e-6
#: The default of arguments that must be given, which Triton declares after optional ones.
_REQUIRED: Final[Any] = object()


class MemoryType(enum.Enum):
    """A kind of memory, with the numbers of Triton's enum."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU: Final = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU: Final = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """The memory that a model prefers for the outputs of its own request."""

    __slots__ = ("preferred_device_id", "preferred_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "PreferredMemory is TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, "
                f"not {preferred_memory_type!r}"
            )
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request. A worker has none."""

    __slots__ = ()

    def get_context(self) -> str | None:
        return None


class InferenceRequest:
    """A request to another model."""

    __slots__ = (
        "__weakref__", "_correlation_id", "_flags", "_inputs", "_model_name", "_model_version", "_parameters",
        "_preferred_memory", "_request_id", "_requested", "_timeout_us", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor | None] = _REQUIRED,
        requested_output_names: Sequence[str | bytes] = _REQUIRED,
        model_name: str | bytes = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(correlation_id, bool) or not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        for name, given in (
            ("inputs", inputs), ("requested_output_names", requested_output_names), ("model_name", model_name)
        ):  # fmt: skip
            if given is _REQUIRED or given is None:
                raise TypeError(f"an InferenceRequest needs {name}")
        if isinstance(requested_output_names, str | bytes):
            raise TypeError("the requested_output_names of an InferenceRequest are a list of str")
        self._request_id = text_of(request_id, "the request_id of an InferenceRequest")
        self._model_name = text_of(model_name, "the model_name of an InferenceRequest")
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(
                    f"Input tensor for request with id '{self._request_id}' and model name "
                    f"'{self._model_name}' should not be empty."
                )
            if not isinstance(tensor, Tensor):
                raise TypeError("the inputs of an InferenceRequest are pb_utils.Tensor objects")
        self._correlation_id = correlation_id
        self._inputs: list[Tensor] | None = list(inputs)  # type: ignore[arg-type]  # none of them is None
        self._requested: Sequence[str] = [text_of(one, "an output's name") for one in requested_output_names]
        self._model_version = operator.index(model_version)
        self._flags = operator.index(flags)
        self._timeout_us = operator.index(timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters) if parameters else {}

    def inputs(self) -> list[Tensor]:
        return self._inputs or []

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> set[str]:
        return set(self._requested)

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def flags(self) -> int:
        """Return the sum of the request's TRITONSERVER_REQUEST_FLAG constants."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """Return the time limit in microseconds, or 0 for no limit."""
        return self._timeout_us

    def parameters(self) -> str:
        """Return the parameters by name, as JSON."""
        return parameters_json(self._parameters)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request and return its response, or an iterator if ``decoupled``."""
        responses = self._call_model(stream=decoupled, blocks=True)
        if decoupled:
            return responses
        try:
            return next(responses, None) or InferenceResponse()
        finally:
            responses.cancel()

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Do as ``exec`` without blocking the event loop. If ``decoupled``, return at the first response."""
        responses = self._call_model(stream=decoupled, blocks=False)
        if decoupled:
            await responses.wait_first()
            return responses
        try:
            return await anext(responses, None) or InferenceResponse()
        finally:
            responses.cancel()

    def preferred_memory(self) -> PreferredMemory | None:
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        """Return whether the client has left."""
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        raise TritonModelException(
            "a request that a model makes has no response sender; expected exec() or async_exec()"
        )

    def set_release_flags(self, flags: int) -> None:
        raise TritonModelException("only a request that came to execute() can be released or rescheduled")

    def _call_model(self, *, stream: bool, blocks: bool) -> ResponseIterator:
        flags = self._flags
        try:
            request = call_request(
                self._model_name,
                arrays_of(self._inputs or ()),
                stream=stream,
                blocks=blocks,
                version="" if self._model_version < 0 else self._model_version,
                requested_outputs=sorted(set(self._requested)),
                parameters=self._parameters,
                timeout_s=self._timeout_us * _US if self._timeout_us else None,
                request_id=self._request_id,
                sequence_id=self._correlation_id,
                sequence_start=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
                sequence_end=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
            )
            calls = worker_context().calls
            return ResponseIterator(calls, calls.ask(request))
        except ModelCallError as error:
            return ResponseIterator(None, None, _failed_response(error))


class ReceivedRequest(InferenceRequest):
    """A request that ``execute`` receives, at a position of its batch. Values that most models do not read
    are computed when they are read. Sent responses go to ``responses``.
    """

    __slots__ = ("_origin", "_position", "_release_flags", "_responses", "_sender")

    def __init__(self, origin: Request, position: int, responses: BatchResponseQueue) -> None:
        self._origin = origin
        self._position = position
        self._responses = responses
        self._inputs = None
        self._sender: InferenceResponseSender | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        if self._inputs is None:
            self._inputs = [received_tensor(name, array) for name, array in self._origin.data.items()]
        return self._inputs

    def request_id(self) -> str:
        return self._origin.details.id

    def correlation_id(self) -> int | str:
        sequence = self._origin.sequence
        return 0 if sequence is None else sequence.id

    def requested_output_names(self) -> set[str]:
        return set(self._origin.requested_output_names or ())

    def model_name(self) -> str:
        return served_triton_model().name

    def model_version(self) -> int:
        return served_triton_model().version

    def flags(self) -> int:
        sequence = self._origin.sequence
        if sequence is None:
            return 0
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if sequence.start else 0
        return start | (TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if sequence.end else 0)

    def set_flags(self, flags: int) -> None:
        raise TritonModelException("the flags of a request that came to execute() are its client's to set")

    def timeout(self) -> int:
        return round(self._origin.details.timeout_s * 1_000_000)

    def priority(self) -> int:
        return self._origin.details.priority

    def parameters(self) -> str:
        return parameters_json(self._origin.parameters)

    def preferred_memory(self) -> PreferredMemory | None:
        return None

    def trace(self) -> InferenceTrace:
        return InferenceTrace()

    def is_cancelled(self) -> bool:
        return is_request_cancelled(self._origin)

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            self._sender = InferenceResponseSender(self._responses, self._position, self._origin)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Release the request when ``execute`` returns, or reschedule it into a later batch."""
        if flags not in {TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE}:
            raise TritonModelException(
                "set_release_flags takes TRITONSERVER_REQUEST_RELEASE_ALL or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, not {flags!r}"
            )
        self._release_flags = flags
        self._responses.is_used = True

    @property
    def is_rescheduled(self) -> bool:
        """True if ``execute`` is to receive the request once more."""
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def reset_release_flags(self) -> None:
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        self._inputs = None  # control inputs may change

    def _call_model(self, *, stream: bool, blocks: bool) -> ResponseIterator:
        repeated = InferenceRequest(
            self.request_id(),
            self.correlation_id(),
            self.inputs(),
            [*self.requested_output_names()],
            self.model_name(),
            self.model_version(),
            self.flags(),
            self.timeout(),
            parameters=self._origin.parameters,
        )
        return repeated._call_model(stream=stream, blocks=blocks)


class ResponseIterator(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses of another model. Deleting the iterator cancels the request."""

    def __init__(
        self,
        calls: OutgoingCalls | None,
        call: ModelCall | None,
        failed: InferenceResponse | None = None,
    ) -> None:
        self._calls = calls
        self._call = call
        self._failed = failed

    def __next__(self) -> InferenceResponse:
        found, self._failed = self._failed, None
        if found is None and self._call is not None:
            found = self._next(self._call.next_reply())
        if found is None:
            raise StopIteration
        return found

    async def __anext__(self) -> InferenceResponse:
        found, self._failed = self._failed, None
        if found is None and self._call is not None:
            found = self._next(await self._call.next_reply_async())
        if found is None:
            raise StopAsyncIteration
        return found

    async def wait_first(self) -> None:
        """Wait for the first response. Other tasks send requests before a loop over the responses blocks."""
        if self._call is not None:
            await self._call.wait_async()

    def cancel(self) -> None:
        """Cancel the request: no more responses are wanted."""
        calls, call, self._call = self._calls, self._call, None
        if calls is not None and call is not None:
            calls.forget(call)

    def _next(self, reply: CallReply) -> InferenceResponse | None:
        if reply.final:
            self.cancel()
        return None if reply.outputs is None and reply.error is None else _response(reply)

    def __del__(self) -> None:
        self.cancel()


def _response(reply: CallReply) -> InferenceResponse:
    if reply.error is not None:
        return _failed_response(reply.error)
    outputs = [received_tensor(name, array) for name, array in (reply.outputs or {}).items()]
    return InferenceResponse(outputs, parameters=reply.parameters)


def _failed_response(error: ModelCallError) -> InferenceResponse:
    return InferenceResponse(error=to_triton_error(error))
