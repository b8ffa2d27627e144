"""What holds for a scheduler whose requests have priorities and whose queue has policies, whatever happens.

The machine of ``test_batcher_properties`` with books of its own on levels and times in the queue.
"""

from __future__ import annotations

from typing import Any

from exploring import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from test_batcher_properties import SchedulerMachine

from gpuserve.core.errors import QueueFull
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.model.spec import PolicySpec, QueueSpec

POLICIES = st.builds(
    PolicySpec,
    timeout_action=st.sampled_from(["reject", "delay"]),
    default_timeout_us=st.sampled_from([0, 0, 5, 400]),
    allow_timeout_override=st.booleans(),
    max_requests=st.sampled_from([0, 0, 0, 4]),
)


@st.composite
def queue_specs(draw: st.DrawFn) -> QueueSpec:
    levels = draw(st.sampled_from([3, 3, 3, 1, 0]))
    numbers = st.integers(1, levels) if levels else st.nothing()
    return QueueSpec(
        max_requests=draw(st.sampled_from([0, 0, 30])),
        max_nbytes=0,
        priority_levels=levels,
        default_priority=draw(numbers) if levels else 0,
        policy=draw(POLICIES),
        policies=tuple(draw(st.dictionaries(numbers, POLICIES)).items()) if levels else (),
    )


class PrioritiesMachine(SchedulerMachine):
    """Clients of several priorities, some of whom may not wait for ever."""

    @initialize()
    def open_books(self) -> None:
        #: When the time of a queued request in its level runs out.
        self.times: dict[QueuedRequest, float] = {}
        #: In the order in which they were delayed.
        self.delayed: list[QueuedRequest] = []

    @staticmethod
    def queues() -> st.SearchStrategy[QueueSpec]:
        return queue_specs()

    def _level(self, request: QueuedRequest) -> int:
        levels = self.queue.priority_levels
        return request.priority if 1 <= request.priority <= levels else self.queue.default_priority

    def _policy(self, request: QueuedRequest) -> PolicySpec:
        return dict(self.queue.policies).get(self._level(request), self.queue.policy)

    def _refusal(self, request: QueuedRequest) -> type[Exception] | None:
        most = self._policy(request).max_requests
        same = [one for one in self.queued if self._level(one) == self._level(request)]
        return QueueFull if most and len(same) >= most else super()._refusal(request)

    def _submit(self, request: QueuedRequest) -> None:
        policy, own_s = self._policy(request), request.timeout_s
        super()._submit(request)
        if not self.submitted or self.submitted[-1] is not request:
            assert request.timeout_s == own_s
            return
        limit_s = policy.default_timeout_us / 1e6
        is_shorter = policy.allow_timeout_override and own_s is not None and own_s < limit_s
        assert request.timeout_s == (None if is_shorter else own_s)
        if limit_s:
            self.times[request] = self.now + (own_s if is_shorter and own_s else limit_s)

    def in_order(self) -> list[QueuedRequest]:
        def rank(request: QueuedRequest) -> tuple[int, Any]:
            delayed = request in self.delayed
            return self._level(request), (delayed, self.delayed.index(request) if delayed else 0)

        return sorted(self.waiting, key=rank)  # stable: otherwise in order of arrival

    def _timed_out(self, action: str) -> list[QueuedRequest]:
        over = [one for one in self.waiting if self.times.get(one, self.now + 1) <= self.now]
        return [one for one in over if self._policy(one).timeout_action == action]

    def _due(self) -> list[QueuedRequest]:
        late = super()._due()
        return late + [one for one in self._timed_out("reject") if one not in late]

    def _to_be_delayed(self) -> list[QueuedRequest]:
        late = super()._due()
        over = [one for one in self._timed_out("delay") if one not in late]
        return sorted(over, key=self.times.__getitem__)

    def _expire(self) -> bool:
        delayed = self._to_be_delayed()
        changed = super()._expire()
        self.delayed += delayed
        for request in delayed:
            del self.times[request]
        return changed

    def _has_time(self, request: QueuedRequest) -> bool:
        # One that waits for its second run has had its time in the queue.
        return super()._has_time(request) or (request in self.waiting and request in self.times)


PrioritiesMachine.TestCase.settings = settings(
    max_examples=examples(200),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestPriorities = PrioritiesMachine.TestCase
