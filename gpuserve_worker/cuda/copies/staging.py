"""The inputs of batches on their way to the device: one buffer a batch, and as few copies into it as can be.
The host waits for none of them. Bytes in page-locked segments are copied from there; small ones, those in
messages and those in a client's region on the host go into memory of our own first, and on in one copy, but
for large ones in a region whose pages are locked. Those on the device already are copied within it, or given
to the callable as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.cuda.copies.client_regions import DeviceRegions
from gpuserve_worker.cuda.copies.exchange import ExportExchange, ExportGone
from gpuserve_worker.cuda.device.buffers import ALIGNMENT, Buffer
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.host_uses import Span
from gpuserve_worker.cuda.device.page_locks import address_of
from gpuserve_worker.cuda.device.runtime import Copy, CudaError
from gpuserve_worker.memory.regions import RegionError
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
from gpuserve_worker.running.batch_inputs import problem_of

if TYPE_CHECKING:
    from gpuserve_worker.cuda.copies.cuda_session import CudaSession

#: Up to this size the host copies faster than a copy of its own begins.
SMALL_NBYTES: Final = 32 << 10
_BOOL: Final = "BOOL"
#: Where a tensor in a client's region has to begin to be used where it is: kernels may not take what is less
#: aligned, and CUDA's word for that ends the process.
_IN_PLACE_ALIGNMENT: Final = 256


class Piece(NamedTuple):
    """Bytes for one place in a buffer. ``source`` is the bytes or, as decoded, where they lie; ``request`` is
    the position of the request that they are of, None for those of a whole batch. ``device_place`` is where
    they are, if that is in a region of device memory; ``is_locked``: it is in one of the host's from which
    the device can copy by itself.
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
        if self.device_place is not None or self.is_locked or loan_of(source) is not None:
            return False
        return isinstance(source, bytes) or self.nbytes <= SMALL_NBYTES or _kind(source) == REGION


class StagedInputs:
    """The inputs of one batch on their way; implements ``Arrival``. ``spans`` are the memory of the host that
    the device reads meanwhile.
    """

    __slots__ = ("_arrived", "_device")

    def __init__(self, device: CudaDevice, spans: Sequence[Span]) -> None:
        self._device = device
        #: An event of its own: the buffer may be given up before the answer is sent. 0: it is over.
        self._arrived = device.events.take()
        device.runtime.record(self._arrived, device.h2d)
        device.host.uses.begin(self._arrived, spans)

    def admit(self) -> None:
        for stream in self._device.arrays.streams() if self._arrived else ():
            self._device.runtime.stream_waits(stream, self._arrived)

    def settle(self) -> None:
        """Wait on the host until no copy is under way any more, whether they went well or not."""
        event, self._arrived = self._arrived, 0
        if not event:
            return
        with suppress(CudaError):  # nothing is copied after an error; who uses the device sees it
            if not self._device.runtime.has_come(event):
                self._device.runtime.wait(event)
        self._device.host.uses.end(event)
        self._device.events.give(event)


def device_inputs(specs: Iterable[TensorSpec]) -> frozenset[str]:
    """The names of the inputs that are given on the device. Byte strings never are."""
    return frozenset(one.name for one in specs if one.memory == "gpu" and one.datatype != BYTES)


