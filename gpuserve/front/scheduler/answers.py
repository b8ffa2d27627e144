"""The answers of one model on their way to who asked: counted, remembered where the model has a response
cache, and held back where its requests are to be answered in their order. No batch and no worker here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gpuserve.errors import RequestError
from gpuserve.front.endpoint.v2 import InferResponse
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.plane.scatter import Answer
from gpuserve.front.scheduler.flights import Flight
from gpuserve.front.scheduler.ordering import AnswerOrder
from gpuserve.front.scheduler.pending import PendingRequest
from gpuserve.front.scheduler.response_cache import ResponseCache, cache_key
from gpuserve.front.scheduler.stream_account import StreamAccount
from gpuserve.front.statistics import FailureReason, Phases
from gpuserve.spec import ModelSpec
from gpuserve_worker.wire import Done, WireError

#: A century and a half.
_MAX_PHASE_NS: Final = (1 << 62) - 1


class Answers:
    """Gives the pending requests of one model what they wait for, each exactly once."""

    def __init__(self, spec: ModelSpec, metrics: ModelMetrics, cache: ResponseCache | None) -> None:
        self._spec = spec
        self._metrics = metrics
        self._cache = cache if spec.response_cache and not spec.decoupled else None
        #: Whether an answer may be in the cache, and whether answers wait for those of earlier requests.
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
            return False
        pending.cache_key = None
        self._metrics.cache_hit(lookup_s)
        pending.counted = True
        self.expect(pending)
        self.give(pending, response)
        return True

    def forget(self) -> None:
        """Keep no answer in the cache from now on: the model is another, or no more."""
        self._cache = None
        self.recalls = False

    def expect(self, pending: PendingRequest) -> None:
        """A request was accepted, after all that were before."""
        if self._order is not None:
            self._order.expect(pending)

    def executed(self, flight: Flight, phases: Phases, answers: Sequence[Answer]) -> None:
        """A batch came back well. Its requests are counted before they are given these answers."""
        self.end_streams(flight, failed=False)
        batch = flight.batch
        self._metrics.executed(batch.instance, batch.rows, flight.sent_at, phases, batch.requests, answers)

    def give(
        self, pending: PendingRequest, answer: Answer, reason: FailureReason = FailureReason.BACKEND
    ) -> None:
        """A request has its answer; None is the end of a stream. An error is counted for this reason."""
        if self._cache is not None:
            self._keep(pending, answer)
        if isinstance(answer, RequestError):
            self._count_failure(pending, answer, reason)
        if self._order is None:
            pending.give(answer)
        else:
            for one, its in self._order.answer(pending, answer):
                one.give(its)

    def fail_now(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        """A request fails before its batch has ended, out of any order."""
        if not pending.is_over:
            self._count_failure(pending, error, reason)
            pending.give(error)
        self.drop(pending)

    def take_back(self, pending: PendingRequest) -> bool:
        """Its client went away; whether nothing had become of it yet."""
        self.drop(pending)
        if pending.counted:  # and held back for the sake of the order
            return False
        pending.counted = True
        self._metrics.cancelled(time.monotonic() - pending.enqueued_at)
        return True

    def drop(self, pending: PendingRequest) -> None:
        """Nobody waits for this one any more, and nobody for it."""
        if self._order is not None:
            for one, its in self._order.drop(pending):
                one.give(its)

    def pass_on(self, flight: Flight, responses: Sequence[Answer]) -> list[PendingRequest]:
        """One response each for some requests of a stream's batch; None: nothing for that one this time.

        An error ends the stream of its request, while the batch goes on: the requests whose streams ended.
        """
        came_at = time.monotonic()
        account, failed = self._account(flight), []
        for position, (pending, response) in enumerate(zip(flight.requests, responses, strict=True)):
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

    def end_streams(self, flight: Flight, *, failed: bool) -> None:
        """A stream's batch ended; told before its requests are."""
        if self._spec.decoupled:
            self._account(flight).ended(flight.requests, failed=failed)

    def _account(self, flight: Flight) -> StreamAccount:
        if flight.account is None:
            flight.account = StreamAccount(self._metrics, len(flight.requests), flight.sent_at)
        return flight.account

    def _keep(self, pending: PendingRequest, answer: Answer) -> None:
        """Remember an answer that was looked for in vain."""
        assert self._cache is not None
        if isinstance(answer, InferResponse) and pending.cache_key is not None:
            started_at = time.monotonic()
            self._cache.store(pending.cache_key, answer)
            self._metrics.cache_kept(time.monotonic() - started_at)

    def _count_failure(self, pending: PendingRequest, error: RequestError, reason: FailureReason) -> None:
        if not pending.counted:
            pending.counted = True
            self._metrics.failed(error.code.value, reason, time.monotonic() - pending.enqueued_at)


def phases_of(done: Done) -> Phases:
    """How long the worker says that it took.

    Raises:
        WireError, TypeError: these are no durations.
    """
    phases = done.compute_input_ns, done.compute_infer_ns, done.compute_output_ns
    if not 0 <= phases[0] | phases[1] | phases[2] <= _MAX_PHASE_NS:
        raise WireError(f"an execution that took {phases} ns")
    return phases
