"""Batches at workers, and which blocks of the input arena each of them holds. A block is freed here or by
``PendingRequest``'s driver, exactly once. No scheduling.

::

    body in place:   request ──(batch answered, arrays kept)──► lent ──(Released)──► free
    gathered copy:   flight ───(batch answered, arrays kept)──► lent ──(Released)──► free
                       └──────(batch answered, or worker dead)─────────────────────► free
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gpuserve.front.batching.slots import Batch
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.models.running_calls import RunningCall
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.wire import YIELD_WINDOW, Cancel, Credit, WireError

if TYPE_CHECKING:
    from gpuserve.front.models.answers import StreamAccount

#: The worker hears that responses have gone out when there are so many, not of each.
_CREDIT_YIELDS: Final = YIELD_WINDOW // 4


@dataclass(eq=False, slots=True)
class InFlightBatch:
    """A batch at a worker since ``sent_at``. ``blocks`` are its own; ``in_place`` ones are the request's. The
    ``timer`` is there where a request of it may run out of time.
    """

    batch: Batch
    requests: list[Any]
    link: WorkerLink
    blocks: list[Block]
    in_place: bool
    sent_at: float
    account: StreamAccount | None = None
    timer: TimerHandle | None = None
    _gone: int = 0
    #: Messages of responses that have come, and how many the worker may send.
    _yields: int = 0
    _credit: int = 1

    def count_yield(self) -> int:
        self._yields += 1
        return self._yields

    def give_credit(self, yields: int) -> None:
        """Let the worker send so many messages of responses more."""
        self._credit += yields
        self.link.send(Credit(self.batch.batch_id, yields))

    def running_call(self, began_at: float) -> RunningCall:
        began_at = max(self.sent_at, began_at)
        is_held_back = self._yields >= self._credit
        return RunningCall(self.batch.instance, self.batch.batch_id, began_at, self._yields, is_held_back)

    def yield_gone(self) -> None:
        """Count one more message of responses that has left, and tell the worker now and then."""
        self._gone += 1
        if self._gone >= _CREDIT_YIELDS:
            self.give_credit(self._gone)
            self._gone = 0


class InFlightBatches:
    """The batches at the workers of one model, and the blocks lent to them beyond their answers."""

    def __init__(self) -> None:
        self._flights: dict[int, InFlightBatch] = {}
        self._lent: dict[int, tuple[WorkerLink, list[Block]]] = {}
        #: What workers may still write to that were given up, and are not dead yet.
        self._given_up: dict[WorkerLink, list[Block]] = {}

    def add(self, flight: InFlightBatch) -> None:
        self._flights[flight.batch.batch_id] = flight
        flight.link.in_flight += 1

    def at(self, link: WorkerLink, batch_id: int) -> InFlightBatch:
        """The batch of that number; WireError where it is not at that worker."""
        flight = self._flights.get(batch_id)
        if flight is None or flight.link is not link:
            raise _not_there(link, batch_id)
        return flight

    def go_on(self, flight: InFlightBatch) -> None:
        """Let a stream's worker send more than the first responses, which have left."""
        if flight.batch.batch_id in self._flights:
            flight.give_credit(YIELD_WINDOW - 1)

    def running(self, began_at: Callable[[str], float]) -> Iterator[RunningCall]:
        """The batches that run now. An instance that runs one at a time began its oldest at ``began_at``."""
        one_by_one: set[WorkerLink] = set()
        for flight in self._flights.values():
            link = flight.link
            if link.slots > 1:
                yield flight.running_call(0.0)
            elif link not in one_by_one:
                one_by_one.add(link)
                yield flight.running_call(began_at(link.instance))

    def find(self, batch_id: int) -> InFlightBatch | None:
        return self._flights.get(batch_id)

    def call_off(self, pending: PendingRequest) -> None:
        """Tell the worker that runs this request, if one does, that nobody waits for it any more."""
        for batch_id, flight in self._flights.items():
            if pending in flight.batch.requests:
                flight.link.send(Cancel(batch_id, flight.batch.position_of(pending)))
                return

    def land(self, link: WorkerLink, batch_id: int, inputs_free: bool) -> InFlightBatch:
        """As ``at``, and take it out: its blocks are free now, or lent until ``release``."""
        flight = self._flights.get(batch_id)
        if flight is None or flight.link is not link:
            raise _not_there(link, batch_id)
        del self._flights[batch_id]
        link.in_flight -= 1
        if flight.timer is not None:
            flight.timer.cancel()
        if inputs_free:
            for block in flight.blocks:
                block.free()
            return flight
        if flight.in_place:
            # The body outlives its request: the callable kept an array over it.
            for pending in flight.requests:
                flight.blocks += pending.blocks
                pending.blocks = ()
        if flight.blocks:
            self._lent[batch_id] = (link, flight.blocks)
        return flight

    def release(self, link: WorkerLink, batch_ids: Iterable[int]) -> None:
        """Free the blocks of batches over whose inputs the last array has died in their worker."""
        for batch_id in batch_ids:
            lender, blocks = self._lent.get(batch_id, (None, []))
            if lender is link:
                del self._lent[batch_id]
                _free(blocks)

    def give_up(self, link: WorkerLink) -> list[PendingRequest]:
        """As ``lose``, of a worker that is not gone yet: what it held is kept for it until then."""
        requests: list[PendingRequest] = []
        kept = self._given_up.setdefault(link, [])
        for batch_id in [n for n, flight in self._flights.items() if flight.link is link]:
            flight = self._flights.pop(batch_id)
            if flight.timer is not None:
                flight.timer.cancel()
            kept += flight.blocks
            requests += flight.requests
        return requests

    @property
    def dying(self) -> Collection[WorkerLink]:
        """The workers that were given up and are not dead yet."""
        return self._given_up.keys()

    def keep_body(self, link: WorkerLink, pending: PendingRequest) -> None:
        """Keep the body of a request, which is over, for a worker that was given up."""
        self._given_up[link] += pending.blocks
        pending.blocks = ()

    def lose(self, link: WorkerLink) -> list[PendingRequest]:
        """Free what a worker held that is gone; the requests that were at it, in order."""
        requests: list[PendingRequest] = []
        _free(self._given_up.pop(link, ()))
        for batch_id in [n for n, flight in self._flights.items() if flight.link is link]:
            flight = self._flights.pop(batch_id)
            if flight.timer is not None:
                flight.timer.cancel()
            _free(flight.blocks)
            requests += flight.requests
        for batch_id in [n for n, (lender, _) in self._lent.items() if lender is link]:
            _free(self._lent.pop(batch_id)[1])
        return requests


def _free(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.free()


def _not_there(link: WorkerLink, batch_id: int) -> WireError:
    return WireError(f"an answer to batch {batch_id}, which is not at instance {link.instance}")
