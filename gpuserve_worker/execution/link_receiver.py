"""Receiving on a worker's link, in whichever thread: batches are queued for the loop, and all other messages
are processed at once. Also the sending of calls to other models (``LinkCallPort``) and of the callable's
metrics (``MetricPort``).
"""

from __future__ import annotations

import functools
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from gpuserve_worker.execution.device_path import Model
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.callable_metrics import MetricRegistry
from gpuserve_worker.inference.failure import client_text
from gpuserve_worker.inference.model_calls import (
    CallReply,
    CallRequest,
    ModelCallError,
    OutgoingCalls,
    Question,
)
from gpuserve_worker.inference.outputs import CheckedOutput, DeviceReader, is_on_device
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.tensor import BYTES, datatype_of, encode_bytes
from gpuserve_worker.protocol.wire import WireError

_Kept = TypeVar("_Kept")
_Kept_co = TypeVar("_Kept_co", covariant=True)


class Backlog(Protocol[_Kept_co]):
    """The batches that have arrived and are not running yet."""

    def __len__(self) -> int: ...

    def enqueue(self, session: FrontSession, run: wire.Run) -> None:
        """Add a batch that has arrived on a session."""

    def dequeue(self) -> _Kept_co | None:
        """Return the oldest batch, which is to run now, or None."""

    def cancel(self, batch_id: int, position: int) -> None:
        """Cancel a batch's request; if it was the last, the batch need not run. A running one is marked."""

    def clear(self) -> None:
        """Drop the waiting batches."""

    def wait_idle(self) -> None:
        """Wait until no thread but the loop's own uses the memory of a front that is gone."""


