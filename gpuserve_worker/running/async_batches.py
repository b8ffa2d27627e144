"""The batches of a callable that awaits or yields, each from its message to its answer. What comes on the
link, and which batches there are, is ``async_loop.py``'s business.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from time import perf_counter_ns
from typing import Any, Final, TypeVar

from gpuserve_worker.calling.outputs import BatchAnswers
from gpuserve_worker.calling.request import Batch, Request
from gpuserve_worker.calling.request_ids import enter_requests
from gpuserve_worker.calling.response import StreamStep
from gpuserve_worker.calling.results import await_only_result, next_response, try_async_result
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.wire import WireFailure
from gpuserve_worker.running.batch_inputs import BatchInputs
from gpuserve_worker.running.execution import Execution, Stopwatch
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.session import BatchReply, FrontSession
from gpuserve_worker.running.splitting import BatchPart, join_answers
from gpuserve_worker.running.supervision import Reporter

_Ended = TypeVar("_Ended")
#: A turn of the event loop takes as long as a response that costs nothing to make.
_SLICE_NS: Final = 200_000
_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")


class _Stopped(Exception):
    def __init__(self, failure: WireFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class AsyncBatch:
    """One batch: who still waits for it, and how many responses it may send."""

    def __init__(self, session: FrontSession, run: wire.Run) -> None:
        self.session = session
        self.run = run
        self.task: asyncio.Task[None] | None = None
        #: What its callable was called with.
        self.inputs: BatchInputs | None = None
        #: The list that the callable was given, as long as somebody may want to mark one of it.
        self.requests: list[Request] = []
        self.given_up = False
        self._waiting = set(range(len(run.requests)))
        self._credit = 1
        self._more_credit = asyncio.Event()

    def cancel_request(self, position: int) -> None:
        """Mark a request whose client is gone; after the last one the batch is given up."""
        if position < len(self.requests):
            self.requests[position].cancelled = True
        self._waiting.discard(position)
        if not self._waiting:
            self.give_up()

    def give_up(self) -> None:
        if self.task is not None and not self.given_up:
            self.given_up = True
            self.task.cancel()

    def forget_call(self) -> None:
        self.inputs, self.requests = None, []

    def add_credit(self, yields: int) -> None:
        self._credit += yields
        self._more_credit.set()

    async def take_credit(self) -> None:
        """Wait until a response may be sent."""
        while self._credit <= 0:
            self._more_credit.clear()
            await self._more_credit.wait()
        self._credit -= 1


class Slices:
    """How long the callable of one batch goes on before all others have their turn."""

    def __init__(self, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._clock = clock
        self._ends_ns = 0

    async def rest(self) -> None:
        """Between two responses: let the others run, unless they just had their turn."""
        if self._clock() >= self._ends_ns:
            await asyncio.sleep(0)
            self._ends_ns = self._clock() + _SLICE_NS


class AsyncExecution:
    """Runs the batches of one model, each in a task of its own. ``batches`` are those under way, by id."""

    def __init__(self, model: Model, reporter: Reporter, batches: dict[int, AsyncBatch]) -> None:
        self._model = model
        self._batches = batches
        self._execution = Execution(model, reporter)
        self._slices = Slices()
        self.recovery = model.path.new_recovery(self._execution, model, reporter)
        self.tell_unrecoverable = self._execution.tell_unrecoverable

    async def try_out(self, session: FrontSession, batch: Batch) -> None:
        batch = self._execution.warm(session, batch)
        await try_async_result(self._model.call(batch if self._execution.takes_batch else batch.as_list()))

    async def reply(self, batch: AsyncBatch) -> BatchReply:
        """Run a batch; the end of it that is to be sent. Earlier responses of a stream are sent from here."""
        batch_id = batch.run.batch_id
        if batch.run.request_ids:  # the task is this batch's alone
            enter_requests(batch.run.request_ids)
        try:
            watch = self._execution.new_watch()
            if self._model.context.decoupled:
                await self._stream(batch, watch)
                watch.returned()
                return wire.Done(batch_id, None, None, False, *watch.phases())
            answers = await self._answers(batch, watch)
            if batch.session.device is None:
                return self._execution.done(batch.session, batch.run, answers, watch)
            pending = self._execution.begin_done(batch.session, batch.run, answers, watch)
            del answers
            return await _ended(pending.is_ready, pending.wait)
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
            return wire.Failed(batch_id, self._failure(error, batch, batch.run, batch.inputs), False)

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
            if not self.recovery.is_worth_it(error, batch.run, was_alone=was_alone):
                raise
        batch.forget_call()
        parts = self.recovery.parts(batch.session, batch.run)
        answers = join_answers(parts, [await self._call_part(batch, watch, part) for part in parts])
        if isinstance(answers, WireFailure):
            raise _Stopped(answers)
        return answers

    async def _attempt(self, batch: AsyncBatch, watch: Stopwatch) -> BatchAnswers:
        inputs = await self._read_inputs(batch)
        if inputs.failures and (refusals := inputs.refusals()) is not None:
            return refusals
        given = inputs.hand_over()
        result = await await_only_result(self._call(batch, given, watch))
        watch.returned()
        del given  # now that the default stream is behind all that reads its arrays
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
        except Exception as error:  # user code may raise anything; its requests fail and nothing else
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
        """Tell the requests of a stream that cannot be run; ``_Stopped``: no other one is left."""
        if len(batch.run.requests) == 1:
            raise _Stopped(inputs.failures[0])
        each: list[Any] = [inputs.failures.get(position) for position in range(len(batch.run.requests))]
        await self._send_answers(batch, BatchAnswers(None, each))
        if inputs.refusals() is not None:
            raise _Stopped(inputs.failures[0])

    async def _drain_async(self, batch: AsyncBatch, responses: AsyncIterator[Any]) -> None:
        try:
            async for response in responses:
                if batch.given_up:  # it swallowed the cancellation, and ends here instead
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
                del response  # the next one is made without it
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
        await batch.take_credit()
        try:
            if session.device is None:
                written = session.writer.write(answers, requests)
            else:
                copies = session.device.begin_outputs(answers, requests)
                written = await _ended(copies.is_ready, copies.wait)
        except OutOfMemory as error:
            raise _Stopped(self._execution.failure(error)) from None
        session.send(wire.Yield(batch.run.batch_id, *written, last))
        for position, answer in enumerate(written.responses or ()):
            if isinstance(answer, WireFailure):  # the last response of its request
                batch.cancel_request(position)
        await self._slices.rest()


async def _ended(is_ready: Callable[[], bool], wait: Callable[[], _Ended]) -> _Ended:
    """What comes of copies from a device, when they are over. The other batches go on meanwhile. A
    cancellation is for the callable, which has returned: what was begun is brought to its end.
    """
    if is_ready():
        return wait()
    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        return await waiting
