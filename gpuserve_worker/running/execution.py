"""What is done with a batch before and after the call, the same for all loops: its arrays are made, its
answers checked and written, and what went wrong is told. The call itself is the loops' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuserve_worker.calling.failure import (
    TEXT_LIMIT,
    DeviceFailure,
    UnrecoverableError,
    client_text,
    cut,
    failure_of,
    log_text,
    log_traceback,
)
from gpuserve_worker.calling.outputs import BatchAnswers, OutputError, OutputRules
from gpuserve_worker.calling.request import Batch, accepts_batch
from gpuserve_worker.memory.arena import OutOfMemory
from gpuserve_worker.memory.regions import RegionError
from gpuserve_worker.protocol import wire
from gpuserve_worker.protocol.payloads import WireRequest, requests_as_tuples
from gpuserve_worker.protocol.wire import WireFailure
from gpuserve_worker.running.batch_inputs import BatchInputs, fill_all, places_of
from gpuserve_worker.running.model import Model
from gpuserve_worker.running.session import BatchReply, FrontSession
from gpuserve_worker.running.supervision import Reporter

if TYPE_CHECKING:
    from gpuserve_worker.running.device_path import OutputCopies

#: The method of a callable that is told of sequences that ended without their last request.
_HOOK: Final = "sequence_dropped"


class Stopwatch:
    """The moments (ns) that a batch passed: it came, the callable was called, the callable returned."""

    __slots__ = ("called_ns", "received_ns", "returned_ns")

    def __init__(self) -> None:
        self.received_ns = self.called_ns = self.returned_ns = perf_counter_ns()

    def staged(self) -> None:
        """Note that the inputs are on their way to a device."""

    def called(self) -> None:
        self.called_ns = self.returned_ns = perf_counter_ns()

    def returned(self) -> None:
        self.returned_ns = perf_counter_ns()

    def leaving(self) -> None:
        """Note that the outputs are on their way from a device."""

    def has_computed(self) -> bool:
        return True

    def wait_computed(self) -> None:
        """Wait until the device is done with what the callable started."""

    def phases(self) -> tuple[int, int, int]:
        return (
            self.called_ns - self.received_ns,
            self.returned_ns - self.called_ns,
            perf_counter_ns() - self.returned_ns,
        )


class Execution:
    """Runs the batches of one model, but for the call."""

    def __init__(self, model: Model, reporter: Reporter) -> None:
        self._model = model
        self._reporter = reporter
        self._output_names = tuple(spec.name for spec in model.context.outputs)
        self._batching = model.context.batching
        #: Whether the callable is given the batch as a whole; otherwise its list of requests.
        self.takes_batch = accepts_batch(model.call)
        self._rules = OutputRules(
            model.name,
            model.context.outputs,
            batching=model.context.batching,
            strict=model.strict,
            exact=model.exact,
            decoupled=model.context.decoupled,
            reader=model.path.reader,
            tell=reporter.error,
        )
        #: Makes the stopwatch of a batch that has just come.
        self.new_watch: Callable[[], Stopwatch] = model.path.new_watch
        self._on_host: Callable[[Any], Any] | None = None
        if model.context.array == "torch":
            from gpuserve_worker.calling.torch_tensors import as_tensor

            self._on_host = as_tensor
        self._unrecoverable: str | None = None
        self._sequences = known_sequences(model.call, reporter)
        self._session: FrontSession | None = None

    def read_inputs(self, session: FrontSession, run: wire.Run) -> BatchInputs:
        """The inputs of a batch as arrays, those for a device on their way there; see ``BatchInputs.admit``.
        Raises ``DeviceFailure``, or ``RegionError`` where the region of its only request has shrunk.
        """
        requests = requests_as_tuples(run.requests)
        if self._sequences is not None:
            if session is not self._session:  # another front, which knows none of them
                self._sequences.forget()
                self._session = session
            self._sequences.before(requests, run.dropped)
        failures = fill_all(run, session.mapping, session.regions, session.loans) if run.fills else {}
        in_place = places_of(run) if self._model.read_only_inputs else ()
        if session.device is None:
            arrays, arrival = session.inputs.arrays(run.batch_id, run.inputs), None
        else:
            arrays, arrival = session.device.stage(run, failures)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        batch = Batch(arrays, requests, self._output_names, self._batching)
        return BatchInputs(batch, failures, in_place, arrival)

    def warm(self, session: FrontSession, batch: Batch) -> Batch:
        """A batch of numpy arrays as the callable is to be given it; raises as ``read_inputs``."""
        arrays: dict[str, Any] = batch.arrays
        if session.device is not None:
            arrays = session.device.warm(arrays)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        return Batch(arrays, batch.requests, batch.output_names, batch.batching)

    def check(
        self, session: FrontSession, result: Any, run: wire.Run, inputs: BatchInputs, *, apart: bool = False
    ) -> BatchAnswers:
        """The answers in what the callable gave; ``apart``: each request's by itself. Raises ``OutputError``,
        or ``RegionError`` where a client's region shrank while the callable read it.
        """
        for place in inputs.in_place:
            session.regions.check(place)
        failures: Mapping[int, WireFailure | None] = inputs.failures
        elsewhere = [one for one in run.requests if not isinstance(one, int) and (one[3] or one[5])]
        answers = self._rules.check(result, inputs.requests, apart=apart or bool(failures or elsewhere))
        if inputs.in_place:
            answers = BatchAnswers(answers.whole, answers.each, answers.parameters, inputs.in_place)
        if failures and self._model.context.decoupled:
            failures = dict.fromkeys(failures)
        return answers.refused(failures) if failures else answers

    def done(
        self, session: FrontSession, run: wire.Run, answers: BatchAnswers, watch: Stopwatch
    ) -> BatchReply:
        try:
            outputs, responses, parameters = session.writer.write(answers, run.requests)
        except (OutOfMemory, RegionError) as error:
            return wire.Failed(run.batch_id, self.failure(error), False)
        return wire.Done(run.batch_id, outputs, responses, False, *watch.phases(), parameters)

    def begin_done(
        self, session: FrontSession, run: wire.Run, answers: BatchAnswers, watch: Stopwatch
    ) -> PendingReply:
        """The one answer to a batch on a device, from which its outputs are on their way."""
        assert session.device is not None, "nothing is on its way on the host"
        copies: OutputCopies | wire.Failed
        try:
            copies = session.device.begin_outputs(answers, run.requests)
            watch.leaving()
        except (OutOfMemory, DeviceFailure, RegionError) as error:
            copies = wire.Failed(run.batch_id, self.failure(error), False)
        return PendingReply(run.batch_id, watch, self, copies)

    def failure_of_call(
        self, error: BaseException, session: FrontSession, inputs: BatchInputs | None
    ) -> WireFailure:
        """As ``failure``; what was raised over a region that shrank meanwhile is of the client's doing."""
        try:
            for place in inputs.in_place if inputs is not None else ():
                session.regions.check(place)
        except RegionError as shrunk:
            return self.failure(shrunk)
        return self.failure(error)

    def failure(self, error: BaseException) -> WireFailure:
        """What the client is told of an error in a batch; the log is told more."""
        if isinstance(error, RegionError):  # of the client's doing
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
        failure = failure_of(error, all_lines=self._model.all_lines)
        if self._model.read_only_inputs and isinstance(error, ValueError) and "read-only" in failure.text:
            hint = "; the inputs of this model are read-only because it sets read_only_inputs"
            failure = failure._replace(text=failure.text + hint)
        summary = f"the inference callable of model {self._model.name!r} raised {log_text(error)}"
        self._reporter.error(summary, log_traceback(error))
        if isinstance(error, UnrecoverableError):
            self._unrecoverable = client_text(error)
        return failure

    def tell_unrecoverable(self) -> bool:
        """Tell the supervisor that the callable can do no further inference, after the answer was sent;
        whether that is so. Until it has decided what becomes of this worker, the callable must not be called
        again.
        """
        text, self._unrecoverable = self._unrecoverable, None
        if text is not None:
            self._reporter.unrecoverable(text)
        return text is not None


