"""Request tracing of one model. A driver without tracing has no tracer, so requests pay nothing for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol

from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.ipc.worker_memory import KeptTensor, LentExport
from gpuserve.front.models.pending_request import OnResponse, PendingRequest
from gpuserve.front.observability.access_log import notes_of
from gpuserve.front.observability.tracing.request_trace import Deliver, Reception, Trace, TracedTensor
from gpuserve.front.observability.tracing.trace_settings import Sampler, TraceLevel
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol import wire

#: The most bytes of a tensor in a trace.
MAX_TENSOR_NBYTES: Final = 1 << 20
#: The most bytes of responses of one stream, which may be endless, and the size of each tensor besides.
MAX_STREAM_NBYTES: Final = 16 << 20
_NOTED_NBYTES: Final = 512
#: The range of trace numbers of one front, so that its successor does not repeat any.
IDS_OF_A_FRONT: Final = 1 << 32


class OnEnd(Protocol):
    """A callback with the outcome of a request."""

    def __call__(self, answer: Answer, *, cancelled: bool = False) -> None: ...


class ModelTracer:
    """Starts traces of one model, and records events of its requests. ``scope`` is the model's name if it has
    settings of its own. ``follows_callers``: a request is traced if its caller traces it, and not if its
    caller decided not to. ``live`` are the ids of the server's traces that have not ended: while there are
    none, batches need no look at their requests.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sampler: Sampler,
        scope: str,
        ids: Iterator[int],
        live: set[int],
        deliver: Deliver,
        *,
        follows_callers: bool,
    ) -> None:
        self._spec = spec
        self._sampler = sampler
        self._scope = scope
        self._ids = ids
        self.live = live
        self._deliver = deliver
        self._follows_callers = follows_callers

    def on_submitted(self, pending: PendingRequest) -> None:
        """Start the trace of a request if it is sampled."""
        request = pending.request
        if request.reception is None and not self._follows_callers:
            sampler = self._sampler
            if sampler.left > 1:  # most requests: counted here, without a call
                sampler.left -= 1
                return
            chosen = sampler.sample()
        else:
            chosen = self._is_sampled(_reception_of(request))
        if chosen:
            trace = self._start(request)
            if TraceLevel.TENSORS in trace.level:
                trace.tensors += _inputs(pending)
                if pending.on_response is not None:
                    pending.on_response = _recording(trace, pending.on_response)
            pending.trace = trace
            _call_on_end(pending, trace.end)

    def on_refused(self, request: InferRequest, error: RequestError, pending: PendingRequest | None) -> None:
        """End the trace of a refused request; without ``pending`` start the trace if it is sampled."""
        trace = getattr(pending, "trace", None)
        if pending is None and self._is_sampled(_reception_of(request)):
            trace = self._start(request)
        if trace is not None:
            trace.end(error)

    def _start(self, request: InferRequest) -> Trace:
        reception = _reception_of(request)
        caller = None if reception is None or reception.stream else reception.root
        notes = notes_of(request)
        trace = Trace(
            next(self._ids),
            self._spec.name,
            self._spec.version,
            # The client's id: the header x-request-id if it is read, or the request's id.
            request.id if notes is None else notes.own_id or request.id,
            self._sampler.level,
            self._scope,
            self._sampler.values.log_frequency,
            reception.parent() if reception is not None and self._follows_callers else None,
        )
        if self._follows_callers:
            outer = caller.context[:1] if caller is not None else (trace.parent or ())[:1]
            trace.enter(*outer or ("",))
        if caller is not None:
            trace.parent_id = caller.id
        elif reception is not None:
            reception.begin(trace)
            reception.root = trace
        trace.note("REQUEST_START")
        trace.note("QUEUE_START")
        self.live.add(trace.id)
        trace.end = partial(self._end, trace, caller, reception)
        return trace

    def on_dispatched(self, batch: Batch) -> None:
        if not self.live:
            return
        for trace in _traces(batch.requests):
            trace.note("COMPUTE_START")
            trace.instance = batch.instance

    def on_computed(self, batch: Batch, done: wire.Done) -> None:
        """Record the end of a batch, with the durations that its worker measured."""
        if not self.live:
            return
        for trace in _traces(batch.requests):
            trace.note("COMPUTE_END")
            # The worker's durations, counted back from its answer, but not to before the batch was sent.
            started, ended = trace.moments.get("COMPUTE_START", 0), trace.moments["COMPUTE_END"]
            output_start = max(started, ended - done.compute_output_ns)
            trace.note("COMPUTE_OUTPUT_START", output_start)
            trace.note("COMPUTE_INPUT_END", max(started, output_start - done.compute_infer_ns))

    def _is_sampled(self, reception: Reception | None) -> bool:
        if reception is None:
            return self._sampler.sample()
        if reception.root is not None and not reception.stream:
            return True
        if reception.decided:
            return False
        reception.decided = not reception.stream
        parent = reception.parent() if self._follows_callers else None
        if parent is None:
            return self._sampler.sample()
        return parent.sampled and self._sampler.sample(forced=True)

    def _end(
        self,
        trace: Trace,
        caller: Trace | None,
        reception: Reception | None,
        answer: Answer,
        *,
        cancelled: bool = False,
    ) -> None:
        del trace.end  # a reference cycle
        if "COMPUTE_START" in trace.moments and "COMPUTE_END" not in trace.moments:
            trace.note("COMPUTE_END")  # it failed, or was cancelled
        trace.note("INFER_RESPONSE_COMPLETE")
        if cancelled:
            trace.error = "CANCELLED"
        elif isinstance(answer, RequestError):
            trace.error = answer.code.value
        elif TraceLevel.TENSORS in trace.level and answer is not None:
            trace.tensors += _outputs(answer)
        trace.note("REQUEST_END")
        self.live.discard(trace.id)
        trace.finished = True
        if caller is not None and not caller.finished:
            caller.children.append(trace)
        elif caller is not None or reception is None:
            self._deliver(trace)
        else:
            reception.answered(trace)


