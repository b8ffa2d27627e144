"""The loop of a worker whose callable is stepped: requests join and leave between steps.

Each batch has one request. ``stepper.py`` has the rules; this module exchanges messages with the front.

::

    front -> Run       admit, before the next step
    front -> Cancel    release, before the next step
    front -> Credit    so many more responses may be sent to this client
    worker -> Stepped  the responses of a step, and the number and time of the steps since the last message
    worker -> Done | Failed | Requeue
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter_ns
from typing import Any, Final, cast

import numpy as np

from gpuserve_worker.execution.batch_inputs import BatchInputs
from gpuserve_worker.execution.device_path import Model, Stopwatch
from gpuserve_worker.execution.event_loop import EventLoop
from gpuserve_worker.execution.execution import Execution
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.execution.step_sender import StepSender
from gpuserve_worker.execution.stepper import Stepper, StepRequest
from gpuserve_worker.inference.alike_outputs import CopiedResponses
from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput, OutputError
from gpuserve_worker.inference.running_requests import enter_requests, leave_requests
from gpuserve_worker.inference.stepping import Last
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.payloads import WireRequest, requests_as_tuples
from gpuserve_worker.protocol.wire import INLINE_NBYTES, YIELD_WINDOW, WireFailure

#: A step that ends this long after the last message is reported, so that the front sees that steps end.
_REPORT_NS: Final = 20_000_000
#: Other tasks of the event loop run after this time; one turn of the event loop costs some 30 µs.
_SLICE_NS: Final = 10_000_000
_EARLY: Final = "step gave a response before the last one, but the model is not decoupled"
_CANCELLED: Final = WireFailure("CANCELLED", "the request was cancelled")


class _Refused(Exception):
    """The inputs of a request cannot be read."""

    def __init__(self, failure: WireFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class StepBatch(StepRequest):
    """A batch of one request. ``answers`` is the only response of a model that is not decoupled. If
    ``is_apart``, the client has chosen memory for an output, another worker reads an output, or an output may
    be a view of a client's region, so each response is a message of its own.
    """

    __slots__ = ("_loop", "answers", "inputs", "is_apart", "run", "session", "watch")

    def __init__(self, loop: StepLoop, session: FrontSession, run: wire.Run) -> None:
        super().__init__(YIELD_WINDOW)
        self._loop = loop
        self.session = session
        self.run = run
        self.watch = Stopwatch()
        self.inputs: BatchInputs | None = None
        self.answers: BatchAnswers | None = None
        request = run.requests[0]
        self.is_apart = not isinstance(request, int) and bool(request[3] or request[5])

    @property
    def request(self) -> WireRequest:
        return requests_as_tuples(self.run.requests)[0]

    def cancel_request(self, position: int) -> None:
        self._loop.stepper.cancel(self)
        self._loop.wake()

    def abort(self) -> None:
        self.cancel_request(0)

    def add_credit(self, yields: int) -> None:
        self._loop.stepper.add_credit(self, yields)
        self._loop.wake()


class StepLoop(EventLoop[StepBatch]):
    """The loop of a stepped callable; implements ``StepSink``."""

    def __init__(self, link: Link, model: Model, reporter: Reporter) -> None:
        super().__init__(link, model)
        self._made = cast(Any, model.call)
        self._reporter = reporter
        self._execution = Execution(model, reporter)
        self._decoupled = model.context.decoupled
        self.stepper: Stepper[StepBatch, WireFailure] = Stepper(
            self._made, self, [one.name for one in model.context.outputs]
        )
        self._sender = StepSender(self._flush, self.fail)
        self._woken = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._named = False
        #: Whether an entry was ever apart.
        self._any_apart = False
        self._steps = self._busy_ns = self._rows = 0
        self._reported_ns = 0
        #: The requests of the last message of a step, and the numbers of their batches.
        self._stepped_entries: Sequence[StepBatch] = ()
        self._stepped_ids: tuple[int, ...] = ()

    @property
    def device_is_lost(self) -> bool:
        return False

    def wake(self) -> None:
        self._woken.set()

    def run_warmup(self, batch: Batch) -> None:
        self._runner.run(self._run_warmup(self._execution.warm(self.session, batch).as_list()[0]))

    async def _run_warmup(self, request: Any) -> None:
        state = self._made.admit(request)
        if inspect.isawaitable(state):
            state = await state
        try:
            for _ in range(YIELD_WINDOW):
                results = self._made.step([state])
                if inspect.isawaitable(results):
                    results = await results
                if type(results[0]) is Last:
                    break
        finally:
            if hasattr(self._made, "release"):
                self._made.release(state)

    # ---- the loop -------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._stepping = self._start(self._step_on())
        await super()._serve()

    async def _finish(self) -> None:
        assert self._stepping is not None
        self._stepping.cancel()
        await super()._finish()
        with suppress(OSError):  # the front is gone
            self.stepper.close()
            self._sender.finish_jobs()
        self._sender.close()

    def _begin(self, run: wire.Run) -> None:
        self.session.leases.begin(run.batch_id)
        batch = self._batches[run.batch_id] = StepBatch(self, self.session, run)
        self.stepper.arrive(batch)
        self.wake()

    async def _step_on(self) -> None:
        stepper, link, sender = self.stepper, self._link, self._sender
        assert self._ended is not None, "the task runs after the loop has begun"
        rests_ns = perf_counter_ns() + _SLICE_NS
        while not self._ended.done():
            sender.start_jobs()
            if stepper.has_changes:
                await stepper.admit_waiting()
            if self._named:
                leave_requests()  # log lines name no request any more
                self._named = False
            if stepper.ready:
                await stepper.step()
                now_ns = perf_counter_ns()
                if self._steps and now_ns - self._reported_ns > _REPORT_NS:
                    self._report()
                if self._execution.report_unrecoverable():
                    self.stop()
                if now_ns > rests_ns:
                    await asyncio.sleep(0)
                    rests_ns = perf_counter_ns() + _SLICE_NS
            elif not stepper.has_work:
                self._woken.clear()
                await self._woken.wait()
                rests_ns = perf_counter_ns() + _SLICE_NS
            while not self._ended.done() and link.has_message():
                self._receive()

    def _flush(self) -> None:
        self.session.flush()  # the session of the present front

    def _report(self) -> None:
        """Send the number and time of the steps since the last message."""
        self._sender.finish_jobs()
        self.session.send(self._stepped())

    def _stepped(self, *responses: Any) -> wire.Stepped:
        message = wire.Stepped(self._steps, self._busy_ns, self._rows, *responses)
        self._steps = self._busy_ns = self._rows = 0
        self._reported_ns = perf_counter_ns()
        return message

    # ---- StepSink -------------------------------------------------------------------------

    def request_of(self, entry: StepBatch) -> Any:
        session, run = entry.session, entry.run
        if run.request_ids:
            enter_requests(run.request_ids, run.traces)
            self._named = True
        if session.device is not None and not session.device.is_open(run):
            session.device.wait_open(run)
        inputs = entry.inputs = self._execution.read_inputs(session, run)
        inputs.admit()
        if inputs.failures:
            raise _Refused(inputs.failures[0])
        entry.is_apart |= bool(inputs.in_place)
        self._any_apart |= entry.is_apart
        entry.watch.called()
        return inputs.detach_batch().as_list()[0]

    def stepped(self, busy_ns: int, active: int) -> None:
        self._sender.end_step()
        self._steps += 1
        self._busy_ns += busy_ns
        self._rows += active

    def respond(
        self, entries: Sequence[StepBatch], responses: Sequence[Any], last: Sequence[int], *, are_dicts: bool
    ) -> Sequence[tuple[StepBatch, WireFailure]]:
        if not self._decoupled:
            return self._keep(entries, responses, last)
        if self._any_apart and any(one.is_apart for one in entries):
            self._sender.finish_jobs()
            return self._respond_apart(entries, responses, last)
        copied = self._execution.rules.copy(responses, INLINE_NBYTES) if are_dicts else None
        if copied is None:
            self._sender.finish_jobs()
            return self._respond_together(entries, responses, self._stepped((), None, None, (), tuple(last)))
        if entries is not self._stepped_entries:  # the same list as long as nobody joins or leaves
            self._stepped_entries = entries
            self._stepped_ids = tuple([one.run.batch_id for one in entries])
        message = self._stepped(self._stepped_ids, None, None, (), tuple(last))
        self._sender.add(partial(self._send_copied, entries, copied, message))
        return ()

    def failure(self, error: Exception, entry: StepBatch | None = None) -> WireFailure:
        if isinstance(error, _Refused):
            return error.failure
        if entry is None:
            return self._execution.failure(error)
        return self._execution.failure_of_call(error, entry.session, entry.inputs)

    def ended(self, entry: StepBatch) -> None:
        run, watch, answers = entry.run, entry.watch, entry.answers
        watch.returned()
        if self._decoupled:
            self._reply(entry, wire.Done(run.batch_id, None, None, False, *watch.phases()))
        elif answers is None:
            error = OutputError("step ended a request without a response, but the model is not decoupled")
            self._reply(entry, wire.Failed(run.batch_id, self._execution.failure(error), False))
        elif entry.session.device is None:
            self._reply(entry, self._execution.done(entry.session, run, answers, watch))
        else:
            self._reply(entry, self._execution.start_reply(entry.session, run, answers, watch).wait())

    def failed(self, entry: StepBatch, failure: WireFailure) -> None:
        self._reply(entry, wire.Failed(entry.run.batch_id, failure, False))

    def cancelled(self, entry: StepBatch) -> None:
        self._reply(entry, wire.Failed(entry.run.batch_id, _CANCELLED, False))

    def postponed(self, entries: Sequence[StepBatch]) -> None:
        # The front puts each of them before the others, so the first one is sent last.
        for entry in reversed(entries):
            self._reply(entry, wire.Requeue(entry.run.batch_id, None, False))

    def retry(self, entry: StepBatch, failure: WireFailure) -> None:
        self._reply(entry, wire.Requeue(entry.run.batch_id, failure, False))

    def release_failed(self, error: Exception) -> None:
        text = f"release of the inference callable of model {self._model.name!r} raised {log_text(error)}"
        self._reporter.error(text, log_traceback(error))

    # ---- responses ------------------------------------------------------------------------

    def _reply(self, entry: StepBatch, reply: wire.Done | wire.Failed | wire.Requeue) -> None:
        entry.inputs = entry.answers = None
        batch_id = entry.run.batch_id
        if self._batches.get(batch_id) is entry:
            del self._batches[batch_id]
        self._sender.add(partial(entry.session.reply, reply, waits=True))
        if entry.session.device is not None or not isinstance(reply, wire.Done):
            self._sender.finish_jobs()

    def _keep(
        self, entries: Sequence[StepBatch], responses: Sequence[Any], last: Sequence[int]
    ) -> list[tuple[StepBatch, WireFailure]]:
        """Keep the responses of a model that is not decoupled for ``ended``."""
        wrong: list[tuple[StepBatch, WireFailure]] = []
        for position, (entry, response) in enumerate(zip(entries, responses, strict=True)):
            try:
                if position not in last or entry.answers is not None:
                    raise OutputError(_EARLY)
                entry.answers = self._check(entry, response)
            except (OutputError, RegionError) as error:
                wrong.append((entry, self._execution.failure(error)))
        return wrong

    def _check(self, entry: StepBatch, response: Any) -> BatchAnswers:
        assert entry.inputs is not None, "the request was admitted"
        return self._execution.check(entry.session, [response], entry.run, entry.inputs)

    def _respond_apart(
        self, entries: Sequence[StepBatch], responses: Sequence[Any], last: Sequence[int]
    ) -> list[tuple[StepBatch, WireFailure]]:
        """Send each response in a message of its own."""
        wrong: list[tuple[StepBatch, WireFailure]] = []
        for position, (entry, response) in enumerate(zip(entries, responses, strict=True)):
            try:
                self._send_alone(entry, self._check(entry, response), is_last=position in last)
            except (OutputError, OutOfMemory, RegionError) as error:
                wrong.append((entry, self._execution.failure(error)))
        return wrong

    def _send_copied(
        self, entries: Sequence[StepBatch], copied: CopiedResponses, message: wire.Stepped
    ) -> None:
        """Send the responses of a step, in any thread."""
        session = entries[0].session
        outputs = self._execution.rules.stack(copied)
        if outputs is not None:
            session.hold(message._replace(outputs=outputs))
            return
        for entry, failure in self._respond_together(entries, copied.mappings(), message):
            session.send(wire.Yield(entry.run.batch_id, None, (failure,)))  # the last response
            self.stepper.cancel(entry)

    def _respond_together(
        self, entries: Sequence[StepBatch], responses: Sequence[Any], message: wire.Stepped
    ) -> list[tuple[StepBatch, WireFailure]]:
        """Send responses in ``message`` if all of them fit, else each in a message of its own."""
        session, last = entries[0].session, set(message.last)
        try:
            requests = [one.request for one in entries]
            answers = self._execution.rules.check(responses, requests, apart=True)
        except OutputError as error:
            failure = self._execution.failure(error)
            return [(one, failure) for one in entries]
        each, parameters = list(answers.each or ()), answers.parameters
        wrong = [(entries[at], one) for at, one in enumerate(each) if isinstance(one, WireFailure)]
        fitting = [at for at, one in enumerate(each) if isinstance(one, list)]
        if _fit_together([one for outputs in each if isinstance(outputs, list) for one in outputs]):
            chosen = BatchAnswers(None, [each[at] for at in fitting])
            written = session.writer.write(chosen, [entries[at].request for at in fitting])
            ids = tuple([entries[at].run.batch_id for at in fitting])
            ends = tuple([new for new, at in enumerate(fitting) if at in last])
            given = tuple([parameters[at] for at in fitting]) if parameters else ()
            steps, busy_ns, active, *_ = message
            session.send(wire.Stepped(steps, busy_ns, active, ids, None, written.responses, given, ends))
            return wrong
        session.send(message._replace(last=()))
        for at in fitting:
            one = BatchAnswers(None, [each[at]], parameters[at : at + 1])
            try:
                self._send_alone(entries[at], one, is_last=at in last)
            except OutOfMemory as error:
                wrong.append((entries[at], self._execution.failure(error)))
        return wrong

    def _send_alone(self, entry: StepBatch, answers: BatchAnswers, *, is_last: bool) -> None:
        session, requests = entry.session, entry.run.requests
        if session.device is None:
            written = session.writer.write(answers, requests)
        else:
            written = session.device.start_output_copies(answers, requests).wait()
        session.send(wire.Yield(entry.run.batch_id, *written, (0,) if is_last else ()))
        if written.responses is not None and isinstance(written.responses[0], WireFailure):
            self.stepper.cancel(entry)  # the failure is the last response


def _fit_together(outputs: Sequence[CheckedOutput]) -> bool:
    """Return whether all bytes of these outputs are on the host and fit into a message."""
    if sum([one.nbytes for one in outputs]) > INLINE_NBYTES:
        return False
    return all(isinstance(part, np.ndarray | bytes) for one in outputs for part in one.parts)
