"""What is done with a batch before and after the call, the same for both loops: its arrays are made, its
answers checked and written, and what went wrong is told. The call itself is the loops' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any, Final

from gpuserve_worker import wire
from gpuserve_worker.failure import UnrecoverableError, client_text, failure_of, log_text, log_traceback
from gpuserve_worker.intake import TakenIn
from gpuserve_worker.memory import OutOfMemory
from gpuserve_worker.model import Model
from gpuserve_worker.outputs import Answers, OutputError, OutputRules
from gpuserve_worker.payloads import requests_as_tuples
from gpuserve_worker.regions import RegionError
from gpuserve_worker.reporting import Report
from gpuserve_worker.request import Batch, accepts_batch
from gpuserve_worker.sequences import known_sequences
from gpuserve_worker.session import Reply, Session
from gpuserve_worker.wire import WireFailure

#: ``logging.ERROR``; the module itself is not needed here.
_ERROR: Final = 40


class Stopwatch:
    """The moments (ns) that a batch passed: it came, the callable was called, the callable returned."""

    __slots__ = ("called_ns", "received_ns", "returned_ns")

    def __init__(self) -> None:
        self.received_ns = self.called_ns = self.returned_ns = perf_counter_ns()

    def called(self) -> None:
        """The callable is called now."""
        self.called_ns = self.returned_ns = perf_counter_ns()

    def returned(self) -> None:
        """The callable has given all of its answer."""
        self.returned_ns = perf_counter_ns()

    def phases(self) -> tuple[int, int, int]:
        """Nanoseconds before, in, and after the callable until now."""
        return (
            self.called_ns - self.received_ns,
            self.returned_ns - self.called_ns,
            perf_counter_ns() - self.returned_ns,
        )


class Execution:
    """One model's batches, but for the call."""

    def __init__(self, model: Model, report: Report) -> None:
        self._model = model
        self._report = report
        self._output_names = tuple(spec.name for spec in model.outputs)
        self._batching = model.batching
        #: Whether the callable is given the batch as a whole; otherwise its list of requests.
        self.takes_batch = accepts_batch(model.call)
        self._rules = OutputRules(
            model.name,
            model.outputs,
            batching=model.batching,
            strict=model.strict,
            decoupled=model.context.decoupled,
        )
        self._unrecoverable: str | None = None
        self._sequences = known_sequences(model.call, report)
        self._session: Session | None = None

    def take_in(self, session: Session, run: wire.Run) -> TakenIn:
        """The inputs of a batch as arrays.

        Raises:
            RegionError: the client's region that its only request is read from has shrunk.
        """
        requests = requests_as_tuples(run.requests)
        if self._sequences is not None:
            if session is not self._session:  # another front, which knows none of them
                self._sequences.forget()
                self._session = session
            self._sequences.before(requests, run.dropped)
        failures, in_place = session.take_in(run)
        arrays = session.inputs.arrays(run.batch_id, run.inputs)
        batch = Batch(arrays, requests, self._output_names, self._batching)
        return TakenIn(batch, failures, in_place)

    def check(self, session: Session, result: Any, run: wire.Run, taken: TakenIn) -> Answers:
        """The answers in what the callable gave.

        Raises:
            OutputError: they are none.
            RegionError: a client's region shrank while the callable read it.
        """
        for place in taken.in_place:
            session.regions.check(place)
        failures: Mapping[int, WireFailure | None] = taken.failures
        placed = [one for one in run.requests if not isinstance(one, int) and one[3]]
        answers = self._rules.check(result, taken.batch.requests, apart=bool(failures or placed))
        if taken.in_place:
            answers = Answers(answers.whole, answers.each, answers.parameters, taken.in_place)
        if failures and self._model.context.decoupled:
            failures = dict.fromkeys(failures)
        return answers.refused(failures) if failures else answers

    def done(self, session: Session, run: wire.Run, answers: Answers, watch: Stopwatch) -> Reply:
        """The one answer to a batch, written."""
        try:
            outputs, responses, parameters = session.writer.write(answers, run.requests)
        except OutOfMemory as error:
            return wire.Failed(run.batch_id, self.no_memory(error), False)
        except RegionError as error:
            return wire.Failed(run.batch_id, self.failure(error), False)
        return wire.Done(run.batch_id, outputs, responses, False, *watch.phases(), parameters)

    def no_memory(self, error: OutOfMemory) -> WireFailure:
        """The arena has no room for an answer."""
        text = f"There is no memory for the outputs of model {self._model.name!r}"
        self._report.log(_ERROR, f"{text}: {error}", "")
        return wire.WireFailure("INTERNAL", text)

    def failure_of_call(self, error: BaseException, session: Session, taken: TakenIn | None) -> WireFailure:
        """As ``failure``; what was raised over a region that shrank meanwhile is of the client's doing."""
        try:
            for place in taken.in_place if taken is not None else ():
                session.regions.check(place)
        except RegionError as shrunk:
            return self.failure(shrunk)
        return self.failure(error)

    def failure(self, error: BaseException) -> WireFailure:
        """What the callable raised, or why its answer is none: for the log, and for the client."""
        if isinstance(error, RegionError):  # of the client's doing
            return wire.WireFailure("INVALID_ARGUMENT", str(error))
        if isinstance(error, OutputError):
            self._report.log(_ERROR, str(error), "")
            return failure_of(error)
        failure = failure_of(error)
        if self._model.read_only_inputs and isinstance(error, ValueError) and "read-only" in failure.text:
            hint = "; the inputs of this model are read-only because it sets read_only_inputs"
            failure = failure._replace(text=failure.text + hint)
        summary = f"the inference callable of model {self._model.name!r} raised {log_text(error)}"
        self._report.log(_ERROR, summary, log_traceback(error))
        if isinstance(error, UnrecoverableError):
            self._unrecoverable = client_text(error)
        return failure

    def tell_unrecoverable(self) -> bool:
        """The answer is sent: whether it was that nothing can be done any more. The supervisor hears of it.

        Until that has decided what becomes of this worker, its callable must not be called again.
        """
        text, self._unrecoverable = self._unrecoverable, None
        if text is not None:
            self._report.unrecoverable(text)
        return text is not None
