"""Calls of an inference callable to its server: inference by another model, or commands about models. A
callable makes them through ``ModelContext``.

This module validates calls, matches answers with calls, and blocks threads or tasks until answers arrive. The
worker's loop sends and receives the messages (``CallPort``).
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypedDict

from gpuserve_worker.inference.failure import INTERNAL
from gpuserve_worker.inference.inference_request import PARAMETER, is_parameter

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Characters of an invalid value in an error text.
_SHOWN: Final = 64
#: Verbs of a ``ModelCommand``.
LOAD: Final = "load"
UNLOAD: Final = "unload"
READY: Final = "ready"


class _StatusName(NamedTuple):
    value: str


class ModelCallError(Exception):
    """Another model could not answer. ``code`` is one of ``errors.Code``. A callable that does not catch the
    exception fails its own request with the code.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = _StatusName(code)


class CallOptions(TypedDict, total=False):
    """Options of a call to another model.

    ``version`` of the model, the newest by default; ``requested_outputs``, all by default; ``parameters`` of
    the request; ``timeout_s`` of the call, no limit by default; ``request_id``, which the model receives;
    ``sequence_id`` of the request's sequence, 0 or "" for none; ``sequence_start`` and ``sequence_end``.
    """

    version: str | int
    requested_outputs: Sequence[str]
    parameters: Mapping[str, Any] | None
    timeout_s: float | None
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


class CallRequest(NamedTuple):
    """A validated inference call. If ``blocks``, the calling thread does nothing else meanwhile. ``sequence``
    is the id, and whether the request starts and ends the sequence.
    """

    model: str
    version: str
    inputs: Mapping[str, Any]
    requested_outputs: tuple[str, ...]
    parameters: dict[str, Any]
    timeout_s: float
    stream: bool
    blocks: bool
    request_id: str = ""
    sequence: tuple[int | str, bool, bool] | None = None


class ModelCommand(NamedTuple):
    """A command about a model. ``verb`` is LOAD, UNLOAD or READY."""

    verb: str
    model: str
    parameters: Mapping[str, Any]


Question: TypeAlias = CallRequest | ModelCommand


def call_request(
    model: str,
    inputs: Mapping[str, Any],
    *,
    stream: bool,
    blocks: bool,
    version: str | int = "",
    requested_outputs: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    request_id: str = "",
    sequence_id: int | str = 0,
    sequence_start: bool = False,
    sequence_end: bool = False,
) -> CallRequest:
    """Return a validated call. Raise ``ModelCallError`` for an invalid argument."""
    if not isinstance(model, str):
        raise _invalid("the name of a model that is called", "a str", model)
    if not isinstance(inputs, (dict, Mapping)):  # of an ABC alone, the check is a call of Python
        raise _invalid(f"the inputs of a call to model {model!r}", "arrays by name", inputs)
    asked = tuple(requested_outputs) if not isinstance(requested_outputs, str) else (requested_outputs,)
    for name in asked:
        if not isinstance(name, str):
            raise _invalid(f"an output asked of model {model!r}", "a str", name)
    given = dict(parameters) if parameters else {}
    for name, value in given.items():
        if not (isinstance(name, str) and is_parameter(name) and is_parameter(value)):
            raise _invalid(f"parameter {name!r} of a call to model {model!r}", PARAMETER, value)
    limit_s = 0.0 if timeout_s is None else timeout_s
    if timeout_s is not None and not (isinstance(limit_s, int | float) and 0 < limit_s < math.inf):
        raise _invalid(f"timeout_s of a call to model {model!r}", "a positive number", timeout_s)
    if not isinstance(request_id, str):
        raise _invalid(f"request_id of a call to model {model!r}", "a str", request_id)
    if not (isinstance(sequence_id, str) or (type(sequence_id) is int and 0 <= sequence_id < 1 << 64)):
        expected = "a str, or an int of 64 bits that is not negative"
        raise _invalid(f"sequence_id of a call to model {model!r}", expected, sequence_id)
    sequence = (sequence_id, bool(sequence_start), bool(sequence_end)) if sequence_id else None
    return CallRequest(
        model, str(version), inputs, asked, given, float(limit_s), stream, blocks, request_id, sequence
    )


def command(verb: str, model: str, **parameters: str | bool) -> ModelCommand:
    """Return a validated command. Raise ``ModelCallError`` for an invalid argument."""
    if not isinstance(model, str):
        raise _invalid(f"the name of a model to {verb}", "a str", model)
    for name, value in parameters.items():
        if not isinstance(value, str | bool):
            raise _invalid(f"{name} of model {model!r}", "a str, or a bool", value)
    return ModelCommand(verb, model, parameters)


def _invalid(what: str, expected: str, given: Any) -> ModelCallError:
    return ModelCallError("INVALID_ARGUMENT", f"{what}: expected {expected}, got {repr(given)[:_SHOWN]}")


