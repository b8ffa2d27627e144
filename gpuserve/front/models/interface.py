"""What the front needs of whoever answers the requests for a model: its workers' driver, or an ensemble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from gpuserve.declare.spec import ModelSpec
from gpuserve.front.batching.interface import SchedulerStatistics
from gpuserve.front.models.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.front.observe.metrics import ModelMetrics
from gpuserve.front.v2.types import InferRequest
from gpuserve_worker.memory.arena import Arena, Block

if TYPE_CHECKING:
    from gpuserve.front.models.model_tracer import ModelTracer
    from gpuserve.front.models.model_workers import ModelWorkers


class Driver(Protocol):
    """One version of a model. Large inputs lie in its ``arena``; ``tracer`` is there while its requests may
    be traced.
    """

    spec: ModelSpec
    metrics: ModelMetrics
    arena: Arena
    tracer: ModelTracer | None

    @property
    def workers(self) -> ModelWorkers | None:
        """Those who run its batches; an ensemble has none."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests and can answer them."""

    @property
    def was_ready(self) -> bool:
        """Whether it could once take requests and answer them."""

    @property
    def unfinished(self) -> int:
        """How many requests wait or run."""

    def statistics(self) -> SchedulerStatistics:
        """The counts of its requests and batches at this moment."""

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for one large input, to be filled while its bytes arrive; None when there is none."""

    def free(self, blocks: Iterable[Block]) -> None:
        """Take that memory back, of a request that was not submitted."""

    def submit(
        self,
        request: InferRequest,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> PendingRequest:
        """Take one request. A ``RequestError`` where it is wrong or refused; its blocks are free then."""

    def resize(self, spec: ModelSpec) -> None:
        """Serve the same model with other instances."""

    def stop_accepting(self) -> None:
        """Refuse new requests; those accepted are still run."""

    def retire(self) -> None:
        """Another driver gets the requests from now on."""

    def close(self) -> None:
        """Give everything up; whoever still waits is told."""
