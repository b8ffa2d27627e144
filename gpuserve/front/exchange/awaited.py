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
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from gpuserve.errors import RequestError, ResourceExhausted
from gpuserve.front.exchange.exchange import AnswerHead, Exchange, Piece

logger = logging.getLogger(__name__)

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
    messages, which may come whenever they like.
    """

    __slots__ = ("_parts", "_reading", "_waiting", "complete", "exchange", "gone", "head", "is_stream")

    def __init__(self, exchange: Exchange, is_stream: bool = False) -> None:
        self.is_stream = is_stream
        self.exchange = exchange
        self.head = exchange.head
        self.gone = False
        self.complete = False
        self._parts: deque[bytes] = deque()
        #: What the next part of the body resolves.
        self._reading: asyncio.Future[None] | None = None
        #: What is cancelled once the client is gone.
        self._waiting: set[asyncio.Future[Any]] = set()

    # ---- the connection's side ------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        if data:
            self._parts.append(bytes(data))
        self.complete = end
        self._wake()

    def abandon(self) -> None:
        self.gone = True
        self._parts.clear()
        self._wake()
        for future in self._waiting:
            future.cancel()

    # ---- the endpoint's side --------------------------------------------------------------

    async def part(self) -> bytes | None:
        """What has come of the body since, at least one byte; None after its end. Raises ``ClientGone``."""
        parts = self._parts
        while not (self.gone or parts or self.complete):
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        if self.gone:
            raise ClientGone
        if not parts:
            return None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
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
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def unless_gone(self, future: asyncio.Future[T]) -> T:
        """The result of a future, which is cancelled if the client leaves before; ``ClientGone`` then."""
        if self.gone:
            future.cancel()
            raise ClientGone
        self._waiting.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            self._waiting.discard(future)

    async def until_gone(self) -> None:
        with contextlib.suppress(ClientGone):
            await self.unless_gone(asyncio.get_running_loop().create_future())

    def _wake(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and not reading.done():
            reading.set_result(None)


#: An endpoint that awaits.
Serve: TypeAlias = Callable[[AwaitedRequest], Coroutine[Any, Any, None]]


class AwaitedRequests:
    """Runs the coroutines of requests, one task each. ``tasks`` are those that run."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange, serve: Serve, *, is_stream: bool = False) -> AwaitedRequest:
        """Have a request served; what is returned is the sink of its body."""
        request = AwaitedRequest(exchange, is_stream)
        task = asyncio.get_running_loop().create_task(_run(request, serve))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return request

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
        if not (exchange.ended or request.gone):
            if exchange.started:
                exchange.reset()
            else:
                exchange.answer(_BROKEN, (_BROKEN_BODY,), len(_BROKEN_BODY))
