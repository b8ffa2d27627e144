"""From the tensors of a ``Run`` to the arrays a callable is given, and the life of the memory below.

An array over an arena block may outlive the call: the callable keeps it, or a slice of it, or a torch
tensor over it. So the block goes back to the front when the last array over it dies, whenever and in
whichever thread that is::

    user's slice -> array -> _Lent (the block) -> _InputLease (one a batch) ... a weak reference tells Leases
                                       \\-> memoryview -> the mapping, which stays mapped

numpy collapses chains of views onto the first base of another type, which ``_Lent`` is by being a
subclass whose own base is no array; it never skips one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpuserve_worker.memory.arena import Mapping
from gpuserve_worker.memory.regions import ClientRegions
from gpuserve_worker.protocol.payloads import REGION
from gpuserve_worker.protocol.tensor import BYTES, bytes_array, numpy_dtype
from gpuserve_worker.protocol.wire import Place, Ref, WireTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A payload of more fields is no ``Ref``; as decoded, none has its name yet.
_REF_FIELDS: Final = len(Ref._fields)


class _InputLease:
    """Lives as long as any array over the input blocks of one batch."""

    __slots__ = ("__weakref__",)


class _Lent(np.ndarray[Any, Any]):
    """The bytes of one block; every array over the block has it in its chain of bases."""

    lease: _InputLease
    memory: memoryview


class Leases:
    """Which batches' input blocks are still referred to, and the word to the front when that ends. Leases end
    in any thread, also in a garbage collection in the middle of any line here, so a lock could deadlock;
    instead every step is one atomic operation on a set, and whoever takes a batch out of ``_dead`` is the one
    that reports it. A batch whose answer is not sent yet is not reported: the answer itself says whether its
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
        """The lease on the inputs of a batch, one a batch."""
        known = self._watches.get(batch_id)
        if known is not None and (granted := known()) is not None:
            return granted
        lease = _InputLease()
        self._watches[batch_id] = weakref.ref(lease, lambda _: self._end(batch_id))
        return lease

    def is_free(self, batch_id: int) -> bool:
        """Whether nothing refers to the inputs of this batch, to be said in its answer."""
        return batch_id not in self._watches or self._claim(batch_id)

    def answered(self, batch_id: int) -> None:
        """The answer is sent: report the batch, now if its lease has ended since, or when it does."""
        self._unanswered.discard(batch_id)
        if self._claim(batch_id):
            self._report(batch_id)

    def close(self) -> None:
        """Report nothing any more: the front that lent the memory is gone."""
        self._report = lambda _: None

    def _end(self, batch_id: int) -> None:
        self._dead.add(batch_id)
        if batch_id not in self._unanswered and self._claim(batch_id):
            self._report(batch_id)

    def _claim(self, batch_id: int) -> bool:
        if batch_id not in self._dead:  # nearly always, and cheaper than an exception
            return False
        try:
            self._dead.remove(batch_id)
        except KeyError:
            return False
        self._watches.pop(batch_id, None)
        return True


class Inputs:
    """Makes the arrays of a batch out of the front's memory."""

    def __init__(
        self, mapping: Mapping, regions: ClientRegions, loans: Mapping, leases: Leases, *, read_only: bool
    ) -> None:
        self._mapping = mapping
        self._regions = regions
        self._loans = loans
        self.leases = leases
        self._read_only = read_only

    def arrays(self, batch_id: int, tensors: tuple[WireTensor, ...]) -> dict[str, NDArray[Any]]:
        """One array for each tensor, by name; of ``bytes`` objects for BYTES. What is in a client's region is
        read where it is, and never written to (``RegionError``: it has shrunk). Raises ``ValueError`` where a
        tensor does not lie in memory that was announced, or is not what it says.
        """
        arrays: dict[str, NDArray[Any]] = {}
        lease: _InputLease | None = None
        payload: Any
        for name, datatype, shape, payload in tensors:
            if datatype == BYTES:
                arrays[name] = bytes_array(self._bytes(payload), shape)
            elif isinstance(payload, bytes):
                # A bytearray is writable, bytes are not: the flags of the array follow.
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
        lent.memory = view  # an array alone does not keep the mapping from being closed
        return lent

    def _bytes(self, payload: Any) -> Any:
        if isinstance(payload, bytes):
            return payload
        memory = self._mapping if len(payload) == _REF_FIELDS else self._loans
        segment, offset, nbytes = payload[:_REF_FIELDS]
        return memory.view(segment, offset, nbytes)
