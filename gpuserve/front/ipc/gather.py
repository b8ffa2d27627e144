"""The input tensors of a batch, gathered where its worker finds them.

Small tensors go inside the message, others side by side in the model's arena. A large request alone in its
batch stays where it is. The front does not touch data in a client's region: the worker copies it to its place
in the arena, or reads it in place.

An input for a device is copied there anyway, and that copy joins the parts. So data in shared memory stays
where it is, however many requests the batch has.

A batch of more than ``ONE_TURN_NBYTES`` is copied over several turns of the event loop, so that other
clients wait at most for one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.ipc.worker_memory import LentBlock, LentExport
from gpuserve.front.requests.inference import Data, InferRequest, InputTensor, RegionSlice
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.protocol.tensor import BYTES, element_count
from gpuserve_worker.protocol.wire import (
    INLINE_NBYTES,
    DeviceLoan,
    Fill,
    Loan,
    Parts,
    Payload,
    Place,
    Ref,
    WireTensor,
)

#: The device inputs of an instance on no device.
NO_INPUTS: Final[frozenset[str]] = frozenset()
_CPU: Final = "cpu"
_GPU: Final = "gpu"


class DeviceInputs:
    """The inputs that workers copy to a device, read once, by instance. ``everywhere``: by all instances."""

    def __init__(self, spec: ModelSpec) -> None:
        to_device = {one.name for one in spec.inputs if one.memory == _GPU and one.datatype != BYTES}
        names = frozenset(to_device) or NO_INPUTS
        self.by_instance = {one.name: names for one in spec.instances if one.device != _CPU}
        self.instances = frozenset(self.by_instance)
        is_everywhere = bool(self.instances) and len(self.instances) == len(spec.instances)
        self.everywhere = names if is_everywhere else NO_INPUTS

    def resize(self, spec: ModelSpec) -> None:
        """Add the instances of a resized model, on the devices that it had. Former instances stay known."""
        names = next(iter(self.by_instance.values()), NO_INPUTS)
        self.by_instance |= {one.name: names for one in spec.instances if one.device != _CPU}
        self.instances = frozenset(self.by_instance)

    def cannot_be_written(self, inputs: Iterable[InputTensor]) -> bool:
        """Return whether no callable can write to the blocks of these inputs, on any instance."""
        return bool(self.everywhere) and all(
            not isinstance(one.data, Block)
            or (
                one.name in self.everywhere
                # A callable may get an export of its own in place.
                and not (isinstance(one.data, LentExport) and not one.data.shared)
            )
            for one in inputs
        )


#: The largest batch that is copied in one turn of the event loop. Reserving and copying take 1 ms per MiB.
ONE_TURN_NBYTES: Final = 8 << 20
#: The part of a larger batch that is copied per turn.
_PART_NBYTES: Final = 2 << 20
#: Datatypes whose bytes the worker must check before use, so that regions of them are copied first.
_CHECKED: Final = frozenset({BYTES, "BOOL"})
#: Data that the worker copies instead of the front.
_PUT_BY_WORKER: Final = (RegionSlice, LentBlock)
#: Data that a worker can read in place.
_IN_PLACE: Final = (RegionSlice, Block)


class Join(NamedTuple):
    """A block to be filled with the bytes of all parts, except those that the worker puts there."""

    block: Block
    parts: Sequence[Data]


class Gathered(NamedTuple):
    """A batch's tensors, and the blocks that the batch owns until its worker is done. ``in_place``: some
    blocks stay the requests', for a retry. ``fills`` are the copies that the worker makes out of regions
    first. ``joins`` are the blocks that ``copy_in_parts`` must fill first, each with its parts.
    """

    tensors: tuple[WireTensor, ...]
    blocks: list[Block]
    in_place: bool
    fills: tuple[Fill, ...] = ()
    with_regions: Sequence[InferRequest] = ()
    joins: Sequence[Join] = ()


def gather(
    requests: Sequence[InferRequest],
    rows: int,
    batched: bool,
    nbytes: int,
    arena: Arena,
    link: WorkerLink,
    read_only: bool = False,
    to_device: frozenset[str] = NO_INPUTS,
    ragged: frozenset[str] = NO_INPUTS,
) -> Gathered:
    """Return the inputs of the requests, concatenated by rows: of shape [rows, …] each if they are
    ``batched``.

    All requests have the same inputs in the same order, with the same inner shapes (``merge_key``) unless an
    input is ``ragged``: its shape is a tuple with the shape of each request. ``rows`` is the sum of their
    rows and ``nbytes`` the size of all inputs. If inputs are ``read_only``, a region that is a whole input
    may be read in place. Inputs ``to_device`` are not joined here. Raises OutOfMemory if the arena has no
    room; nothing stays allocated then.
    """
    first = requests[0]
    blocks: list[Block] = []
    tensors: list[WireTensor] = []
    fills: list[Fill] = []
    joins: list[Join] | None = [] if nbytes > ONE_TURN_NBYTES else None
    in_place = False
    with_regions: list[InferRequest] = []
    for request in requests:
        if request.regions:
            with_regions.append(request)  # noqa: PERF401 - a comprehension is a call here
    try:
        for position, tensor in enumerate(first.inputs):
            parts = [one.inputs[position].data for one in requests] if len(requests) > 1 else [tensor.data]
            payload: Payload
            if nbytes <= INLINE_NBYTES and not with_regions:
                try:
                    payload = b"".join(parts)  # type: ignore[arg-type]  # most requests have no blocks
                except TypeError:
                    payload = b"".join([_view(part) for part in parts])
            elif tensor.name in to_device and _can_stay(parts, tensor.datatype):
                payload = _parts_payload(parts, arena, link, blocks, joins, read_only)
                in_place = True
            elif len(parts) == 1 and (found := _in_place(parts[0], tensor.datatype, link, read_only)):
                in_place = in_place or isinstance(parts[0], Block)
                payload = found
            else:
                block = _join(parts, arena, joins)
                blocks.append(block)
                fills += _fills(requests, position, block, link)
                payload = Ref(block.segment, block.offset, block.nbytes)
            shape: tuple[Any, ...] = (rows, *tensor.shape[1:]) if batched else tensor.shape
            if tensor.name in ragged:
                shape = tuple([one.inputs[position].shape for one in requests])
            tensors.append(WireTensor(tensor.name, tensor.datatype, shape, payload))
    except BaseException:
        for block in blocks:
            arena.free(block)
        raise
    return Gathered(tuple(tensors), blocks, in_place, tuple(fills), with_regions, joins or ())


def _view(data: Data) -> bytes | memoryview:
    assert not isinstance(data, RegionSlice), "the front has no view of a region"
    return data.view if isinstance(data, Block) else data


def _in_place(data: Data, datatype: str, link: WorkerLink, read_only: bool) -> Payload | None:
    """Return where the worker finds a tensor that need not be copied; None if a copy is needed."""
    if isinstance(data, RegionSlice):
        if read_only and datatype not in _CHECKED and not data.device:
            return Place(data.number, data.offset, data.nbytes)
    elif isinstance(data, LentBlock):
        if read_only or not data.shared:
            return data.lend(link)
    elif isinstance(data, Block):
        return Ref(data.segment, data.offset, data.nbytes)
    return None


def _can_stay(parts: Sequence[Data], datatype: str) -> bool:
    """Return whether a worker can fetch the parts for its device itself. Heap memory needs a copy here."""
    if datatype in _CHECKED and any(isinstance(part, RegionSlice) for part in parts):
        return False
    return any(isinstance(part, _IN_PLACE) for part in parts)


def _parts_payload(
    parts: Sequence[Data],
    arena: Arena,
    link: WorkerLink,
    blocks: list[Block],
    joins: list[Join] | None,
    read_only: bool,
) -> Payload:
    """Return where a worker finds each part; parts on the heap are joined into one of ``blocks``."""
    rest = [part for part in parts if not isinstance(part, _IN_PLACE)]
    block = _join(rest, arena, joins) if rest else None
    if block is not None:
        blocks.append(block)
    places: list[Ref | Place | Loan | DeviceLoan] = []
    offset = 0
    for part in parts:
        if isinstance(part, RegionSlice):
            places.append(Place(part.number, part.offset, part.nbytes))
        elif isinstance(part, LentBlock):
            places.append(part.lend(link, in_place=len(parts) == 1 and (read_only or not part.shared)))
        elif isinstance(part, Block):
            places.append(Ref(part.segment, part.offset, part.nbytes))
        elif block is not None:
            places.append(Ref(block.segment, block.offset + offset, len(part)))
            offset += len(part)
    return places[0] if len(places) == 1 else Parts(tuple(places))


def _fills(requests: Sequence[InferRequest], position: int, block: Block, link: WorkerLink) -> list[Fill]:
    """Return the copies that the worker makes into an input's block, of parts that the front left out."""
    fills = []
    offset = block.offset
    for number, request in enumerate(requests):
        tensor = request.inputs[position]
        data = tensor.data
        source: Place | Loan | DeviceLoan | None = None
        if isinstance(data, RegionSlice):
            source = Place(data.number, data.offset, data.nbytes)
        elif isinstance(data, LentBlock):
            source = data.lend(link)
        if source is not None:
            elements = element_count(tensor.shape)
            fills.append(Fill(number, tensor.datatype, elements, block.segment, offset, source))
        offset += len(data)
    return fills


