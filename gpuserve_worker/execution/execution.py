"""Execution of one batch around the call, shared by all loops: making the arrays, reducing the result to one
response, checking and writing the outputs, and reporting failures. The loops make the call itself.

A result may be a value, an awaitable, a generator or an async generator. A model that is not decoupled gives
exactly one response, which ``only_result`` and ``await_only_result`` return. ``try_result`` and
``try_async_result`` run calls whose result is dropped.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from gpuserve_worker.execution.batch_inputs import BatchInputs, copy_fills, in_place_regions
from gpuserve_worker.execution.device_path import Model, Stopwatch
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.execution.session import FrontSession, OutputCopies
from gpuserve_worker.inference.failure import (
    TEXT_LIMIT,
    DeviceFailure,
    UnrecoverableError,
    client_text,
    cut,
    failure_of,
    log_text,
    log_traceback,
)
from gpuserve_worker.inference.inference_request import Batch, BatchedOutputs, accepts_batch
from gpuserve_worker.inference.outputs import BatchAnswers, OutputError, OutputRules
from gpuserve_worker.inference.ragged import RaggedTensor, ragged_names, split_ragged
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.memory.client_regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import WireRequest, requests_as_tuples
from gpuserve_worker.protocol.wire import YIELD_WINDOW, WireFailure

#: Result types of most callables, which need neither awaiting nor iterating.
AT_HAND: Final = (BatchedOutputs, list)


def is_deferred(result: Any) -> bool:
    """Return whether a result must be awaited or iterated."""
    return inspect.isawaitable(result) or isinstance(result, Iterator | AsyncIterator)


def only_result(result: Any) -> Any:
    """Return a result's only response, awaited if necessary; raise ``OutputError`` for another number."""
    if not is_deferred(result):
        return result
    import asyncio  # few plain functions return awaitables

    return asyncio.run(await_only_result(result))


async def await_only_result(result: Any) -> Any:
    """Return the one response in a result. Raise ``OutputError`` unless there is exactly one."""
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        return _only_response([one async for one in _first_two_of(result)])
    if isinstance(result, Iterator):
        return _only_response(_first_two(result))
    return result


def try_result(result: Any) -> None:
    """Run a warm-up result to its end and drop it."""
    if is_deferred(result):
        import asyncio

        asyncio.run(try_async_result(result))


async def try_async_result(result: Any) -> None:
    """Run a warm-up result to its end on the running event loop and drop it. A generator may never end, so it
    is closed after ``YIELD_WINDOW`` responses.
    """
    if inspect.isawaitable(result):
        result = await result
    if isinstance(result, AsyncIterator):
        taken = 0
        async for _ in result:
            taken += 1
            if taken == YIELD_WINDOW:
                break
        if hasattr(result, "aclose"):
            await result.aclose()
    elif isinstance(result, Iterator):
        for _ in itertools.islice(result, YIELD_WINDOW):
            pass
        if hasattr(result, "close"):
            result.close()


def next_response(generator: Iterator[Any]) -> tuple[bool, Any]:
    """Return (True, the next response), or (False, None) at the end; ``OutputError`` for a value there."""
    try:
        return True, next(generator)
    except StopIteration as end:
        if end.value is not None:
            raise OutputError(
                "The inference callable gave a generator that returned its response; expected to yield every "
                "response, with `yield` in place of `return`"
            ) from None
        return False, None