class PendingReply(NamedTuple):
    """The reply to a batch whose outputs may still be on their way from a device, or its failure."""

    batch_id: int
    watch: Stopwatch
    execution: Execution
    copies: OutputCopies | wire.Failed

    def is_ready(self) -> bool:
        return isinstance(self.copies, wire.Failed) or self.copies.is_ready()

    def wait(self) -> BatchReply:
        """The reply, when all of it is there. To be called once. A device's error makes it a ``Failed``."""
        if isinstance(self.copies, wire.Failed):
            return self.copies
        try:
            outputs, responses, parameters = self.copies.wait()
        except (DeviceFailure, RegionError) as error:
            return wire.Failed(self.batch_id, self.execution.failure(error), False)
        return wire.Done(self.batch_id, outputs, responses, False, *self.watch.phases(), parameters)


class KnownSequences:
    """The sequences of which a callable was given requests, but not yet the last one. A callable that keeps
    something for each sequence takes it away with the request whose ``sequence.end`` is true. For those that
    never come that far it may have a method ``sequence_dropped(sequence_id)``. It is called between batches,
    in the thread of the callable, when a sequence was idle for too long, was given up by its client, or was
    known to a front process that died.
    """

    def __init__(self, dropped: Callable[[int | str], Any], reporter: Reporter) -> None:
        self._dropped = dropped
        self._reporter = reporter
        self._known: set[int | str] = set()

    def before(self, requests: Sequence[WireRequest], dropped: Sequence[int | str]) -> None:
        """Note the requests of a batch that is about to run; ``dropped`` have ended since the last one."""
        for sequence_id in dropped:
            self._drop(sequence_id)
        for request in requests:
            if request[4] is not None:
                sequence_id, _, end = request[4]
                (self._known.discard if end else self._known.add)(sequence_id)

    def forget(self) -> None:
        """Drop all of them: nobody will go on with any."""
        for sequence_id in sorted(self._known, key=str):
            self._drop(sequence_id)

    def _drop(self, sequence_id: int | str) -> None:
        self._known.discard(sequence_id)
        try:
            self._dropped(sequence_id)
        except Exception as error:  # user code may raise anything; no request fails of it
            text = f"{_HOOK} raised {log_text(error)} for sequence {sequence_id!r}"
            self._reporter.error(text, log_traceback(error))


def known_sequences(inference_callable: Any, reporter: Reporter) -> KnownSequences | None:
    """What is known of the sequences of a callable; None for one that does not want to be told."""
    dropped = getattr(inference_callable, _HOOK, None)
    return KnownSequences(dropped, reporter) if callable(dropped) else None
