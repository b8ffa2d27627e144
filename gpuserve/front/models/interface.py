"""Whoever answers the requests for a model: its workers' driver, or an ensemble."""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from gpuserve.core.errors import ResourceExhausted
from gpuserve.front.batching import refusals
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.front.models.answers import ModelAnswers
from gpuserve.front.models.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observability.metrics.model_metrics import ModelMetrics
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.validation import check_claim
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Arena, Block, OutOfMemory

if TYPE_CHECKING:
    from gpuserve.front.models.model_workers import ModelWorkers
    from gpuserve.front.models.watching import RequestWatcher

logger = logging.getLogger(__name__)

#: A model whose memory for inputs is full for so long is not ready, if no request is queued or running.
STARVED_S: Final = 10.0
#: Before that, objects in reference cycles are deleted: they may own the memory.
_COLLECTED_S: Final = STARVED_S / 2
STARVED: Final = (
    f"its memory for inputs (max_arena_nbytes) has been full for over {STARVED_S:g} s, while no request for "
    "it is queued or running"
)


class Driver(ABC):
    """One version of a model. Large inputs lie in its ``arena``; an ensemble has no ``workers``."""

    spec: ModelSpec
    metrics: ModelMetrics
    arena: Arena
    workers: ModelWorkers | None = None
    #: Whether it is not ready because its memory for inputs stays full, as of the last ``shrink``.
    is_starved = False
    _full_since: float | None = None
    _answers: ModelAnswers

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it takes requests and can answer them."""

    @property
    def was_ready(self) -> bool:
        """Whether it could once; of an ensemble, what its models still load is seen by ``ready``."""
        return self.workers is None or self.workers.were_up

    @property
    def tracer(self) -> RequestWatcher | None:
        """It is there while requests of the model may be traced, or are noted for the access log."""
        return self._answers.tracer

    @tracer.setter
    def tracer(self, tracer: RequestWatcher | None) -> None:
        self._answers.tracer = tracer

    @abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """The counts of its requests and batches at this moment."""

    @property
    def unfinished(self) -> int:
        counts = self.statistics()
        return counts.queued + counts.running_requests

    def claim(self, nbytes: int) -> Block | None:
        """Memory for one large input, filled after ``reserve``; None: it is for the heap. InvalidArgument: no
        input is so large; ResourceExhausted, NoMemory: there is none.
        """
        check_claim(self.spec, nbytes)
        most = self.arena.limit_nbytes
        if nbytes > most:
            raise ResourceExhausted(
                f"an input of {nbytes} bytes for model {self.spec.name!r} is larger than its memory for "
                f"inputs, expected at most {most} bytes (max_arena_nbytes)"
            )
        try:
            return self.arena.claim(nbytes)
        except OutOfMemory as error:
            raise refusals.no_memory(self.spec.name) from error

    def free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.free()

    @abstractmethod
    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Take a request, and its blocks to free. ``on_answer`` gets what became of it, or else its
        ``answer`` is awaited; ``on_response`` gets a stream's responses. Raises ``RequestError`` where it is
        refused.
        """

    @abstractmethod
    def take_back(self, pending: PendingRequest) -> None:
        """Take a request out of the queue, or drop its result, after its client went away."""

    def shrink(self) -> None:
        """Called now and then: give back what a burst took of arenas, and nothing has used since."""
        self._look_for_starvation(time.monotonic())
        self.arena.shrink()
        for link in () if self.workers is None else self.workers.instances.up.values():
            link.shrink()

    def _look_for_starvation(self, now: float) -> None:
        if not self.arena.is_full:
            if self.is_starved:
                logger.warning("model %s has memory for inputs again", self.spec.name)
            self.is_starved, self._full_since = False, None
            return
        if self._full_since is None:
            self._full_since = now
        full_s = now - self._full_since
        if not self.is_starved and full_s > _COLLECTED_S and not self.unfinished:
            gc.collect()
            self.is_starved = full_s > STARVED_S
            if self.is_starved:
                logger.error("model %s is not ready: %s", self.spec.name, STARVED)

    def resize(self, spec: ModelSpec) -> None:
        self.spec = spec

    @abstractmethod
    def stop_accepting(self) -> None:
        """Refuse new requests; those accepted are still run."""

    def retire(self) -> None:
        """Another driver gets the requests from now on; what this one still answers is not remembered."""
        self._answers.forget()

    @abstractmethod
    def close(self) -> None:
        """Give everything up; whoever still waits is told."""
