"""The worker's main loop: receive, run the batch, reply. One batch at a time, in one thread.

Three phases, three ways to fail. A transport error ends the loop: without its peer a worker has no
work. Whatever user code raises becomes a reply. A fault of gpuserve itself, on either side of the link,
is caught nowhere and ends the process with its traceback.

::

    front -> Attach, Segment, DropSegment     the front's memory is mapped
    front -> Run       inputs.py -> the callable -> outputs.py       -> Done | Failed
    front -> Free      blocks of the output arena are taken back
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Final, NamedTuple

from gpuserve_worker import wire
from gpuserve_worker.callable import InferenceCallable
from gpuserve_worker.context import ModelContext
from gpuserve_worker.failure import client_text, failure, log_text, log_traceback
from gpuserve_worker.inputs import Inputs, Leases
from gpuserve_worker.link import Link
from gpuserve_worker.memory import Arena, Mapping, OutOfMemory
from gpuserve_worker.outputs import Answers, OutputError, OutputRules, OutputWriter
from gpuserve_worker.request import Batch, accepts_batch
from gpuserve_worker.tensor import TensorSpec
from gpuserve_worker.wire import WireFailure

#: ``logging.ERROR``; the module itself is not needed here.
_ERROR: Final = 40


class Model(NamedTuple):
    """What the loop serves: a loaded callable, and what was declared of it."""

    context: ModelContext
    call: InferenceCallable
    strict: bool
    read_only_inputs: bool

    @property
    def name(self) -> str:
        """The model's name."""
        return self.context.name

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The declared outputs."""
        return self.context.outputs

    @property
    def batching(self) -> bool:
        """Whether axis 0 is the batch axis."""
        return self.context.batching


class _Front:
    """All that is shared with one front, and goes when another takes the link over."""

    def __init__(self, link: Link, *, read_only_inputs: bool) -> None:
        self._link = link
        self.mapping = Mapping()
        self.leases = Leases(self._released)
        self.inputs = Inputs(self.mapping, self.leases, read_only=read_only_inputs)
        # The front bounds what is in flight; this only stops an answer no machine could hold.
        self._arena = Arena(_machine_nbytes(), self._segment, self._drop)
        self.writer = OutputWriter(self._arena)

    def close(self) -> None:
        """Give up the memory on both sides, as far as no array of the user's is over it."""
        self.leases.close()
        self.mapping.close()
        self.writer.close()
        self._arena.close()

    def _segment(self, segment: int, fd: int, nbytes: int) -> None:
        self._link.send(wire.Segment(segment, nbytes), (fd,))

    def _drop(self, segment: int) -> None:
        self._send_if_there(wire.DropSegment(segment))

    def _released(self, batch_id: int) -> None:
        self._send_if_there(wire.Released((batch_id,)))

    def _send_if_there(self, message: wire.Message) -> None:
        """Send what nobody needs to hear who is gone.

        It runs wherever an array happens to die, or when all is given up; that the peer is gone is the
        loop's to see.
        """
        try:
            self._link.send(message)
        except OSError:
            pass


def _machine_nbytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Outcome(NamedTuple):
    """What came of a batch, and the moments (ns) it passed: inputs made, callable returned."""

    answers: Answers | WireFailure
    called_ns: int
    returned_ns: int


class Loop:
    """Runs the batches of one model. ``log`` takes (level, text, traceback)."""

    def __init__(self, link: Link, model: Model, log: Callable[[int, str, str], None]) -> None:
        self._link = link
        self._model = model
        self._log = log
        self._output_names = tuple(spec.name for spec in model.outputs)
        self._as_batch = accepts_batch(model.call)
        self._rules = OutputRules(model.name, model.outputs, batching=model.batching, strict=model.strict)
        self._front = self._new_front()
        self._stopping = False

    def run(self) -> None:
        """Serve until the peer is gone or ``stop`` is called.

        Raises:
            OSError: the peer went away while something was sent to it.
            WireError, ValueError, KeyError: the peer broke the protocol.
        """
        while not self._stopping:
            received = self._link.receive()
            if received is None:
                break
            message, fds = received
            try:
                self._take(message, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def stop(self) -> None:
        """Return from ``run`` once the batch at hand is answered. Called from another thread."""
        self._stopping = True
        self._link.stop_receiving()

    def close(self) -> None:
        """Give up the memory shared with the front, after ``run``, in a process that goes on."""
        self._front.close()

    def _take(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.Run():
                if not self._stopping:
                    self._run(message)
            case wire.Free(blocks):
                self._front.writer.free(blocks)
            case wire.Segment(segment, nbytes):
                self._front.mapping.attach(segment, fds[0], nbytes)
            case wire.DropSegment(segment):
                self._front.mapping.detach(segment)
            case wire.Attach(epoch):
                self._attach(epoch)
            case _:
                raise wire.WireError(f"{type(message).__name__} is not for a worker's link")

    def _new_front(self) -> _Front:
        return _Front(self._link, read_only_inputs=self._model.read_only_inputs)

    def _attach(self, epoch: int) -> None:
        self._front.close()
        self._front = self._new_front()
        self._link.send(wire.Attached(epoch))

    def _run(self, run: wire.Run) -> None:
        received_ns = perf_counter_ns()
        leases = self._front.leases
        leases.begin(run.batch_id)
        outcome = self._compute(run)
        reply = self._write(run, outcome, received_ns)
        del outcome  # outputs may be views of the inputs
        # Neither the batch nor an exception is referred to here any more: what still is, the user keeps.
        self._link.send(reply._replace(inputs_free=leases.is_free(run.batch_id)))
        leases.answered(run.batch_id)

    def _compute(self, run: wire.Run) -> _Outcome:
        arrays = self._front.inputs.arrays(run.batch_id, run.inputs)
        batch = Batch(arrays, run.requests, self._output_names, self._model.batching)
        del arrays
        called_ns = returned_ns = perf_counter_ns()
        answers: Answers | WireFailure
        try:
            result = self._model.call(batch if self._as_batch else batch.as_list())
            returned_ns = perf_counter_ns()
            answers = self._rules.check(result, run.requests)
        except OutputError as error:
            self._log(_ERROR, str(error), "")
            answers = failure(str(error))
        except Exception as error:  # user code may raise anything; its batch fails and nothing else
            answers = self._raised(error)
        return _Outcome(answers, called_ns, max(returned_ns, called_ns))

    def _write(self, run: wire.Run, outcome: _Outcome, received_ns: int) -> wire.Done | wire.Failed:
        answers, called_ns, returned_ns = outcome
        if isinstance(answers, WireFailure):
            return wire.Failed(run.batch_id, answers, False)
        try:
            outputs, responses = self._front.writer.write(answers)
        except OutOfMemory as error:
            text = f"There is no memory for the outputs of model {self._model.name!r}"
            self._log(_ERROR, f"{text}: {error}", "")
            return wire.Failed(run.batch_id, failure(text), False)
        return wire.Done(
            run.batch_id,
            outputs,
            responses,
            False,
            called_ns - received_ns,
            returned_ns - called_ns,
            perf_counter_ns() - returned_ns,
        )

    def _raised(self, error: Exception) -> WireFailure:
        """The callable's exception, for the log and for the client."""
        text = client_text(error)
        if self._model.read_only_inputs and isinstance(error, ValueError) and "read-only" in text:
            text += "; the inputs of this model are read-only because it sets read_only_inputs"
        summary = f"the inference callable of model {self._model.name!r} raised {log_text(error)}"
        self._log(_ERROR, summary, log_traceback(error))
        return failure(text)
