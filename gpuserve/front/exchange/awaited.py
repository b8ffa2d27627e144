"""The one place where an endpoint awaits: a request that a coroutine serves, in a task of its own.

Contract, for who writes such an endpoint (``serve``)::

    async def serve(request: AwaitedRequest) -> None:
        body = await request.body(MAX_NBYTES)       # or part() until None
        reply = await request.unless_gone(future)   # the future is cancelled if the client leaves
        request.exchange.answer(HEAD, (reply,), len(reply))

    sink = requests.begin(exchange, serve)          # what an ``Accept`` returns

The response goes by ``request.exchange``: ``answer``, or ``start``, ``send``, ``room``, ``finish``; see
``Exchange``. What is sent to a client that has gone is dropped. Everything that waits raises ``ClientGone``
(a ``ConnectionResetError``) then; it ends the task quietly, so ``serve`` cleans up in ``finally`` and need
not catch it. Only the end of the server cancels the task: an endpoint that must go on without its client
just does not wait by the request. Errors of a request are the endpoint's to answer; any other exception is a
defect, which is logged. A response that ``serve`` has not ended is broken off, or is a 500 if it has not
begun.

An endpoint that answers without waiting needs none of this: it is a ``Sink`` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from gpuserve.core.errors import NoMemory, RequestError, ResourceExhausted
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Piece
from gpuserve.front.ipc.heap_memory import AWAITED_NBYTES, REQUEST_NBYTES, Intake, Share

logger = logging.getLogger(__name__)

#: So much of a body that nobody has read yet is not counted.
_UNCOUNTED_NBYTES: Final = 8 << 10
#: A longer body is joined by a thread.
_JOINED_NBYTES: Final = 4 << 20
T = TypeVar("T")

_BROKEN_BODY: Final = b"internal server error\n"
_BROKEN: Final = AnswerHead(500, ((b"content-type", b"text/plain; charset=utf-8"),))


class ClientGone(ConnectionResetError):
    """The client has left, or gave its request up."""

    def __init__(self) -> None:
        super().__init__("the client is gone")


class AwaitedRequest:
    """The ``Sink`` of a request that a coroutine serves, and what that coroutine asks. ``gone``: the client
    has left, or the response is through; nothing more comes. ``complete``: nothing of the body is still to
    come, so ``part`` gives the rest of it, and will not wait. ``is_stream``: its body is a stream of
    messages, which may come whenever they like. ``share`` holds what is there of its body, and once it waits
    for more, its own objects too.
    """

    __slots__ = (
        "_parts",
        "_reading",
        "_refusal",
        "_unread_nbytes",
        "_waiting",
        "asleep_in",
        "complete",
        "exchange",
        "gone",
        "head",
        "is_stream",
        "share",
    )

    def __init__(self, exchange: Exchange, share: Share, is_stream: bool = False) -> None:
        self.share = share
        #: Where it waits to be begun, until something of its body comes.
        self.asleep_in: AwaitedRequests | None = None
        self.is_stream = is_stream
        self.exchange = exchange
        self.head = exchange.head
        self.gone = False
        self.complete = False
        self._parts: list[bytes] = []
        self._unread_nbytes = 0
        #: There is no memory for what comes: none of it is kept any more, and who reads is told.
        self._refusal: NoMemory | None = None
        #: What the next part of the body resolves.
        self._reading: asyncio.Future[None] | None = None
        #: What is cancelled once the client is gone.
        self._waiting: set[asyncio.Future[Any]] | None = None

    # ---- the connection's side ------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        if self.asleep_in is not None:
            self.asleep_in.wake(self)
        if data and self._refusal is None:
            self._parts.append(bytes(data))
            self._unread_nbytes += len(data)
            if self._unread_nbytes > _UNCOUNTED_NBYTES:
                self._count()
        self.complete = end
        self._wake()

    def abandon(self) -> None:
        self.gone = True
        if self.asleep_in is not None:
            self.asleep_in.forget(self)
        self._parts.clear()
        self._wake()
        for future in self._waiting or ():
            future.cancel()

    # ---- the endpoint's side --------------------------------------------------------------

    async def part(self) -> bytes | None:
        """What has come of the body since, at least one byte; None after its end. Raises ``ClientGone``, or
        NoMemory: there is none for it.
        """
        parts = self._parts
        while not (self.gone or parts or self.complete or self._refusal):
            if not self.share.nbytes:
                self.stay()
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        if self.gone:
            raise ClientGone
        if self._refusal is not None:
            raise self._refusal
        if not parts:
            return None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._unread_nbytes = 0
        if self.share.nbytes > 1:
            self.share.hold(1)  # what is read is its reader's to count
        self.exchange.consumed(len(data))
        return data

    async def body(
        self,
        max_nbytes: int,
        refusal: type[RequestError] = ResourceExhausted,
        hold: Callable[[int], None] = lambda _: None,
    ) -> bytes:
        """The whole body, or what of it was not read by ``part``. ``hold`` is told how much is kept of it.
        Raises RequestError: it is larger than ``max_nbytes``: a ``refusal``; or what ``hold`` raises;
        ClientGone: it has not ended, and will not.
        """
        parts: list[bytes] = []
        nbytes = 0
        while (part := await self.part()) is not None:
            parts.append(part)
            nbytes += len(part)
            if nbytes > max_nbytes:
                raise refusal(f"the request body is over the limit of {max_nbytes} bytes")
            hold(nbytes)
        if nbytes > _JOINED_NBYTES:
            return await asyncio.to_thread(b"".join, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stay(self) -> None:
        """Count the request's objects from now on, as it may be there for long. Raises NoMemory."""
        if not self.share.nbytes:
            self.share.hold(1)

    async def unless_gone(self, future: asyncio.Future[T]) -> T:
        """The result of a future, which is cancelled if the client leaves before; ``ClientGone`` then."""
        if self.gone:
            future.cancel()
            raise ClientGone
        waiting = self._waiting = self._waiting or set()
        waiting.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            waiting.discard(future)
            del future  # its error has a traceback, which has this frame

    async def until_gone(self) -> None:
        with contextlib.suppress(ClientGone):
            await self.unless_gone(asyncio.get_running_loop().create_future())

    def _count(self) -> None:
        try:
            self.share.hold(self._unread_nbytes)
        except NoMemory as error:
            self._refusal = error
            self._parts.clear()

    def let_go(self) -> None:
        """It is served: nothing is held any more, nor a cycle left to the garbage collector."""
        self._parts.clear()
        self._refusal = None
        self.share.hold(0)

    def _wake(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and not reading.done():
            reading.set_result(None)


#: An endpoint that awaits.
Serve: TypeAlias = Callable[[AwaitedRequest], Coroutine[Any, Any, None]]


class AwaitedRequests:
    """Runs the coroutines of requests, one task each. ``tasks`` are those that run; what they hold is counted
    by ``intake``.
    """

    def __init__(self, intake: Intake | None = None) -> None:
        self._intake = intake or Intake(sys.maxsize)
        self.tasks: set[asyncio.Task[None]] = set()
        self._asleep: dict[AwaitedRequest, Serve] = {}

    def begin(
        self, exchange: Exchange, serve: Serve, *, is_stream: bool = False, sleeps: bool = False
    ) -> AwaitedRequest:
        """Have a request served; what is returned is the sink of its body. One that ``sleeps`` is begun when
        something of it comes: tens of thousands that are only opened cost next to nothing, and may be there
        for long; for those it raises NoMemory.
        """
        objects_nbytes = REQUEST_NBYTES if sleeps else AWAITED_NBYTES
        share = Share(self._intake, exchange.ends.source, objects_nbytes)
        request = AwaitedRequest(exchange, share, is_stream)
        if sleeps:
            request.stay()
            request.asleep_in = self
            self._asleep[request] = serve
        else:
            self._start(request, serve)
        return request

    def wake(self, request: AwaitedRequest) -> None:
        request.asleep_in = None
        self._start(request, self._asleep.pop(request))

    def wake_all(self) -> None:
        """Begin what sleeps, as there is something that it must hear."""
        for request in list(self._asleep):
            self.wake(request)

    def forget(self, request: AwaitedRequest) -> None:
        """Nothing will come of one that sleeps."""
        request.asleep_in = None
        del self._asleep[request]
        request.let_go()

    def _start(self, request: AwaitedRequest, serve: Serve) -> None:
        task = asyncio.get_running_loop().create_task(_run(request, serve))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def stop(self) -> None:
        """Cancel what still runs, and wait for it to end."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(request: AwaitedRequest, serve: Serve) -> None:
    exchange = request.exchange
    try:
        await serve(request)
    except Exception as error:
        if not (request.gone and isinstance(error, OSError)):
            logger.exception("defect while serving %s", request.head.path[:256])
    finally:
        request.let_go()
        if not (exchange.ended or request.gone):
            if exchange.started:
                exchange.reset()
            else:
                exchange.answer(_BROKEN, (_BROKEN_BODY,), len(_BROKEN_BODY))
