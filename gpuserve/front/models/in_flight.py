"""Batches at workers, and the blocks of the input arena that each of them holds.

Either this module or the driver frees a block, exactly once::

    body in place:   request ──(batch answered, arrays kept)──► lent ──(Released)──► free
    gathered copy:   flight ───(batch answered, arrays kept)──► lent ──(Released)──► free
                       └──────(batch answered, or worker dead)─────────────────────► free
"""

from __future__ import annotations

import time
from asyncio import TimerHandle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.pending_request import PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.statistics import ResponseFate
from gpuserve.front.scheduling.slots import Batch
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.wire import YIELD_WINDOW, Cancel, Credit, WireError

#: The number of sent responses after which the worker gets credit for as many.
_CREDIT_YIELDS: Final = YIELD_WINDOW // 4


class RunningCall(NamedTuple):
    """A running batch: start and count of responses. ``is_held_back``: it waits for slow clients."""

    instance: str
    batch_id: int
    began_at: float
    n_responses: int = 0
    is_held_back: bool = False


@dataclass(eq=False, slots=True)
class InFlightBatch:
    """A batch at a worker since ``sent_at``. ``blocks`` are its own; ``in_place`` blocks are the request's.
    ``timer`` fires when the deadline of a request passes. ``is_sent``: the worker knows the batch. ``others``
    are all batches of the model at workers.
    """

    batch: Batch
    requests: list[Any]
    link: WorkerLink
    blocks: list[Block]
    in_place: bool
    sent_at: float
    account: StreamAccount | None = None
    timer: TimerHandle | None = None
    is_sent: bool = True
    others: dict[int, InFlightBatch] = field(default_factory=dict)
    _gone: int = 0
    #: The messages of responses received so far, and the messages that the worker may send in all.
    _yields: int = 0
    _credit: int = 1

    def open_window(self) -> None:
        """Note that the worker may send a full window of responses from the start."""
        self._credit = YIELD_WINDOW

    def count_yield(self) -> int:
        self._yields += 1
        return self._yields

    def grant_credit(self) -> None:
        """Allow the worker to send the rest of a window of messages of responses."""
        self._credit += YIELD_WINDOW - 1
        self.link.send(Credit(((self.batch.batch_id, YIELD_WINDOW - 1),)))

    def running_call(self, began_at: float) -> RunningCall:
        began_at = max(self.sent_at, began_at)
        is_held_back = self._yields >= self._credit
        n_responses = self._yields + self.link.n_steps
        return RunningCall(self.batch.instance, self.batch.batch_id, began_at, n_responses, is_held_back)

    def on_yield_sent(self) -> None:
        """Count one more sent message of responses. Now and then, grant the worker credit for all batches."""
        self._gone += 1
        if self._gone >= _CREDIT_YIELDS:
            behind = [one for one in self.others.values() if one.link is self.link and one._gone]
            grants = tuple([(one.batch.batch_id, one._gone) for one in behind])
            for one in behind:
                one._credit += one._gone
                one._gone = 0
            if grants:
                self.link.post_soon(Credit(grants))