def _first_two(generator: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    while len(found) < 2:
        more, response = next_response(generator)
        if not more:
            break
        found.append(response)
    if hasattr(generator, "close"):
        generator.close()
    return found


async def _first_two_of(generator: AsyncIterator[Any]) -> AsyncIterator[Any]:
    count = 0
    async for response in generator:
        yield response
        count += 1
        if count == 2:
            break
    if hasattr(generator, "aclose"):
        await generator.aclose()


def _only_response(responses: list[Any]) -> Any:
    if len(responses) == 1:
        return responses[0]
    given = "more than one response" if responses else "a generator that ended without a response"
    raise OutputError(
        f"The inference callable gave {given}; expected exactly one response, or a model that is decoupled"
    )


#: Name of the optional method for sequences that ended without their last request.
_HOOK: Final = "sequence_dropped"


class Execution:
    """The preparation and completion of one model's batches, without the call."""

    def __init__(self, model: Model, reporter: Reporter) -> None:
        self._model = model
        self._reporter = reporter
        self._output_names = tuple(spec.name for spec in model.context.outputs)
        self._batching = model.context.batching
        self._ragged = ragged_names(model.context.inputs, model.context.outputs)
        #: Whether the callable accepts the whole ``Batch``; otherwise it is given a list of requests.
        self.takes_batch = accepts_batch(model.call)
        self.rules = OutputRules(
            model.name,
            model.context.outputs,
            batching=model.context.batching,
            strict=model.strict,
            exact=model.exact,
            decoupled=model.context.decoupled,
            owned_outputs=model.owned_outputs,
            reader=model.path.reader,
            tell=reporter.error,
        )
        #: Factory of stopwatches, called when a batch has just arrived.
        self.new_watch: Callable[[], Stopwatch] = model.path.new_watch
        self._on_host: Callable[[Any], Any] | None = None
        if model.context.array == "torch":
            from gpuserve_worker.protocol.tensor import as_tensor

            self._on_host = as_tensor
        #: Text before an exception of user code, "" for none.
        self._failure_prefix: str = getattr(model.call, "failure_prefix", "")
        self._unrecoverable: str | None = None
        self._sequences = track_sequences(model.call, reporter)
        self._session: FrontSession | None = None

    def read_inputs(self, session: FrontSession, run: wire.Run) -> BatchInputs:
        """Return the inputs of a batch as arrays; inputs for a device may still be in transfer until
        ``BatchInputs.admit``. Raise ``DeviceFailure``, or ``RegionError`` if the region of the only request
        has shrunk.
        """
        requests = requests_as_tuples(run.requests)
        if self._sequences is not None:
            if session is not self._session:  # a new front, which has none of the sequences
                self._sequences.forget()
                self._session = session
            self._sequences.before(requests, run.dropped)
        failures = copy_fills(run, session.mapping, session.regions, session.loans) if run.fills else {}
        in_place = in_place_regions(run) if self._model.read_only_inputs else ()
        shapes: Mapping[str, list[tuple[int, ...]]] = {}
        if self._ragged.inputs:
            inputs, shapes = split_ragged(run.inputs)
            run = run._replace(inputs=inputs)
        if session.device is None:
            arrays: dict[str, Any] = session.inputs.arrays(run.batch_id, run.inputs)
            arrival = None
        else:
            arrays, arrival = session.device.stage(run, failures)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        for name, of_requests in shapes.items():
            arrays[name] = RaggedTensor(arrays[name], of_requests, self._ragged.inputs[name])
        batch = Batch(arrays, requests, self._output_names, self._batching, self._ragged)
        return BatchInputs(batch, failures, in_place, arrival)

    def start(self, session: FrontSession, run: wire.Run) -> None:
        """Start a batch in the other ranks. Called just before the callable."""
        if self._model.rank is not None:
            self._model.rank.start(session.leases, run)

    def warm(self, session: FrontSession, batch: Batch) -> Batch:
        """Return a warm-up batch as arrays of the callable's kind. Raise as ``read_inputs``."""
        arrays: dict[str, Any] = batch.arrays
        if session.device is not None:
            arrays = session.device.warm(arrays)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        for name, axes in self._ragged.inputs.items():
            if name in arrays:
                arrays[name] = RaggedTensor(arrays[name].reshape(-1), [tuple(arrays[name].shape)], axes)
        return Batch(arrays, batch.requests, batch.output_names, batch.batching, self._ragged)

    def try_outputs(self, result: Any, batch: Batch) -> None:
        """Convert the outputs of a warm-up as those of a request, which may compile kernels."""
        with suppress(OutputError):
            self.rules.check(result, batch.requests)

    def check(
        self, session: FrontSession, result: Any, run: wire.Run, inputs: BatchInputs, *, apart: bool = False
    ) -> BatchAnswers:
        """Return the checked responses in the callable's result; ``apart`` keeps the requests separate. Raise
        ``OutputError``, or ``RegionError`` if a client's region shrank while the callable read it.
        """
        if (rank := self._model.rank) is not None:
            rank.returned(run.batch_id)
            if not rank.leads:
                return BatchAnswers([], None)
        for place in inputs.in_place:
            session.regions.check(place)
        failures: Mapping[int, WireFailure | None] = inputs.failures
        apart = apart or bool(failures)
        for one in run.requests:
            if not isinstance(one, int) and (one[3] or one[5]):
                apart = True
        answers = self.rules.check(result, inputs.requests, apart=apart)
        if inputs.in_place:
            answers = BatchAnswers(answers.whole, answers.each, answers.parameters, inputs.in_place)
        if failures and self._model.context.decoupled:
            failures = dict.fromkeys(failures)
        return answers.refused(failures) if failures else answers

    def done(
        self, session: FrontSession, run: wire.Run, answers: BatchAnswers, watch: Stopwatch
    ) -> wire.BatchReply:
        try:
            outputs, responses, parameters = session.writer.write(answers, run.requests)
        except (OutOfMemory, RegionError) as error:
            return wire.Failed(run.batch_id, self.failure(error), False)
        return wire.Done(run.batch_id, outputs, responses, False, *watch.phases(), parameters)

    def start_reply(
        self, session: FrontSession, run: wire.Run, answers: BatchAnswers, watch: Stopwatch
    ) -> PendingReply:
        """Start the copies of a batch's outputs from the device, and return its pending reply."""
        assert session.device is not None, "outputs on the host need no copy"
        copies: OutputCopies | wire.Failed
        try:
            copies = session.device.start_output_copies(answers, run.requests, watch.mark_computed)
            watch.leaving()
        except (OutOfMemory, DeviceFailure, RegionError) as error:
            copies = wire.Failed(run.batch_id, self.failure(error), False)
        return PendingReply(run.batch_id, watch, self, copies)

    def failure_of_call(
        self, error: BaseException, session: FrontSession, inputs: BatchInputs | None
    ) -> WireFailure:
        """Return a call's failure as ``failure``; a client's, if a region shrank meanwhile."""
        try:
            for place in inputs.in_place if inputs is not None else ():
                session.regions.check(place)
        except RegionError as shrunk:
            return self.failure(shrunk)
        return self.failure(error)

    def failure(self, error: BaseException) -> WireFailure:
        """Return the failure that the client receives for an error in a batch, and log the details."""
        if isinstance(error, RegionError):  # the client caused the error
            return WireFailure(error.code, str(error))
        if isinstance(error, OutOfMemory):  # the arena has no room for the outputs
            text = f"There is no memory for the outputs of model {self._model.name!r}"
            self._reporter.error(f"{text}: {error}")
            return WireFailure("NO_MEMORY", text)
        if isinstance(error, DeviceFailure):
            whose = f"the device of instance {self._model.context.instance!r} of model {self._model.name!r}"
            self._reporter.error(f"{whose} failed: {error}", log_traceback(error))
            code = "RESOURCE_EXHAUSTED" if error.is_out_of_memory else "INTERNAL"
            return WireFailure(code, f"{whose} failed: {client_text(error)}")
        if isinstance(error, OutputError):
            self._reporter.error(cut(str(error), TEXT_LIMIT))
            return failure_of(error)
        failure = failure_of(error, all_lines=self._model.all_lines, prefix=self._failure_prefix)
        if self._model.read_only_inputs and isinstance(error, ValueError) and "read-only" in failure.text:
            hint = "; the inputs of this model are read-only because it sets read_only_inputs"
            failure = failure._replace(text=failure.text + hint)
        summary = f"the inference callable of model {self._model.name!r} raised {log_text(error)}"
        self._reporter.error(summary, log_traceback(error))
        if isinstance(error, UnrecoverableError):
            self._unrecoverable = client_text(error)
        return failure

    def report_unrecoverable(self) -> bool:
        """Report to the supervisor, after the reply was sent, that the callable can run no further inference.
        Return whether that is the case. The callable must not be called again before the supervisor has
        decided about this worker.
        """
        text, self._unrecoverable = self._unrecoverable, None
        if text is not None:
            self._reporter.unrecoverable(text)
        return text is not None


class PendingReply(NamedTuple):
    """The reply to a batch whose outputs may still be in transfer from a device, or its failure."""

    batch_id: int
    watch: Stopwatch
    execution: Execution
    copies: OutputCopies | wire.Failed

    def is_ready(self) -> bool:
        return isinstance(self.copies, wire.Failed) or self.copies.is_ready()

    def wait(self) -> wire.BatchReply:
        """Wait for the outputs and return the reply. A device error makes it a ``Failed``. Call this once."""
        if isinstance(self.copies, wire.Failed):
            return self.copies
        try:
            outputs, responses, parameters = self.copies.wait()
        except (DeviceFailure, RegionError) as error:
            return wire.Failed(self.batch_id, self.execution.failure(error), False)
        return wire.Done(self.batch_id, outputs, responses, False, *self.watch.phases(), parameters)


class ActiveSequences:
    """The active sequences of a callable that has a method ``sequence_dropped(sequence_id)``.

    A callable that keeps state for each sequence deletes it at the request whose ``sequence.end`` is true.
    For sequences that never get there, the method is called between batches, in the thread of the callable:
    when a sequence was idle for too long, was cancelled by its client, or belonged to a front process that
    died.
    """

    def __init__(self, dropped: Callable[[int | str], Any], reporter: Reporter) -> None:
        self._dropped = dropped
        self._reporter = reporter
        self._known: set[int | str] = set()

    def before(self, requests: Sequence[WireRequest], dropped: Sequence[int | str]) -> None:
        """Record the requests of the next batch; ``dropped`` sequences ended since the last one."""
        for sequence_id in dropped:
            self._drop(sequence_id)
        for request in requests:
            if request[4] is not None:
                sequence_id, _, end = request[4]
                (self._known.discard if end else self._known.add)(sequence_id)

    def forget(self) -> None:
        """Drop all sequences, because no front will continue them."""
        for sequence_id in sorted(self._known, key=str):
            self._drop(sequence_id)

    def _drop(self, sequence_id: int | str) -> None:
        self._known.discard(sequence_id)
        try:
            self._dropped(sequence_id)
        except Exception as error:  # user code may raise anything; no request fails because of it
            text = f"{_HOOK} raised {log_text(error)} for sequence {sequence_id!r}"
            self._reporter.error(text, log_traceback(error))


def track_sequences(inference_callable: Any, reporter: Reporter) -> ActiveSequences | None:
    """Return a tracker of sequences, or None if the callable has no method for dropped ones."""
    dropped = getattr(inference_callable, _HOOK, None)
    return ActiveSequences(dropped, reporter) if callable(dropped) else None
