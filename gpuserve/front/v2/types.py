"""The requests and responses of the v2 protocol: plain types, which both codecs (HTTP, gRPC) make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.payloads import Sequence as Sequence  # noqa: PLC0414 - exported

#: What a request without any of something has of it.
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class RegionSlice:
    """A tensor's place in a region of shared memory that a client registered.

    ``region`` is the name that the client gave it; ``offset`` counts from where the region begins. Its length
    is that of a tensor's data elsewhere. ``number`` is what the region is known by to workers, once the
    request has been found to name one that there is; before that it is 0, which none has. So is it with
    ``device``, the device whose memory the region is; "" for memory of the host.
    """

    region: str
    offset: int
    nbytes: int
    number: int = field(default=0, init=False)
    device: str = field(default="", init=False)

    def __len__(self) -> int:
        return self.nbytes

    def again(self) -> RegionSlice:
        return RegionSlice(self.region, self.offset, self.nbytes)


#: The bytes of a tensor in wire layout: in heap memory, already in the model's arena, or the client's own.
Data: TypeAlias = bytes | memoryview | Block | RegionSlice


@dataclass(eq=False, slots=True)
class InputTensor:
    """One input of a request. ``shape`` is as sent, with the batch axis; ``data`` is row-major,
    little-endian, and BYTES has 4 bytes of length before each element. ``problem`` is what was found wrong
    with those of BYTES, "" for nothing, None where nobody has looked yet.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data
    problem: str | None = None


class InferRequest:
    """One inference request: a record, of 20 fields because the protocol has so many.

    ``model_version`` is the version as text, "" for the newest. ``outputs`` are the names asked for,
    in order; empty means all. ``timeout_s`` is the client's own limit, None for none; ``priority`` is 0
    where none is given. ``empty_final`` asks for a last response without outputs at the end of a stream.
    ``parameters`` are the request parameters without the ones the protocol itself reads. ``placements``
    says, by name, which of the outputs asked for are to be written into a client's region; ``class_counts``
    of which outputs only so many largest elements are wanted; ``sequence`` where the request belongs.
    ``regions`` are all the places in regions that it names, of inputs and of outputs. ``reception`` notes
    when it came and went (see ``observe/tracing``), where it is traced, else None; its ``receiver``
    makes one once it is. ``sender`` is the exchange by which it came, None where it came from no client.
    ``ticket`` is what another process that it came by knows it by, and ``reader`` is there where that takes
    the outputs of a whole batch and cuts them apart itself.
    """

    __slots__ = (
        "class_counts", "depth", "empty_final", "id", "inputs", "kept", "model_name", "model_version",
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
        #: Within how many others it is; 0 where it came from outside.
        self.depth = 0
        #: The outputs that only other workers read, which may stay on the device of its own.
        self.kept: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class OutputTensor:
    """One output; ``data`` is row-major, BYTES length-prefixed, empty where it is ``placed`` in a region."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    placed: bool = False


@dataclass(eq=False, slots=True)
class InferResponse:
    """One response. ``model_version`` is the decimal version, never empty; ``id`` echoes the request's. The
    outputs' memory may belong to a worker's output arena: whoever writes the response calls ``close()`` when
    the bytes have been copied out, exactly once. ``memory`` is that arena.
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
    """One version of a model in the repository index: READY, UNAVAILABLE, LOADING or UNLOADING."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
