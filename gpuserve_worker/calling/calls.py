"""What an inference callable asks its server (``questions.py``), and the answers that come. A callable asks
through ``ModelContext``. Which messages go where, and who receives, is the loop's business (``CallPort``);
here is which answer belongs to which question, and how a thread or a task waits for it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from gpuserve_worker.calling.failure import INTERNAL
from gpuserve_worker.calling.questions import CallRequest, ModelCallError, Question

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_SERVER: Final = "no other model can be asked before a server calls this callable"


class CallReply(NamedTuple):
    """One response to a question, an error in its place, or neither, which is the end of a stream. ``lease``
    is what is to be given back when it is taken, 0 where its arrays do that.
    """

    outputs: dict[str, NDArray[Any]] | None
    parameters: dict[str, Any]
    error: ModelCallError | None
    final: bool
    lease: int = 0


class CallPort(Protocol):
    """What a loop does for the calls of its callable."""

    def ask(self, call_id: int, question: Question) -> None:
        """Send a question; ``ModelCallError``: its inputs are no tensors, or there is no memory for them."""

    def call_off(self, call_id: int) -> None:
        """Say that nobody waits for the answer any more."""

    def give_back(self, lease: int) -> None:
        """Say that a reply without memory of its own was taken."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let messages come in until something is true; any thread may call it."""

    def look(self) -> None:
        """Let messages come in that have been sent, if any, without waiting; any thread may call it."""

    def wakes(self) -> bool:
        """Whether the calling thread runs the event loop that messages come in on."""


class ModelCall:
    """One call to another model, and the replies to it that have come and were not taken."""

    def __init__(self, call_id: int, port: CallPort) -> None:
        self.call_id = call_id
        self._port = port
        self._replies: deque[CallReply] = deque()
        self._ended = False
        self._on_reply: Callable[[], None] = _nothing

    @property
    def ready(self) -> bool:
        """Whether there is a reply to be taken, or none will come."""
        return bool(self._replies) or self._ended

    def add(self, reply: CallReply) -> None:
        self._replies.append(reply)
        self._ended = reply.final
        self._on_reply()

    def take(self) -> CallReply:
        if not self.ready:
            self._port.wait(lambda: self.ready)
        return self._next()

    async def take_async(self) -> CallReply:
        """The next reply; the event loop goes on meanwhile."""
        import asyncio

        if not self._port.wakes():
            return await asyncio.to_thread(self.take)
        if not self.ready:
            came = asyncio.Event()
            self._on_reply = came.set
            await came.wait()
            self._on_reply = _nothing
        return self._next()

    def close(self) -> None:
        while self._replies:
            self._next()
        if not self._ended:
            self._ended = True
            self._port.call_off(self.call_id)

    def _next(self) -> CallReply:
        reply = self._replies.popleft() if self._replies else CallReply(None, {}, None, True)
        if reply.lease:
            self._port.give_back(reply.lease)
        return reply


class OutgoingCalls:
    """The calls of one worker that are under way. Any thread may make one."""

    def __init__(self) -> None:
        self._port: CallPort | None = None
        self._refusal = _NO_SERVER
        self._calls: dict[int, ModelCall] = {}
        self._numbers = itertools.count(1)
        # A stream that nobody reads on is forgotten wherever it happens to die, also in a line below.
        self._lock = threading.RLock()

    def open(self, port: CallPort) -> None:
        with self._lock:
            self._port = port

    def close(self, text: str) -> None:
        with self._lock:
            self._port, self._refusal = None, text
        self.fail_all(text)

    def ask(self, question: Question) -> ModelCall:
        with self._lock:
            port = self._port
            if port is None:
                raise ModelCallError("UNAVAILABLE", self._refusal)
            call = ModelCall(next(self._numbers), port)
            self._calls[call.call_id] = call
        try:
            port.ask(call.call_id, question)
        except BaseException:
            self.forget(call)
            raise
        return call

    def look(self) -> None:
        """Hear what the server has said by now, such as that nobody waits for a request any more."""
        if (port := self._port) is not None:
            port.look()

    def forget(self, call: ModelCall) -> None:
        with self._lock:  # no reply is added after this
            self._calls.pop(call.call_id, None)
        call.close()

    def reply(self, call_id: int, reply: CallReply) -> bool:
        with self._lock:
            call = self._calls.get(call_id)
            if call is not None:
                call.add(reply)
        return call is not None

    def fail_all(self, text: str) -> None:
        """Fail the calls under way: whoever would have answered is gone."""
        with self._lock:
            for call in list(self._calls.values()):
                call.add(CallReply(None, {}, ModelCallError("UNAVAILABLE", text), True))


def outputs_of(reply: CallReply, request: CallRequest) -> dict[str, NDArray[Any]]:
    """The outputs of the one reply to a question. Raises ``ModelCallError`` where it is none."""
    if reply.error is not None:
        raise reply.error
    if reply.outputs is None:
        raise ModelCallError(INTERNAL, f"model {request.model!r} gave no response")
    return reply.outputs


def _nothing() -> None: ...