def _join(parts: Sequence[Data], arena: Arena, joins: list[Join] | None) -> Block:
    """Return a block of all parts, with the bytes that the front copies; with ``joins``, copied later."""
    nbytes = sum(map(len, parts))
    if joins is not None:
        joins.append(Join(arena.sparse(nbytes), parts))
        return joins[-1].block
    block = arena.allocate(nbytes)
    view, position = block.view, 0
    for part in parts:
        end = position + len(part)
        if not isinstance(part, _PUT_BY_WORKER):
            view[position:end] = _view(part)
        position = end
    return block


def copy_in_parts(joins: Iterable[Join], arena: Arena) -> Iterator[None]:
    """Fill the blocks, one part per step. Raises OutOfMemory if the arena or the machine has no room."""
    copied_nbytes = 0
    for block, parts in joins:
        position = 0
        for part in parts:
            source = None if isinstance(part, _PUT_BY_WORKER) else memoryview(_view(part))
            for start in range(0, len(part), _PART_NBYTES):
                end = min(start + _PART_NBYTES, len(part))
                arena.reserve(block, position + end, is_body=False)
                if source is not None:
                    block.view[position + start : position + end] = source[start:end]
                copied_nbytes += end - start
                if copied_nbytes >= _PART_NBYTES:
                    copied_nbytes = 0
                    yield
            position += len(part)


def adopt_blocks(request: InferRequest, arena: Arena) -> list[Block]:
    """Copy inputs in another driver's arena to the heap. Returns blocks in ``arena`` and lent blocks."""
    blocks = []
    for one in request.inputs:
        if not isinstance(one.data, Block):
            continue
        if one.data.arena is arena or isinstance(one.data, LentBlock):
            blocks.append(one.data)
            continue
        foreign, one.data = one.data, bytes(one.data.view)
        foreign.free()
    return blocks


def free_body(request: InferRequest) -> None:
    """Free the inputs of a request that no driver has accepted."""
    for one in request.inputs:
        if isinstance(one.data, Block):
            one.data.free()
    request.inputs.clear()


def heap_nbytes(request: InferRequest) -> int:
    """Return how many bytes the inputs of a request take on the heap."""
    return sum(len(one.data) for one in request.inputs if isinstance(one.data, bytes | memoryview))
