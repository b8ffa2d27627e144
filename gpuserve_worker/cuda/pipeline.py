"""Where each batch of a worker with a device stands, and which of them may go on. Pure: no CUDA, no thread
and no lock is in here, and nothing is known of what a batch is made of.

::

                staged             called              returned            answered
    RECEIVED ───────────► ARRIVING ───────► COMPUTING ──────────► LEAVING ──────────► ENDED
        │ dropped            │ dropped
        └────────► DROPPED ◄─┘

The copies to the device, the calls and the copies back overlap, each in the order in which the batches came;
one call is under way at a time. How many batches there are at once is the front's to bound: it sends no more
than it has slots for, and is told that one is free early (``wire.Computed``) for one batch at a time, so that
copies that are slower than the calls do not pile up.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, Generic, TypeVar

#: A copy back of less than this is over before the front has made use of a slot that is free early.
ANNOUNCED_NBYTES: Final = 1 << 20


class BatchStage(enum.Enum):
    """Where a batch stands between its message and its answer."""

    RECEIVED = "its message has come"
    ARRIVING = "its inputs are on their way to the device"
    COMPUTING = "its callable is called"
    LEAVING = "its outputs are on their way back"
    ENDED = "it is answered"
    DROPPED = "the front that wanted it is gone"


#: Where a batch may go on to from each stage.
NEXT: Final = {
    BatchStage.RECEIVED: (BatchStage.ARRIVING, BatchStage.DROPPED),
    BatchStage.ARRIVING: (BatchStage.COMPUTING, BatchStage.DROPPED),
    BatchStage.COMPUTING: (BatchStage.LEAVING,),
    BatchStage.LEAVING: (BatchStage.ENDED,),
}


class IllegalStep(Exception):
    """A step that cannot happen at a stage: a defect of the worker."""


class PipelinedBatch:
    """A batch on its way. ``nbytes`` are those that are copied back. ``is_cleared``: its work on the device
    has ended well, so a fault that shows later is not of its doing.
    """

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.stage = BatchStage.RECEIVED
        self.nbytes = 0
        self.is_cleared = False

    def advance(self, stage: BatchStage) -> None:
        """Go on to a stage; raises ``IllegalStep`` where the one before does not lead there."""
        if stage not in NEXT.get(self.stage, ()):
            raise IllegalStep(f"batch {self.batch_id}: {stage.name} after {self.stage.name}")
        self.stage = stage


_Batch = TypeVar("_Batch", bound=PipelinedBatch)


class Pipeline(Generic[_Batch]):
    """The batches of one worker that have not ended, oldest first."""

    def __init__(self) -> None:
        #: RECEIVED or ARRIVING.
        self._waiting: deque[_Batch] = deque()
        self._computing: _Batch | None = None
        self._leaving: deque[_Batch] = deque()

    def __len__(self) -> int:
        """How many batches wait to be called."""
        return len(self._waiting)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    def is_only_suspect(self, batch: _Batch) -> bool:
        """Whether a fault of the device can be of nobody's doing but this batch's."""
        suspects = [*self._leaving, self._computing]
        return [one for one in suspects if one is not None and not one.is_cleared] == [batch]

    def receive(self, batch: _Batch) -> None:
        self._waiting.append(batch)

    def next_to_stage(self) -> _Batch | None:
        return next((one for one in self._waiting if one.stage is BatchStage.RECEIVED), None)

    def next_to_call(self) -> _Batch | None:
        """The oldest batch that waits, if no other is being called; it may have to be staged first."""
        return self._waiting[0] if self._waiting and self._computing is None else None

    def staged(self, batch: _Batch) -> None:
        batch.advance(BatchStage.ARRIVING)

    def called(self, batch: _Batch) -> None:
        """Note that the callable is called; raises ``IllegalStep`` where it is not its turn."""
        if self.next_to_call() is not batch:
            raise IllegalStep(f"batch {batch.batch_id} is called out of turn")
        batch.advance(BatchStage.COMPUTING)
        self._computing = self._waiting.popleft()

    def returned(self, batch: _Batch, nbytes: int) -> None:
        """Note that a call is over, well or badly, and how many bytes are to be copied back."""
        batch.advance(BatchStage.LEAVING)
        batch.nbytes = nbytes
        self._computing = None
        self._leaving.append(batch)

    def answered(self, batch: _Batch) -> None:
        if not self._leaving or self._leaving[0] is not batch:
            raise IllegalStep(f"batch {batch.batch_id} is answered out of turn")
        batch.advance(BatchStage.ENDED)
        self._leaving.popleft()

    def computed(self, batch: _Batch) -> _Batch | None:
        """The work of a batch on the device has ended well. The front is to be told of it now where this is
        given back: when the copy takes a while, and others are behind it, which have slots of their own.
        """
        batch.is_cleared = True
        if not self._leaving or self._leaving[0] is not batch or batch.nbytes < ANNOUNCED_NBYTES:
            return None
        behind = len(self._waiting) + (self._computing is not None) + len(self._leaving) - 1
        return batch if behind else None

    def drop_waiting(self) -> list[_Batch]:
        dropped = list(self._waiting)
        self._waiting.clear()
        for batch in dropped:
            batch.advance(BatchStage.DROPPED)
        return dropped
