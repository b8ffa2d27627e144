"""The loop of a worker whose callable awaits or yields: several concurrent batches in one thread, on an
asyncio event loop.

Each batch is a task. The front limits the number of batches to ``slots``.

::

    front -> Run       a task: the callable -> Yield, Yield, … -> Done | Failed
    front -> Cancel    a client is gone; after the last one of a batch, the task is cancelled
    front -> Credit    so many more Yield may be sent

A generator's task yields to the other tasks between its responses. It waits after the first response until
the front has sent it, and later while ``YIELD_WINDOW`` responses are on their way to slow clients. Failures
are handled as in ``loop.py``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, Final, TypeVar

from gpuserve_worker.execution.batch_inputs import BatchInputs, BatchPart, join_answers
from gpuserve_worker.execution.device_path import Model, Stopwatch
from gpuserve_worker.execution.event_loop import EventLoop
from gpuserve_worker.execution.execution import (
    Execution,
    await_only_result,
    next_response,
    try_async_result,
)
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.inference_request import Batch, Request, StreamStep
from gpuserve_worker.inference.outputs import BatchAnswers
from gpuserve_worker.inference.running_requests import enter_requests, leave_requests
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.wire import WireFailure


class AsyncLoop(EventLoop["AsyncBatch"]):
    """The loop of a callable that awaits or yields, with a task for each batch."""

    def __init__(self, link: Link, model: Model, reporter: Reporter) -> None:
        super().__init__(link, model)
        self._execution = AsyncExecution(model, reporter, self._batches)

    @property
    def device_is_lost(self) -> bool:
        return self._execution.recovery.device_is_lost

    def run_warmup(self, batch: Batch) -> None:
        self._runner.run(self._execution.run_warmup(self.session, batch))

    def _begin(self, run: wire.Run) -> None:
        self.session.leases.begin(run.batch_id)
        batch = AsyncBatch(self.session, run)
        self._batches[run.batch_id] = batch
        batch.task = self._start(self._run(batch))

    async def _run(self, batch: AsyncBatch) -> None:
        execution = self._execution
        reply = await execution.reply(batch)
        batch.drop_call()
        batch_id = batch.run.batch_id
        if self._batches.get(batch_id) is batch:
            del self._batches[batch_id]
        if isinstance(reply, wire.Failed):
            judged = await execution.recovery.resolve_failure(reply, was_alone=not self._batches)
            if execution.recovery.device_is_lost:
                self._end(None)
            if judged is None:
                return
            reply = judged
        batch.session.reply(reply)
        if execution.report_unrecoverable():
            self.stop()


_Ended = TypeVar("_Ended")
#: Time slice of a generator; an iteration of the event loop costs as much as a trivial response.
_SLICE_NS: Final = 200_000
_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")


class _Stopped(Exception):
    def __init__(self, failure: WireFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class AsyncBatch:
    """One batch in execution: the requests whose clients still wait, and the credit for responses."""

    def __init__(self, session: FrontSession, run: wire.Run) -> None:
        self.session = session
        self.run = run
        self.task: asyncio.Task[None] | None = None
        #: Inputs of the call.
        self.inputs: BatchInputs | None = None
        #: The list given to the callable, kept while a request of it may have to be marked as cancelled.
        self.requests: list[Request] = []
        self.given_up = False
        self._waiting = set(range(len(run.requests)))
        self._credit = 1
        self._more_credit = asyncio.Event()

    def cancel_request(self, position: int) -> None:
        """Mark a request whose client is gone. Cancel the batch after its last request."""
        if position < len(self.requests):
            self.requests[position].cancelled = True
        self._waiting.discard(position)
        if not self._waiting:
            self.abort()

    def abort(self) -> None:
        if self.task is not None and not self.given_up:
            self.given_up = True
            self.task.cancel()

    def drop_call(self) -> None:
        self.inputs, self.requests = None, []

    def add_credit(self, yields: int) -> None:
        self._credit += yields
        self._more_credit.set()

    async def use_credit(self) -> None:
        """Wait until a response may be sent, and use one credit."""
        while self._credit <= 0:
            self._more_credit.clear()
            await self._more_credit.wait()
        self._credit -= 1


class TimeSlices:
    """The time slices of one model's generators."""

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock = clock
        self._ends_ns = 0

    async def rest(self) -> None:
        """Yield to other tasks between two responses, unless they have just run."""
        if self._clock() >= self._ends_ns:
            await asyncio.sleep(0)
            self._ends_ns = self._clock() + _SLICE_NS


