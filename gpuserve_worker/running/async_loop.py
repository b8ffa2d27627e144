"""The loop of a worker whose callable awaits or yields: several batches under way in one thread, on an
asyncio event loop. Each batch is a task; how many there are at once is the front's to keep to ``slots``.

::

    front -> Run       a task: the callable -> Yield, Yield, … -> Done | Failed          (async_batches.py)
    front -> Cancel    a request's client is gone; when the last of a batch is, the task is cancelled
    front -> Credit    so many more Yield may be sent

A generator's task lets the others run between its responses, waits after the first until the front
has let it out, and later once ``YIELD_WINDOW`` of them are on their way to slow clients. Failures are told
apart as in ``loop.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gpuserve_worker.calling.request import Batch
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.running.async_batches import AsyncBatch, AsyncExecution
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.reception import LinkReceiver
from gpuserve_worker.running.supervision import Reporter

#: How long a callable has after a cancellation before it is cancelled again, at the end of the worker.
_CANCEL_AGAIN_S: Final = 0.1


class AsyncLoop(LinkReceiver):
    """Runs the batches of one model, several at once; implements ``WorkerLoop``."""

    def __init__(self, link: Link, model: Model, reporter: Reporter) -> None:
        super().__init__(link, model)
        self._batches: dict[int, AsyncBatch] = {}
        self._execution = AsyncExecution(model, reporter, self._batches)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._answered = threading.Condition()
        self._ended: asyncio.Future[None] | None = None
        #: Makes its event loop when it is first used; the warm-up and the service must share it.
        self._runner = asyncio.Runner()

    @property
    def device_is_lost(self) -> bool:
        return self._execution.recovery.device_is_lost

    def try_out(self, batch: Batch) -> None:
        self._runner.run(self._execution.try_out(self.session, batch))

    def run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    def stop(self) -> None:
        self._stopping = True
        self._link.stop_receiving()

    def fail(self, error: BaseException) -> None:
        with suppress(RuntimeError):  # it has ended already
            self._runner.get_loop().call_soon_threadsafe(self._end, error)

    def close(self) -> None:
        self._calls.close()
        self._metrics.close()
        self.session.close()
        self._model.path.close()

    runs_event_loop = LinkReceiver.is_own_thread

    def look(self) -> None:
        """Obeys nothing: the event loop does, when it is let."""

    def wait(self, ready: Callable[[], bool]) -> None:
        """In the loop's own thread nothing goes on meanwhile but receiving; another thread just waits."""
        if not self.is_own_thread():
            with self._answered:
                self._answered.wait_for(ready)
            return
        while not ready():
            self._receive()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self.begin()
        self._model.path.enter_beside()  # the callable may compute in threads of its own
        self._ended = loop.create_future()
        loop.add_reader(self._link.fileno(), self._on_readable)
        try:
            await self._ended
        finally:
            loop.remove_reader(self._link.fileno())
            await self._finish()

    async def _finish(self) -> None:
        """Cut what is under way: the front has waited as long as it would. A callable may swallow that."""
        for batch in self._batches.values():
            batch.give_up()
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
        # A callable that waited in this very thread for another model may have taken what was there.
        if self._link.has_message():
            self._receive()

    def _receive(self) -> None:
        try:
            while (received := self._link.receive()) is not None:
                self._obey(*received)
                if not self._link.pending:
                    return
            self._end(None)
        except BaseException as error:
            self._end(error)

    def _answer(self, take: Callable[[], None]) -> None:
        """Let calls have their answers, whichever thread waits for one."""
        with self._answered:
            take()
            self._answered.notify_all()

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Answer():
                self._answer(lambda: self._calls.take(message))
            case wire.Run():
                if not self._stopping:
                    self._begin(message)
            case wire.Cancel(batch_id, position):
                if (batch := self._batches.get(batch_id)) is not None:  # else it has just ended
                    batch.cancel_request(position)
            case wire.Credit(batch_id, yields):
                if (batch := self._batches.get(batch_id)) is not None:
                    batch.add_credit(yields)
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                self.session.take_memory(message, fds)

    def _attach(self, epoch: int) -> None:
        """Give up what is under way: who waited for it waited at the front before."""
        for batch in self._batches.values():
            batch.give_up()
        self._batches.clear()
        self.session.close()
        self._link.send(wire.Attached(epoch))
        self.session = self._new_session()
        self._metrics.attached(self.session)
        self._answer(self._calls.attached)  # last: no question is left that was asked on the old session

    def _begin(self, run: wire.Run) -> None:
        self.session.leases.begin(run.batch_id)
        batch = AsyncBatch(self.session, run)
        self._batches[run.batch_id] = batch
        task = asyncio.get_running_loop().create_task(self._run(batch))
        batch.task = task
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())  # a fault of ours, or the front is gone

    async def _run(self, batch: AsyncBatch) -> None:
        execution = self._execution
        reply = await execution.reply(batch)
        batch.forget_call()
        batch_id = batch.run.batch_id
        if self._batches.get(batch_id) is batch:
            del self._batches[batch_id]
        if isinstance(reply, wire.Failed):
            judged = await execution.recovery.judge(reply, was_alone=not self._batches)
            if execution.recovery.device_is_lost:
                self._end(None)
            if judged is None:
                return
            reply = judged
        batch.session.reply(reply)
        if execution.tell_unrecoverable():
            self.stop()
