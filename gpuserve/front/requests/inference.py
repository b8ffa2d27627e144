"""Inference requests and responses of v2: plain types that the codecs of HTTP and gRPC share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.payloads import Sequence as Sequence  # noqa: PLC0414 - exported

#: The empty mapping that requests share for parts that they do not use.
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class RegionSlice:
    """A tensor's slice of a shared-memory region that a client registered.

    ``region`` is the client's name of the region, and ``offset`` counts from its start. ``nbytes`` is the
    length of the tensor's data. ``number`` identifies the region to workers; it is 0, which no region has,
    until the region has been found. ``device`` is the device whose memory the region is, "" for host memory.
    """

    region: str
    offset: int
    nbytes: int
    number: int = field(default=0, init=False)
    device: str = field(default="", init=False)

    def __len__(self) -> int:
        return self.nbytes

    def unresolved_copy(self) -> RegionSlice:
        """Return the slice as it was sent, for another request."""
        return RegionSlice(self.region, self.offset, self.nbytes)


#: The bytes of a tensor in wire layout: in heap memory, in the model's arena, or in a client's region.
Data: TypeAlias = bytes | memoryview | Block | RegionSlice


@dataclass(eq=False, slots=True)
class InputTensor:
    """One input of a request.

    ``shape`` is as sent, with the batch axis. ``data`` is row-major and little-endian; BYTES elements have 4
    bytes of length before them. ``problem`` describes the first invalid BYTES element, is "" if all are
    valid, and None if they were not checked yet.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data
    problem: str | None = None


class InferRequest:
    """One inference request: a record with 20 fields, because the protocol has so many.

    ``model_version`` is the version as text, "" for the newest. ``outputs`` are the requested names in order;
    empty means all. ``timeout_s`` is the client's own limit, None for none; ``priority`` is 0 if none is
    given. ``empty_final`` asks for a last response without outputs at the end of a stream. ``parameters`` are
    the request parameters that the protocol itself does not read. ``placements`` maps requested outputs to
    the client's regions that they are written into; ``class_counts`` maps outputs to the number of largest
    elements wanted; ``sequence`` is the sequence of the request. ``regions`` are all region slices of inputs
    and outputs. ``reception`` is the trace record of receiving and sending (``observability/tracing``) if the
    request is traced, else None; ``receiver`` creates the record. ``sender`` is the exchange that received
    the request, None if no client sent it. ``ticket`` identifies the request to the ingress process that
    received it, and ``reader`` is set if that process splits the outputs of a whole batch itself.
    """

    __slots__ = (
        "class_counts", "depth", "empty_final", "id", "inputs", "kept", "model_name", "model_version", "near",
        "outputs", "parameters", "placements", "priority", "reader", "receiver", "reception", "regions",
        "sender", "sequence", "ticket", "timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        model_name: str,
        model_version: str,
        request_id: str,
        parameters: dict[str, Any],
        inputs: list[InputTensor],
        outputs: tuple[str, ...],
        timeout_s: float | None,
        priority: int = 0,
        empty_final: bool = False,
        placements: Mapping[str, RegionSlice] = NOTHING,
        class_counts: Mapping[str, int] = NOTHING,
        sequence: Sequence | None = None,
        regions: tuple[RegionSlice, ...] = (),
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = request_id
        self.parameters = parameters
        self.inputs = inputs
        self.outputs = outputs
        self.timeout_s = timeout_s
        self.priority = priority
        self.empty_final = empty_final
        self.placements = placements
        self.class_counts = class_counts
        self.sequence = sequence
        self.regions = regions
        self.reception: Any = None
        self.receiver: Any = None
        self.sender: Any = None
        self.reader: Any = None
        self.ticket = 0
        #: The number of requests that this request is nested in; 0 if it came from outside.
        self.depth = 0
        #: Outputs that only other workers read, which may stay on the worker's device.
        self.kept: tuple[str, ...] = ()
        #: The device whose memory holds the largest input of an ensemble's step, or "".
        self.near = ""


@dataclass(eq=False, slots=True)
class OutputTensor:
    """One output. ``data`` is row-major, BYTES length-prefixed, empty if ``placed`` in a region."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    placed: bool = False


@dataclass(eq=False, slots=True)
class InferResponse:
    """One response. ``model_version`` is the decimal version, never empty; ``id`` echoes the request's id.

    The memory of the outputs may belong to a worker's output arena, which is then ``memory``. The writer of
    the response calls ``close()`` exactly once, when the bytes have been copied out.
    """

    model_name: str
    model_version: str
    id: str
    parameters: Mapping[str, Any]
    outputs: list[OutputTensor]
    on_close: Callable[[], None] | None = None
    memory: Any = None

    def close(self) -> None:
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close()


class IndexEntry(NamedTuple):
    """One model version in the repository index: READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
