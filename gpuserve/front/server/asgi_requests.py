"""Requests answered by an ASGI application (ASGI 3.0): one task each. No byte of either protocol is here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Final

from gpuserve.front.endpoint.asgi import Application, Scope
from gpuserve.front.server.exchange import Exchange, Header, Piece

logger = logging.getLogger(__name__)

_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}
_TRAILERS: Final[dict[str, Any]] = {"http.response.trailers": {}}
_DISCONNECT: Final = {"type": "http.disconnect"}
_BROKEN_BODY: Final = b"internal server error\n"
_BROKEN: Final = (
    (b"content-type", b"text/plain; charset=utf-8"),
    (b"content-length", b"%d" % len(_BROKEN_BODY)),
)


class AsgiRequests:
    """Gives each request to the application. ``tasks`` are those that run."""

    def __init__(self, application: Application) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self._application = application
        self._loop = asyncio.get_running_loop()

    def accept(self, exchange: Exchange) -> AsgiRequest:
        """The sink of a request."""
        request = AsgiRequest(exchange, self._loop)
        task = self._loop.create_task(self._run(request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return request

    async def _run(self, request: AsgiRequest) -> None:
        try:
            await self._application(_scope(request.exchange), request.receive, request.send)
        except Exception as error:
            if not (request.gone and isinstance(error, OSError)):
                logger.exception("defect while serving a request")
        finally:
            request.close()


class AsgiRequest:
    """One request: a ``Sink``, and the two ends that its application is given.

    ``gone``: the client is, or the response is through.
    """

    __slots__ = (
        "_begin",
        "_body_ended",
        "_end_told",
        "_finished",
        "_loop",
        "_parts",
        "_started",
        "_trailers",
        "_waiter",
        "exchange",
        "gone",
    )

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self.exchange = exchange
        self.gone = False
        self._loop = loop
        self._parts: deque[bytes] = deque()
        self._body_ended = False
        self._end_told = False
        #: A response that has begun but whose first part has not come: it may end with its head.
        self._begin: tuple[int, list[Header]] | None = None
        self._started = False
        self._trailers = False
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    # ---- the connection's side ------------------------------------------------------------

    def take(self, data: Piece, end: bool) -> None:
        """The next part of the body."""
        if data:
            self._parts.append(bytes(data))
        self._body_ended = end
        self._wake()

    def abandon(self) -> None:
        """Nobody reads the response any more."""
        self.gone = True
        self._parts.clear()
        self._wake()

    # ---- the application's side -----------------------------------------------------------

    async def receive(self) -> dict[str, Any]:
        """What of the body has come; after its end, that the client is gone, once it is."""
        parts = self._parts
        while not (self.gone or parts or (self._body_ended and not self._end_told)):
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.gone:
            return _DISCONNECT
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._end_told = self._body_ended
        self.exchange.consumed(len(body))
        return {"type": "http.request", "body": body, "more_body": not self._end_told}

    async def send(self, message: dict[str, Any]) -> None:
        """A part of the response.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self._finished:
            return
        if self.gone:
            raise ConnectionResetError("the client is gone")
        match message["type"]:
            case "http.response.start":
                self._start(message["status"], message.get("headers", ()), message.get("trailers", False))
            case "http.response.body":
                more = message.get("more_body", False)
                self._body(message.get("body", b""), more)
                if more:
                    await self.exchange.room()
            case "http.response.trailers":
                self.exchange.finish(message.get("headers", ()))
                self._finish()
            case other:
                raise ValueError(f"an ASGI message of type {other!r}, which is not sent here")

    def close(self) -> None:
        """The application is through: a response that it did not finish is broken off."""
        if self._finished or self.gone:
            return
        if self._started:
            self.exchange.reset()
        else:
            self.exchange.start(500, _BROKEN)
            self.exchange.send(_BROKEN_BODY, end=True)
        self._finish()

    def _start(self, status: int, headers: list[Header], trailers: bool) -> None:
        self._trailers = trailers
        if trailers:
            self._started = True
            self.exchange.start(status, headers)
        else:
            self._begin = status, headers

    def _body(self, body: bytes, more: bool) -> None:
        end = not more and not self._trailers
        head_ends = end and not body and self._begin is not None
        if self._begin is not None:
            (status, headers), self._begin = self._begin, None
            self._started = True
            self.exchange.start(status, headers, end=head_ends)
        if (body or end) and not head_ends:
            self.exchange.send(body, end=end)
        if end:
            self._finish()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _finish(self) -> None:
        self._finished = True
        self.abandon()


def _scope(exchange: Exchange) -> Scope:
    head, ends = exchange.head, exchange.ends
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": head.http_version,
        "method": head.method,
        "scheme": head.scheme,
        "path": head.path,
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": ends.client,
        "server": ends.server,
        "extensions": _TRAILERS if head.trailers else {},
    }
