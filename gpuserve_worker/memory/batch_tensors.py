"""Tensors of batches in shared memory: input arrays over the front's memory, and outputs written to the
worker's arena.

An array over an arena block may outlive the call: the callable may keep the array, a slice of it, or a torch
tensor over it. The block is therefore returned to the front when the last array over it is deleted, in
whichever thread::

    user's slice -> array -> _Lent (the block) -> _InputLease (one a batch) ... a weakref tells InputLeases
                                       \\-> memoryview -> the mapping, which stays mapped

numpy collapses chains of views onto the first base of another type, which ``_Lent`` is, being a subclass
whose own base is no array. numpy never skips such a base.

``OutputWriter`` copies checked outputs: small ones into the message, others into the worker's output arena or
a client's region of shared memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.memory.arena import Arena, Block, Mapping
from gpuserve_worker.memory.client_regions import ClientRegions, RegionError, copy
from gpuserve_worker.protocol.payloads import REGION, requests_as_tuples
from gpuserve_worker.protocol.tensor import BYTES, bytes_array, numpy_dtype
from gpuserve_worker.protocol.wire import (
    INLINE_NBYTES,
    Payload,
    Place,
    Ref,
    WireFailure,
    WireRequest,
    WireTensor,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A decoded payload with more fields is not a ``Ref``; decoding does not restore classes.
_REF_FIELDS: Final = len(Ref._fields)


class _InputLease:
    """A lease that lives as long as any array over the input blocks of one batch."""

    __slots__ = ("__weakref__",)


class _Lent(np.ndarray[Any, Any]):
    """The bytes of one block. Every array over the block has this object in its chain of bases."""

    lease: _InputLease
    memory: memoryview


class InputLeases:
    """The leases on input blocks, and the report to the front when a lease ends.

    A lease may end in any thread, also in a garbage collection inside any line of this class, so a lock could
    deadlock. Instead every step is one atomic operation on a set, and the thread that removes a batch from
    ``_dead`` reports it. A batch is not reported before its reply is sent, because the reply says whether its
    inputs are free.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._watches: dict[int, weakref.ref[_InputLease]] = {}
        self._dead: set[int] = set()
        self._unanswered: set[int] = set()

    def begin(self, batch_id: int) -> None:
        self._unanswered.add(batch_id)

    def grant(self, batch_id: int) -> _InputLease:
        """Return the lease on the inputs of a batch. All inputs of the batch share it."""
        known = self._watches.get(batch_id)
        if known is not None and (granted := known()) is not None:
            return granted
        lease = _InputLease()
        self._watches[batch_id] = weakref.ref(lease, lambda _: self._end(batch_id))
        return lease

    def is_free(self, batch_id: int) -> bool:
        """Return whether nothing refers to the inputs of this batch, for its reply."""
        return batch_id not in self._watches or self._claim(batch_id)

    def answered(self, batch_id: int) -> None:
        """Record a sent reply; the batch is reported now if its lease has ended, or when it ends."""
        self._unanswered.discard(batch_id)
        if self._claim(batch_id):
            self._report(batch_id)

    def close(self) -> None:
        """Stop reporting, because the front that lent the memory is gone."""
        self._report = lambda _: None

    def _end(self, batch_id: int) -> None:
        self._dead.add(batch_id)
        if batch_id not in self._unanswered and self._claim(batch_id):
            self._report(batch_id)

    def _claim(self, batch_id: int) -> bool:
        if batch_id not in self._dead:  # the usual case, and cheaper than an exception
            return False
        try:
            self._dead.remove(batch_id)
        except KeyError:
            return False
        self._watches.pop(batch_id, None)
        return True