class InFlightBatches:
    """The batches at the workers of one model, and the blocks lent to workers beyond the answers."""

    def __init__(self) -> None:
        self._flights: dict[int, InFlightBatch] = {}
        self._lent: dict[int, tuple[WorkerLink, list[Block]]] = {}
        #: Blocks that abandoned workers may still write to until they are dead.
        self._abandoned: dict[WorkerLink, list[Block]] = {}

    def add(self, flight: InFlightBatch) -> None:
        self._flights[flight.batch.batch_id] = flight
        flight.others = self._flights
        flight.link.in_flight += 1

    def batch_at(self, link: WorkerLink, batch_id: int) -> InFlightBatch:
        """Return the batch of a number. Raises WireError if it is not at that worker."""
        flight = self._flights.get(batch_id)
        if flight is None or flight.link is not link:
            raise _unknown_batch(link, batch_id)
        return flight

    def grant_window(self, flight: InFlightBatch) -> None:
        """Grant a stream's worker the full window, after its first responses were sent."""
        if flight.batch.batch_id in self._flights:
            flight.grant_credit()

    def running(self, began_at: Callable[[str], float]) -> Iterator[RunningCall]:
        """Iterate over running batches. A sequential instance began its oldest batch at ``began_at``."""
        one_by_one: set[WorkerLink] = set()
        for flight in self._flights.values():
            link = flight.link
            if link.slots > 1:
                yield flight.running_call(0.0)
            elif link not in one_by_one:
                one_by_one.add(link)
                yield flight.running_call(began_at(link.instance))

    def requests_at(self, link: WorkerLink) -> list[PendingRequest]:
        """Return the requests of all batches at a worker."""
        return [one for flight in self._flights.values() if flight.link is link for one in flight.requests]

    def find(self, batch_id: int) -> InFlightBatch | None:
        return self._flights.get(batch_id)

    def cancel_at_worker(self, pending: PendingRequest) -> None:
        """Notify the worker that runs this request, if any, that the request was cancelled."""
        for batch_id, flight in self._flights.items():
            if pending in flight.batch.requests:
                if flight.is_sent:
                    flight.link.send(Cancel(batch_id, flight.batch.position_of(pending)))
                return

    def complete(self, link: WorkerLink, batch_id: int, inputs_free: bool) -> InFlightBatch:
        """Remove an ended batch. Its blocks are free, or lent until ``free_lent``. Raises as ``batch_at``."""
        flight = self._flights.get(batch_id)
        if flight is None or flight.link is not link:
            raise _unknown_batch(link, batch_id)
        del self._flights[batch_id]
        link.in_flight -= 1
        if flight.timer is not None:
            flight.timer.cancel()
        if inputs_free:
            for block in flight.blocks:
                block.free()
            return flight
        if flight.in_place:
            # The callable kept an array over the body, which outlives its request.
            for pending in flight.requests:
                flight.blocks += pending.blocks
                pending.blocks = ()
        if flight.blocks:
            self._lent[batch_id] = (link, flight.blocks)
        return flight

    def free_lent(self, link: WorkerLink, batch_ids: Iterable[int]) -> None:
        """Free the blocks of batches over whose inputs the last array has died in their worker."""
        for batch_id in batch_ids:
            lender, blocks = self._lent.get(batch_id, (None, []))
            if lender is link:
                del self._lent[batch_id]
                _free(blocks)

    def abandon_worker(self, link: WorkerLink) -> list[PendingRequest]:
        """Remove and return the requests of a worker that is not dead yet, and keep its blocks until then."""
        requests: list[PendingRequest] = []
        kept = self._abandoned.setdefault(link, [])
        for flight in self._remove_batches(link):
            kept += flight.blocks
            requests += flight.requests
        return requests

    def _remove_batches(self, link: WorkerLink) -> list[InFlightBatch]:
        flights = [flight for flight in self._flights.values() if flight.link is link]
        for flight in flights:
            del self._flights[flight.batch.batch_id]
            if flight.timer is not None:
                flight.timer.cancel()
        return flights

    @property
    def abandoned(self) -> Collection[WorkerLink]:
        """Return the abandoned workers that are not dead yet."""
        return self._abandoned.keys()

    def keep_body(self, link: WorkerLink, pending: PendingRequest) -> None:
        """Keep the body of a completed request for an abandoned worker."""
        self._abandoned[link] += pending.blocks
        pending.blocks = ()

    def remove_worker(self, link: WorkerLink) -> list[PendingRequest]:
        """Free all blocks of a dead worker. Returns the requests that were at the worker, in order."""
        requests: list[PendingRequest] = []
        _free(self._abandoned.pop(link, ()))
        for flight in self._remove_batches(link):
            _free(flight.blocks)
            requests += flight.requests
        for batch_id in [n for n, (lender, _) in self._lent.items() if lender is link]:
            _free(self._lent.pop(batch_id)[1])
        return requests


class StreamAccount:
    """Statistics of the responses of one decoupled batch: the index and the time of each."""

    __slots__ = ("_indices", "_last_at", "_metrics")

    def __init__(self, metrics: ModelMetrics, requests: int, sent_at: float) -> None:
        self._metrics = metrics
        self._indices = [0] * requests
        self._last_at = [sent_at] * requests

    def responded(self, position: int, pending: PendingRequest, came_at: float, *, failed: bool) -> None:
        """Count a delivered response that came at ``came_at``. A ``failed`` one ends its request."""
        is_first = self._indices[position] == 0
        if not failed:
            since = pending.enqueued_at if is_first else self._last_at[position]
            self._metrics.responded(came_at - since, is_first=is_first)
        fate = ResponseFate.FAIL if failed else ResponseFate.SUCCESS
        self._add(position, fate, came_at, time.monotonic() - came_at)

    def ended(self, requests: Sequence[PendingRequest], *, failed: bool) -> None:
        """Count the end of the batch for each request, before its requests are counted."""
        now = time.monotonic()
        for position, pending in enumerate(requests):
            if pending.cancelled or pending.is_cancelled:
                self._add(position, ResponseFate.CANCEL, now)
            elif not pending.is_over:
                self._add(position, ResponseFate.FAIL if failed else ResponseFate.EMPTY, now)

    def ended_empty(self, position: int) -> None:
        """Count the end of one request without a response, before the end of its batch."""
        self._add(position, ResponseFate.EMPTY, time.monotonic())

    def _add(self, position: int, fate: ResponseFate, now: float, output_s: float = 0.0) -> None:
        index, since_s = self._indices[position], now - self._last_at[position]
        self._indices[position] = index + 1
        self._last_at[position] = now
        self._metrics.statistics.responded(index, fate, since_s, output_s)


def _free(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.free()


def _unknown_batch(link: WorkerLink, batch_id: int) -> WireError:
    return WireError(f"an answer to batch {batch_id}, which is not at instance {link.instance}")