class ReceiveLock:
    """A lock on receiving from the link. The loop receives batches; a callable that calls another model waits
    for its answer in the loop's thread or in another. Whichever thread holds the lock receives for all.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._waiting = 0

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free, at almost no cost while no thread waits."""
        return self._turn.acquire(blocking=False)

    def release(self) -> None:
        """Release the lock and wake the waiting threads, which then receive or find their answer."""
        self._turn.release()
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def receive_until(self, ready: Callable[[], bool], receive: Callable[[], None]) -> None:
        """Block until ``ready``, which a message may cause; ``receive`` receives one message."""
        while not ready():
            if self.try_acquire():
                try:
                    if not ready():
                        receive()
                finally:
                    self.release()
            else:
                self._wait_release(ready)

    def _wait_release(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting += 1  # before the lock is checked, so that its release notifies this thread
            try:
                if self._turn.locked() and not ready():
                    self._changed.wait()
            finally:
                self._waiting -= 1


class LinkReceiver(ABC):
    """The receiving side of a worker's link. ``session`` is the session with the present front."""

    def __init__(self, link: Link, model: Model) -> None:
        self._link = link
        self._model = model
        self.session = self._new_session()
        self._thread = 0
        self._calls = LinkCallPort(model.context.calls, self)
        self._metrics = MetricPort(model.context.metrics)

    def begin(self) -> None:
        self._thread = threading.get_ident()

    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    @abstractmethod
    def wait(self, ready: Callable[[], bool]) -> None:
        """Receive until ``ready``. Any thread may call this. The end of the link ends every call, so that a
        thread that waits for one is ready then.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the loop with a fault found in another thread. Any thread may call this."""

    @abstractmethod
    def poll(self) -> None:
        """Process the messages that have arrived, unless another thread does. Any thread may call this."""

    def runs_event_loop(self) -> bool:
        """Return whether the calling thread runs the event loop that receives messages."""
        return False

    def _new_session(self) -> FrontSession:
        model = self._model
        read_only, rank = model.read_only_inputs, model.rank
        return FrontSession(self._link, model.path, self.fail, read_only_inputs=read_only, rank=rank)

    def _dispatch(self, message: wire.Message, fds: list[int]) -> None:
        try:
            self._take(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    @abstractmethod
    def _take(self, message: wire.Message, fds: list[int]) -> None:
        """Process a message. The caller keeps its descriptors."""


class BatchReceiver(LinkReceiver, Generic[_Kept]):
    """The receiver of a loop that runs one batch after the other."""

    def __init__(self, link: Link, model: Model, backlog: Backlog[_Kept]) -> None:
        super().__init__(link, model)
        self._backlog = backlog
        #: Whether the callable is running.
        self.running = False
        self.stopping = False
        self.ended = False
        #: The error of an invalid message.
        self._fault: BaseException | None = None
        self.turn = ReceiveLock()
        #: Sessions whose memory the running batch may still use.
        self._retired: deque[FrontSession] = deque()

    def next_batch(self) -> _Kept | None:
        """Return the next batch, or None at the end. Process all other messages that arrive before it."""
        while not self.stopping and self._fault is None:
            if self._retired:
                self._close_retired()
            if self._backlog and (batch := self._backlog.dequeue()) is not None:
                return batch
            if self.ended:
                return None
            if self.session.held:
                self.session.flush()
            if self.turn.try_acquire():
                try:
                    if not self._backlog:  # otherwise the previous lock holder has just queued a batch
                        self.receive()
                finally:
                    self.turn.release()
            else:
                self.wait(lambda: bool(self._backlog) or self.stopping or self.ended)
        return None

    def receive(self) -> None:
        """Receive all messages of the next datagram."""
        try:
            while (received := self._link.receive()) is not None:
                self._dispatch(*received)
                if not self._link.pending:
                    return
            if self._model.rank is not None and not self.stopping:
                self._model.rank.on_broken_link()
        except (
            WireError,
            ValueError,
            KeyError,
        ) as error:  # a callable may wait in this call and must not see the error
            self._fault = error
        self.ended = True
        self._calls.close()

    def receive_waiting(self) -> None:
        """Receive all messages that have arrived, unless another thread is receiving."""
        while not self.ended and self.turn.try_acquire():
            try:
                if not self._link.has_message():
                    return
                self.receive()
            finally:
                self.turn.release()

    poll = receive_waiting

    def stop(self) -> None:
        """Make ``next_batch`` return None. Any thread may call this."""
        self.stopping = True
        self._link.stop_receiving()

    def fail(self, error: BaseException) -> None:
        self._fault = error
        self._backlog.clear()  # the device may be lost, and the waiting batches are not the cause
        self.stop()

    def raise_error(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Free the memory shared with the front after the end of the loop, in a process that continues."""
        self._calls.close()
        self._metrics.close()
        self._close_retired()
        self._backlog.wait_idle()
        self.session.close()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.turn.receive_until(ready, self.receive)

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                self._backlog.enqueue(self.session, message)
            case wire.Answer():
                self._calls.deliver(message)
            case wire.Cancel(batch_id, position):
                self._backlog.cancel(batch_id, position)  # a running plain function cannot be interrupted
            case wire.Attach(epoch):
                self._attach(epoch)
            case wire.Agreed() if self._model.rank is not None:
                self._model.rank.relay(message)
            case wire.Stop() if self._model.rank is not None:
                self.stopping = True
            case _:
                if self._model.rank is not None:
                    self._model.rank.relay(message, fds)
                self.session.process_memory_message(message, fds)

    def _attach(self, epoch: int) -> None:
        """Start a session with a new front; calls on the old one fail, so that every call ends."""
        self.session.retire()
        self._retired.append(self.session)
        if self.is_own_thread() and not self.running:
            self._close_retired()
        self._backlog.clear()  # the batches belong to the previous front
        self._link.send(wire.Attached(epoch))
        self.session = self._new_session()
        rank = self._model.rank
        if rank is not None:
            rank.relay(wire.Attach(epoch))
        if rank is None or rank.leads:
            self._calls.attached()
        else:
            self._calls.refuse(_NOT_RANK_0)
        self._metrics.attached(self.session)
        if self.session.device is not None:
            self.session.device.report_memory()

    def _close_retired(self) -> None:
        self._backlog.wait_idle()
        while self._retired:
            self._retired.popleft().close()


_REPLACED: Final = "the server was interrupted while it answered; the call may be made again"
_NOT_RANK_0: Final = "only rank 0 of an instance can ask other models"
_ENDED: Final = "this instance of the model ends, so no other model can be asked any more"


class LinkCallPort:
    """The calls of one worker's callable to other models, on its link; implements ``CallPort``."""

    def __init__(self, calls: OutgoingCalls, receiver: LinkReceiver) -> None:
        self._calls = calls
        self._receiver = receiver
        self.wait = receiver.wait
        self.poll = receiver.poll
        self.wakes = receiver.runs_event_loop

    def attached(self) -> None:
        """Fail the calls of the previous front, and accept calls for the new one."""
        self._calls.fail_all(_REPLACED)
        self._calls.open(self)

    def close(self) -> None:
        self.refuse(_ENDED)

    def refuse(self, text: str) -> None:
        self._calls.close(text)

    def ask(self, call_id: int, question: Question) -> None:
        message: wire.Message
        if isinstance(question, CallRequest):
            message = self._call(call_id, question)
        else:
            verb, model, parameters = question
            message = wire.Command(call_id, verb, model, dict(parameters))
        if not self._receiver.session.send(message):
            raise ModelCallError("UNAVAILABLE", _REPLACED)

    def _call(self, call_id: int, request: CallRequest) -> wire.Call:
        waits = request.blocks and self._receiver.is_own_thread()
        session = self._receiver.session
        reader = None if session.device is None else session.device.reader
        outputs = [_tensor(request.model, name, value, reader) for name, value in request.inputs.items()]
        try:
            inputs = session.writer.tensors(outputs)
        except OutOfMemory:
            text = f"There is no memory for the inputs of a call to model {request.model!r}"
            raise ModelCallError("RESOURCE_EXHAUSTED", text) from None
        return wire.Call(
            call_id,
            request.model,
            request.version,
            inputs,
            request.requested_outputs,
            request.parameters,
            request.timeout_s,
            request.stream,
            waits,
            request.request_id,
            request.sequence,
        )

    def cancel_call(self, call_id: int) -> None:
        self._receiver.session.send_best_effort(wire.CancelCall(call_id))

    def return_lease(self, lease: int) -> None:
        self._receiver.session.send_best_effort(wire.Return((lease,)))

    def deliver(self, answer: wire.Answer) -> None:
        """Deliver an answer to its call. Raise ``ValueError`` if the answer names unknown memory."""
        call_id, lease, outputs, parameters, failure, final = answer
        if failure is not None:
            reply = CallReply(None, {}, ModelCallError(*failure), True)
        elif outputs is None:
            reply = CallReply(None, parameters, None, True)
        else:
            arrays, held = self._receiver.session.borrow(lease, outputs)
            reply = CallReply(arrays, parameters, None, final, 0 if held else lease)
        if not self._calls.reply(call_id, reply) and reply.lease:  # the call was cancelled
            self.return_lease(reply.lease)


#: ``np.dtype.name``, by which ``datatype_of`` finds a datatype, is six calls of Python.
_datatype: Final = functools.lru_cache(maxsize=32)(datatype_of)


def _tensor(model: str, name: Any, value: Any, reader: DeviceReader | None) -> CheckedOutput:
    """Return a call's input in writable host memory; raise ``ModelCallError`` if it is no tensor."""
    if not isinstance(name, str):
        text = f"an input of a call to model {model!r} is named {name!r}: names must be str"
        raise ModelCallError("INVALID_ARGUMENT", text)
    try:
        array = _array(value, reader)
        datatype = _datatype(np.dtype(object) if array.dtype.kind in "SU" else array.dtype)
        if datatype != BYTES:
            return CheckedOutput(name, datatype, array.shape, array.nbytes, array.dtype, [array])
        encoded = encode_bytes(array.ravel().tolist())
    except (TypeError, ValueError, BufferError) as error:
        text = f"input {name!r} of a call to model {model!r}: {client_text(error)}"
        raise ModelCallError("INVALID_ARGUMENT", text) from None
    return CheckedOutput(name, BYTES, array.shape, len(encoded), np.dtype(object), [encoded])


def _array(value: Any, reader: DeviceReader | None) -> Any:
    if reader is None or type(value) is np.ndarray or not is_on_device(value):
        return np.asarray(value)
    array = reader.read(value)
    return reader.as_dtype(array, array.dtype, value)


#: Changes within this time are sent together.
_GATHER_S: Final = 0.05


class MetricPort:
    """The sender of metrics: before a batch's reply, else by a thread from the first change on."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._session: FrontSession | None = None
        self._due = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        #: Held while changes are sent, so that changes sent to one front are not sent to the next as well.
        self._lock = threading.Lock()

    def attached(self, session: FrontSession) -> None:
        """Send all metrics to a front that has taken over the link."""
        with self._lock:
            self._session = session
            session.before_reply = self._send_changes
            self._registry.start_over()
        self._registry.follow(self._wake)

    def close(self) -> None:
        self._ended.set()
        self._due.set()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpuserve-metrics", daemon=True)
            self._thread.start()
        self._due.set()

    def _run(self) -> None:
        with suppress(OSError):  # the front is gone, which the worker's loop detects
            while self._due.wait() and not self._ended.wait(_GATHER_S):
                self._due.clear()
                self._send_changes()

    def _send_changes(self) -> None:
        if not self._registry.has_changes:
            return
        with self._lock:
            assert self._session is not None  # the registry has no follower before a session exists
            changes = self._registry.collect()
            if changes and not self._session.send(wire.Metrics(changes)):
                self._registry.start_over()
