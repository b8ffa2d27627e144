"""A pending request: its state, the delivery of its answer, and the observers of requests on their way."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from gpuserve.core.errors import RequestError
from gpuserve.front.ipc.scatter import Answer
from gpuserve.front.models.response_cache import CacheKey
from gpuserve.front.observability.access_log import RequestNotes, notes_of
from gpuserve.front.requests import inference
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.validation import CheckedRequest
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol import wire

if TYPE_CHECKING:
    from gpuserve.front.observability.tracing.request_trace import Trace


logger = logging.getLogger(__name__)

#: Receives a response, and closes it when its bytes are copied out.
OnResponse: TypeAlias = Callable[[InferResponse], None]
#: Receives the answer of a request, and closes its response. Called once, and never after ``cancel()``. It
#: may be called before ``submit`` returns, and must not raise.
OnAnswer: TypeAlias = "Callable[[PendingRequest, Answer], None]"


class AnswerState(enum.Enum):
    """The state of a request that is not awaited by a future."""

    WAITING = enum.auto()
    ANSWERED = enum.auto()
    CANCELLED = enum.auto()


# Compared once per request: a look-up on an Enum class costs ten times a look-up of a global.
_NEW: Final = RequestState.NEW
_WAITING: Final = AnswerState.WAITING
_ANSWERED: Final = AnswerState.ANSWERED


class RequestOwner(ABC):
    """The driver that a request belongs to, as far as the request knows it."""

    spec: ModelSpec

    @abstractmethod
    def cancel(self, pending: PendingRequest) -> None:
        """Cancel a request: remove it from the queue or drop its result, because its client went away."""


class PendingRequest(QueuedRequest):
    """A request in the scheduler, with its answer to come and the blocks of its body.

    The answer is delivered to ``on_answer``. Without one ``answer`` is a future. The answer of a decoupled
    model's request is None, at the end of its stream; ``on_response`` gets each response before.
    ``cache_key`` is the key under which to cache the answer. ``counted``: the outcome is in the statistics,
    where it must be once. ``trace`` exists only if the request is traced, and so does ``on_cancelled``,
    which is called if a request without a future is cancelled.
    """

    __slots__ = (
        "_driver", "_state", "answer", "blocks", "cache_key", "counted", "lookup_s", "on_answer",
        "on_cancelled", "on_response", "request", "trace",
    )  # fmt: skip

    answer: asyncio.Future[Any]
    #: The duration of the cache look-up that missed.
    lookup_s: float
    on_cancelled: Callable[[], None]
    trace: Trace

    def __init__(
        self,
        driver: RequestOwner,
        request: InferRequest,
        checked: CheckedRequest,
        blocks: Sequence[Block],
        retriable: bool,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        # As in ``QueuedRequest``, without one more call per request.
        self.rows, self.merge_key, self.nbytes, self.row_elements, self.row_shapes = checked
        self.deadline = None
        self.retriable = retriable
        self.priority = request.priority
        self.timeout_s = request.timeout_s
        self.sequence = -1
        self.attempts = 0
        self.cancelled = False
        self.state = _NEW
        self._driver = driver
        self._state = _WAITING
        self.request = request
        self.blocks = blocks
        self.on_response = on_response
        self.on_answer = on_answer
        if on_answer is None:
            self.answer = asyncio.get_running_loop().create_future()
        self.cache_key: CacheKey | None = None
        self.counted = False

    @property
    def correlation(self) -> inference.Sequence | None:
        return self.request.sequence

    @property
    def device(self) -> str:
        """Return the device whose memory the request names, or "". Checked before: at most one."""
        return next((one.device for one in self.request.regions if one.device), "")

    @property
    def near(self) -> str:
        return self.request.near

    def client_of(self, header: bytes) -> Hashable:
        sender = self.request.sender
        if sender is None:
            return ""
        if header:
            for name, value in sender.head.headers:
                if name == header:
                    return (value,)  # a tuple, unlike any address
        source: Hashable = sender.endpoints.source
        return source

    @property
    def is_ensemble_step(self) -> bool:
        return self.request.depth > 0

    @property
    def spec(self) -> ModelSpec:
        return self._driver.spec

    @property
    def is_over(self) -> bool:
        return self.answer.done() if self.on_answer is None else self._state is not _WAITING

    @property
    def is_cancelled(self) -> bool:
        """Return whether the request was cancelled before it had an answer."""
        return self.answer.cancelled() if self.on_answer is None else self._state is AnswerState.CANCELLED

    def deliver(self, answer: Answer) -> None:
        if self.on_answer is None:
            self._resolve(answer)
        elif self._state is _WAITING:
            self._state = _ANSWERED
            try:
                self.on_answer(self, answer)
            except Exception:  # other requests are answered in the same turn
                logger.exception("server defect: cannot deliver an answer of model %s", self.spec.name)
        elif isinstance(answer, InferResponse):
            answer.close()

    def mark_answered(self) -> bool:
        """Mark the request as answered by a batch reader. Returns False if nobody waits for it."""
        if self._state is not _WAITING:
            return False
        self._state = _ANSWERED
        return True

    def reassign(self, driver: RequestOwner, blocks: Sequence[Block]) -> None:
        """Transfer the request to another driver, as if new there. ``blocks`` hold its body now."""
        self._driver, self.blocks = driver, blocks
        self.timeout_s = self.request.timeout_s
        self.deadline = None if self.timeout_s is None else self.enqueued_at + self.timeout_s

    def cancel(self) -> None:
        self._driver.cancel(self)

    def abandon(self) -> bool:
        """Prevent any later answer. Returns False if the request had its answer, or was cancelled before."""
        if self.on_answer is None:
            return self._abandon_future()
        if self._state is not _WAITING:
            return False
        self._state = AnswerState.CANCELLED
        if hasattr(self, "on_cancelled"):
            self.on_cancelled()
        return True

    def _resolve(self, answer: Answer) -> None:
        future = self.answer
        if future.done():
            if isinstance(answer, InferResponse):
                answer.close()
        elif isinstance(answer, RequestError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _abandon_future(self) -> bool:
        future = self.answer
        if not future.done() or future.cancelled():
            return True
        # The request was answered, and counted, in the same turn of the event loop in which its client left.
        if future.exception() is None and future.result() is not None:
            future.result().close()
        return False


class RequestObserver(Protocol):
    """An observer of requests. A driver has at most one, so requests pay only for enabled features. ``live``
    are the ids of traces of requests that have not ended.
    """

    @property
    def live(self) -> Collection[int]: ...

    def on_submitted(self, pending: PendingRequest) -> None: ...

    def on_refused(
        self, request: InferRequest, error: RequestError, pending: PendingRequest | None
    ) -> None: ...

    def on_dispatched(self, batch: Batch) -> None: ...

    def on_computed(self, batch: Batch, done: wire.Done) -> None: ...


class AccessLogObserver:
    """Notes the queue time, the run time and the batch of requests for the access log. The observer
    ``tracer`` is called as well.
    """

    def __init__(self, tracer: RequestObserver | None) -> None:
        self._tracer = tracer
        self.live: Collection[int] = () if tracer is None else tracer.live

    def on_submitted(self, pending: PendingRequest) -> None:
        if self._tracer is not None:
            self._tracer.on_submitted(pending)

    def on_refused(self, request: InferRequest, error: RequestError, pending: PendingRequest | None) -> None:
        if self._tracer is not None:
            self._tracer.on_refused(request, error, pending)

    def on_dispatched(self, batch: Batch) -> None:
        now = time.monotonic()
        for one, notes in _noted(batch):
            notes.dispatched(now - one.enqueued_at, batch.rows)
        if self._tracer is not None:
            self._tracer.on_dispatched(batch)

    def on_computed(self, batch: Batch, done: wire.Done) -> None:
        compute_s = (done.compute_input_ns + done.compute_infer_ns + done.compute_output_ns) * 1e-9
        for _, notes in _noted(batch):
            notes.computed(compute_s)
        if self._tracer is not None:
            self._tracer.on_computed(batch, done)


def _noted(batch: Batch) -> Iterator[tuple[PendingRequest, RequestNotes]]:
    for one in batch.requests:
        assert isinstance(one, PendingRequest)
        notes = None if one.is_ensemble_step else notes_of(one.request)
        if notes is not None:
            yield one, notes