class Staging:
    """Brings the inputs of one model, those in ``names``, to the device. ``kind`` is "cupy" or "torch". Where
    inputs are ``read_only``, those that are there already are given as they are.
    """

    def __init__(
        self, device: CudaDevice, names: frozenset[str], kind: str, *, read_only: bool = False
    ) -> None:
        self._uses_in_place = read_only
        self._device = device
        self._names = names
        self._kind = kind

    def stage(
        self, session: CudaSession, run: Run, failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs | None]:
        """All inputs of a batch as arrays by name, and the arrival of those for the device; None if none is.
        Requests whose bytes cannot be had are put into ``failures``, by position. Raises as ``bring``.
        """
        front = session.front
        if not self._names:
            return front.inputs.arrays(run.batch_id, run.inputs), None
        ours = [one for one in run.inputs if one[0] in self._names]
        others = tuple([one for one in run.inputs if one[0] not in self._names])
        arrays: dict[str, Any] = front.inputs.arrays(run.batch_id, others)
        if self._uses_in_place and session.regions.any_open:
            ours = self._use_in_place(ours, arrays, lambda one: self._in_region(one, session.regions))
        if session.exchange.lends:
            of_batch = front.leases.grant(run.batch_id)
            ours = self._use_in_place(ours, arrays, lambda one: self._lent(one, session.exchange, of_batch))
        if not ours:
            return arrays, None
        brought, arrival = self.bring(session, ours, failures)
        arrays |= brought
        return {one[0]: arrays[one[0]] for one in run.inputs}, arrival

    def _use_in_place(
        self, tensors: Sequence[WireTensor], arrays: dict[str, Any], over: Callable[[WireTensor], Any | None]
    ) -> list[WireTensor]:
        """Add the arrays over tensors that can be given as they are; the other tensors."""
        left = []
        for tensor in tensors:
            array = over(tensor)
            if array is None:
                left.append(tensor)
            else:
                arrays[tensor[0]] = array
        return left

    def _in_region(self, tensor: WireTensor, regions: DeviceRegions) -> Any | None:
        """The array over an input that is all in one region, which stays open; None: it is to be copied."""
        place = device_place(tensor[3], regions)
        if place is None or not place.nbytes:
            return None
        region = regions.get(place.region)
        assert region is not None, "it was there a line above"
        address = region.address(place)
        if address % _IN_PLACE_ALIGNMENT:
            return None
        return self._over(address, place.nbytes, region.lease(), tensor)

    def _lent(self, tensor: WireTensor, exchange: ExportExchange, of_batch: object) -> Any | None:
        """The array over what another worker keeps on this device; None: it is to be copied. ``of_batch``
        lives until the device is through with it. Raises as ``ExportExchange.opened``.
        """
        _, datatype, shape, source = tensor
        loan = loan_of(source)
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
        """The same arrays, those that are for the device there; the default stream waits for them."""
        if not self._names:
            return arrays
        ours = [
            WireTensor(name, datatype_of(array.dtype), array.shape, array.tobytes())
            for name, array in arrays.items()
            if name in self._names
        ]
        brought, arrival = self.bring(session, ours, {})
        arrival.admit()
        arrival.settle()
        return {name: brought.get(name, array) for name, array in arrays.items()}

    def bring(
        self, session: CudaSession, tensors: Sequence[WireTensor], failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], StagedInputs]:
        """Begin to copy tensors of one batch: arrays on the device by name, and when they are there. Raises
        ``RegionError`` where the region of the only request cannot be read, ``ValueError`` where a tensor is
        not in memory that was announced, or not what it says.
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
        buffer = device.buffers.take(nbytes)
        memory = device.arrays.memory(buffer.address, buffer.nbytes, device.buffers.lease(buffer))
        copying = _Copying(device, session, buffer, failures)
        try:
            for run in runs(pieces):
                copying.copy(run)
        except BaseException:
            with suppress(CudaError):  # what was begun reads memory that is its owner's after the answer
                device.runtime.synchronize_stream(device.h2d)
            raise
        arrival = StagedInputs(device, copying.spans)
        arrays = {
            name: device.arrays.over(memory, offset, datatype, tuple(shape), self._kind)
            for (name, datatype, shape, _), offset in zip(tensors, offsets, strict=True)
        }
        return arrays, arrival


class _Copying:
    def __init__(
        self, device: CudaDevice, session: CudaSession, buffer: Buffer, failures: dict[int, WireFailure]
    ) -> None:
        self._device = device
        self._session = session
        self._buffer = buffer
        self._failures = failures
        #: What is read of memory that is not ours.
        self.spans: list[Span] = []

    def copy(self, run: Sequence[Piece]) -> None:
        if run[0].is_staged:
            self._copy_staged(run)
            return
        (piece,) = run
        if piece.device_place is not None:
            self._copy_region(piece, piece.device_place)
        elif (loan := loan_of(piece.source)) is not None:
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
        """As ``_copy_region``, from a region of the host. What its client cuts off the file while the copy is
        under way stays there until it is over, because the pages are locked.
        """
        place = Place(*piece.source)
        try:
            memory = self._session.front.regions.view(place)
        except RegionError as error:
            self._refuse(piece, place.nbytes, error)
            return
        self._copy_from(memory, piece)

    def _refuse(self, piece: Piece, nbytes: int, error: RegionError) -> None:
        """Have zeros for rows that cannot be had, and refuse their request; those of a whole batch raise."""
        if piece.request is None:
            raise error
        device = self._device
        device.runtime.clear(self._buffer.address + piece.offset, nbytes, device.h2d)
        self._failures[piece.request] = WireFailure(error.code, str(error))

    def _copy_region(self, piece: Piece, place: Place) -> None:
        """Copy a piece from a client's region of the device. A request whose rows cannot be had is refused,
        and its rows are zeros; ``RegionError``: they are those of the whole batch.
        """
        device = self._device
        region = self._session.regions.get(place.region)
        assert region is not None, "a place in device memory was looked for"
        to = self._buffer.address + piece.offset
        try:
            region.begin_copy(place, to, device.h2d)
        except RegionError as error:
            self._refuse(piece, place.nbytes, error)

    def _copy_loan(self, piece: Piece, loan: DeviceLoan) -> None:
        device, to = self._device, self._buffer.address + piece.offset
        try:
            source = self._session.exchange.opened(loan).mapped().address + loan.offset
        except ExportGone as error:
            self._refuse(piece, loan.nbytes, error)
            return
        if loan.nbytes:
            device.runtime.copy(to, source, loan.nbytes, Copy.DEVICE_TO_DEVICE, device.h2d)

    def _copy_staged(self, run: Sequence[Piece]) -> None:
        """Put pieces that follow each other into memory of our own, as in the buffer, and copy that."""
        device = self._device
        start, last = run[0].offset, run[-1]
        nbytes = last.offset + last.nbytes - start
        block = device.host.blocks.take(nbytes)
        try:
            for piece in run:
                self._put(piece, block.memory[piece.offset - start :][: piece.nbytes])
            self._to_device(start, block.address, nbytes)
        finally:
            device.runtime.record(block.event, device.h2d)
            device.host.blocks.give(block)

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
        """Copy a request's rows from a client's region; why they cannot be had, where they cannot."""
        try:
            self._session.front.regions[piece.source[0]].read(Place(*piece.source), target)
        except RegionError as error:
            return str(error)
        return problem_of(piece.datatype, 0, target)

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
    """The place that a payload, as decoded, names in a region of device memory; None where it names none."""
    if not regions.any_open or isinstance(source, bytes) or len(source) < len(Place._fields):
        return None
    is_there = source[3] == REGION and regions.get(source[0]) is not None
    return Place(*source) if is_there else None


def named_by(run: Run) -> tuple[set[int], set[int]]:
    """The regions of clients and the segments of other workers' exports that a batch names, by number."""
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
    """Whether a piece is copied by itself where it is in a region whose pages are locked. Other bytes than a
    BOOL may have are looked for in a copy, which its client cannot change.
    """
    if isinstance(piece.source, bytes) or piece.nbytes <= SMALL_NBYTES or piece.datatype == _BOOL:
        return False
    return piece.device_place is None and _kind(piece.source) == REGION


def loan_of(source: Any) -> DeviceLoan | None:
    if isinstance(source, bytes) or len(source) < len(DeviceLoan._fields) or source[3] != DEVICE_LOAN:
        return None
    return DeviceLoan(*source)


def _kind(source: Any) -> str:
    return source[3] if len(source) > 3 else ""


def layout(tensors: Sequence[WireTensor]) -> tuple[list[int], list[Piece], int]:
    """Where each tensor begins in a buffer, what is copied where, and the bytes that the buffer needs."""
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
    """Pieces by the copies that bring them: those that the host copies first, together where they follow each
    other (what is left out between two tensors is copied too); each of the others by itself.
    """
    found: list[list[Piece]] = []
    for piece in pieces:
        if found and piece.is_staged and found[-1][0].is_staged:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found
