"""One request with an answer to come, and how that gets to who asked: in the very turn, or as a future."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpuserve.core.errors import RequestError
from gpuserve.front.memory.scatter import Answer
from gpuserve.front.models.response_cache import CacheKey
from gpuserve.front.queueing.queue import QueuedRequest, RequestState
from gpuserve.front.requests import inference
from gpuserve.front.requests.inference import InferRequest, InferResponse
from gpuserve.front.requests.validation import CheckedRequest
from gpuserve.model.spec import ModelSpec
from gpuserve_worker.memory.arena import Block

if TYPE_CHECKING:
    from gpuserve.front.models.interface import Driver
    from gpuserve.front.observability.tracing.request_trace import Trace

logger = logging.getLogger(__name__)

#: Takes a response, which it closes when the bytes are copied out.
OnResponse: TypeAlias = Callable[[InferResponse], None]
#: Takes the answer of a request, whose response it closes; called once, and never after ``take_back()``.
#: It may be called before ``submit`` returns, and is to keep its errors to itself.
OnAnswer: TypeAlias = "Callable[[PendingRequest, Answer], None]"


class AnswerState(enum.Enum):
    """What became of a request that is not awaited by a future."""

    WAITING = enum.auto()
    ANSWERED = enum.auto()
    TAKEN_BACK = enum.auto()


# Compared once a request: a look-up on an Enum class costs ten times one of a global.
_NEW: Final = RequestState.NEW
_WAITING: Final = AnswerState.WAITING
_ANSWERED: Final = AnswerState.ANSWERED


class PendingRequest(QueuedRequest):
    """A request in the scheduler, with its answer to come and the blocks that its body lies in.

    The answer is given to ``on_answer``; ``answer``, a future, is there only where nobody gave one. That of
    a decoupled model's request is None, at the end of its stream; each of its responses is given to
    ``on_response`` before. ``cache_key`` is what its answer is to be kept under; ``counted`` that what became
    of it is in the statistics, where it must be once. ``trace`` is there only where the request is traced,
    and so is ``on_taken_back``, which is called where there is no future to tell of that.
    """

    __slots__ = (
        "_driver", "_state", "answer", "blocks", "cache_key", "counted", "lookup_s", "on_answer",
        "on_response", "on_taken_back", "request", "trace",
    )  # fmt: skip

    answer: asyncio.Future[Any]
    #: How long its answer was looked for in the cache, in vain.
    lookup_s: float
    on_taken_back: Callable[[], None]
    trace: Trace

    def __init__(
        self,
        driver: Driver,
        request: InferRequest,
        checked: CheckedRequest,
        blocks: Sequence[Block],
        retriable: bool,
        on_response: OnResponse | None = None,
        on_answer: OnAnswer | None = None,
    ) -> None:
        # As ``QueuedRequest`` would, without a call more for each request.
        self.rows, self.merge_key, self.nbytes = checked
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
        """The device whose memory it names, "" where it names none; not two, as was checked before."""
        return next((one.device for one in self.request.regions if one.device), "")

    def client_of(self, header: bytes) -> Hashable:
        sender = self.request.sender
        if sender is None:
            return ""
        if header:
            for name, value in sender.head.headers:
                if name == header:
                    return (value,)  # which no address is
        source: Hashable = sender.ends.source
        return source

    @property
    def is_inner(self) -> bool:
        return self.request.depth > 0

    @property
    def spec(self) -> ModelSpec:
        return self._driver.spec

    @property
    def is_over(self) -> bool:
        return self.answer.done() if self.on_answer is None else self._state is not _WAITING

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waited for its answer any more when there was none yet."""
        return self.answer.cancelled() if self.on_answer is None else self._state is AnswerState.TAKEN_BACK

    def give(self, answer: Answer) -> None:
        if self.on_answer is None:
            self._resolve(answer)
        elif self._state is _WAITING:
            self._state = _ANSWERED
            try:
                self.on_answer(self, answer)
            except Exception:  # it must not hit whoever else is answered in this turn
                logger.exception("defect in taking an answer of model %s", self.spec.name)
        elif isinstance(answer, InferResponse):
            answer.close()

    def end_uncut(self) -> bool:
        """Leave the answer to who takes the outputs of the whole batch; False: nobody waits for it."""
        if self._state is not _WAITING:
            return False
        self._state = _ANSWERED
        return True

    def move(self, driver: Driver, blocks: Sequence[Block]) -> None:
        """Belong to another driver, as if it had just come there; ``blocks`` are where its body lies now."""
        self._driver, self.blocks = driver, blocks
        self.timeout_s = self.request.timeout_s
        self.deadline = None if self.timeout_s is None else self.enqueued_at + self.timeout_s

    def take_back(self) -> None:
        self._driver.take_back(self)

    def give_up(self) -> bool:
        """Give it no answer from now on; False: it had one, or was given up before."""
        if self.on_answer is None:
            return self._leave()
        if self._state is not _WAITING:
            return False
        self._state = AnswerState.TAKEN_BACK
        if hasattr(self, "on_taken_back"):
            self.on_taken_back()
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

    def _leave(self) -> bool:
        future = self.answer
        if not future.done() or future.cancelled():
            return True
        # It was answered, and counted, in the very turn of the loop in which its client left.
        if future.exception() is None and future.result() is not None:
            future.result().close()
        return False
