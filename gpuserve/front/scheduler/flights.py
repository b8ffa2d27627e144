"""Batches at workers, and which blocks of the input arena each of them holds. A block is freed here or by
``PendingRequest``'s driver, exactly once. No scheduling.

::

    body in place:   request ──(batch answered, arrays kept)──► lent ──(Released)──► free
    gathered copy:   flight ───(batch answered, arrays kept)──► lent ──(Released)──► free
                       └──────(batch answered, or worker dead)─────────────────────► free
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from gpuserve.front.links import WorkerLink
from gpuserve.front.scheduler.batcher import Batch
from gpuserve.front.scheduler.pending import PendingRequest
from gpuserve_worker.memory import Block
from gpuserve_worker.wire import YIELD_WINDOW, Cancel, Credit, WireError

if TYPE_CHECKING:
    from gpuserve.front.scheduler.stream_account import StreamAccount

#: The worker hears that responses have gone out when there are so many, not of each.
_CREDIT_YIELDS: Final = YIELD_WINDOW // 4


class Flight:
    """A batch at a worker. ``blocks`` are the batch's own; with ``in_place`` the worker sees the body of
    its one request, whose blocks stay the request's. ``account`` is there once a stream had a response.
    """

    __slots__ = ("_gone", "_yields", "account", "batch", "blocks", "in_place", "link", "sent_at")

    def __init__(
        self, batch: Batch, link: WorkerLink, blocks: list[Block], in_place: bool, sent_at: float
    ) -> None:
        self.batch = batch
        self.link = link
        self.blocks = blocks
        self.in_place = in_place
        self.sent_at = sent_at
        self.account: StreamAccount | None = None
        self._gone = 0
        self._yields = 0

    def count_yield(self) -> int:
        """One more message of responses has come; how many there are now."""
        self._yields += 1
        return self._yields

    def yield_gone(self) -> None:
        """One more message of responses has left for its clients."""
        self._gone += 1
        if self._gone >= _CREDIT_YIELDS:
            self.link.send(Credit(self.batch.batch_id, self._gone))
            self._gone = 0

    @property
    def requests(self) -> list[PendingRequest]:
        """The requests of the batch; the driver queues no other kind."""
        requests: list[Any] = self.batch.requests
        return requests


class Flights:
    """The batches at the workers of one model, and the blocks lent to them beyond their answers."""

    def __init__(self, free: Callable[[Iterable[Block]], None]) -> None:
        self._free = free
        self._flights: dict[int, Flight] = {}
        self._lent: dict[int, tuple[WorkerLink, list[Block]]] = {}

    def depart(self, flight: Flight) -> None:
        """A batch is sent to its worker."""
        self._flights[flight.batch.batch_id] = flight

    def at(self, link: WorkerLink, batch_id: int) -> Flight:
        """The batch of that number, which must be at that worker.

        Raises:
            WireError: it is not.
        """
        flight = self._flights.get(batch_id)
        if flight is None or flight.link is not link:
            raise WireError(f"an answer to batch {batch_id}, which is not at instance {link.instance}")
        return flight

    def call_off(self, pending: PendingRequest) -> None:
        """Tell the worker that runs this request, if one does, that nobody waits for it any more."""
        for batch_id, flight in self._flights.items():
            if pending in flight.batch.requests:
                flight.link.send(Cancel(batch_id, flight.batch.position_of(pending)))
                return

    def land(self, link: WorkerLink, batch_id: int, inputs_free: bool) -> Flight:
        """A worker answered a batch; its blocks are free now, or lent until ``release``.

        Raises:
            WireError: that worker does not have such a batch.
        """
        flight = self.at(link, batch_id)
        del self._flights[batch_id]
        if inputs_free:
            self._free(flight.blocks)
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
        """The last array over these batches' inputs has died in their worker."""
        for batch_id in batch_ids:
            lender, blocks = self._lent.get(batch_id, (None, []))
            if lender is link:
                del self._lent[batch_id]
                self._free(blocks)

    def lose(self, link: WorkerLink) -> list[PendingRequest]:
        """A worker is gone, and what it held is free: the requests that were at it, in order."""
        requests: list[PendingRequest] = []
        for batch_id in [n for n, flight in self._flights.items() if flight.link is link]:
            flight = self._flights.pop(batch_id)
            self._free(flight.blocks)
            requests += flight.requests
        for batch_id in [n for n, (lender, _) in self._lent.items() if lender is link]:
            self._free(self._lent.pop(batch_id)[1])
        return requests
