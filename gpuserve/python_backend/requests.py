"""``InferenceRequest``: one that came for a ``model.py``, or one that it makes for another model. Both say
the same of themselves. How a request of its own is asked is not in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.python_backend.asking import ResponseIterator, ask, ask_async, ask_stream
from gpuserve.python_backend.errors import TritonModelException
from gpuserve.python_backend.model_file import served
from gpuserve.python_backend.parameters import as_json, checked_parameters
from gpuserve.python_backend.responses import InferenceResponse
from gpuserve.python_backend.senders import InferenceResponseSender, Outlet, has_left
from gpuserve.python_backend.tensors import Tensor, received_tensor
from gpuserve_worker.calling.request import Request

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_REQUEST_RELEASE_ALL: Final = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE: Final = 2
TRITONSERVER_MEMORY_CPU: Final = 0
TRITONSERVER_MEMORY_GPU: Final = 2


class PreferredMemory:
    """Where the outputs of a request of its own are to lie."""

    __slots__ = ("preferred_device_id", "preferred_memory_type")

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        if preferred_memory_type not in {TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU}:
            raise TypeError(
                "PreferredMemory is TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, "
                f"not {preferred_memory_type!r}"
            )
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to; there is none in a worker."""

    __slots__ = ()

    def get_context(self) -> str | None:
        return None


class InferenceRequest:
    """A request to another model, with inputs of its own."""

    __slots__ = (
        "__weakref__", "_correlation_id", "_flags", "_inputs", "_model_name", "_model_version", "_parameters",
        "_preferred_memory", "_request_id", "_requested", "_timeout_us", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(correlation_id, bool) or not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if not all(isinstance(one, Tensor) for one in inputs):
            raise TypeError("the inputs of an InferenceRequest are pb_utils.Tensor objects")
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._inputs: list[Tensor] | None = list(inputs)
        self._requested: Sequence[str] = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout_us = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters)

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
        """Whether it starts or ends a sequence: a sum of the TRITONSERVER_REQUEST_FLAG constants."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """The limit in microseconds that its client gave it, 0 for none."""
        return self._timeout_us

    def parameters(self) -> str:
        """Its parameters by name, as JSON."""
        return as_json(self._parameters)

    def given_parameters(self) -> Mapping[str, Any]:
        """The parameters that a request was made with, by name."""
        return self._parameters

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Ask the model, and wait for its response; of a ``decoupled`` model, for each as it comes."""
        return ask_stream(self, blocks=True) if decoupled else ask(self)

    async def async_exec(
        self,
        decoupled: bool = False,
    ) -> InferenceResponse | ResponseIterator:
        """As ``exec``, while the event loop goes on."""
        return ask_stream(self, blocks=False) if decoupled else await ask_async(self)

    def preferred_memory(self) -> PreferredMemory | None:
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        """Whether its client has gone."""
        return False

    def get_response_sender(self) -> InferenceResponseSender:
        raise TritonModelException(
            "a request that a model makes has no response sender; expected exec() or async_exec()"
        )

    def set_release_flags(self, flags: int) -> None:
        raise TritonModelException("only a request that came to execute() can be released or rescheduled")


class ReceivedRequest(InferenceRequest):
    """A request that came for the model, at a position of its batch. What most models do not ask it is found
    when they do. Responses that are sent go to ``outlet``.
    """

    __slots__ = ("_origin", "_outlet", "_position", "_release_flags", "_sender")

    def __init__(self, origin: Request, position: int, outlet: Outlet) -> None:
        self._origin = origin
        self._position = position
        self._outlet = outlet
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
        return served().name

    def model_version(self) -> int:
        return served().version

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
        return as_json(self._origin.parameters)

    def given_parameters(self) -> Mapping[str, Any]:
        return self._origin.parameters or {}

    def preferred_memory(self) -> PreferredMemory | None:
        return None

    def trace(self) -> InferenceTrace:
        return InferenceTrace()

    def is_cancelled(self) -> bool:
        return has_left(self._origin)

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            self._sender = InferenceResponseSender(self._outlet, self._position, self._origin)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """Give the request back at the end of ``execute``, or have it come again in a later batch."""
        if flags not in {TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE}:
            raise TritonModelException(
                "set_release_flags takes TRITONSERVER_REQUEST_RELEASE_ALL or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, not {flags!r}"
            )
        self._release_flags = flags
        self._outlet.is_used = True

    @property
    def is_rescheduled(self) -> bool:
        """Whether it is to come to ``execute`` once more."""
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def come_again(self) -> None:
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
