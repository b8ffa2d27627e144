"""The inputs of batches on their way to the device: one buffer a batch, and as few copies into it as can be.
The host waits for none of them. See ``buffers.py`` for how long a buffer lives.

Where the bytes come from decides how they go: those in page-locked segments are copied from there; small
ones, those in messages and those in a client's region first go into memory of our own, next to each other,
and from there in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.cuda import loan_inputs
from gpuserve_worker.cuda.buffers import ALIGNMENT, Buffer
from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.pins import address_of
from gpuserve_worker.cuda.region_inputs import copy_part, device_place, in_place
from gpuserve_worker.cuda.runtime import Copy, CudaError
from gpuserve_worker.intake import problem_of
from gpuserve_worker.payloads import LOAN, PARTS, REGION, DeviceLoan, Place, WireFailure, WireTensor
from gpuserve_worker.regions import RegionError
from gpuserve_worker.tensor import BYTES, TensorSpec, datatype_of, element_count, numpy_dtype
from gpuserve_worker.wire import Run

if TYPE_CHECKING:
    from gpuserve_worker.cuda.exchange import Exchange
    from gpuserve_worker.session import Session

#: Up to this size the host copies faster than a copy of its own begins.
SMALL_NBYTES: Final = 32 << 10


class Piece(NamedTuple):
    """Bytes for one place in a buffer. ``source`` is the bytes or, as decoded, where they lie; ``request`` is
    the position of the request that they are of, None for those of a whole batch. ``device_place`` is where
    they are, if that is on the device already.
    """

    offset: int
    nbytes: int
    source: Any
    datatype: str
    request: int | None
    device_place: Place | None = None

    @property
    def is_staged(self) -> bool:
        """Whether the host copies it first."""
        source = self.source
        if self.device_place is not None or loan_inputs.loan_of(source) is not None:
            return False
        return isinstance(source, bytes) or self.nbytes <= SMALL_NBYTES or _kind(source) == REGION


class Arrival:
    """The inputs of one batch, on their way."""

    __slots__ = ("_buffer", "_device")

    def __init__(self, device: Device, buffer: Buffer) -> None:
        self._device = device
        self._buffer = buffer

    def admit(self) -> None:
        """What this thread puts into its streams from now on begins when they are there. The host goes on."""
        for stream in self._device.arrays.streams():
            self._device.runtime.stream_waits(stream, self._buffer.arrived)

    def has_come(self) -> bool:
        """Whether they are there, and the memory that they were copied from is of no use any more.

        Raises:
            CudaError: a copy went wrong.
        """
        return self._device.runtime.has_come(self._buffer.arrived)

    def settle(self) -> None:
        """Wait on the host until no copy is under way any more, whether they went well or not."""
        try:
            if not self.has_come():
                self._device.runtime.wait(self._buffer.arrived)
        except CudaError:
            pass  # nothing is copied after an error; who uses the device sees it


def device_inputs(specs: Iterable[TensorSpec]) -> frozenset[str]:
    """The inputs that are given on the device, by name. Byte strings never are."""
    return frozenset(one.name for one in specs if one.memory == "gpu" and one.datatype != BYTES)


class Staging:
    """Brings the inputs of one model, those in ``names``, to the device. ``kind`` is "cupy" or "torch". Where
    inputs are ``read_only``, those that are there already are given as they are.
    """

    def __init__(self, device: Device, names: frozenset[str], kind: str, *, read_only: bool = False) -> None:
        self._uses_in_place = read_only
        self._device = device
        self._names = names
        self._kind = kind

    def take_in(
        self, session: Session, run: Run, failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], Arrival | None]:
        """All inputs of a batch as arrays by name, and the arrival of those for the device; None if none is.

        Requests whose bytes cannot be had are put into ``failures``, by position; their rows are zeros.

        Raises: as ``bring``.
        """
        ours = [one for one in run.inputs if one[0] in self._names]
        others = tuple([one for one in run.inputs if one[0] not in self._names])
        arrays: dict[str, Any] = session.inputs.arrays(run.batch_id, others)
        if self._uses_in_place and session.regions.any_on_device:
            ours = self._use_in_place(session, ours, arrays)
        if session.exchange is not None and session.exchange.lends:
            ours = self._use_loans(session.exchange, session.leases.grant(run.batch_id), ours, arrays)
        if not ours:
            return arrays, None
        brought, arrival = self.bring(session, ours, failures)
        session.under_way(run.batch_id, arrival)
        arrays |= brought
        return {one[0]: arrays[one[0]] for one in run.inputs}, arrival

    def _use_in_place(
        self, session: Session, tensors: Sequence[WireTensor], arrays: dict[str, Any]
    ) -> list[WireTensor]:
        """Add the arrays over tensors that can be given as they are; the other tensors."""
        left = []
        for tensor in tensors:
            array = in_place(self._device, tensor, session.regions, self._kind)
            if array is None:
                left.append(tensor)
            else:
                arrays[tensor[0]] = array
        return left

    def _use_loans(
        self, exchange: Exchange, of_batch: object, tensors: Sequence[WireTensor], arrays: dict[str, Any]
    ) -> list[WireTensor]:
        """Add the arrays over what other workers keep on this device; the other tensors."""
        left = []
        for tensor in tensors:
            array = loan_inputs.in_place(self._device, exchange, tensor, self._kind, of_batch)
            if array is None:
                left.append(tensor)
            else:
                arrays[tensor[0]] = array
        return left

    def warm(self, session: Session, arrays: dict[str, Any]) -> dict[str, Any]:
        """The same arrays, those that are for the device there; the default stream waits for them."""
        ours = [
            WireTensor(name, datatype_of(array.dtype), array.shape, array.tobytes())
            for name, array in arrays.items()
            if name in self._names
        ]
        brought, arrival = self.bring(session, ours, {})
        arrival.admit()
        return {name: brought.get(name, array) for name, array in arrays.items()}

    def bring(
        self, session: Session, tensors: Sequence[WireTensor], failures: dict[int, WireFailure]
    ) -> tuple[dict[str, Any], Arrival]:
        """Begin to copy tensors of one batch.

        Raises:
            CudaError: CUDA refused, or the device has no memory.
            RegionError: the client's region that the only request is read from cannot be read.
            ValueError: a tensor does not lie in memory that was announced, or is not what it says.
        """
        offsets, pieces, nbytes = layout(tensors)
        device, regions = self._device, session.regions
        if regions.any_on_device:
            pieces = [one._replace(device_place=device_place(one.source, regions)) for one in pieces]
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
        finally:
            device.runtime.record(buffer.arrived, device.h2d)
        arrays = {
            name: device.arrays.over(memory, offset, datatype, tuple(shape), self._kind)
            for (name, datatype, shape, _), offset in zip(tensors, offsets, strict=True)
        }
        return arrays, Arrival(device, buffer)


class _Copying:
    """The copies of one batch into its buffer."""

    def __init__(
        self, device: Device, session: Session, buffer: Buffer, failures: dict[int, WireFailure]
    ) -> None:
        self._device = device
        self._session = session
        self._buffer = buffer
        self._failures = failures

    def copy(self, run: Sequence[Piece]) -> None:
        """Begin one copy; see ``runs``."""
        if run[0].is_staged:
            self._copy_staged(run)
            return
        (piece,) = run
        if piece.device_place is not None:
            self._copy_within(piece, piece.device_place)
            return
        if (loan := loan_inputs.loan_of(piece.source)) is not None:
            self._copy_loan(piece, loan)
            return
        source = address_of(self._view(piece.source))
        self._to_device(piece.offset, source, piece.nbytes)

    def _copy_within(self, piece: Piece, place: Place) -> None:
        """Copy a piece from a client's region of the device."""
        to = self._buffer.address + piece.offset
        failure = copy_part(self._device, self._session.regions, place, to, piece.request)
        if failure is not None and piece.request is not None:
            self._failures[piece.request] = failure

    def _copy_loan(self, piece: Piece, loan: DeviceLoan) -> None:
        """Copy a piece from what another worker keeps on its device."""
        exchange, to = self._session.exchange, self._buffer.address + piece.offset
        assert exchange is not None, "a session with a device has one"
        failure = loan_inputs.copy_part(self._device, exchange, loan, to, piece.request)
        if failure is not None and piece.request is not None:
            self._failures[piece.request] = failure

    def _copy_staged(self, run: Sequence[Piece]) -> None:
        """Put pieces that follow each other into memory of our own, as in the buffer, and copy that."""
        device = self._device
        start, last = run[0].offset, run[-1]
        nbytes = last.offset + last.nbytes - start
        block = device.host_blocks.take(nbytes)
        try:
            for piece in run:
                self._put(piece, block.memory[piece.offset - start :][: piece.nbytes])
            self._to_device(start, block.address, nbytes)
        finally:
            device.runtime.record(block.event, device.h2d)
            device.host_blocks.give(block)

    def _put(self, piece: Piece, target: memoryview) -> None:
        """Copy a piece on the host."""
        if isinstance(piece.source, bytes):
            target[:] = piece.source
        elif _kind(piece.source) != REGION:
            target[:] = self._view(piece.source)
        elif piece.request is None:
            self._session.regions.read(Place(*piece.source), target)
        elif (problem := self._read_part(piece, target)) is not None:
            np.frombuffer(target, np.uint8)[:] = 0
            self._failures[piece.request] = WireFailure("INVALID_ARGUMENT", problem)

    def _read_part(self, piece: Piece, target: memoryview) -> str | None:
        """Copy a request's rows from a client's region; why they cannot be had, where they cannot."""
        try:
            self._session.regions.read(Place(*piece.source), target)
        except RegionError as error:
            return str(error)
        return problem_of(piece.datatype, 0, target)

    def _to_device(self, offset: int, source: int, nbytes: int) -> None:
        if nbytes:
            device, to = self._device, self._buffer.address + offset
            device.runtime.copy(to, source, nbytes, Copy.HOST_TO_DEVICE, device.h2d)

    def _view(self, source: Any) -> memoryview:
        memory = self._session.loans if _kind(source) == LOAN else self._session.mapping
        segment, offset, nbytes = source[:3]
        return memory.view(segment, offset, nbytes)


def _kind(source: Any) -> str:
    return source[3] if len(source) > 3 else ""


def layout(tensors: Sequence[WireTensor]) -> tuple[list[int], list[Piece], int]:
    """Where each tensor begins in a buffer, what is copied where, and how many bytes the buffer needs.

    Raises:
        ValueError: a tensor has more or fewer bytes than its shape says.
    """
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
    """The payload, or its parts with the positions of their requests."""
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
