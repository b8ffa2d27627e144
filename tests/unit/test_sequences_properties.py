"""What holds for the scheduler of sequences whatever happens, in whatever order.

The machine plays clients, workers and time against it, and keeps its own books of what each sequence may
still say and where it is.
"""

from __future__ import annotations

from exploring import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled import US_A_SECOND, model_spec
from sequenced import SequencedRequest, ids

from gpuserve.core.errors import InvalidArgument, Unavailable
from gpuserve.front.requests.inference import Sequence
from gpuserve.front.scheduling.request_queue import QueuedRequest, RequestState
from gpuserve.front.scheduling.sequence_scheduler import SequenceScheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, QueueSpec, SequenceBatching, SequenceControl

INSTANCES = ("a", "b", "c")
IDLE_US = 50
READY = (SequenceControl("READY", "ready", "BOOL", (False, True)),)


class SequenceMachine(RuleBasedStateMachine):
    """Everybody and everything around one scheduler."""

    @initialize(
        strategy=st.sampled_from(["direct", "oldest"]),
        max_batch_size=st.sampled_from([4, 2, 1, 0]),
        delay_us=st.sampled_from([0, 0, 10]),
        data=st.data(),
    )
    def start(self, strategy: str, max_batch_size: int, delay_us: int, data: st.DataObject) -> None:
        direct = strategy == "direct"
        self.max_batch_size = max_batch_size
        self.prefetch = data.draw(st.integers(0, 1))
        self.sequence = SequenceBatching(
            strategy,
            IDLE_US,
            0 if direct else data.draw(st.integers(0, 3)),
            data.draw(st.sampled_from([0.0, 0.6])) if direct else 0.0,
            data.draw(st.sampled_from([(), READY])),
        )
        self.scheduler = SequenceScheduler(
            model_spec(
                max_batch_size=max_batch_size,
                sequence=self.sequence,
                batching=BatchingSpec(delay_us, merge=data.draw(st.sampled_from([True, True, True, False]))),
                queue=QueueSpec(0, 0),
                prefetch=self.prefetch,
            )
        )
        self.now = 0.0
        self.up: set[str] = set()
        self.running: dict[int, Batch] = {}
        self.waiting: list[SequencedRequest] = []
        self.accepted = 0
        self.ends: dict[QueuedRequest, str] = {}
        #: What each callable knows: the sequences that it was given a part of, and not their end.
        self.known: set[tuple[str, int | str]] = set()
        #: Where each sequence is.
        self.places: dict[int | str, str] = {}
        for instance in INSTANCES[: data.draw(st.sampled_from([2, 1, 3, 0]))]:
            self.instance_up(instance)

    # ---- what happens ---------------------------------------------------------------------

    @rule(
        correlation_id=st.sampled_from([1, 2, 3, 4, 5, 6, "x", "y"]),
        start=st.sampled_from([True, False, False]),
        end=st.sampled_from([True, False, False]),
        key=st.sampled_from(["", "", "", "k"]),
        timeout_us=st.sampled_from([None, None, None, 20]),
    )
    def submit(
        self, correlation_id: int | str, start: bool, end: bool, key: str, timeout_us: int | None
    ) -> None:
        timeout_s = None if timeout_us is None else timeout_us / US_A_SECOND
        request = SequencedRequest(Sequence(correlation_id, start, end), key=key, timeout_s=timeout_s)
        try:
            self.scheduler.submit(request, self.now)
        except (InvalidArgument, Unavailable):  # it never began, or went with its instance
            assert not start, "a start is never refused"
            assert request.state is RequestState.NEW
            return
        self.accepted += 1
        self.waiting.append(request)

    @rule(
        correlation_id=st.sampled_from([1, 2, 3, 4, "x"]),
        more=st.integers(0, 3),
        end=st.sampled_from([True, False]),
    )
    def submit_many(self, correlation_id: int | str, more: int, end: bool) -> None:
        self.submit(correlation_id, True, False, "", None)
        for number in range(more):
            self.submit(correlation_id, False, end and number == more - 1, "", None)

    @rule(us=st.sampled_from([0, 1, 5, 10, 30, 60]))
    def time_passes(self, us: int) -> None:
        self.now += us / US_A_SECOND
        self._expire()

    @rule(again=st.booleans())
    def finish_all_and_dispatch(self, again: bool) -> None:
        for batch_id in list(self.running):
            self._finish(batch_id)
        self.dispatch()
        if again:
            self.finish_all_and_dispatch(False)

    @rule()
    def dispatch(self) -> None:
        self._expire()
        while (batch := self.scheduler.next_batch(self.now)) is not None:
            self._check(batch)
        wakeup = self.scheduler.next_wakeup(self.now)
        assert wakeup is None or wakeup >= self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        if request.state is not RequestState.QUEUED:  # it fell with another, and that is not told yet
            assert self.scheduler.cancel(request) is False
            return
        assert self.scheduler.cancel(request) is True
        self.waiting.remove(request)
        self._end(request, "cancelled")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel_running(self, data: st.DataObject) -> None:
        batch = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        assert self.scheduler.cancel(data.draw(st.sampled_from(batch.requests))) is False

    @precondition(lambda self: len(self.up) < len(INSTANCES))
    @rule(data=st.data())
    def another_instance(self, data: st.DataObject) -> None:
        self.instance_up(data.draw(st.sampled_from(sorted(set(INSTANCES) - self.up))))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def instance_down(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        self.up.remove(instance)
        self._go_down(instance)

    def _go_down(self, instance: str) -> None:
        lost = self.scheduler.instance_down(instance)
        for batch_id in [n for n, batch in self.running.items() if batch.instance == instance]:
            for request in self.running.pop(batch_id).requests:
                assert request.cancelled or request in lost, "what ran there is lost"
                if request.cancelled:
                    self._end(request, "cancelled")
        self.known = {(where, name) for where, name in self.known if where != instance}
        for request in lost:
            if request in self.waiting:
                self.waiting.remove(request)
            self._end(request, "lost")

    def instance_up(self, instance: str) -> None:
        self.scheduler.instance_up(instance)
        self.up.add(instance)

    # ---- the books ------------------------------------------------------------------------

    def _end(self, request: QueuedRequest, how: str) -> None:
        assert request not in self.ends, "a request ends once"
        assert request.state is RequestState.FINISHED
        self.ends[request] = how

    def _finish(self, batch_id: int) -> None:
        batch = self.running.pop(batch_id)
        assert self.scheduler.complete(batch_id) is batch
        for request in batch.requests:
            self._end(request, "cancelled" if request.cancelled else "finished")

    def _expire(self) -> None:
        for request in self.scheduler.expire(self.now):
            assert isinstance(request, SequencedRequest)
            self.waiting.remove(request)
            due = request.deadline is not None and request.deadline <= self.now
            self._end(request, "expired" if due and not request.cancelled else "cancelled")

    def _check(self, batch: Batch) -> None:
        """A batch as it may be; it runs from now on."""
        assert self._may_run(batch)
        assert 1 <= len(batch.requests) <= max(1, self.max_batch_size)
        assert len({request.merge_key for request in batch.requests}) == 1
        names = ids(batch)
        assert len(set(names)) == len(names), "one request of each sequence"
        capacity = 1 if self.sequence.strategy == "direct" else 1 + self.prefetch
        assert sum(one.instance == batch.instance for one in self.running.values()) < capacity
        for name in batch.dropped:
            assert (batch.instance, name) in self.known, "only what it knows is dropped, once"
            self.known.remove((batch.instance, name))
        for request in batch.requests:
            assert isinstance(request, SequencedRequest)
            self._check_turn(request, batch)
        if self.sequence.keeps_rows:
            assert len(set(batch.seats)) == len(batch.requests)
        else:
            assert batch.seats == ()
        self.running[batch.batch_id] = batch

    def _may_run(self, batch: Batch) -> bool:
        return batch.instance in self.up

    def _check_turn(self, request: SequencedRequest, batch: Batch) -> None:
        name, start, end = request.correlation
        first = next(
            one
            for one in self.waiting
            if one.correlation.id == name and one.state is not RequestState.FINISHED
        )
        assert request is first, "the requests of a sequence run in their order"
        self.waiting.remove(request)
        assert not any(name in ids(one) for one in self.running.values()), "one at a time"
        assert start or self.places[name] == batch.instance, "a sequence meets one instance"
        assert start or (batch.instance, name) in self.known, "what goes on has begun there"
        self.places[name] = batch.instance
        self.known.add((batch.instance, name))
        if end:
            self.known.remove((batch.instance, name))

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts = self.scheduler.statistics()
        settled = counts.finished + counts.cancelled + counts.expired + counts.lost
        assert counts.accepted == self.accepted
        assert counts.accepted == counts.queued + counts.running_requests + settled
        assert counts.queued == sum(one.state is RequestState.QUEUED for one in self.waiting)
        assert counts.running_requests == sum(len(one.requests) for one in self.running.values())

    def teardown(self) -> None:
        """Whatever has happened, all that waits runs in the end."""
        if not hasattr(self, "scheduler"):
            return
        if not self.up:
            self.instance_up(INSTANCES[0])
        for _ in range(4 * self.accepted + 10):
            self.dispatch()
            if not self.running:
                wakeup = self.scheduler.next_wakeup(self.now)
                if wakeup is None:
                    break
                self.now = wakeup
                continue
            for batch_id in list(self.running):
                self._finish(batch_id)
        self._expire()
        assert self.waiting == []
        assert len(self.ends) == self.accepted


TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