def _reception_of(request: InferRequest) -> Reception | None:
    """Return the network timing of a request, created here if the request is to be traced."""
    if request.reception is None and request.receiver is not None:
        request.reception = request.receiver.receive()
    found: Reception | None = request.reception
    return found


def _call_on_end(pending: PendingRequest, on_end: OnEnd) -> None:
    """Call ``on_end`` with the answer before the answer is delivered."""
    on_answer = pending.on_answer
    if on_answer is None:
        pending.answer.add_done_callback(lambda answer: _resolved(answer, on_end))
        return

    def noted(pending: PendingRequest, answer: Answer) -> None:
        on_end(answer)
        on_answer(pending, answer)

    pending.on_answer = noted
    pending.on_cancelled = partial(on_end, None, cancelled=True)


def _resolved(future: asyncio.Future[Any], on_end: OnEnd) -> None:
    if future.cancelled():
        on_end(None, cancelled=True)
    else:
        error = future.exception()
        on_end(error if isinstance(error, RequestError) else future.result())


def trace_ids(epoch: int) -> Iterator[int]:
    """Return the trace numbers of one front. ``epoch`` counts the fronts of a server."""
    return itertools.count(max(epoch - 1, 0) * IDS_OF_A_FRONT + 1)


def _traces(requests: Iterable[QueuedRequest]) -> Iterator[Trace]:
    for one in requests:
        trace = getattr(one, "trace", None)
        if trace is not None:
            yield trace


def _recording(trace: Trace, on_response: OnResponse) -> OnResponse:
    left = MAX_STREAM_NBYTES

    def noted(response: InferResponse) -> None:
        nonlocal left
        if left > 0:
            tensors = list(_outputs(response))
            left -= sum(_NOTED_NBYTES + len(one.data) for one in tensors)
            trace.tensors += tensors
        on_response(response)

    return noted


def _inputs(pending: PendingRequest) -> Iterator[TracedTensor]:
    for one in pending.request.inputs:
        yield _tensor("TENSOR_QUEUE_INPUT", one.name, one.datatype, one.shape, one.data)


def _outputs(response: InferResponse) -> Iterator[TracedTensor]:
    for one in response.outputs:
        data = None if isinstance(one, KeptTensor) else one.data
        yield _tensor("TENSOR_BACKEND_OUTPUT", one.name, one.datatype, one.shape, data)


def _tensor(activity: str, name: str, datatype: str, shape: Iterable[int], data: Any) -> TracedTensor:
    """Return a copy of a tensor's bytes; no bytes for regions and device memory."""
    if isinstance(data, Block) and not isinstance(data, LentExport):
        data = data.view
    if not isinstance(data, (bytes, memoryview)):
        return TracedTensor(activity, name, datatype, tuple(shape), b"", True)
    try:
        copied = bytes(data[:MAX_TENSOR_NBYTES])
    except ValueError:  # the memory was released: its client left in this turn of the loop
        return TracedTensor(activity, name, datatype, tuple(shape), b"", True)
    return TracedTensor(activity, name, datatype, tuple(shape), copied, len(data) > MAX_TENSOR_NBYTES)
