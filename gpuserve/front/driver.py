"""What the front needs of whoever answers the requests for a model: its workers' driver, or an ensemble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from gpuserve.front.endpoint.v2 import InferRequest
from gpuserve.front.metrics import ModelMetrics
from gpuserve.front.plane.device_inputs import DeviceInputs
from gpuserve.front.scheduler.instances import Instances
from gpuserve.front.scheduler.interface import SchedulerStatistics
from gpuserve.front.scheduler.pending import OnAnswer, OnResponse, PendingRequest
from gpuserve.spec import ModelSpec
from gpuserve_worker.memory import Arena, Block

if TYPE_CHECKING:
    from gpuserve.front.tracing.model_tracer import ModelTracer


class Counting(Protocol):
    """Whoever knows how many requests there are."""

    def statistics(self) -> SchedulerStatistics:
        """The counts at this moment."""


class Driver(Protocol):
    """One version of a model. ``tracer`` is there while its requests may be traced."""

    spec: ModelSpec
    metrics: ModelMetrics
    arena: Arena
    instances: Instances
    device_inputs: DeviceInputs
    tracer: ModelTracer | None

    @property
    def scheduler(self) -> Counting:
        """What has its requests."""

    @property
    def ready(self) -> bool:
        """Whether it takes requests and can answer them."""

    @property
    def was_ready(self) -> bool:
        """Whether it could once."""

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""

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

    def stop_accepting(self) -> None:
        """Refuse new requests; those accepted are still run."""

    def retire(self) -> None:
        """Another driver gets the requests from now on."""

    def close(self) -> None:
        """Give everything up; whoever still waits is told."""
