"""The event client: events of a running server for synchronous and asynchronous code, over ZeroMQ."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Collection, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from gpuserve.core.errors import ControlError, InvalidArgument
from gpuserve.core.event_log import FREQUENT, HELLO, EventKind, topic
from gpuserve.core.suggestions import explained
from gpuserve.supervisor.control.operator_client import ask
from gpuserve.supervisor.control.operator_protocol import near

if TYPE_CHECKING:
    import asyncio


_KINDS: Final = {one.value: one for one in EventKind}
#: Time limit of the server's confirmation; a healthy server answers sooner.
_HELLO_TIMEOUT_S: Final = 10.0
#: Events queued here for a slow program; the server queues as many. Further events are lost.
_MAX_QUEUED: Final = 1000
#: Twelve days; ZeroMQ adds up to as much again, which must fit a signed 32-bit number.
_NO_RECONNECT_MS: Final = 1 << 30


@explained
def events(
    server: str | None = None,
    kinds: str | Iterable[str | EventKind] = (),
    *,
    model: str | None = None,
    past: bool = False,
) -> EventStream:
    """Return the events of a running server of this machine, until it ends or the stream is closed.

    Each event is a dict: "time" in seconds since 1970, "number", "kind", if it concerns them "model",
    "version" and "instance", and the facts of its kind. Gaps in the numbers show events that were lost
    because this program was slow.

    Args:
        server: one of the server's ports, such as "localhost:8000"; None is the only server of this user.
        kinds: kinds of events, or a single one; none means all but "log" and "sample", which are frequent.
        model: only events of this model.
        past: start with the events that the server has kept, the last 500 at most.

    Raises:
        ControlError: there is no such server, there are several, or the server does not publish events.
        InvalidArgument: there is no such kind.
    """
    chosen = chosen_kinds([kinds] if isinstance(kinds, str) else kinds)
    return EventStream(server, chosen, model=model, past=past)


def chosen_kinds(names: Iterable[str | EventKind]) -> frozenset[EventKind]:
    """Return kinds by their names, or all kinds that are not frequent if none is named."""
    found = set()
    for name in names:
        value = name.value if isinstance(name, EventKind) else name
        if value not in _KINDS:
            raise InvalidArgument(f"there is no event {value!r}{near(value, _KINDS)}")
        found.add(_KINDS[value])
    return frozenset(found) or frozenset(EventKind) - FREQUENT


class EventStream:
    """An iterator over events, also for ``async for``, and a context manager that closes it."""

    def __init__(
        self,
        server: str | None,
        kinds: Collection[EventKind],
        *,
        model: str | None = None,
        past: bool = False,
    ) -> None:
        import zmq  # `import gpuserve` must stay light

        self._kinds = frozenset(one.value for one in kinds)
        self._model = model
        self._past: deque[dict[str, Any]] = deque()
        self._last_past_number = 0
        self._is_closed = self._has_server_ended = False
        address = _ask_events(server)["address"]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, _MAX_QUEUED)
        # No reconnection: another server may take over the address. With -1 ZeroMQ would drop unread events.
        self._socket.set(zmq.RECONNECT_IVL, _NO_RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._subscribe(address, [topic(one, model or "") for one in kinds])
            if past:
                for event in _ask_events(server)["events"]:  # those since the subscription among them
                    self._last_past_number = max(self._last_past_number, event["number"])
                    if event["kind"] in self._kinds and self._matches_model(event):
                        self._past.append(event)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> dict[str, Any]:
        event = self.next()
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> dict[str, Any]:
        while (event := self._receive()) is None:
            if self.is_over:
                raise StopAsyncIteration
            await self._readable()
        return event

    @property
    def is_over(self) -> bool:
        """True if no more events come: the server has ended and all are read, or the stream is closed."""
        if self._has_server_ended and not self._past and (unread := self._receive()) is not None:
            self._past.append(unread)
        return self._is_closed or (self._has_server_ended and not self._past)

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next event, or None at the end or after ``timeout_s``."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (event := self._receive()) is None and not self.is_over:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._wait(left_s)
        return event

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)
            self._context.term()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_monitor"):
            self.close()

    def _matches_model(self, event: dict[str, Any]) -> bool:
        return self._model is None or event.get("model") == self._model

    def _subscribe(self, address: str, topics: Iterable[bytes]) -> None:
        """Subscribe, and wait for the server's answer to a greeting: by then it knows all subscriptions."""
        self._socket.connect(address)
        for name in topics:
            self._socket.subscribe(name)
        hello = HELLO + os.urandom(8).hex().encode()
        self._socket.subscribe(hello)
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        while True:
            message = self._receive_message()
            if message is not None and message[0] == hello:  # earlier events are among the past ones
                self._socket.unsubscribe(hello)
                return
            left_s = deadline - time.monotonic()
            if self._has_server_ended or left_s <= 0:
                raise ControlError("the server does not accept subscribers to its events")
            if message is None:
                self._wait(left_s)

    def _receive_message(self) -> list[bytes] | None:
        """Return the next message, or None if none has arrived."""
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        if not self._socket.poll(0):
            if not self._monitor.poll(0):
                return None
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._has_server_ended = True
            if not self._socket.poll(0):  # no event arrived right before the end
                return None
        return self._socket.recv_multipart(zmq.NOBLOCK)

    def _receive(self) -> dict[str, Any] | None:
        if self._past:
            return self._past.popleft()
        while not self._is_closed and (message := self._receive_message()) is not None:
            event: dict[str, Any] = json.loads(message[-1])
            if not event or not self._matches_model(event):
                continue
            # Frequent kinds are numbered on their own.
            if event["number"] > self._last_past_number or _KINDS[event["kind"]] in FREQUENT:
                return event
        return None

    def _wait(self, timeout_s: float) -> None:
        """Wait for a message or the server's end, ``timeout_s`` at most."""
        import zmq

        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(None if math.isinf(timeout_s) else math.ceil(timeout_s * 1000))

    async def _readable(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        descriptors = (self._socket.fileno(), self._monitor.fileno())  # readable once for each arrival
        for fd in descriptors:
            loop.add_reader(fd, wake)
        try:
            await ready
        finally:
            for fd in descriptors:
                loop.remove_reader(fd)


def _ask_events(server: str | None) -> dict[str, Any]:
    outcome = ask(server, "events", {}, lambda _: None)
    if outcome.code:
        raise ControlError(outcome.text)
    return dict(outcome.result)
