"""Requests served by coroutines, one task each, and periodic work.

An endpoint that has to wait is a coroutine function (``AsyncHandler``)::

    async def serve(request: AsyncRequest) -> None:
        body = await request.body(MAX_NBYTES)               # or part() until None
        reply = await request.wait_unless_gone(future)      # cancels the future if the client leaves
        request.exchange.answer(HEAD, (reply,), len(reply))

    receiver = requests.start(exchange, serve)              # what a RequestHandler returns

The response is sent by ``request.exchange``: ``answer``, or ``start``, ``send``, ``room``, ``finish``; see
``Exchange``. Output for a client that has gone is dropped. Every waiting method then raises ``ClientGone`` (a
``ConnectionResetError``), which endpoints the task quietly, so ``serve`` cleans up in ``finally`` and need
not catch it. Only the end of the server cancels the task: an endpoint that must continue without its client
does not wait by the request. Errors of a request are the endpoint's to answer; any other exception is a
defect, which is logged. If ``serve`` returns without ending the response, the response is aborted, or is a
500 if it has not begun.

An endpoint that answers without waiting needs no task: it is a ``BodyReceiver`` itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

from gpuserve.core.errors import NoMemory, RequestError, ResourceExhausted
from gpuserve.front.ipc.heap_memory import AWAITED_NBYTES, REQUEST_NBYTES, Intake, Share
from gpuserve.front.net.exchange import AnswerHead, Exchange, Piece, wake

logger = logging.getLogger(__name__)

#: Unread body bytes that are not counted.
_UNCOUNTED_NBYTES: Final = 8 << 10
#: A body above this size is joined by a thread.
_THREAD_JOIN_NBYTES: Final = 4 << 20
T = TypeVar("T")

_ERROR_BODY: Final = b"internal server error\n"
_ERROR_HEAD: Final = AnswerHead(500, ((b"content-type", b"text/plain; charset=utf-8"),))


class ClientGone(ConnectionResetError):
    """The client has left or cancelled its request."""

    def __init__(self) -> None:
        super().__init__("the client is gone")


class AsyncRequest:
    """The ``BodyReceiver`` of a request that a coroutine serves, and the coroutine's interface to it.

    ``gone``: the client has left, or the response is complete. ``complete``: the whole body has arrived.
    ``is_stream``: the body is a stream of messages, which may arrive at any time. ``share`` counts the unread
    part of the body, and the request's own objects once it waits for more.
    """

    __slots__ = (
        "_parts", "_reading", "_refusal", "_unread_nbytes", "_waiting", "complete", "dormant_in", "exchange",
        "gone", "head", "is_stream", "share",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, share: Share, is_stream: bool = False) -> None:
        self.share = share
        #: The owner while the request is dormant: not started before some of its body arrives.
        self.dormant_in: AsyncRequests | None = None
        self.is_stream = is_stream
        self.exchange = exchange
        self.head = exchange.head
        self.gone = False
        self.complete = False
        self._parts: list[bytes] = []
        self._unread_nbytes = 0
        #: Set if there is no memory for the body, of which nothing is kept then: the error for the reader.
        self._refusal: NoMemory | None = None
        #: Resolved by the next part of the body.
        self._reading: asyncio.Future[None] | None = None
        #: Futures to cancel when the client leaves.
        self._waiting: set[asyncio.Future[Any]] | None = None

    # ---- for the connection -------------------------------------------------------------------

    def receive_body(self, data: Piece, end: bool) -> None:
        if self.dormant_in is not None:
            self.dormant_in.start_dormant(self)
        if data and self._refusal is None:
            self._parts.append(bytes(data))
            self._unread_nbytes += len(data)
            if self._unread_nbytes > _UNCOUNTED_NBYTES:
                try:
                    self.share.hold(self._unread_nbytes)
                except NoMemory as error:
                    self._refusal = error
                    self._parts.clear()
        self.complete = end
        wake(self._reading)

    def abandon(self) -> None:
        self.gone = True
        if self.dormant_in is not None:
            self.dormant_in.forget_dormant(self)
        self._parts.clear()
        wake(self._reading)
        for future in self._waiting or ():
            future.cancel()

    # ---- for the endpoint ---------------------------------------------------------------------

    async def part(self) -> bytes | None:
        """Return the next bytes of the body, or None after its end. Raise ClientGone or NoMemory."""
        parts = self._parts
        while not (self.gone or parts or self.complete or self._refusal):
            if not self.share.nbytes:
                self.count_objects()
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
            self.share.hold(1)  # the reader counts the part from now on
        self.exchange.consumed(len(data))
        return data

    async def body(
        self,
        max_nbytes: int,
        refusal: type[RequestError] = ResourceExhausted,
        hold: Callable[[int], None] = lambda _: None,
    ) -> bytes:
        """Return the whole body, or the rest of it after calls of ``part``.

        Args:
            max_nbytes: The limit in bytes.
            refusal: The error for a larger body.
            hold: Called with the number of bytes kept so far.

        Raises:
            RequestError: The body is over the limit, or ``hold`` raised the error.
            ClientGone: The body will not be complete.
        """
        parts: list[bytes] = []
        nbytes = 0
        too_large = refusal(f"the request body is over the limit of {max_nbytes} bytes")
        if (self.head.content_length or 0) > max_nbytes:
            raise too_large
        while (part := await self.part()) is not None:
            parts.append(part)
            nbytes += len(part)
            if nbytes > max_nbytes:
                raise too_large
            hold(nbytes)
        if nbytes > _THREAD_JOIN_NBYTES:
            return await asyncio.to_thread(b"".join, parts)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def count_objects(self) -> None:
        """Count the request's objects from now on, because the request may stay long. Raise NoMemory."""
        if not self.share.nbytes:
            self.share.hold(1)

    async def wait_unless_gone(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future. If the client leaves first, cancel it and raise ClientGone."""
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
            del future  # the traceback of its error refers to this frame

    async def wait_until_gone(self) -> None:
        """Wait until the client leaves."""
        with contextlib.suppress(ClientGone):
            await self.wait_unless_gone(asyncio.get_running_loop().create_future())

    def release(self) -> None:
        """Release the memory held for a served request, and break reference cycles."""
        self._parts.clear()
        self._refusal = None
        self.share.hold(0)


#: An endpoint that waits.
AsyncHandler: TypeAlias = Callable[[AsyncRequest], Coroutine[Any, Any, None]]


class AsyncRequests:
    """The tasks of requests, one each. ``intake`` counts the memory that the requests hold."""

    def __init__(self, intake: Intake | None = None) -> None:
        self._intake = intake or Intake(sys.maxsize)
        self.tasks: set[asyncio.Task[None]] = set()
        self._dormant: dict[AsyncRequest, AsyncHandler] = {}

    def start(
        self, exchange: Exchange, serve: AsyncHandler, *, is_stream: bool = False, dormant: bool = False
    ) -> AsyncRequest:
        """Serve a request by a coroutine, and return the receiver of its body. A ``dormant`` request starts
        with its body, so idle streams cost next to nothing; it may stay long, so this raises NoMemory.
        """
        objects_nbytes = REQUEST_NBYTES if dormant else AWAITED_NBYTES
        share = Share(self._intake, exchange.endpoints.source, objects_nbytes)
        request = AsyncRequest(exchange, share, is_stream)
        if dormant:
            request.count_objects()
            request.dormant_in = self
            self._dormant[request] = serve
        else:
            self._start(request, serve)
        return request

    def start_dormant(self, request: AsyncRequest) -> None:
        request.dormant_in = None
        self._start(request, self._dormant.pop(request))

    def start_all_dormant(self) -> None:
        """Start all dormant requests, because their coroutines have to react to an event."""
        for request in list(self._dormant):
            self.start_dormant(request)

    def forget_dormant(self, request: AsyncRequest) -> None:
        """Drop a dormant request that will not be started."""
        request.dormant_in = None
        del self._dormant[request]
        request.release()

    def _start(self, request: AsyncRequest, serve: AsyncHandler) -> None:
        task = asyncio.get_running_loop().create_task(_run(request, serve))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def stop(self) -> None:
        """Cancel the running tasks and wait for their end."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(request: AsyncRequest, serve: AsyncHandler) -> None:
    exchange = request.exchange
    try:
        await serve(request)
    except Exception as error:
        if not (request.gone and isinstance(error, OSError)):
            logger.exception("defect while serving %s", request.head.path[:256])
    finally:
        request.release()
        if not (exchange.ended or request.gone):
            if exchange.started:
                exchange.reset()
            else:
                exchange.answer(_ERROR_HEAD, (_ERROR_BODY,), len(_ERROR_BODY))


# ---- periodic work -------------------------------------------------------------------------------

#: Seconds between an error and the restart of the work.
RESTART_S: Final = 10.0


async def run_periodic_work(work: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine that works until its task is cancelled. Log its errors and restart it."""
    while True:
        try:
            await work()
            return
        except Exception:
            logger.exception("periodic work failed and restarts in %.0f s", RESTART_S)
        await asyncio.sleep(RESTART_S)
