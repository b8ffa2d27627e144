"""Puts the tensors of a batch where its worker finds them: inside the message when they are small,
side by side in the model's arena otherwise. A large request alone in its batch stays where it is. What lies
in a client's region is not touched: its worker copies it to its place in the arena, or reads it where it is.

An input that goes to the worker's device is copied there anyway, and joined by that copy: what lies in shared
memory stays where it is, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpuserve.front.links.output_memory import LentBlock
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.device_inputs import NO_INPUTS
from gpuserve.front.requests.inference import Data, InferRequest, RegionSlice
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

#: Datatypes whose bytes have to be looked at before they are an input, for which they are copied first.
_CHECKED: Final = frozenset({BYTES, "BOOL"})
#: What the front does not copy: the worker does.
_PUT_BY_WORKER: Final = (RegionSlice, LentBlock)
#: What a worker can read where it is.
_IN_PLACE: Final = (RegionSlice, Block)


class Gathered(NamedTuple):
    """A batch's tensors, and the blocks that it owns until its worker is done; ``in_place`` ones stay the
    requests', for a retry. ``fills`` is what the worker first copies out of regions.
    """

    tensors: tuple[WireTensor, ...]
    blocks: list[Block]
    in_place: bool
    fills: tuple[Fill, ...] = ()
    with_regions: Sequence[InferRequest] = ()


def gather(
    requests: Sequence[InferRequest],
    rows: int,
    batched: bool,
    nbytes: int,
    arena: Arena,
    link: WorkerLink,
    read_only: bool = False,
    to_device: frozenset[str] = NO_INPUTS,
) -> Gathered:
    """The inputs of the requests, concatenated by rows: of shape [rows, …] each, where they are ``batched``.
    All requests have the same inputs in the same order, with the same inner shapes (``merge_key``). ``rows``
    is the batch's sum of rows, ``nbytes`` that of the bytes of all of its inputs. Where inputs are
    ``read_only``, a region that is the whole of one may be read where it is. Inputs ``to_device`` are not
    joined here. Raises OutOfMemory: the arena has no room; nothing stays allocated.
    """
    first = requests[0]
    blocks: list[Block] = []
    tensors: list[WireTensor] = []
    fills: list[Fill] = []
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
                payload = _inline(parts)
            elif tensor.name in to_device and _stays(parts, tensor.datatype):
                payload = _apart(parts, arena, link, blocks, read_only)
                in_place = True
            elif len(parts) == 1 and (found := _as_it_is(parts[0], tensor.datatype, link, read_only)):
                in_place = in_place or isinstance(parts[0], Block)
                payload = found
            else:
                block = _join(parts, arena)
                blocks.append(block)
                fills += _fills(requests, position, block, link)
                payload = Ref(block.segment, block.offset, block.nbytes)
            shape = (rows, *tensor.shape[1:]) if batched else tensor.shape
            tensors.append(WireTensor(tensor.name, tensor.datatype, shape, payload))
    except BaseException:
        for block in blocks:
            arena.free(block)
        raise
    return Gathered(tuple(tensors), blocks, in_place, tuple(fills), with_regions)


def _inline(parts: Sequence[Any]) -> bytes:
    try:
        return b"".join(parts)
    except TypeError:  # one of them is a block
        return b"".join([_view(part) for part in parts])


def _view(data: Data) -> bytes | memoryview:
    assert not isinstance(data, RegionSlice), "the front has no view of a region"
    return data.view if isinstance(data, Block) else data


def _as_it_is(data: Data, datatype: str, link: WorkerLink, read_only: bool) -> Payload | None:
    """Where the worker finds a tensor that nobody has to move; None where it has to be."""
    if isinstance(data, RegionSlice):
        if read_only and datatype not in _CHECKED and not data.device:
            return Place(data.number, data.offset, data.nbytes)
    elif isinstance(data, LentBlock):
        if read_only or not data.shared:
            return data.lend(link)
    elif isinstance(data, Block):
        return Ref(data.segment, data.offset, data.nbytes)
    return None


def _stays(parts: Sequence[Data], datatype: str) -> bool:
    """Whether a worker can fetch them for its device from where they lie; heap memory needs a copy here."""
    if datatype in _CHECKED and any(isinstance(part, RegionSlice) for part in parts):
        return False
    return any(isinstance(part, _IN_PLACE) for part in parts)


def _apart(
    parts: Sequence[Data], arena: Arena, link: WorkerLink, blocks: list[Block], read_only: bool
) -> Payload:
    """Where a worker finds each part. Those in heap memory are put into one block, which joins ``blocks``."""
    rest = [part for part in parts if not isinstance(part, _IN_PLACE)]
    block = _join(rest, arena) if rest else None
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
    """What the worker copies into the block of an input that the front has left out of it."""
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


def _join(parts: Sequence[Data], arena: Arena) -> Block:
    """A block as long as all parts together, with the bytes of those in it that the front copies."""
    block = arena.allocate(sum(map(len, parts)))
    view, position = block.view, 0
    for part in parts:
        end = position + len(part)
        if not isinstance(part, _PUT_BY_WORKER):
            view[position:end] = _view(part)
        position = end
    return block