_NO_SERVER: Final = "no other model can be asked before a server calls this callable"
_FORKED: Final = (
    "a process that was forked from a worker cannot ask other models: expected the worker's own process, in "
    "any thread (concurrent.futures.ThreadPoolExecutor, multiprocessing.pool.ThreadPool)"
)


class CallReply(NamedTuple):
    """One response to a call, or an error; neither of the two marks the end of a stream. ``lease`` is to be
    returned when the reply is received, 0 if its arrays return the lease.
    """

    outputs: dict[str, NDArray[Any]] | None
    parameters: dict[str, Any]
    error: ModelCallError | None
    final: bool
    lease: int = 0


class CallPort(Protocol):
    """The loop's sending and receiving for the calls of its callable."""

    def ask(self, call_id: int, question: Question) -> None:
        """Send a call. Raise ``ModelCallError`` if its inputs are no tensors, or if there is no memory for
        them.
        """

    def cancel_call(self, call_id: int) -> None:
        """Tell the server that the callable no longer waits for the answer."""

    def return_lease(self, lease: int) -> None:
        """Return the lease of a reply without memory of its own."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Receive messages until ``ready``. Any thread may call this."""

    def poll(self) -> None:
        """Receive the messages that have arrived, without blocking. Any thread may call this."""

    def wakes(self) -> bool:
        """Return whether the calling thread runs the event loop that receives messages."""


class ModelCall:
    """One call to another model, and its replies that were received and not yet returned."""

    def __init__(self, call_id: int, port: CallPort) -> None:
        self.call_id = call_id
        self._port = port
        self._replies: deque[CallReply] = deque()
        self._ended = False
        self._on_reply: Callable[[], None] | None = None

    def is_ready(self) -> bool:
        """Return whether a reply can be returned, or none will come."""
        return bool(self._replies) or self._ended

    def add(self, reply: CallReply) -> None:
        self._replies.append(reply)
        self._ended = reply.final
        if self._on_reply is not None:
            self._on_reply()

    def next_reply(self) -> CallReply:
        self._port.wait(self.is_ready)
        return self._next()

    async def next_reply_async(self) -> CallReply:
        """Return the next reply while the event loop continues."""
        await self.wait_async()
        return self._next()

    async def wait_async(self) -> None:
        """Wait until the next reply can be returned, while the event loop continues."""
        import asyncio

        if self.is_ready():
            return
        if not self._port.wakes():
            await asyncio.to_thread(self._port.wait, self.is_ready)
            return
        came = asyncio.Event()
        self._on_reply = came.set
        await came.wait()
        self._on_reply = None

    def close(self) -> None:
        while self._replies:
            self._next()
        if not self._ended:
            self._ended = True
            self._port.cancel_call(self.call_id)

    def _next(self) -> CallReply:
        reply = self._replies.popleft() if self._replies else CallReply(None, {}, None, True)
        if reply.lease:
            self._port.return_lease(reply.lease)
        return reply


class OutgoingCalls:
    """The active calls of one worker. Any thread may make one."""

    def __init__(self) -> None:
        self._port: CallPort | None = None
        self._refusal = _NO_SERVER
        self._calls: dict[int, ModelCall] = {}
        self._numbers = itertools.count(1)
        # Reentrant, because an abandoned stream may be deleted in any line, also below.
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._refuse_in_child)

    def open(self, port: CallPort) -> None:
        with self._lock:
            self._port = port

    def close(self, text: str) -> None:
        with self._lock:
            self._port, self._refusal = None, text
        self.fail_all(text)

    def _refuse_in_child(self) -> None:
        self._port, self._refusal = None, _FORKED
        self._lock = threading.RLock()  # a thread that the child does not have may hold the other one

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

    def poll(self) -> None:
        """Process the server's messages that have arrived, such as cancellations."""
        if (port := self._port) is not None:
            port.poll()

    def forget(self, call: ModelCall) -> None:
        with self._lock:  # replies are no longer added
            self._calls.pop(call.call_id, None)
        call.close()

    def reply(self, call_id: int, reply: CallReply) -> bool:
        with self._lock:
            call = self._calls.get(call_id)
            if call is not None:
                call.add(reply)
        return call is not None

    def fail_all(self, text: str) -> None:
        """Fail the active calls, because the process that would have answered is gone."""
        with self._lock:
            for call in list(self._calls.values()):
                call.add(CallReply(None, {}, ModelCallError("UNAVAILABLE", text), True))


def outputs_of(reply: CallReply, request: CallRequest) -> dict[str, NDArray[Any]]:
    """Return the outputs of the only reply to a call. Raise ``ModelCallError`` if the reply has none."""
    if reply.error is not None:
        raise reply.error
    if reply.outputs is None:
        raise ModelCallError(INTERNAL, f"model {request.model!r} gave no response")
    return reply.outputs
