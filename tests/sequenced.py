"""A scheduler of sequences, and their requests, for its tests."""

from __future__ import annotations

import math

from scheduled import US_A_SECOND, Clocked, model_spec

from gpuserve.front.requests.inference import Sequence
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.sequence_scheduler import SequenceScheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, QueueSpec, SequenceBatching


class SequencedRequest(QueuedRequest):
    """A request that knows its sequence."""

    __slots__ = ("_correlation",)

    def __init__(
        self, correlation: Sequence, *, key: str = "", nbytes: int = 1, timeout_s: float | None = None
    ) -> None:
        super().__init__(1, nbytes, key, timeout_s=timeout_s)
        self._correlation = correlation

    @property
    def correlation(self) -> Sequence:
        return self._correlation

    def __repr__(self) -> str:
        return f"<{self._correlation} {self.state.name}>"


class Sequenced(Clocked):
    """The scheduler of a model with sequences."""

    def __init__(
        self,
        strategy: str = "direct",
        *,
        instances: int = 1,
        max_batch_size: int = 4,
        sequence: SequenceBatching | None = None,
        batching: BatchingSpec | None = None,
        max_requests: int = 0,
        prefetch: int = 0,
        front_lost_at: float = -math.inf,
    ) -> None:
        spec = model_spec(
            max_batch_size=max_batch_size,
            sequence=sequence or SequenceBatching(strategy, max_sequence_idle_us=1000),
            batching=batching or BatchingSpec(),
            queue=QueueSpec(max_requests, 0),
            prefetch=prefetch,
        )
        super().__init__(SequenceScheduler(spec, front_lost_at), instances)

    def submit(
        self, correlation_id: int | str, flags: str = "", *, key: str = "", timeout_us: int | None = None
    ) -> SequencedRequest:
        """A request with the ``flags`` "s" for start and "e" for end."""
        timeout_s = None if timeout_us is None else timeout_us / US_A_SECOND
        correlation = Sequence(correlation_id, "s" in flags, "e" in flags)
        request = SequencedRequest(correlation, key=key, timeout_s=timeout_s)
        self.scheduler.submit(request, self.now)
        return request

    def submit_all(self, requests: str) -> list[SequencedRequest]:
        """Requests of sequences, as ``a:s a b:se``: the name of each, and its flags."""
        return [self.submit(*one.split(":")) for one in requests.split()]

    def run_all(self) -> list[str]:
        """The sequences of every batch that goes now, each ending before the next is formed."""
        return ["".join(map(str, step)) for step in iter(self.step, None) if step is not None]

    def step(self) -> list[int | str] | None:
        """Form a batch and end it at once: the sequences in it, in the order of its rows."""
        batch = self.next()
        if batch is None:
            return None
        self.scheduler.complete(batch.batch_id)
        return ids(batch)

    def expired(self) -> list[QueuedRequest]:
        return self.scheduler.expire(self.now)


def ids(batch: Batch) -> list[int | str]:
    """The sequences of a batch."""
    return [one.correlation.id for one in batch.requests if one.correlation is not None]
