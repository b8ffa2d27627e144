"""The loop of a worker whose callable awaits or yields: several batches under way in one thread, on an
asyncio event loop. Each batch is a task; how many there are at once is the front's to keep to ``slots``.

::

    front -> Run       a task: the callable -> Yield, Yield, … -> Done | Failed
    front -> Cancel    a request's client is gone; when the last of a batch is, the task is cancelled
    front -> Credit    so many more Yield may be sent

A generator's task lets the others run after each of its responses, and waits once ``YIELD_WINDOW`` of
them are on their way to slow clients. Failures are told apart as in ``loop.py``.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuserve_worker import wire
from gpuserve_worker.call_port import LinkPort
from gpuserve_worker.execution import Execution
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.link import Link
from gpuserve_worker.memory import OutOfMemory
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers
from gpuserve_worker.reporting import Report
from gpuserve_worker.request import Batch
from gpuserve_worker.results import await_only_result, next_response, try_async_result
from gpuserve_worker.session import Reply, Session
from gpuserve_worker.stopwatch import Stopwatch
from gpuserve_worker.under_way import UnderWay, ended
from gpuserve_worker.wire import WireFailure

if TYPE_CHECKING:
    from gpuserve_worker.cuda.recovery import Recovery

_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")
#: How long a callable has after a cancellation before it is cancelled again, at the end of the worker.
_CANCEL_AGAIN_S: Final = 0.1


class _Stopped(Exception):
    """A response cannot be given, and the batch ends with this failure."""

    def __init__(self, failure: WireFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class AsyncLoop:
    """Runs the batches of one model, several at once."""

    def __init__(self, link: Link, model: Model, report: Report) -> None:
        self._link = link
        self._model = model
        self._execution = Execution(model, report)
        self._session = self._new_session()
        self._batches: dict[int, UnderWay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._thread = 0
        self._recovery = _recovery(model, self._execution, report)
        self._answered = threading.Condition()
        self._calls = LinkPort(
            model.context.calls, lambda: self._session, self._wait, self._is_own_thread, on_event_loop=True
        )
        self._readable = select.poll()
        self._ended: asyncio.Future[None] | None = None
        #: Makes its event loop when it is first used; the warm-up and the service must share it.
        self._runner = asyncio.Runner()

    @property
    def device_is_lost(self) -> bool:
        """After ``run``: whether it ended because this process can use its device no more."""
        return self._recovery is not None and self._recovery.device_is_lost

    def try_out(self, batch: Batch) -> None:
        """Call the callable on a batch that nobody waits for; raises what it raises."""
        self._runner.run(self._try_out(batch))

    async def _try_out(self, batch: Batch) -> None:
        batch = self._execution.warm(self._session, batch)
        await try_async_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    def run(self) -> None:
        """Serve until the peer is gone or ``stop`` is called; raises as ``Loop.run``."""
        with self._runner:
            self._runner.run(self._serve())

    def stop(self) -> None:
        """Return from ``run`` once the batches at hand are answered. Called from another thread."""
        self._stopping = True
        self._link.stop_receiving()

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""
        self._calls.close()
        self._session.close()
        if self._model.device is not None:
            self._model.device.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if self._model.device is not None:  # the callable may compute in threads of its own
            self._model.device.enter_beside()
        self._ended = loop.create_future()
        self._readable.register(self._link.fileno(), select.POLLIN)
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
        if self._readable.poll(0):
            self._receive()

    def _receive(self) -> None:
        try:
            received = self._link.receive()
            if received is None:
                self._end(None)
                return
            message, fds = received
            try:
                self._take(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        except BaseException as error:
            self._end(error)

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _wait(self, ready: Callable[[], bool]) -> None:
        """In the loop's own thread nothing else goes on meanwhile; another thread just waits."""
        if not self._is_own_thread():
            with self._answered:
                self._answered.wait_for(ready)
            return
        while not ready():
            self._receive()

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
                self._session.take_memory(message, fds)

    def _new_session(self) -> Session:
        read_only_inputs = self._model.read_only_inputs
        return Session(self._link, read_only_inputs=read_only_inputs, device=self._model.device)

    def _attach(self, epoch: int) -> None:
        """Who waited for what is under way waited at the front before: none of it is of use now."""
        for batch in self._batches.values():
            batch.give_up()
        self._batches.clear()
        self._session.close()
        self._link.send(wire.Attached(epoch))
        self._session = self._new_session()
        self._answer(self._calls.attached)  # last: no question is left that was asked on the old session

    # ---- one batch ------------------------------------------------------------------------

    def _begin(self, run: wire.Run) -> None:
        self._session.leases.begin(run.batch_id)
        batch = UnderWay(self._session, run)
        self._batches[run.batch_id] = batch
        task = asyncio.get_running_loop().create_task(self._run(batch))
        batch.task = task
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._end(task.exception())  # a fault of ours, or the front is gone

    async def _run(self, batch: UnderWay) -> None:
        reply = await self._reply(batch)
        batch.requests = []
        batch.taken = None
        batch_id = batch.run.batch_id
        if self._batches.get(batch_id) is batch:
            del self._batches[batch_id]
        if self._recovery is not None and isinstance(reply, wire.Failed):
            judged = await self._recovery.judge(reply, was_alone=not self._batches)
            if self._recovery.device_is_lost:
                self._end(None)
            if judged is None:
                return
            reply = judged
        batch.session.reply(reply)
        if self._execution.tell_unrecoverable():
            self.stop()

    async def _reply(self, batch: UnderWay) -> Reply:
        batch_id = batch.run.batch_id
        try:
            watch = self._execution.new_watch()
            if self._model.context.decoupled:
                await self._stream(batch, watch)
                watch.returned()
                return wire.Done(batch_id, None, None, False, *watch.phases())
            answers = await self._answers(batch, watch)
            return await self._done(batch, answers, watch)
        except _Stopped as stopped:
            return wire.Failed(batch_id, stopped.failure, False)
        except asyncio.CancelledError as error:
            if batch.given_up:
                return wire.Failed(batch_id, _CANCELLED, False)
            # Nobody asked for it: something inside the callable was cancelled, and it let that through.
            failure = self._execution.failure(
                RuntimeError("the inference callable was cancelled from within")
            )
            del error
            return wire.Failed(batch_id, failure, False)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            known = self._recovery.failure(error, batch.run) if self._recovery is not None else None
            failure = known or self._execution.failure_of_call(error, batch.session, batch.taken)
            return wire.Failed(batch_id, failure, False)

    async def _done(self, batch: UnderWay, answers: Answers, watch: Stopwatch) -> Reply:
        """The one answer to a batch. While a device brings it, the other batches go on."""
        if self._model.device is None:
            return self._execution.done(batch.session, batch.run, answers, watch)
        finishing = self._execution.begin_done(batch.session, batch.run, answers, watch)
        return await ended(finishing)

    def _take_in(self, batch: UnderWay) -> TakenIn:
        batch.taken = self._execution.take_in(batch.session, batch.run)
        batch.taken.admit()
        return batch.taken

    def _call(self, batch: UnderWay, inputs: Batch, watch: Stopwatch) -> Any:
        watch.called()
        if self._execution.takes_batch:
            return self._model.call(inputs)
        requests = inputs.as_list()
        batch.requests = requests
        return self._model.call(requests)

    async def _answers(self, batch: UnderWay, watch: Stopwatch) -> Answers:
        try:
            return await self._attempt(batch, watch)
        except Exception as error:
            was_alone = batch.taken is not None and len(self._batches) == 1
            recovery = self._recovery
            if recovery is None or not recovery.is_worth_it(error, batch.run, was_alone=was_alone):
                raise
        batch.taken, batch.requests = None, []
        answers = await recovery.run_again(batch.session, batch.run, partial(self._run_part, batch, watch))
        if isinstance(answers, WireFailure):
            raise _Stopped(answers)
        return answers

    async def _attempt(self, batch: UnderWay, watch: Stopwatch) -> Answers:
        taken = self._take_in(batch)
        if taken.failures and (refusals := taken.refusals()) is not None:
            return refusals
        result = await await_only_result(self._call(batch, taken.batch, watch))
        watch.returned()
        return self._execution.check(batch.session, result, batch.run, taken)

    async def _run_part(self, batch: UnderWay, watch: Stopwatch, run: wire.Run, taken: TakenIn) -> Answers:
        """Call the callable on a part of a batch."""
        inputs = taken.batch
        result = await await_only_result(
            self._model.call(inputs if self._execution.takes_batch else inputs.as_list())
        )
        watch.returned()
        return self._execution.check(batch.session, result, run, taken, apart=True)

    async def _stream(self, batch: UnderWay, watch: Stopwatch) -> None:
        taken = self._take_in(batch)
        if taken.failures:
            await self._refuse(batch, taken)
        result = self._call(batch, taken.batch, watch)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            await self._drain_async(batch, result)
        elif isinstance(result, Iterator):
            await self._drain(batch, result)
        else:
            await self._send(batch, result)

    async def _refuse(self, batch: UnderWay, taken: TakenIn) -> None:
        """Tell those requests of a stream that cannot be run; the others go on.

        Raises:
            _Stopped: there are none.
        """
        if len(batch.run.requests) == 1:
            raise _Stopped(taken.failures[0])
        each: list[Any] = [taken.failures.get(position) for position in range(len(batch.run.requests))]
        await self._send_answers(batch, Answers(None, each))
        if taken.refusals() is not None:
            raise _Stopped(taken.failures[0])

    async def _drain_async(self, batch: UnderWay, responses: AsyncIterator[Any]) -> None:
        try:
            async for response in responses:
                if batch.given_up:  # it swallowed the cancellation, and ends here instead
                    return
                await self._send(batch, response)
        finally:
            if hasattr(responses, "aclose"):
                await responses.aclose()

    async def _drain(self, batch: UnderWay, responses: Iterator[Any]) -> None:
        try:
            while True:
                more, response = next_response(responses)
                if not more:
                    return
                await self._send(batch, response)
                del response  # the next one is made without it
        finally:
            if hasattr(responses, "close"):
                responses.close()

    async def _send(self, batch: UnderWay, response: Any) -> None:
        assert batch.taken is not None
        answers = self._execution.check(batch.session, response, batch.run, batch.taken)
        await self._send_answers(batch, answers)

    async def _send_answers(self, batch: UnderWay, answers: Answers) -> None:
        try:
            if self._model.device is None:
                written = batch.session.writer.write(answers, batch.run.requests)
            else:
                copies = batch.session.begin_outputs(answers, batch.run.requests)
                written = await ended(copies)
        except OutOfMemory as error:
            raise _Stopped(self._execution.no_memory(error)) from None
        batch.session.send(wire.Yield(batch.run.batch_id, *written))
        for position, answer in enumerate(written.responses or ()):
            if isinstance(answer, WireFailure):  # the last response of its request
                batch.cancel_request(position)
        await batch.take_credit()


def _recovery(model: Model, execution: Execution, report: Report) -> Recovery | None:
    if model.device is None:
        return None
    from gpuserve_worker.cuda.recovery import Recovery  # only a worker with a device has any use for it

    return Recovery(model.device, execution, model, report)
