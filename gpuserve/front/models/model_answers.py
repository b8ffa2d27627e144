"""The delivery of the answers of one model: counted, cached, and held back to preserve their order."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.batch_messages import region_numbers
from gpuserve.front.ipc.scatter import Answer, WholeOutputs
from gpuserve.front.ipc.shared_memory import RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.models.in_flight import InFlightBatch, StreamAccount
from gpuserve.front.models.pending_request import PendingRequest, RequestObserver
from gpuserve.front.models.response_cache import MAX_CACHED_NBYTES, ResponseCache, cache_key
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.statistics import FailureReason, Phases
from gpuserve.front.scheduling import refusals
from gpuserve.front.scheduling.request_queue import QueuedRequest, RemovalReason
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.wire import Done, WireError

#: 150 years.
_MAX_PHASE_NS: Final = (1 << 62) - 1


class ModelAnswers:
    """Delivers the answer of each pending request of one model, exactly once."""

    def __init__(
        self,
        spec: ModelSpec,
        metrics: ModelMetrics,
        cache: ResponseCache | None = None,
        regions: RegionTable | None = None,
    ) -> None:
        self._spec = spec
        self._regions = regions
        self.tracer: RequestObserver | None = None
        self._metrics = metrics
        self._cache = cache if spec.response_cache and not spec.decoupled else None
        self.has_cache = self._cache is not None
        self.in_order = spec.batching.preserve_ordering
        self._order: AnswerOrder[PendingRequest, Answer] | None = AnswerOrder() if self.in_order else None

    def answer_from_cache(self, pending: PendingRequest) -> bool:
        """Answer a new request from the cache. Returns False if it has to run, and is to be cached."""
        if self._cache is None or pending.request.regions:  # the front does not read regions
            return False
        if pending.nbytes > MAX_CACHED_NBYTES:
            return False
        started_at = time.monotonic()
        pending.cache_key = cache_key(self._spec.name, self._spec.version, pending.request)
        response = self._cache.lookup(pending.cache_key, pending.request.id)
        lookup_s = time.monotonic() - started_at
        if response is None:
            self._metrics.cache_missed(lookup_s)
            pending.lookup_s = lookup_s
            return False
        pending.cache_key = None
        self._metrics.cache_hit(pending, lookup_s)
        pending.counted = True
        self.expect(pending)
        self.deliver(pending, response)
        return True

    def release_inputs(self, pending: PendingRequest) -> None:
        """Release the body and the regions of a request that is in no batch any more."""
        if pending.blocks:
            for block in pending.blocks:
                block.free()
            pending.blocks = ()
        request = pending.request
        # The scheduler may refer to a completed request for a while, which must not keep its body alive.
        request.inputs.clear()
        if request.regions and self._regions is not None:
            self._regions.unpin(request)
            request.regions = ()

    def announce_regions(self, link: WorkerLink, requests: Sequence[InferRequest]) -> None:
        if self._regions is not None:
            self._regions.announce(link, region_numbers(requests))

    def stop_caching(self) -> None:
        """Stop caching answers, because the model was replaced or removed."""
        self._cache = None
        self.has_cache = False

    def expect(self, pending: PendingRequest) -> None:
        if self._order is not None:
            self._order.expect(pending)

    def deliver(
        self, pending: PendingRequest, answer: Answer, reason: FailureReason = FailureReason.BACKEND
    ) -> None:
        """Deliver an answer; None is the end of a stream. An error is counted for ``reason``."""
        if self._cache is not None and isinstance(answer, InferResponse) and pending.cache_key is not None:
            started_at = time.monotonic()
            self._cache.store(pending.cache_key, answer)
            self._metrics.cache_kept(pending.lookup_s, time.monotonic() - started_at)
        if isinstance(answer, RequestError):
            self._count_failure(pending, answer, reason)
        if self._order is None:
            pending.deliver(answer)
        else:
            for one, its_answer in self._order.answer(pending, answer):
                one.deliver(its_answer)

    def readers_of(self, requests: Sequence[PendingRequest]) -> Sequence[Any]:
        """Return the readers of this batch's unsplit outputs; none if this process must see some of it."""
        if requests[0].request.reader is None or self._cache is not None or self._order is not None:
            return ()
        readers = dict.fromkeys([one.request.reader for one in requests])
        return () if None in readers or self.tracer is not None else tuple(readers)

    def deliver_whole(
        self, requests: Sequence[PendingRequest], readers: Iterable[Any], whole: WholeOutputs
    ) -> None:
        """Deliver a batch's outputs to readers that split them."""
        for pending in requests:
            if pending.blocks:
                self.release_inputs(pending)
            else:  # without blocks and without regions
                pending.request.inputs.clear()
        for reader in readers:
            reader.receive_batch(requests, whole)

    def finish(
        self, pending: QueuedRequest, answer: Answer, reason: FailureReason = FailureReason.BACKEND
    ) -> None:
        assert isinstance(pending, PendingRequest)
        self.release_inputs(pending)
        self.deliver(pending, answer, reason)

    def refuse(self, requests: Iterable[QueuedRequest], error: RequestError) -> None:
        """Answer requests that were removed from the queue with an error that is nobody's fault."""
        for pending in requests:
            self.finish(pending, error, FailureReason.OTHER)

    def refuse_removed(self, pending: QueuedRequest) -> None:
        """Answer a request that ``Scheduler.expire`` returned."""
        reason = FailureReason.REJECTED
        error: RequestError
        if pending.removal_reason in {RemovalReason.LATE, RemovalReason.HOPELESS}:
            self._refuse_late(pending)
            return
        if pending.correlation is not None and self._spec.in_sequences:
            removed = pending.removal_reason
            error = refusals.removed_from_sequence(self._spec.name, pending.correlation.id, removed)
            if removed is RemovalReason.CANCELLED:
                reason = FailureReason.CANCELED
        elif pending.removal_reason is RemovalReason.CROWDING:
            error = refusals.crowded_out(self._spec.name)
        else:
            error = refusals.waited_too_long()
        self.finish(pending, error, reason)

    def _refuse_late(self, pending: QueuedRequest) -> None:
        """Answer a request whose deadline passed in the queue, regardless of the order of answers."""
        assert isinstance(pending, PendingRequest)
        name, timeout_s = self._spec.name, pending.request.timeout_s
        if pending.removal_reason is RemovalReason.LATE:
            late = refusals.too_late(name, timeout_s, was_queued=True)
        else:
            late = refusals.hopeless(name, timeout_s)
        self.fail_now(pending, late, FailureReason.REJECTED)
        self.release_inputs(pending)

    def fail_lost(self, pending: QueuedRequest, ended: Callable[[], RequestError] | None) -> None:
        """Answer a request that is lost with its instance. ``ended`` makes the error if no worker died."""
        if ended is not None:
            self.finish(pending, ended(), FailureReason.OTHER)
        elif pending.correlation is not None and self._spec.in_sequences:
            self.finish(pending, refusals.sequence_lost(self._spec.name, pending.correlation.id))
        else:
            isolated = getattr(pending, "removal_reason", None) is RemovalReason.ISOLATED
            self.finish(pending, refusals.worker_died(self._spec.name, pending.attempts, isolated))

    def fail_now(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        """Fail a request before its batch has ended, regardless of the order of answers."""
        if not pending.is_over:
            self._count_failure(pending, error, reason)
            pending.deliver(error)
        self.drop(pending)

    def cancel(self, pending: PendingRequest) -> bool:
        """Count a request whose client went away. Returns whether it had no outcome yet."""
        self.drop(pending)
        if pending.counted:  # and held back to preserve the order
            return False
        pending.counted = True
        self._metrics.cancelled(time.monotonic() - pending.enqueued_at)
        return True

    def drop(self, pending: PendingRequest) -> None:
        """Let no answer wait for this request any more."""
        if self._order is not None:
            for one, its_answer in self._order.drop(pending):
                one.deliver(its_answer)

    def deliver_responses(
        self, flight: InFlightBatch, responses: Sequence[Answer], last: Sequence[int] = ()
    ) -> list[PendingRequest]:
        """Deliver one response each, or None, to the requests of a stream's batch. Returns the failed
        requests. The requests at the positions ``last`` get no further response.
        """
        came_at = time.monotonic()
        account, failed = self._account(flight), []
        for position, (pending, response) in enumerate(zip(flight.requests, responses, strict=True)):
            if position in last and not isinstance(response, RequestError):
                self._end_stream(account, position, pending, response, came_at)
                continue
            if response is None:
                continue
            if pending.is_over or pending.cancelled or pending.on_response is None:
                if isinstance(response, InferResponse):
                    response.close()
            elif isinstance(response, InferResponse):
                pending.on_response(response)
                account.responded(position, pending, came_at, failed=False)
            else:
                account.responded(position, pending, came_at, failed=True)
                self.fail_now(pending, response, FailureReason.BACKEND)
            if isinstance(response, RequestError):
                failed.append(pending)
        return failed

    def _end_stream(
        self,
        account: StreamAccount,
        position: int,
        pending: PendingRequest,
        response: InferResponse | None,
        came_at: float,
    ) -> None:
        """Deliver the last response of one request, or its absence, before its batch has ended."""
        if pending.is_over or pending.cancelled:
            if response is not None:
                response.close()
            return
        pending.deliver(response)
        if response is None:
            account.ended_empty(position)
        else:
            account.responded(position, pending, came_at, failed=False)

    def end_streams(self, flight: InFlightBatch, *, failed: bool) -> None:
        """Count the end of a stream's batch, before its requests are counted."""
        if self._spec.decoupled:
            self._account(flight).ended(flight.requests, failed=failed)

    def _account(self, flight: InFlightBatch) -> StreamAccount:
        if flight.account is None:
            flight.account = StreamAccount(self._metrics, len(flight.requests), flight.sent_at)
        return flight.account

    def _count_failure(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        if not pending.counted:
            pending.counted = True
            self._metrics.failed(error.code.value, reason, time.monotonic() - pending.enqueued_at)


def phases_of(done: Done) -> Phases:
    """Return the durations that the worker measured. Raises WireError or TypeError if invalid."""
    phases = done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
    if not 0 <= phases[0] | phases[1] | phases[2] <= _MAX_PHASE_NS:
        raise WireError(f"an execution that took {phases} ns")
    return phases


R = TypeVar("R", bound=Hashable)
A = TypeVar("A")


class AnswerOrder(Generic[R, A]):
    """Returns answers in the order in which their requests were accepted, though batches end in any order.
    Pure. Each expected request must be answered or dropped. The caller owns memory that a waiting answer
    holds.
    """

    def __init__(self) -> None:
        #: In order of acceptance, each with its answer, if there is one.
        self._expected: OrderedDict[R, list[A]] = OrderedDict()

    def expect(self, request: R) -> None:
        self._expected[request] = []

    def answer(self, request: R, answer: A) -> list[tuple[R, A]]:
        """Return the answers that may be delivered now, in order. A dropped request is answered at once."""
        kept = self._expected.get(request)
        if kept is None:
            return [(request, answer)]
        kept.append(answer)
        return self._release()

    def drop(self, request: R) -> list[tuple[R, A]]:
        """Forget a cancelled or answered request. Returns the answers that waited only for it."""
        own = [(request, answer) for answer in self._expected.pop(request, [])]
        return own + self._release()

    def _release(self) -> list[tuple[R, A]]:
        released: list[tuple[R, A]] = []
        while self._expected:
            request, answers = next(iter(self._expected.items()))
            if not answers:
                break
            del self._expected[request]
            released += [(request, answer) for answer in answers]
        return released

    def __len__(self) -> int:
        """Return the number of requests that are expected, or have an answer that waits."""
        return len(self._expected)
