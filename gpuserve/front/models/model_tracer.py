"""The tracing of one model's requests: what its driver tells of them, while anything of it is to be traced. A
driver has one of these or none, so a server that traces nothing does no work for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol

from gpuserve.core.errors import RequestError
from gpuserve.front.batching.slots import Batch
from gpuserve.front.links.export_memory import KeptTensor, LentExport
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.pending import OnResponse, PendingRequest
from gpuserve.front.observability.access_log import notes_of
from gpuserve.front.observability.tracing.request_trace import Deliver, Reception, Trace, TracedTensor
from gpuserve.front.observability.tracing.trace_settings import Sampler, TraceLevel
from gpuserve.front.queueing.queue import QueuedRequest
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol import wire

#: So much of a tensor is noted.
MAX_TENSOR_NBYTES: Final = 1 << 20
#: So much of the responses of one stream, which may go on for ever, and what each tensor takes besides.
MAX_STREAM_NBYTES: Final = 16 << 20
_NOTED_NBYTES: Final = 512
#: What an unfinished front had given out as numbers is not given out by its successor.
IDS_OF_A_FRONT: Final = 1 << 32


class OnEnd(Protocol):
    """A call that takes what became of a request."""

    def __call__(self, answer: Answer, *, taken_back: bool = False) -> None: ...


class ModelTracer:
    """Begins traces of one model, and notes what happens to them. ``scope``: the name of the model where it
    has settings of its own. ``follows_callers``: a request is traced if its caller traces it, and not if its
    caller chose not to.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sampler: Sampler,
        scope: str,
        ids: Iterator[int],
        deliver: Deliver,
        *,
        follows_callers: bool,
    ) -> None:
        self._spec = spec
        self._sampler = sampler
        self._scope = scope
        self._ids = ids
        self._deliver = deliver
        self._follows_callers = follows_callers

    def begin(self, pending: PendingRequest) -> None:
        """Begin the trace of a request, if it is one of those that are traced."""
        request = pending.request
        if request.reception is None and not self._follows_callers:
            sampler = self._sampler
            if sampler.left > 1:  # nearly every request: it is counted here, without a call
                sampler.left -= 1
                return
            chosen = sampler.sample()
        else:
            chosen = self._chooses(_received(request))
        if chosen:
            self._begin(pending, _received(request))

    def _begin(self, pending: PendingRequest, reception: Reception | None) -> None:
        caller = None if reception is None or reception.stream else reception.root
        trace = self._new_trace(pending, reception)
        if caller is not None:
            trace.parent_id = caller.id
        elif reception is not None:
            reception.begin(trace)
            reception.root = trace
        trace.note("REQUEST_START")
        if TraceLevel.TENSORS in trace.level:
            trace.tensors += _inputs(pending)
            if pending.on_response is not None:
                pending.on_response = _noting(trace, pending.on_response)
        pending.trace = trace
        trace.note("QUEUE_START")
        _watch(pending, partial(self._end, trace, caller, reception))

    def dispatched(self, batch: Batch) -> None:
        for trace in _traces(batch.requests):
            trace.note("COMPUTE_START")
            trace.instance = batch.instance

    def computed(self, batch: Batch, done: wire.Done) -> None:
        """Note that a batch has come back, with what its worker measured."""
        for trace in _traces(batch.requests):
            trace.note("COMPUTE_END")
            _note_compute(trace, done)

    def _chooses(self, reception: Reception | None) -> bool:
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

    def _new_trace(self, pending: PendingRequest, reception: Reception | None) -> Trace:
        return Trace(
            next(self._ids),
            self._spec.name,
            self._spec.version,
            _id_of(pending.request),
            self._sampler.level,
            self._scope,
            self._sampler.values.log_frequency,
            reception.parent() if reception is not None and self._follows_callers else None,
        )

    def _end(
        self,
        trace: Trace,
        caller: Trace | None,
        reception: Reception | None,
        answer: Answer,
        *,
        taken_back: bool = False,
    ) -> None:
        if "COMPUTE_START" in trace.moments and "COMPUTE_END" not in trace.moments:
            trace.note("COMPUTE_END")  # it failed, or was given up
        trace.note("INFER_RESPONSE_COMPLETE")
        if taken_back:
            trace.error = "CANCELLED"
        elif isinstance(answer, RequestError):
            trace.error = answer.code.value
        elif TraceLevel.TENSORS in trace.level and answer is not None:
            trace.tensors += _outputs(answer)
        trace.note("REQUEST_END")
        trace.finished = True
        if caller is not None and not caller.finished:
            caller.children.append(trace)
        elif caller is not None or reception is None:
            self._deliver(trace)
        else:
            reception.answered(trace)


def _id_of(request: InferRequest) -> str:
    """What the client calls it: its header x-request-id, where that is read, or the request's own id."""
    notes = notes_of(request)
    return request.id if notes is None else notes.own_id or request.id


def _received(request: InferRequest) -> Reception | None:
    """What notes the network's side of a request; made here where the request is to be traced."""
    if request.reception is None and request.receiver is not None:
        request.reception = request.receiver.receive()
    found: Reception | None = request.reception
    return found


def _watch(pending: PendingRequest, on_end: OnEnd) -> None:
    """Call back once the request is through, with its answer, before anybody else has that."""
    on_answer = pending.on_answer
    if on_answer is None:
        pending.answer.add_done_callback(lambda answer: _resolved(answer, on_end))
        return

    def noted(pending: PendingRequest, answer: Answer) -> None:
        on_end(answer)
        on_answer(pending, answer)

    pending.on_answer = noted
    pending.on_taken_back = partial(on_end, None, taken_back=True)


def _resolved(future: asyncio.Future[Any], on_end: OnEnd) -> None:
    if future.cancelled():
        on_end(None, taken_back=True)
    else:
        error = future.exception()
        on_end(error if isinstance(error, RequestError) else future.result())


def trace_ids(epoch: int) -> Iterator[int]:
    """The numbers of the traces of one front; ``epoch`` counts the fronts of a server."""
    return itertools.count(max(epoch - 1, 0) * IDS_OF_A_FRONT + 1)


def _traces(requests: Iterable[QueuedRequest]) -> Iterator[Trace]:
    for one in requests:
        trace = getattr(one, "trace", None)
        if trace is not None:
            yield trace


def _note_compute(trace: Trace, done: wire.Done) -> None:
    """What the worker measured, counted back from its answer, and not to before the batch was sent."""
    started, ended = trace.moments.get("COMPUTE_START", 0), trace.moments["COMPUTE_END"]
    output_start = max(started, ended - done.compute_output_ns)
    trace.note("COMPUTE_OUTPUT_START", output_start)
    trace.note("COMPUTE_INPUT_END", max(started, output_start - done.compute_infer_ns))


def _noting(trace: Trace, on_response: OnResponse) -> OnResponse:
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
    """A copy of a tensor's bytes; a client's region is not looked at, and a device cannot be."""
    if isinstance(data, Block) and not isinstance(data, LentExport):
        data = data.view
    if not isinstance(data, (bytes, memoryview)):
        return TracedTensor(activity, name, datatype, tuple(shape), b"", True)
    try:
        copied = bytes(data[:MAX_TENSOR_NBYTES])
    except ValueError:  # the memory was given back: its client left in this turn of the loop
        return TracedTensor(activity, name, datatype, tuple(shape), b"", True)
    return TracedTensor(activity, name, datatype, tuple(shape), copied, len(data) > MAX_TENSOR_NBYTES)
