"""Who is told of the requests of one model on their way: its tracer, or the access log, or both. A driver has
one or none, so nobody pays for what is not wanted.
"""

from __future__ import annotations

import time
from typing import Protocol

from gpuserve.front.batching.slots import Batch
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.observability.access_log import notes_of
from gpuserve_worker.protocol import wire


class RequestWatcher(Protocol):
    """Is told when a request comes, when its batch leaves for a worker, and when that has come back."""

    def begin(self, pending: PendingRequest) -> None: ...

    def dispatched(self, batch: Batch) -> None: ...

    def computed(self, batch: Batch, done: wire.Done) -> None: ...


class AccessNotes:
    """Notes for the access log how long requests waited and ran, and in which batch."""

    def begin(self, pending: PendingRequest) -> None:
        """Of which model it is was noted before."""

    def dispatched(self, batch: Batch) -> None:
        now = time.monotonic()
        for one in batch.requests:
            assert isinstance(one, PendingRequest)
            notes = None if one.is_inner else notes_of(one.request)
            if notes is not None:
                notes.dispatched(now - one.enqueued_at, batch.rows)

    def computed(self, batch: Batch, done: wire.Done) -> None:
        compute_s = (done.compute_input_ns + done.compute_infer_ns + done.compute_output_ns) * 1e-9
        for one in batch.requests:
            assert isinstance(one, PendingRequest)
            notes = None if one.is_inner else notes_of(one.request)
            if notes is not None:
                notes.computed(compute_s)


class BothWatchers:
    def __init__(self, first: RequestWatcher, second: RequestWatcher) -> None:
        self._each = first, second

    def begin(self, pending: PendingRequest) -> None:
        for one in self._each:
            one.begin(pending)

    def dispatched(self, batch: Batch) -> None:
        for one in self._each:
            one.dispatched(batch)

    def computed(self, batch: Batch, done: wire.Done) -> None:
        for one in self._each:
            one.computed(batch, done)


def watched_by(tracer: RequestWatcher | None, notes: RequestWatcher | None) -> RequestWatcher | None:
    """Who is told, where there may be either."""
    if tracer is None or notes is None:
        return tracer or notes
    return BothWatchers(tracer, notes)
