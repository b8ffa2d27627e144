"""The answers of one model on their way to who asked: counted, cached, and held back for their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from gpuserve.core.errors import RequestError
from gpuserve.front.batching import refusals
from gpuserve.front.batching.answer_order import AnswerOrder
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.batch_messages import region_numbers
from gpuserve.front.memory.regions import RegionTable
from gpuserve.front.memory.scatter import Answer, WholeOutputs
from gpuserve.front.models.in_flight import InFlightBatch
from gpuserve.front.models.pending import PendingRequest
from gpuserve.front.models.response_cache import ResponseCache, cache_key
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.queueing.queue import QueuedRequest, RemovalReason
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.statistics import FailureReason, Phases, ResponseFate
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.protocol.wire import Done, WireError

if TYPE_CHECKING:
    from gpuserve.front.models.watching import RequestWatcher

#: A century and a half.
_MAX_PHASE_NS: Final = (1 << 62) - 1


class StreamAccount:
    """What the responses of one decoupled batch were: at which index of its stream each came, and when."""

    __slots__ = ("_indices", "_last_at", "_metrics")

    def __init__(self, metrics: ModelMetrics, requests: int, sent_at: float) -> None:
        self._metrics = metrics
        self._indices = [0] * requests
        self._last_at = [sent_at] * requests

    def responded(self, position: int, pending: PendingRequest, came_at: float, *, failed: bool) -> None:
        """Count a response that came then and is with its door; a ``failed`` one ends its request."""
        if self._indices[position] == 0 and not failed:
            self._metrics.first_response.observe((came_at - pending.enqueued_at) * 1000)
        fate = ResponseFate.FAIL if failed else ResponseFate.SUCCESS
        self._add(position, fate, came_at, time.monotonic() - came_at)

    def ended(self, requests: Sequence[PendingRequest], *, failed: bool) -> None:
        """Count what the end of the batch was to each request; told before its requests are counted."""
        now = time.monotonic()
        for position, pending in enumerate(requests):
            if pending.cancelled or pending.is_given_up:
                self._add(position, ResponseFate.CANCEL, now)
            elif not pending.is_over:
                self._add(position, ResponseFate.FAIL if failed else ResponseFate.EMPTY, now)

    def ended_empty(self, position: int) -> None:
        """Count the end of one request that has no response of its own, and came before its batch's."""
        self._add(position, ResponseFate.EMPTY, time.monotonic())

    def _add(self, position: int, fate: ResponseFate, now: float, output_s: float = 0.0) -> None:
        index, since_s = self._indices[position], now - self._last_at[position]
        self._indices[position] = index + 1
        self._last_at[position] = now
        self._metrics.statistics.responded(index, fate, since_s, output_s)