class Inputs:
    """The factory of input arrays over the front's memory."""

    def __init__(
        self,
        mapping: Mapping,
        regions: ClientRegions,
        loans: Mapping,
        leases: InputLeases,
        *,
        read_only: bool,
    ) -> None:
        self._mapping = mapping
        self._regions = regions
        self._loans = loans
        self.leases = leases
        self._read_only = read_only

    def arrays(self, batch_id: int, tensors: tuple[WireTensor, ...]) -> dict[str, NDArray[Any]]:
        """Return one array for each tensor by name; BYTES tensors become arrays of ``bytes`` objects. A
        tensor in a client's region is read in place and never written; raise ``RegionError`` if the region
        has shrunk. Raise ``ValueError`` if a tensor is not in announced memory or does not match its
        description.
        """
        arrays: dict[str, NDArray[Any]] = {}
        lease: _InputLease | None = None
        payload: Any
        for name, datatype, shape, payload in tensors:
            if datatype == BYTES:
                arrays[name] = bytes_array(self._bytes(payload), shape)
            elif isinstance(payload, bytes):
                # numpy makes an array over a bytearray writable, and one over bytes read-only.
                memory = payload if self._read_only else bytearray(payload)
                arrays[name] = np.ndarray(shape, numpy_dtype(datatype), memory)
            elif len(payload) > _REF_FIELDS and payload[3] == REGION:
                region = self._regions.view(Place(*payload)).toreadonly()
                arrays[name] = np.ndarray(shape, numpy_dtype(datatype), region)
            else:
                lease = lease or self.leases.grant(batch_id)
                lent = self._lend(payload, lease)
                arrays[name] = np.ndarray(shape, numpy_dtype(datatype), lent)
        return arrays

    def _lend(self, payload: Any, lease: _InputLease) -> _Lent:
        view = self._bytes(payload)
        if self._read_only:
            view = view.toreadonly()
        lent = _Lent((len(view),), np.uint8, view)
        lent.lease = lease
        lent.memory = view  # keeps the mapping open, which an array alone does not
        return lent

    def _bytes(self, payload: Any) -> Any:
        if isinstance(payload, bytes):
            return payload
        memory = self._mapping if len(payload) == _REF_FIELDS else self._loans
        segment, offset, nbytes = payload[:_REF_FIELDS]
        return memory.view(segment, offset, nbytes)


class Written(NamedTuple):
    """The fields of a ``Done`` or ``Yield`` with the responses to a batch."""

    outputs: tuple[WireTensor, ...] | None
    responses: tuple[tuple[WireTensor, ...] | WireFailure | None, ...] | None
    parameters: tuple[dict[str, Any], ...]


class OutputWriter:
    """A writer of checked outputs for the front, which keeps their blocks until they are read."""

    def __init__(self, arena: Arena, regions: ClientRegions) -> None:
        self._arena = arena
        self._regions = regions
        self._blocks: dict[tuple[int, int], Block] = {}
        # A callable may call other models from any thread, and the inputs of those calls are written here
        # too.
        self._lock = threading.Lock()
        self._closed = False

    def write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        """Write the responses to these requests; write nothing after ``close()``. Raise ``OutOfMemory``, or
        ``RegionError`` if a client's region that an output is a view of has shrunk; all blocks are freed
        then.
        """
        with self._lock:
            return Written(None, None, ()) if self._closed else self._write(answers, requests)

    def _write(self, answers: BatchAnswers, requests: Sequence[WireRequest | int]) -> Written:
        taken: list[Block] = []
        inline = Budget(INLINE_NBYTES)
        try:
            if answers.whole is not None:
                whole = self._tensors(answers.whole, inline, taken)
                self._check(answers.sources)
                return Written(whole, None, answers.parameters)
            responses = tuple(
                [
                    one
                    if one is None or isinstance(one, WireFailure)
                    else self._response(one, request, inline, taken)
                    for one, request in zip(answers.each or (), requests_as_tuples(requests), strict=True)
                ]
            )
            self._check(answers.sources)
            return Written(None, responses, answers.parameters)
        except BaseException:
            self._abandon(taken)
            raise

    def _abandon(self, taken: list[Block]) -> None:
        self._free((block.segment, block.offset) for block in taken)

    def tensors(self, outputs: list[CheckedOutput]) -> tuple[WireTensor, ...]:
        """Write tensors other than responses, to be freed by ``Free`` as well. Raise as ``write``."""
        return self.write(BatchAnswers(outputs, None), ()).outputs or ()

    def free(self, places: Iterable[tuple[int, int]]) -> None:
        """Free blocks that the front has read. Raise ``KeyError`` if no block begins at a place."""
        with self._lock:
            self._free(places)

    def _free(self, places: Iterable[tuple[int, int]]) -> None:
        for segment, offset in places:
            self._arena.free(self._blocks.pop((segment, offset)))

    def shrink(self) -> None:
        with self._lock:
            self._arena.shrink()

    def close(self) -> None:
        """Close the arena, and free unread blocks before, as a view would keep the memory mapped."""
        with self._lock:
            self._closed = True
            self._free(list(self._blocks))
            self._arena.close()

    def _check(self, sources: Iterable[Place]) -> None:
        for place in sources:
            self._regions.check(place)

    def _response(
        self, outputs: list[CheckedOutput], request: WireRequest, inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...] | WireFailure:
        if not request[3]:
            return self._tensors(outputs, inline, taken)
        places = {name: Place(*place) for name, place in request[3]}
        placed: dict[str, WireTensor] = {}
        for output in outputs:
            if output.name in places:
                try:
                    placed[output.name] = self._placed(output, places[output.name], taken)
                except RegionError as error:
                    return WireFailure("INVALID_ARGUMENT", str(error))
                except _TooSmall as error:
                    return WireFailure("INTERNAL", str(error))
        if len(placed) == len(outputs):
            return tuple(placed.values())
        others = self._tensors([one for one in outputs if one.name not in places], inline, taken)
        by_name = placed | {one.name: one for one in others}
        return tuple([by_name[output.name] for output in outputs])

    def _placed(self, output: CheckedOutput, place: Place, taken: list[Block]) -> WireTensor:
        used = filled_place(output, place)
        self._regions[used.region].write(used, lambda memory: fill(memory, output))
        return WireTensor(output.name, output.datatype, output.shape, used)

    def _tensors(
        self, outputs: list[CheckedOutput], inline: Budget, taken: list[Block]
    ) -> tuple[WireTensor, ...]:
        tensors: list[WireTensor] = []
        for one in outputs:
            payload = as_bytes(one) if inline.consume(one.nbytes) else self._in_block(one, taken)
            tensors.append(WireTensor(one.name, one.datatype, one.shape, payload))
        return tuple(tensors)

    def _in_block(self, output: CheckedOutput, taken: list[Block]) -> Payload:
        block = self._block(output, taken)
        fill(block.view, output)
        return Ref(block.segment, block.offset, output.nbytes)

    def _block(self, output: CheckedOutput, taken: list[Block]) -> Block:
        block = self._arena.allocate(output.nbytes)
        self._blocks[block.segment, block.offset] = block
        taken.append(block)
        return block


