"""What is done with a batch before and after the call, the same for both loops: its arrays are made, its
answers checked and written, and what went wrong is told. The call itself is the loops' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuserve_worker import wire
from gpuserve_worker.failure import (
    DeviceError,
    UnrecoverableError,
    client_text,
    failure_of,
    log_text,
    log_traceback,
)
from gpuserve_worker.finishing import Finishing
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
from gpuserve_worker.stopwatch import Stopwatch
from gpuserve_worker.wire import WireFailure

if TYPE_CHECKING:
    from gpuserve_worker.cuda.output_copies import OutputCopies
    from gpuserve_worker.cuda.staging import Arrival, Staging

#: ``logging.ERROR``; the module itself is not needed here.
_ERROR: Final = 40


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
            device_arrays=None if model.device is None else model.device.arrays,
        )
        #: Makes the stopwatch of a batch that has just come.
        self.new_watch: Callable[[], Stopwatch] = Stopwatch
        self._on_host: Callable[[Any], Any] | None = None
        self._staging: Staging | None = None
        self._use_device()
        self._unrecoverable: str | None = None
        self._sequences = known_sequences(model.call, report)
        self._session: Session | None = None

    def _use_device(self) -> None:
        """What is done otherwise where the model's inputs go to a device, or are no numpy arrays."""
        model = self._model
        if model.context.array == "torch":
            from gpuserve_worker.torch_tensors import as_tensor

            self._on_host = as_tensor
        if model.device is None:
            return
        from gpuserve_worker.cuda.device_stopwatch import DeviceStopwatch
        from gpuserve_worker.cuda.staging import Staging, device_inputs

        self.new_watch = partial(DeviceStopwatch, model.device)
        names = device_inputs(model.context.inputs)
        if names:
            read_only = model.read_only_inputs
            self._staging = Staging(model.device, names, model.context.array, read_only=read_only)

    def take_in(self, session: Session, run: wire.Run) -> TakenIn:
        """The inputs of a batch as arrays. Those for a device are on their way there when this returns; see
        ``TakenIn.admit``.

        Raises:
            RegionError: the client's region that its only request is read from has shrunk.
            DeviceError: the device refused.
        """
        requests = requests_as_tuples(run.requests)
        if self._sequences is not None:
            if session is not self._session:  # another front, which knows none of them
                self._sequences.forget()
                self._session = session
            self._sequences.before(requests, run.dropped)
        failures, in_place = session.take_in(run)
        arrival: Arrival | None = None
        if self._staging is None:
            arrays = session.inputs.arrays(run.batch_id, run.inputs)
        else:
            arrays, arrival = self._staging.take_in(session, run, failures)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        batch = Batch(arrays, requests, self._output_names, self._batching)
        return TakenIn(batch, failures, in_place, arrival)

    def warm(self, session: Session, batch: Batch) -> Batch:
        """A batch of numpy arrays as the callable is to be given it; raises as ``take_in``."""
        arrays: dict[str, Any] = batch.arrays
        if self._staging is not None:
            arrays = self._staging.warm(session, arrays)
        if self._on_host is not None:
            arrays = {name: self._on_host(array) for name, array in arrays.items()}
        return Batch(arrays, batch.requests, batch.output_names, batch.batching)

    def check(
        self, session: Session, result: Any, run: wire.Run, taken: TakenIn, *, apart: bool = False
    ) -> Answers:
        """The answers in what the callable gave; ``apart``: each request's by itself.

        Raises:
            OutputError: they are none.
            RegionError: a client's region shrank while the callable read it.
        """
        for place in taken.in_place:
            session.regions.check(place)
        failures: Mapping[int, WireFailure | None] = taken.failures
        elsewhere = [one for one in run.requests if not isinstance(one, int) and (one[3] or one[5])]
        answers = self._rules.check(result, taken.batch.requests, apart=apart or bool(failures or elsewhere))
        if taken.in_place:
            answers = Answers(answers.whole, answers.each, answers.parameters, taken.in_place)
        if failures and self._model.context.decoupled:
            failures = dict.fromkeys(failures)
        return answers.refused(failures) if failures else answers

    def begin_done(self, session: Session, run: wire.Run, answers: Answers, watch: Stopwatch) -> Finishing:
        """The one answer to a batch, whose outputs may still be on their way from the device."""
        if session.device is None:
            return Finishing(run.batch_id, watch, self.failure, None, self.done(session, run, answers, watch))
        copies: OutputCopies | None = None
        reply: Reply | None = None
        try:
            copies = session.begin_outputs(answers, run.requests)
            watch.leaving()
        except OutOfMemory as error:
            reply = wire.Failed(run.batch_id, self.no_memory(error), False)
        except (DeviceError, RegionError) as error:
            reply = wire.Failed(run.batch_id, self.failure(error), False)
        return Finishing(run.batch_id, watch, self.failure, copies, reply)

    def done(self, session: Session, run: wire.Run, answers: Answers, watch: Stopwatch) -> Reply:
        """The one answer to a batch, written; waits for a device."""
        if session.device is not None:
            return self.begin_done(session, run, answers, watch).wait()
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
            return wire.WireFailure(error.code, str(error))
        if isinstance(error, DeviceError):
            return self._device_failure(error)
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

    def _device_failure(self, error: DeviceError) -> WireFailure:
        text = f"the device of instance {self._model.context.instance!r} of model {self._model.name!r} failed"
        self._report.log(_ERROR, f"{text}: {error}", log_traceback(error))
        code = "RESOURCE_EXHAUSTED" if error.is_out_of_memory else "INTERNAL"
        return wire.WireFailure(code, f"{text}: {client_text(error)}")

    def tell_unrecoverable(self) -> bool:
        """The answer is sent: whether it was that nothing can be done any more. The supervisor hears of it.

        Until that has decided what becomes of this worker, its callable must not be called again.
        """
        text, self._unrecoverable = self._unrecoverable, None
        if text is not None:
            self._report.unrecoverable(text)
        return text is not None
