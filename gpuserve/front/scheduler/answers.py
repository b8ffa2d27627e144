"""The answers of one model on their way to who asked: counted, remembered where the model has a response
cache, and held back where its requests are to be answered in their order. No batch and no worker here.
"""

from __future__ import annotations

import time

from gpuserve.errors import RequestError
from gpuserve.front.endpoint.v2 import InferResponse
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.plane.scatter import Answer
from gpuserve.front.scheduler.flights import PendingRequest
from gpuserve.front.scheduler.ordering import AnswerOrder
from gpuserve.front.scheduler.response_cache import ResponseCache, cache_key
from gpuserve.spec import ModelSpec


class Answers:
    """Gives the pending requests of one model what they wait for, each exactly once."""

    def __init__(self, spec: ModelSpec, metrics: ModelMetrics, cache: ResponseCache | None) -> None:
        self._spec = spec
        self._metrics = metrics
        self._cache = cache if spec.response_cache and not spec.decoupled else None
        in_order = spec.batching.preserve_ordering
        self._order: AnswerOrder[PendingRequest, Answer] | None = AnswerOrder() if in_order else None

    def recall(self, pending: PendingRequest) -> bool:
        """Answer a new request from the cache. False: it has to be run, and its answer will be kept."""
        if self._cache is None:
            return False
        started = time.monotonic()
        pending.cache_key = cache_key(self._spec.name, self._spec.version, pending.request)
        response = self._cache.lookup(pending.cache_key, pending.request.id)
        if response is None:
            self._metrics.cache_missed()
            return False
        pending.cache_key = None
        self._metrics.cache_hit(time.monotonic() - started)
        pending.recalled = True
        self.expect(pending)
        self.give(pending, response)
        return True

    def expect(self, pending: PendingRequest) -> None:
        """A request was accepted, after all that were before."""
        if self._order is not None:
            self._order.expect(pending)

    def give(self, pending: PendingRequest, answer: Answer) -> None:
        """A request has its answer; None is the end of a stream."""
        if isinstance(answer, InferResponse) and self._cache is not None and pending.cache_key is not None:
            self._cache.store(pending.cache_key, answer)
        if self._order is None:
            self._deliver(pending, answer)
            return
        for one, its in self._order.answer(pending, answer):
            self._deliver(one, its)

    def fail_now(self, pending: PendingRequest, error: RequestError) -> None:
        """A request fails before its batch has ended, out of any order."""
        if not pending.answer.done():
            self._metrics.failed(1, error.code.value)
            pending.answer.set_exception(error)
        self.drop(pending)

    def drop(self, pending: PendingRequest) -> None:
        """Nobody waits for this one any more, and nobody for it."""
        if self._order is not None:
            for one, its in self._order.drop(pending):
                self._deliver(one, its)

    def pass_on(self, pending: PendingRequest, response: InferResponse | RequestError) -> None:
        """One response of a stream; an error ends it for this request, whose batch goes on."""
        if isinstance(response, RequestError):
            self.fail_now(pending, response)
        elif pending.answer.done() or pending.on_response is None:
            response.close()
        else:
            pending.on_response(response)

    def _deliver(self, pending: PendingRequest, answer: Answer) -> None:
        future = pending.answer
        if future.done():
            if isinstance(answer, InferResponse):
                answer.close()
        elif isinstance(answer, RequestError):
            self._metrics.failed(1, answer.code.value)
            future.set_exception(answer)
        else:
            if not pending.recalled:
                self._metrics.succeeded(time.monotonic() - pending.enqueued_at, pending.rows)
            future.set_result(answer)
