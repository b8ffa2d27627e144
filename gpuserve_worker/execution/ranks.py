"""The ranks of an instance: its processes, which run the same batches in the same order.

Rank 0 has the link to the front, and is the front of the other ranks, its followers. It passes them the
memory that it is lent, and each batch just before it calls the callable. Followers call theirs on the same
bytes and drop the outputs::

    rank 0 -> follower   Attach, Segment, DropSegment, Region, DropRegion, Lend, Unlend, Run, Agreed, Stop
    follower -> rank 0   Done | Failed of each batch, Released; rank 0 ignores all others

Rank 0 answers a batch as soon as its own call returns, and starts the next one when all followers have
returned. A call that raises in every rank is a failure of its batch. A call that raises in some ranks only
leaves the ranks out of step, so the rank that notices ends its process; the supervisor then ends the others.
It names the rank that ended first as the cause, so a rank that loses its link to another one waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

from gpuserve_worker.execution.lifecycle import EXIT_FAILED, Reporter, leave
from gpuserve_worker.memory.batch_tensors import InputLeases
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.datagram import close_all
from gpuserve_worker.protocol.link import Link

#: Time within which a call that raised in one rank must have raised in all of them.
AGREEMENT_S: Final = 2.0
#: Time within which the supervisor kills the other ranks of a dead one.
_DEATH_S: Final = 5.0
_FOR_ALL: Final = frozenset(
    {wire.Attach, wire.Segment, wire.DropSegment, wire.Region, wire.DropRegion, wire.Lend, wire.Unlend}
)


class Rank:
    """One rank's side of the exchange with the other ranks. Any thread may call any method."""

    leads = False

    def relay(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Process a message of the front that may concern other ranks, or of rank 0."""

    def start(self, leases: InputLeases, run: wire.Run) -> None:
        """Start a batch in the other ranks, just before the callable is called here. ``leases`` are those of
        the front's memory.
        """

    def returned(self, batch_id: int) -> None:
        """Note that the callable returned."""

    def before_reply(self, reply: wire.BatchReply) -> None:
        """Wait for the other ranks if the reply depends on them."""

    def after_reply(self, reply: wire.BatchReply) -> None:
        """Wait until the other ranks have returned from the batch."""

    def wait_idle(self) -> None:
        """Wait until the other ranks have returned from all batches of rank 0."""

    def stop_others(self) -> None:
        """Let the other ranks end, because there are no further batches."""

    def on_broken_link(self) -> None:
        """Handle a link that broke. A follower waits for the supervisor, because rank 0 has ended."""


class _Started:
    """A batch that all ranks run. ``lease`` keeps its inputs in the front's memory for the followers."""

    def __init__(self, batch_id: int, lease: Any) -> None:
        self.batch_id = batch_id
        self.lease = lease
        self.has_returned = False


class Leader(Rank):
    """Rank 0 of an instance. ``links`` lead to ranks 1, 2, …"""

    leads = True

    def __init__(self, links: Sequence[Link], reporter: Reporter) -> None:
        self._links = links
        self._reporter = reporter
        self._started: deque[_Started] = deque()
        #: Notified when a batch has ended in all ranks.
        self._ended = threading.Condition()
        #: The leases of answered batches whose inputs a follower keeps, by rank and batch.
        self._kept: dict[tuple[int, int], Any] = {}

    def relay(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        if type(message) in _FOR_ALL:
            if isinstance(message, wire.Attach):
                self._kept.clear()  # the memory was that of the previous front
            self._send(message, fds)

    def start(self, leases: InputLeases, run: wire.Run) -> None:
        in_memory = any(not isinstance(payload, bytes) for *_, payload in run.inputs)
        lease = leases.grant(run.batch_id) if in_memory else None
        self._started.append(_Started(run.batch_id, lease))
        # The copies from clients' regions have been made, and checked, by this rank.
        self._send(run._replace(fills=(), may_wait=False))

    def returned(self, batch_id: int) -> None:
        if (started := self._find(batch_id)) is not None:
            started.has_returned = True

    def before_reply(self, reply: wire.BatchReply) -> None:
        """Check that a call which raised here has raised, or soon raises, in every rank."""
        started = self._find(reply.batch_id)
        if not isinstance(reply, wire.Failed) or started is None or started.has_returned:
            return
        deadline = time.monotonic() + AGREEMENT_S
        for rank, link in enumerate(self._links, start=1):
            if self._failed(rank, link, started, deadline) is not True:
                end_rank(self._reporter, f"rank 0 raised an exception, and rank {rank} did not")
        self._end(started)
        self._send(wire.Agreed(reply.batch_id))

    def after_reply(self, reply: wire.BatchReply) -> None:
        started = self._find(reply.batch_id)
        if started is None:
            return
        for rank, link in enumerate(self._links, start=1):
            if self._failed(rank, link, started):
                end_rank(self._reporter, f"rank {rank} raised an exception, and rank 0 did not")
        self._end(started)

    def _end(self, started: _Started) -> None:
        with self._ended:
            self._started.remove(started)
            self._ended.notify_all()

    def wait_idle(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: not self._started)

    def stop_others(self) -> None:
        for link in self._links:
            with suppress(OSError):  # it has ended, which the supervisor notices
                link.send(wire.Stop())

    def _find(self, batch_id: int) -> _Started | None:
        # A copy, because another thread may start a batch now.
        return next((one for one in tuple(self._started) if one.batch_id == batch_id), None)

    def _failed(self, rank: int, link: Link, started: _Started, deadline: float | None = None) -> bool | None:
        """Return whether a call raised in a follower, or None if it has not ended at the deadline."""
        while deadline is None or link.has_message(max(0.0, deadline - time.monotonic())):
            try:
                received = link.receive()
            except OSError:
                received = None
            if received is None:
                _await_end(self._reporter, rank)
            message, fds = received
            close_all(fds)
            match message:
                case wire.Released(batch_ids):
                    for one in batch_ids:
                        self._kept.pop((rank, one), None)
                case wire.Done() | wire.Failed() as reply if reply.batch_id == started.batch_id:
                    if not reply.inputs_free:
                        self._kept[rank, reply.batch_id] = started.lease
                    return isinstance(reply, wire.Failed)
        return None

    def _send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        data = wire.WORKER.encode(message)
        for rank, link in enumerate(self._links, start=1):
            try:
                link.send_encoded(data, fds)
            except OSError:
                _await_end(self._reporter, rank)


class Follower(Rank):
    """A rank other than 0: its link leads to rank 0."""

    def __init__(self, number: int, reporter: Reporter) -> None:
        self._number = number
        self._reporter = reporter
        self._disagreement: threading.Timer | None = None

    def relay(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        if isinstance(message, wire.Agreed) and self._disagreement is not None:
            self._disagreement.cancel()

    def before_reply(self, reply: wire.BatchReply) -> None:
        """After a failure, end this process unless all ranks agree: rank 0 may wait in a collective."""
        if isinstance(reply, wire.Failed):
            reason = f"rank {self._number} raised an exception, and rank 0 did not"
            self._disagreement = threading.Timer(AGREEMENT_S, end_rank, (self._reporter, reason))
            self._disagreement.daemon = True
            self._disagreement.start()

    def on_broken_link(self) -> None:
        _await_end(self._reporter, 0)


def _await_end(reporter: Reporter, rank: int) -> NoReturn:
    """Wait for the supervisor, which knows why the rank died and kills this process too."""
    time.sleep(_DEATH_S)
    end_rank(reporter, f"rank {rank} ended")


def end_rank(reporter: Reporter, reason: str) -> NoReturn:
    """End this process, and with it the instance."""
    with suppress(OSError):  # the supervisor is gone
        reporter.ending(reason)
    leave(EXIT_FAILED)
