"""The receiving side of workers with an event loop; callables: ``async_loop.py``, ``step_loop.py``."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

from gpuserve_worker.execution.device_path import Model
from gpuserve_worker.execution.link_receiver import LinkReceiver
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link

#: Time after a cancellation until the callable is cancelled again, at the end of the worker.
_CANCEL_AGAIN_S: Final = 0.1


class RunningBatch(Protocol):
    """A batch in execution, as messages of the front address it."""

    def cancel_request(self, position: int) -> None:
        """Note that the client of a request is gone."""

    def add_credit(self, yields: int) -> None:
        """Allow more responses."""

    def abort(self) -> None:
        """Cancel the whole batch."""


Running = TypeVar("Running", bound=RunningBatch)


class EventLoop(LinkReceiver, Generic[Running]):
    """A loop that receives messages on an asyncio event loop and runs several batches of one model at once;
    implements ``WorkerLoop``. A subclass begins batches, in ``_tasks``.
    """

    def __init__(self, link: Link, model: Model) -> None:
        super().__init__(link, model)
        self._batches: dict[int, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._answered = threading.Condition()
        self._ended: asyncio.Future[None] | None = None
        #: Creates its event loop at first use; warm-up and service must share the loop.
        self._runner = asyncio.Runner()

    @property
    @abstractmethod
    def device_is_lost(self) -> bool:
        """True if the device can no longer be used."""

    @abstractmethod
    def _begin(self, run: wire.Run) -> None:
        """Begin a batch."""

    def run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    def stop(self) -> None:
        self._stopping = True
        self._link.stop_receiving()

    def fail(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # the event loop has ended already
            self._runner.get_loop().call_soon_threadsafe(self._end, error)

    def close(self) -> None:
        self._calls.close()
        self._metrics.close()
        self.session.close()
        self._model.path.close()

    runs_event_loop = LinkReceiver.is_own_thread

    def poll(self) -> None:
        """Do nothing: the event loop receives messages when it runs."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block until ``ready``; the loop's own thread receives messages, others wait for the loop."""
        if not self.is_own_thread():
            with self._answered:
                self._answered.wait_for(ready)
            return
        while not ready():
            self._receive()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.begin()
        self._model.path.enter_concurrently()  # the callable may use the device in its own threads
        self._ended = loop.create_future()
        loop.add_reader(self._link.fileno(), self._on_readable)
        try:
            await self._ended
        finally:
            loop.remove_reader(self._link.fileno())
            await self._finish()

    async def _finish(self) -> None:
        """Cancel the running batches, because the front has waited as long as it would. A callable may
        swallow a cancellation, so cancellation is repeated.
        """
        for batch in self._batches.values():
            batch.abort()
        while self._tasks:
            _, going_on = await asyncio.wait(self._tasks, timeout=_CANCEL_AGAIN_S)
            for task in going_on:
                task.cancel()

    def _end(self, error: BaseException | None) -> None:
        assert self._ended is not None
        self._answer(self._calls.close)
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    def _on_readable(self) -> None:
        # A callable that waited in this thread for another model may have received the message.
        if self._link.has_message():
            self._receive()

    def _receive(self) -> None:
        try:
            while (received := self._link.receive()) is not None:
                self._dispatch(*received)
                if not self._link.pending:
                    return
            self._end(None)
        except BaseException as error:
            self._end(error)

    def _answer(self, take: Callable[[], None]) -> None:
        """Run ``take``, which completes calls to other models, and wake the threads that wait for them."""
        with self._answered:
            take()
            self._answered.notify_all()

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Answer():
                self._answer(lambda: self._calls.deliver(message))
            case wire.Run():
                if not self._stopping:
                    self._begin(message)
            case wire.Cancel(batch_id, position):
                if (batch := self._batches.get(batch_id)) is not None:  # otherwise the batch has just ended
                    batch.cancel_request(position)
            case wire.Credit(grants):
                for batch_id, yields in grants:
                    if (batch := self._batches.get(batch_id)) is not None:
                        batch.add_credit(yields)
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                self.session.process_memory_message(message, fds)

    def _attach(self, epoch: int) -> None:
        """Cancel the batches, whose receivers were the last front's clients, and start a session."""
        for batch in self._batches.values():
            batch.abort()
        self._batches.clear()
        self.session.close()
        self._link.send(wire.Attached(epoch))
        self.session = self._new_session()
        self._metrics.attached(self.session)
        self._answer(self._calls.attached)  # last, so that every call of the old session is completed

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task whose exception ends the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())  # a defect of gpuserve, or the front is gone
