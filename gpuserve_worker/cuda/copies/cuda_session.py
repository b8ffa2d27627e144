"""One front's session with a worker on a GPU, and the staging of inputs: one buffer a batch, with as few
copies as possible.

The host waits for no copy. Bytes in page-locked segments are copied directly. Small inputs, inputs in
messages and inputs in clients' host regions are first copied to the worker's own host blocks and then in one
copy to the device, except for large inputs in a page-locked region. Inputs on the device are copied within
it, or given to the callable without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.cuda.copies.ipc_regions import (
    DeviceRegions,
    ExportExchange,
    ExportUnavailable,
    wait_copies,
)
from gpuserve_worker.cuda.copies.output_copies import DeviceWriter
from gpuserve_worker.cuda.device.arrays import ALIGNMENT, Buffer, BufferLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.host_memory import HostBlock, Span, address_of
from gpuserve_worker.cuda.device.ipc_memory import OpenedMemory
from gpuserve_worker.cuda.device.runtime import DEFAULT_STREAM, Copy, CudaError
from gpuserve_worker.execution.batch_inputs import input_defect
from gpuserve_worker.inference.failure import DeviceFailure
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import (
    DEVICE_LOAN,
    LOAN,
    PARTS,
    REGION,
    DeviceLoan,
    Fill,
    Place,
    WireFailure,
    WireTensor,
    requests_as_tuples,
)
from gpuserve_worker.protocol.tensor import BYTES, TensorSpec, datatype_of, element_count, numpy_dtype
from gpuserve_worker.protocol.wire import Run

#: The shortest time between two reports of the process's memory on the device.
_REPORT_S: Final = 2.0

if TYPE_CHECKING:
    from gpuserve_worker.execution.session import FrontSession


class CudaSession:
    """The device's part of a session on a GPU, for ``front``; implements ``DeviceSession``."""

    def __init__(self, device: CudaDevice, staging: Staging, front: FrontSession, arena: Arena) -> None:
        self._staging = staging
        self._device = device
        self._process_nbytes = device.runtime.process_nbytes
        self._reported = wire.DeviceMemory(0)
        self._report_due_s = 0.0
        self._opened = device.opened
        self.front = front
        self.reader = device.arrays
        self.regions = DeviceRegions(device, front.regions, front.fail)
        self.open_region = self.regions.open
        self.wait_reads = partial(wait_copies, device, device.h2d)
        #: Exports for other workers, and loans of theirs.
        self.exchange = ExportExchange(device, front.send, front.fail)
        self.retire = self.exchange.retire
        self.writer = DeviceWriter(arena, front.regions, device, self.regions, self.exchange)
        self.start_output_copies = self.writer.begin
        #: Inputs that may still be in transfer, by batch.
        self._arrivals: dict[int, StagedInputs] = {}

    def is_open(self, run: wire.Run) -> bool:
        return not (self.regions.any_opening or self._opened.opening) or not self._opening(run)

    def wait_open(self, run: wire.Run) -> None:
        for memory in self._opening(run):
            memory.wait()

    def stage(
        self, run: wire.Run, failures: dict[int, wire.WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs | None]:
        arrays, arrival = self._staging.stage(self, run, failures)
        if arrival is not None:
            if run.batch_id in self._arrivals:
                self.wait_inputs_read(run.batch_id)  # the inputs of the first attempt
            self._arrivals[run.batch_id] = arrival
        return arrays, arrival

    def warm(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return self._staging.warm(self, arrays)

    def wait_inputs_read(self, batch_id: int) -> None:
        arrival = self._arrivals.pop(batch_id, None)
        if arrival is not None:
            arrival.wait_idle()

    def process_message(self, message: wire.Message) -> bool:
        if not isinstance(message, wire.Shrink):
            return self.exchange.process_message(message)
        self.writer.shrink()
        self._shrink_inputs()
        return True

    def _shrink_inputs(self) -> None:
        """Free memory for inputs that no batch has needed since the last call, and report the rest. In the
        background: CUDA waits for the device before it frees memory.
        """

        def run() -> None:
            with suppress(CudaError, OSError):  # the device or the front is lost, which others find
                self._device.buffers.shrink()
                self._device.host.blocks.shrink()
                self._report_due_s = 0.0
                self.report_memory()

        self._device.host.later(run)

    def report_memory(self) -> None:
        now = monotonic()
        if now < self._report_due_s:
            return
        self._report_due_s = now + _REPORT_S
        memory = wire.DeviceMemory(self._process_nbytes(), self._device.host.locks.locked_nbytes)
        if memory != self._reported:
            self._reported = memory
            self.front.send(memory)

    def close(self) -> None:
        """Close the memory that the front lent. No batch of the front runs any more."""
        for batch_id in list(self._arrivals):
            self.wait_inputs_read(batch_id)
        self.exchange.close()

    def _opening(self, run: wire.Run) -> list[OpenedMemory]:
        regions, segments = memory_named_by(run)
        named = [*map(self.regions.opening, regions), *map(self.exchange.opening, segments)]
        return [one for one in named if one is not None]


#: Up to this size a copy by the host is faster than the start of a separate device copy.
SMALL_NBYTES: Final = 32 << 10
_BOOL: Final = "BOOL"
#: Shapes of static inputs that have memory.
_MAX_STATIC: Final = 64
#: Alignment of a tensor for use in place: kernels may require it, and CUDA's error for less ends the process.
_IN_PLACE_ALIGNMENT: Final = 256


class Piece(NamedTuple):
    """Bytes for one place in a buffer. ``source`` is the bytes or their decoded location; ``request`` is the
    position of their request, None for a whole batch. ``device_place`` is their place in a region of device
    memory, if any; ``is_locked``: they are in a page-locked host region that the device can read.
    """

    offset: int
    nbytes: int
    source: Any
    datatype: str
    request: int | None
    device_place: Place | None = None
    is_locked: bool = False

    @property
    def is_staged(self) -> bool:
        source = self.source
        if isinstance(source, bytes):
            return True
        if self.device_place is not None or self.is_locked or device_loan(source) is not None:
            return False
        return self.nbytes <= SMALL_NBYTES or _kind(source) == REGION


class StagedInputs:
    """The inputs of one batch in transfer; implements ``Arrival``. The device reads ``spans`` of others' host
    memory, and ``blocks`` of the worker's.
    """

    __slots__ = ("_arrived", "_blocks", "_device", "_ticket", "static_copies")

    def __init__(self, device: CudaDevice, spans: Sequence[Span], blocks: Sequence[HostBlock]) -> None:
        self._device = device
        self._blocks = blocks
        #: 0: the copies have ended.
        self._arrived = device.events.acquire()
        #: Once this work of the default stream is complete, so are the copies, which it waits for.
        self._ticket: int | None = None
        #: Copies to static inputs, with what keeps their sources alive: (to, source, nbytes, owner).
        self.static_copies: list[tuple[int, int, int, object]] = []
        device.runtime.record(self._arrived, device.h2d)
        if spans:
            device.host.uses.begin(self._arrived, spans)

    def admit(self) -> None:
        for stream in self._device.arrays.streams() if self._arrived else ():
            self._device.runtime.stream_wait_event(stream, self._arrived)
        for to, source, nbytes, _ in self.static_copies:
            self._device.runtime.copy(to, source, nbytes, Copy.DEVICE_TO_DEVICE, DEFAULT_STREAM)
        if self.static_copies:
            self._device.order_after_default()
        self._ticket = self._device.progress.next_ticket

    def wait_idle(self) -> None:
        """Block the host until no copy is running, whether the copies succeeded or not."""
        event, self._arrived = self._arrived, 0
        if not event:
            return
        device = self._device
        if self._ticket is None or self._ticket > device.progress.completed:
            with suppress(CudaError):  # no copy runs after an error; the next user of the device sees it
                if not device.runtime.is_complete(event):
                    device.runtime.wait(event)
        device.host.uses.end(event)
        device.events.release_event(event)
        for block in self._blocks:
            device.host.blocks.release_block(block)


def device_inputs(specs: Iterable[TensorSpec]) -> frozenset[str]:
    """Return the names of the inputs that are given on the device. BYTES inputs never are."""
    return frozenset(one.name for one in specs if one.memory == "gpu" and one.datatype != BYTES)


class Staging:
    """The transfer of one model's inputs in ``names`` to the device. ``kind`` is "cupy" or "torch". If inputs
    are ``read_only``, those that are on the device already are used in place. With ``static_rows`` each input
    has memory for so many rows, where every batch begins: the inputs are copied there in the order of the
    default stream.
    """

    def __init__(
        self,
        device: CudaDevice,
        names: frozenset[str],
        kind: str,
        *,
        read_only: bool = False,
        static_rows: int = 0,
    ) -> None:
        self._uses_in_place = read_only and not static_rows
        self._static_rows = static_rows
        #: The static memory by name and shape of a row, and the arrays over it with their addresses.
        self._static_memory: dict[Any, Any] = {}
        self._static_arrays: dict[tuple[str, tuple[int, ...]], tuple[Any, int]] = {}
        self._device = device
        self._names = names
        self._kind = kind

    def stage(
        self, session: CudaSession, run: Run, failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs | None]:
        """Return all inputs of a batch as arrays by name, and the arrival of those for the device, or None.
        Add requests whose bytes cannot be read to ``failures``, by position. Raise as ``start_transfer``.
        """
        front = session.front
        if not self._names:
            return front.inputs.arrays(run.batch_id, run.inputs), None
        ours = [one for one in run.inputs if one[0] in self._names]
        arrays: dict[str, Any] = {}
        if len(ours) < len(run.inputs):
            others = tuple([one for one in run.inputs if one[0] not in self._names])
            arrays = front.inputs.arrays(run.batch_id, others)
        if self._uses_in_place and session.regions.any_open:
            ours = self._use_in_place(ours, arrays, lambda one: self._in_region(one, session.regions))
        if session.exchange.has_loans and not self._static_rows:
            of_batch = front.leases.grant(run.batch_id)
            ours = self._use_in_place(ours, arrays, lambda one: self._lent(one, session.exchange, of_batch))
        if not ours:
            return arrays, None
        brought, arrival = self.start_transfer(session, ours, failures)
        if not arrays:
            return brought, arrival
        arrays |= brought
        return {one[0]: arrays[one[0]] for one in run.inputs}, arrival

    def _use_in_place(
        self, tensors: Sequence[WireTensor], arrays: dict[str, Any], over: Callable[[WireTensor], Any | None]
    ) -> list[WireTensor]:
        """Add the arrays of tensors that are used in place. Return the other tensors."""
        left = []
        for tensor in tensors:
            array = over(tensor)
            if array is None:
                left.append(tensor)
            else:
                arrays[tensor[0]] = array
        return left

    def _in_region(self, tensor: WireTensor, regions: DeviceRegions) -> Any | None:
        """Return the array over an input in one region, which stays open; None if it must be copied."""
        place = device_place(tensor[3], regions)
        if place is None or not place.nbytes:
            return None
        region = regions.get(place.region)
        assert region is not None, "device_place found the region"
        address = region.address(place)
        if address % _IN_PLACE_ALIGNMENT:
            return None
        return self._over(address, place.nbytes, region.lease(), tensor)

    def _lent(self, tensor: WireTensor, exchange: ExportExchange, of_batch: object) -> Any | None:
        """Return the array over another worker's export on this device, or None if it must be copied.
        ``of_batch`` lives until the device has read it. Raise as ``ExportExchange.opened``.
        """
        _, datatype, shape, source = tensor
        loan = device_loan(source)
        if loan is None or not loan.in_place or not loan.nbytes:
            return None
        opened = exchange.opened(loan)
        mapped = opened.mapped()
        if not mapped.is_here:
            return None
        if loan.nbytes != element_count(shape) * numpy_dtype(datatype).itemsize:
            raise ValueError(f"a loan of {loan.nbytes} bytes for {datatype} of shape {tuple(shape)}")
        lease = self._device.returns.lease(opened, of_batch)
        return self._over(mapped.address + loan.offset, loan.nbytes, lease, tensor)

    def _over(self, address: int, nbytes: int, owner: object, tensor: WireTensor) -> Any:
        arrays = self._device.arrays
        memory = arrays.memory(address, nbytes, owner)
        return arrays.over(memory, 0, tensor[1], tuple(tensor[2]), self._kind)

    def warm(self, session: CudaSession, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the same arrays, with the device inputs on the device; the default stream waits for them."""
        if not self._names:
            return arrays
        ours = [
            WireTensor(name, datatype_of(array.dtype), array.shape, array.tobytes())
            for name, array in arrays.items()
            if name in self._names
        ]
        brought, arrival = self.start_transfer(session, ours, {})
        arrival.admit()
        arrival.wait_idle()
        return {name: brought.get(name, array) for name, array in arrays.items()}

    def start_transfer(
        self, session: CudaSession, tensors: Sequence[WireTensor], failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs]:
        """Start copying tensors of one batch. Return arrays on the device by name, and their arrival. Raise
        ``RegionError`` if the region of the only request cannot be read, ``ValueError`` if a tensor is not in
        announced memory or does not match its description.
        """
        offsets, pieces, nbytes = layout(tensors)
        device, regions = self._device, session.regions
        if regions.any_open:
            pieces = [one._replace(device_place=device_place(one.source, regions)) for one in pieces]
        known = session.front.regions
        if len(known) and any(map(may_be_locked, pieces)):
            pieces = [
                one._replace(is_locked=may_be_locked(one) and known.is_locked(one.source[0]))
                for one in pieces
            ]
        buffer = device.buffers.acquire(nbytes)
        memory = device.arrays.memory(buffer.address, buffer.nbytes, BufferLease(device.buffers, buffer))
        copying = _Copying(device, session, buffer, failures)
        try:
            for run in runs(pieces):
                copying.copy(run)
        except BaseException:
            with suppress(CudaError):  # started copies read memory that its owner may reuse after the reply
                device.runtime.synchronize_stream(device.h2d)
            for block in copying.blocks:
                device.host.blocks.release_block(block)
            raise
        arrival = StagedInputs(device, copying.spans, copying.blocks)
        arrays = {
            name: device.arrays.over(memory, offset, datatype, tuple(shape), self._kind)
            for (name, datatype, shape, _), offset in zip(tensors, offsets, strict=True)
        }
        if self._static_rows:
            for (name, datatype, shape, _), offset in zip(tensors, offsets, strict=True):
                given = arrays[name]
                arrays[name], to = self._static(name, datatype, tuple(shape))
                nbytes = element_count(shape) * numpy_dtype(datatype).itemsize
                if nbytes:
                    arrival.static_copies.append((to, buffer.address + offset, nbytes, given))
        return arrays, arrival

    def _static(self, name: str, datatype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
        """Return the array over an input's static memory, and its address; DeviceFailure: too many shapes."""
        found = self._static_arrays.get((name, shape))
        if found is None:
            rows = self._static_rows
            is_batch = bool(shape) and shape[0] <= rows
            key = name, shape[1:] if is_batch else shape, is_batch
            if key not in self._static_memory:
                if len(self._static_memory) >= _MAX_STATIC:
                    raise DeviceFailure(f"static_inputs has memory for {_MAX_STATIC} shapes of inputs")
                count = element_count(key[1]) * (rows if is_batch else 1)
                owned = self._device.buffers.acquire(count * numpy_dtype(datatype).itemsize)
                self._static_memory[key] = self._device.arrays.memory(owned.address, owned.nbytes, None)
            memory = self._static_memory[key]
            array = self._device.arrays.over(memory, 0, datatype, shape, self._kind)
            found = self._static_arrays[name, shape] = array, memory.ptr
        return found


class _Copying:
    """The copies of one batch's pieces into a buffer."""

    def __init__(
        self, device: CudaDevice, session: CudaSession, buffer: Buffer, failures: dict[int, WireFailure]
    ) -> None:
        self._device = device
        self._session = session
        self._buffer = buffer
        self._failures = failures
        #: Memory of others, and of the worker, that the copies read.
        self.spans: list[Span] = []
        self.blocks: list[HostBlock] = []

    def copy(self, run: Sequence[Piece]) -> None:
        if run[0].is_staged:
            self._copy_staged(run)
            return
        (piece,) = run
        if piece.device_place is not None:
            self._copy_region(piece, piece.device_place)
        elif (loan := device_loan(piece.source)) is not None:
            self._copy_loan(piece, loan)
        elif piece.is_locked:
            self._copy_locked(piece)
        else:
            self._copy_from(self._view(piece.source), piece)

    def _copy_from(self, memory: memoryview, piece: Piece) -> None:
        address = address_of(memory)
        self.spans.append((address, piece.nbytes))
        self._to_device(piece.offset, address, piece.nbytes)

    def _copy_locked(self, piece: Piece) -> None:
        """Copy a piece from a page-locked host region. If its client truncates the file during the copy, the
        locked pages stay until the copy ends.
        """
        place = Place(*piece.source)
        try:
            memory = self._session.front.regions.view(place)
        except RegionError as error:
            self._refuse(piece, place.nbytes, error)
            return
        self._copy_from(memory, piece)

    def _refuse(self, piece: Piece, nbytes: int, error: RegionError) -> None:
        """Clear the rows of a piece and refuse its request. For a piece of a whole batch raise the error."""
        if piece.request is None:
            raise error
        device = self._device
        device.runtime.clear(self._buffer.address + piece.offset, nbytes, device.h2d)
        self._failures[piece.request] = WireFailure(error.code, str(error))

    def _copy_region(self, piece: Piece, place: Place) -> None:
        """Copy a piece from a client's device region; refuse the request if that cannot be read."""
        device = self._device
        region = self._session.regions.get(place.region)
        assert region is not None, "a place in device memory was looked for"
        to = self._buffer.address + piece.offset
        try:
            region.start_copy(place, to, device.h2d)
        except RegionError as error:
            self._refuse(piece, place.nbytes, error)

    def _copy_loan(self, piece: Piece, loan: DeviceLoan) -> None:
        device, to = self._device, self._buffer.address + piece.offset
        try:
            source = self._session.exchange.opened(loan).mapped().address + loan.offset
        except ExportUnavailable as error:
            self._refuse(piece, loan.nbytes, error)
            return
        if loan.nbytes:
            device.runtime.copy(to, source, loan.nbytes, Copy.DEVICE_TO_DEVICE, device.h2d)

    def _copy_staged(self, run: Sequence[Piece]) -> None:
        """Copy consecutive pieces to a host block, as the buffer has them, and the block to the device."""
        start, last = run[0].offset, run[-1]
        nbytes = last.offset + last.nbytes - start
        block = self._device.host.blocks.acquire(nbytes)
        self.blocks.append(block)
        for piece in run:
            self._put(piece, block.memory[piece.offset - start :][: piece.nbytes])
        self._to_device(start, block.address, nbytes)

    def _put(self, piece: Piece, target: memoryview) -> None:
        if isinstance(piece.source, bytes):
            target[:] = piece.source
        elif _kind(piece.source) != REGION:
            target[:] = self._view(piece.source)
        elif piece.request is None:
            self._session.front.regions[piece.source[0]].read(Place(*piece.source), target)
        elif (problem := self._read_part(piece, target)) is not None:
            np.frombuffer(target, np.uint8)[:] = 0
            self._failures[piece.request] = WireFailure("INVALID_ARGUMENT", problem)

    def _read_part(self, piece: Piece, target: memoryview) -> str | None:
        """Copy a request's rows from a client's region; return the reason if they are invalid."""
        try:
            self._session.front.regions[piece.source[0]].read(Place(*piece.source), target)
        except RegionError as error:
            return str(error)
        return input_defect(piece.datatype, 0, target)

    def _to_device(self, offset: int, source: int, nbytes: int) -> None:
        if nbytes:
            device, to = self._device, self._buffer.address + offset
            device.runtime.copy(to, source, nbytes, Copy.HOST_TO_DEVICE, device.h2d)

    def _view(self, source: Any) -> memoryview:
        front = self._session.front
        memory = front.loans if _kind(source) == LOAN else front.mapping
        segment, offset, nbytes = source[:3]
        return memory.view(segment, offset, nbytes)


def device_place(source: Any, regions: DeviceRegions) -> Place | None:
    """Return the place in a region of device memory that a decoded payload names, or None."""
    if not regions.any_open or isinstance(source, bytes) or len(source) < len(Place._fields):
        return None
    is_there = source[3] == REGION and regions.get(source[0]) is not None
    return Place(*source) if is_there else None


def memory_named_by(run: Run) -> tuple[set[int], set[int]]:
    """Return the numbers of clients' regions and of other workers' exports that a batch names."""
    regions = {place[0] for one in requests_as_tuples(run.requests) for _, place in one[3]}
    segments = set()
    sources = [source for one in run.inputs for _, source in _sources(one[3])]
    for source in (*sources, *[Fill(*one).source for one in run.fills]):
        if not isinstance(source, bytes):
            kind = _kind(source)
            if kind == REGION:
                regions.add(source[0])
            elif kind == DEVICE_LOAN:
                segments.add(source[0])
    return regions, segments


def may_be_locked(piece: Piece) -> bool:
    """Return whether a piece is copied directly if its region is page-locked. BOOL inputs are never: their
    bytes are checked in a copy that the client cannot change.
    """
    if isinstance(piece.source, bytes) or piece.nbytes <= SMALL_NBYTES or piece.datatype == _BOOL:
        return False
    return piece.device_place is None and _kind(piece.source) == REGION


def device_loan(source: Any) -> DeviceLoan | None:
    if isinstance(source, bytes) or len(source) < len(DeviceLoan._fields) or source[3] != DEVICE_LOAN:
        return None
    return DeviceLoan(*source)


def _kind(source: Any) -> str:
    return source[3] if len(source) > 3 else ""


def layout(tensors: Sequence[WireTensor]) -> tuple[list[int], list[Piece], int]:
    """Return the offset of each tensor in a buffer, the pieces to copy, and the size of the buffer."""
    offsets: list[int] = []
    pieces: list[Piece] = []
    end = 0
    for name, datatype, shape, payload in tensors:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(offset)
        end = offset
        for request, source in _sources(payload):
            nbytes = len(source) if isinstance(source, bytes) else source[2]
            pieces.append(Piece(end, nbytes, source, datatype, request))
            end += nbytes
        if end - offset != element_count(shape) * numpy_dtype(datatype).itemsize:
            raise ValueError(f"input {name!r} of shape {tuple(shape)} has {end - offset} bytes")
    return offsets, pieces, end


def _sources(payload: Any) -> Iterable[tuple[int | None, Any]]:
    if not isinstance(payload, bytes) and len(payload) == 2 and payload[1] == PARTS:
        return enumerate(payload[0])
    return [(None, payload)]


def runs(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return the pieces grouped into copies: staged pieces together if they are consecutive (padding between
    tensors is copied too), each other piece alone.
    """
    found: list[list[Piece]] = []
    for piece in pieces:
        if found and piece.is_staged and found[-1][0].is_staged:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found