class ModelAnswers:
    """Gives pending requests of one model what they wait for, exactly once. ``recalls``: from the cache."""

    def __init__(
        self,
        spec: ModelSpec,
        metrics: ModelMetrics,
        cache: ResponseCache | None = None,
        regions: RegionTable | None = None,
    ) -> None:
        self._spec = spec
        self._regions = regions
        self.tracer: RequestWatcher | None = None
        self._metrics = metrics
        self._cache = cache if spec.response_cache and not spec.decoupled else None
        self.recalls = self._cache is not None
        self.in_order = spec.batching.preserve_ordering
        self._order: AnswerOrder[PendingRequest, Answer] | None = AnswerOrder() if self.in_order else None

    def recall(self, pending: PendingRequest) -> bool:
        """Answer a new request from the cache. False: it has to be run, and its answer will be kept."""
        if self._cache is None or pending.request.regions:  # nobody here has read what is in a region
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
        self._metrics.cache_hit(lookup_s)
        pending.counted = True
        self.expect(pending)
        self.give(pending, response)
        return True

    def settle(self, pending: PendingRequest) -> None:
        """Let a request that is in no batch any more let go of its body and its regions."""
        if pending.blocks:
            for block in pending.blocks:
                block.free()
            pending.blocks = ()
        request = pending.request
        # The scheduler may refer to a request for a while after it is through; not to its body.
        request.inputs.clear()
        if request.regions and self._regions is not None:
            self._regions.unpin(request)
            request.regions = ()

    def introduce_regions(self, link: WorkerLink, requests: Sequence[InferRequest]) -> None:
        if self._regions is not None:
            self._regions.introduce(link, region_numbers(requests))

    def forget(self) -> None:
        """Keep no answer in the cache from now on: the model is another, or no more."""
        self._cache = None
        self.recalls = False

    def expect(self, pending: PendingRequest) -> None:
        if self._order is not None:
            self._order.expect(pending)

    def give(
        self, pending: PendingRequest, answer: Answer, reason: FailureReason = FailureReason.BACKEND
    ) -> None:
        """Give a request its answer; None is the end of a stream. An error is counted for this reason."""
        if self._cache is not None:
            self._keep(pending, answer)
        if isinstance(answer, RequestError):
            self._count_failure(pending, answer, reason)
        if self._order is None:
            pending.give(answer)
        else:
            for one, its in self._order.answer(pending, answer):
                one.give(its)

    def readers_of(self, requests: Sequence[PendingRequest]) -> Sequence[Any]:
        """Who takes the outputs of this batch uncut; nobody where some of it is to be seen here."""
        if requests[0].request.reader is None or self._cache is not None or self._order is not None:
            return ()
        readers = dict.fromkeys([one.request.reader for one in requests])
        return () if None in readers or self.tracer is not None else tuple(readers)

    def give_uncut(
        self, requests: Sequence[PendingRequest], readers: Iterable[Any], whole: WholeOutputs
    ) -> None:
        """Give a batch's outputs to those who cut them apart."""
        for pending in requests:
            if pending.blocks:
                self.settle(pending)
            else:  # it names no region either
                pending.request.inputs.clear()
        for reader in readers:
            reader.take_batch(requests, whole)

    def finish(
        self, pending: QueuedRequest, answer: Answer, reason: FailureReason = FailureReason.BACKEND
    ) -> None:
        assert isinstance(pending, PendingRequest)
        self.settle(pending)
        self.give(pending, answer, reason)

    def refuse(self, requests: Iterable[QueuedRequest], error: RequestError) -> None:
        """Answer requests that were taken out of the queue with an error that is nobody's fault."""
        for pending in requests:
            self.finish(pending, error, FailureReason.OTHER)

    def refuse_removed(self, pending: QueuedRequest) -> None:
        """Answer a request that ``Scheduler.expire`` gave."""
        reason = FailureReason.REJECTED
        error: RequestError
        if pending.removal_reason in {RemovalReason.LATE, RemovalReason.HOPELESS}:
            self._refuse_late(pending)
            return
        if pending.correlation is not None and self._spec.in_sequences:
            removed = pending.removal_reason
            error = refusals.taken_out(self._spec.name, pending.correlation.id, removed)
            if removed is RemovalReason.CANCELLED:
                reason = FailureReason.CANCELED
        elif pending.removal_reason is RemovalReason.CROWDING:
            error = refusals.crowded_out(self._spec.name)
        else:
            error = refusals.waited_too_long()
        self.finish(pending, error, reason)

    def _refuse_late(self, pending: QueuedRequest) -> None:
        """Answer a request whose own time runs out in the queue, whatever the order of the answers is."""
        assert isinstance(pending, PendingRequest)
        name, timeout_s = self._spec.name, pending.request.timeout_s
        if pending.removal_reason is RemovalReason.LATE:
            late = refusals.too_late(name, timeout_s, was_queued=True)
        else:
            late = refusals.hopeless(name, timeout_s)
        self.fail_now(pending, late, FailureReason.REJECTED)
        self.settle(pending)

    def lose(self, pending: QueuedRequest, ended: Callable[[], RequestError] | None) -> None:
        """Answer a request that ``Scheduler.instance_down`` gave; ``ended``: why, where no worker died."""
        if ended is not None:
            self.finish(pending, ended(), FailureReason.OTHER)
        elif pending.correlation is not None and self._spec.in_sequences:
            self.finish(pending, refusals.sequence_lost(self._spec.name, pending.correlation.id))
        else:
            isolated = getattr(pending, "removal_reason", None) is RemovalReason.ISOLATED
            self.finish(pending, refusals.worker_died(self._spec.name, pending.attempts, isolated))

    def fail_now(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        """A request fails before its batch has ended, out of any order."""
        if not pending.is_over:
            self._count_failure(pending, error, reason)
            pending.give(error)
        self.drop(pending)

    def take_back(self, pending: PendingRequest) -> bool:
        """Count a request whose client went away; whether nothing had become of it yet."""
        self.drop(pending)
        if pending.counted:  # and held back for the sake of the order
            return False
        pending.counted = True
        self._metrics.cancelled(time.monotonic() - pending.enqueued_at)
        return True

    def drop(self, pending: PendingRequest) -> None:
        """Let no answer wait for this request any more."""
        if self._order is not None:
            for one, its in self._order.drop(pending):
                one.give(its)

    def pass_on(
        self, flight: InFlightBatch, responses: Sequence[Answer], last: Sequence[int] = ()
    ) -> list[PendingRequest]:
        """One response each for some requests of a stream's batch, or None; the requests that have failed.
        For those at the positions ``last`` nothing comes after it.
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
        """Give one request its last response, or tell that there is none, before its batch has ended."""
        if pending.is_over or pending.cancelled:
            if response is not None:
                response.close()
            return
        pending.give(response)
        if response is None:
            account.ended_empty(position)
        else:
            account.responded(position, pending, came_at, failed=False)

    def end_streams(self, flight: InFlightBatch, *, failed: bool) -> None:
        """Count the end of a stream's batch; told before its requests are."""
        if self._spec.decoupled:
            self._account(flight).ended(flight.requests, failed=failed)

    def _account(self, flight: InFlightBatch) -> StreamAccount:
        if flight.account is None:
            flight.account = StreamAccount(self._metrics, len(flight.requests), flight.sent_at)
        return flight.account

    def _keep(self, pending: PendingRequest, answer: Answer) -> None:
        """Keep an answer in the cache that was looked for there in vain."""
        assert self._cache is not None
        if isinstance(answer, InferResponse) and pending.cache_key is not None:
            started_at = time.monotonic()
            self._cache.store(pending.cache_key, answer)
            self._metrics.cache_kept(pending.lookup_s, time.monotonic() - started_at)

    def _count_failure(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        if not pending.counted:
            pending.counted = True
            self._metrics.failed(error.code.value, reason, time.monotonic() - pending.enqueued_at)


def phases_of(done: Done) -> Phases:
    """How long the worker says that it took; WireError or TypeError where these are no durations."""
    phases = done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
    if not 0 <= phases[0] | phases[1] | phases[2] <= _MAX_PHASE_NS:
        raise WireError(f"an execution that took {phases} ns")
    return phases