class _TooSmall(Exception):
    """A client's region has no room for an output. The text is for the client."""


def filled_place(output: CheckedOutput, place: Place) -> Place:
    """Return the part of a client's place that an output fills; raise ``_TooSmall``, the response."""
    if output.nbytes > place.nbytes:
        raise _TooSmall(
            f"shared memory size specified with the request for output '{output.name}' ({place.nbytes} "
            f"bytes) should be at least {output.nbytes} bytes to hold the results"
        )
    return Place(place.region, place.offset, output.nbytes)


class Budget:
    """Bytes that may still be sent inline in a message."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def consume(self, nbytes: int) -> bool:
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


def as_bytes(output: CheckedOutput) -> bytes:
    """Return the bytes of an output on the host, row-major, to be sent in a message."""
    parts = output.parts
    if output.datatype == BYTES:
        return b"".join(parts)
    if len(parts) == 1 and parts[0].dtype == output.dtype:
        data: bytes = parts[0].tobytes()
        return data
    if all(part.dtype == output.dtype for part in parts):
        return b"".join([part.tobytes() for part in parts])
    memory = bytearray(output.nbytes)
    fill(memoryview(memory), output)
    return bytes(memory)


def fill(memory: memoryview, output: CheckedOutput) -> None:
    """Write an output row-major to memory of its ``nbytes``: the parts along axis 0, cast during the copy."""
    position = 0
    if output.datatype == BYTES:
        for part in output.parts:
            memory[position : position + len(part)] = part
            position += len(part)
        return
    parts, dtype, shape = output.parts, output.dtype, output.shape
    if shape and not isinstance(shape[0], int):  # the parts differ in shape
        parts, shape = [part.reshape(-1) for part in parts], (output.nbytes // dtype.itemsize,)
    whole = np.ndarray(shape, dtype, memory)
    if len(parts) == 1 and parts[0].dtype == dtype:  # the usual case, without a cast
        copy(whole, parts[0])
        return
    with np.errstate(all="ignore"):  # a NaN cast to an integer is the callable's responsibility
        if len(parts) == 1:
            np.copyto(whole, parts[0], casting="unsafe")
            return
        np.concatenate(parts, out=whole, casting="unsafe")