class AsyncExecution:
    """The execution of a model's batches, each in a task; ``batches`` are the running ones, by id."""

    def __init__(self, model: Model, reporter: Reporter, batches: dict[int, AsyncBatch]) -> None:
        self._model = model
        self._batches = batches
        self._execution = Execution(model, reporter)
        self._slices = TimeSlices()
        self.recovery = model.path.new_recovery(self._execution.read_inputs, model, reporter)
        self.report_unrecoverable = self._execution.report_unrecoverable

    async def run_warmup(self, session: FrontSession, batch: Batch) -> None:
        batch = self._execution.warm(session, batch)
        await try_async_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    async def reply(self, batch: AsyncBatch) -> wire.BatchReply:
        """Run a batch and return its final reply. Earlier responses of a stream are sent from here."""
        batch_id = batch.run.batch_id
        if batch.run.request_ids:  # the task has a context of its own
            enter_requests(batch.run.request_ids, batch.run.traces)
        try:
            watch = self._execution.new_watch()
            if self._model.context.decoupled:
                await self._stream(batch, watch)
                watch.returned()
                return wire.Done(batch_id, None, None, False, *watch.phases())
            answers = await self._answers(batch, watch)
            if batch.session.device is None:
                return self._execution.done(batch.session, batch.run, answers, watch)
            pending = self._execution.start_reply(batch.session, batch.run, answers, watch)
            del answers
            return await _ended(pending.is_ready, pending.wait)
        except _Stopped as stopped:
            return wire.Failed(batch_id, stopped.failure, False)
        except asyncio.CancelledError as error:
            if batch.given_up:
                return wire.Failed(batch_id, _CANCELLED, False)
            # The cancellation came from inside the callable, which did not handle it.
            failure = self._execution.failure(
                RuntimeError("the inference callable was cancelled from within")
            )
            del error
            return wire.Failed(batch_id, failure, False)
        except (SystemExit, KeyboardInterrupt):  # which mean the process, and end it
            raise
        except BaseException as error:  # user code may raise anything; its batch fails and nothing else
            return wire.Failed(batch_id, self._failure(error, batch, batch.run, batch.inputs), False)
        finally:
            if batch.run.request_ids:
                leave_requests()

    async def _read_inputs(self, batch: AsyncBatch) -> BatchInputs:
        device = batch.session.device
        if device is not None and not device.is_open(batch.run):
            await asyncio.to_thread(device.wait_open, batch.run)
        batch.inputs = self._execution.read_inputs(batch.session, batch.run)
        batch.inputs.admit()
        return batch.inputs

    def _call(self, batch: AsyncBatch, inputs: Batch, watch: Stopwatch) -> Any:
        watch.called()
        if self._execution.takes_batch:
            return self._model.call(inputs)
        requests = inputs.as_list()
        batch.requests = requests
        return self._model.call(requests)

    async def _answers(self, batch: AsyncBatch, watch: Stopwatch) -> BatchAnswers:
        try:
            return await self._attempt(batch, watch)
        except Exception as error:
            was_alone = batch.inputs is not None and len(self._batches) == 1
            if not self.recovery.should_retry(error, batch.run, was_alone=was_alone):
                raise
        batch.drop_call()
        parts = self.recovery.parts(batch.session, batch.run)
        answers = join_answers(parts, [await self._call_part(batch, watch, part) for part in parts])
        if isinstance(answers, WireFailure):
            raise _Stopped(answers)
        return answers

    async def _attempt(self, batch: AsyncBatch, watch: Stopwatch) -> BatchAnswers:
        inputs = await self._read_inputs(batch)
        if inputs.failures and (refusals := inputs.refusals()) is not None:
            return refusals
        given = inputs.detach_batch()
        result = await await_only_result(self._call(batch, given, watch))
        watch.returned()
        del given  # the default stream is ordered after all work that reads its arrays
        return self._execution.check(batch.session, result, batch.run, inputs)

    async def _call_part(
        self, batch: AsyncBatch, watch: Stopwatch, part: BatchPart
    ) -> BatchAnswers | WireFailure:
        run, inputs = part
        given = inputs.batch if self._execution.takes_batch else inputs.batch.as_list()
        try:
            result = await await_only_result(self._model.call(given))
            watch.returned()
            return self._execution.check(batch.session, result, run, inputs, apart=True)
        except Exception as error:  # user code may raise anything; only its requests fail
            return self._failure(error, batch, run, inputs)

    def _failure(
        self, error: BaseException, batch: AsyncBatch, run: wire.Run, inputs: BatchInputs | None
    ) -> WireFailure:
        known = self.recovery.failure(error, run)
        return known or self._execution.failure_of_call(error, batch.session, inputs)

    async def _stream(self, batch: AsyncBatch, watch: Stopwatch) -> None:
        inputs = await self._read_inputs(batch)
        if inputs.failures:
            await self._refuse(batch, inputs)
        result = self._call(batch, inputs.batch, watch)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, AsyncIterator):
            await self._drain_async(batch, result)
        elif isinstance(result, Iterator):
            await self._drain(batch, result)
        else:
            await self._send(batch, result)

    async def _refuse(self, batch: AsyncBatch, inputs: BatchInputs) -> None:
        """Send the failures of requests that cannot run; raise ``_Stopped`` if no other is left."""
        if len(batch.run.requests) == 1:
            raise _Stopped(inputs.failures[0])
        each: list[Any] = [inputs.failures.get(position) for position in range(len(batch.run.requests))]
        await self._send_answers(batch, BatchAnswers(None, each))
        if inputs.refusals() is not None:
            raise _Stopped(inputs.failures[0])

    async def _drain_async(self, batch: AsyncBatch, responses: AsyncIterator[Any]) -> None:
        try:
            async for response in responses:
                if batch.given_up:  # the callable swallowed the cancellation, so its stream ends here
                    return
                await self._send(batch, response)
        finally:
            if hasattr(responses, "aclose"):
                await responses.aclose()

    async def _drain(self, batch: AsyncBatch, responses: Iterator[Any]) -> None:
        try:
            while True:
                more, response = next_response(responses)
                if not more:
                    return
                await self._send(batch, response)
                del response  # free the response before the next one is made
        finally:
            if hasattr(responses, "close"):
                responses.close()

    async def _send(self, batch: AsyncBatch, response: Any) -> None:
        assert batch.inputs is not None
        answers = self._execution.check(batch.session, response, batch.run, batch.inputs)
        await self._send_answers(batch, answers, response.last if type(response) is StreamStep else ())

    async def _send_answers(
        self, batch: AsyncBatch, answers: BatchAnswers, last: tuple[int, ...] = ()
    ) -> None:
        session, requests = batch.session, batch.run.requests
        await batch.use_credit()
        try:
            if session.device is None:
                written = session.writer.write(answers, requests)
            else:
                copies = session.device.start_output_copies(answers, requests)
                written = await _ended(copies.is_ready, copies.wait)
        except OutOfMemory as error:
            raise _Stopped(self._execution.failure(error)) from None
        session.send(wire.Yield(batch.run.batch_id, *written, last))
        for position, answer in enumerate(written.responses or ()):
            if isinstance(answer, WireFailure):  # a failure is the last response of its request
                batch.cancel_request(position)
        await self._slices.rest()


async def _ended(is_ready: Callable[[], bool], wait: Callable[[], _Ended]) -> _Ended:
    """Return the result of copies from a device after their end. Other batches run meanwhile. A cancellation
    is meant for the callable, which has returned, so started copies are completed.
    """
    if is_ready():
        return wait()
    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        return await waiting


@contextmanager
def event_loop_of_thread() -> Iterator[None]:
    """Set an event loop that does not run for the calling thread. Only main threads have one by default, and
    plain callables request it by ``asyncio.get_event_loop()``.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()
