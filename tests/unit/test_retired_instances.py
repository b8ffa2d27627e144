"""Instances that are to go: they get nothing new, finish what they have, and nothing is lost or run twice."""

from __future__ import annotations

from typing import Any

import pytest
from device_requests import BoundRequest
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from present import present
from scheduled import Model, model_spec
from sequenced import Sequenced, ids
from test_batcher_properties import INSTANCES, SchedulerMachine
from test_device_scheduler_properties import DEVICES, DeviceMachine
from test_sequences_properties import SequenceMachine

from gpuserve.config.settings.server import ResourceLimit
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.rate_limiter import RateLimitedSource, SharedResources
from gpuserve.front.scheduling.request_queue import QueuedRequest
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, InstanceSpec, QueueSpec, Resource
from gpuserve.model.spec import RateLimiter as Rate

FEW = settings(
    max_examples=examples(100),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class RetiringMachine(SchedulerMachine):
    """The scheduler of one model, some of whose instances are on their way out."""

    def __init__(self) -> None:
        super().__init__()
        self.retired: set[str] = set()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        self.scheduler.retire(instance)
        self.up.remove(instance)
        self.retired.add(instance)

    @rule()
    def let_go(self) -> None:
        for instance in sorted(self.retired):
            idle = not self._load(instance)
            assert self.scheduler.is_idle(instance) is idle
            if idle:
                assert self.scheduler.instance_down(instance) == []
                self.retired.remove(instance)

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def a_retired_one_dies(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.retired)))
        self.retired.remove(instance)
        self._go_down(instance)

    @rule(instance=st.sampled_from(INSTANCES))
    def instance_up(self, instance: str) -> None:
        if instance not in self.up | self.retired:
            self.scheduler.instance_up(instance)
            self.up.add(instance)

    def teardown(self) -> None:
        gone, self.retired = sorted(self.retired), set()
        for instance in gone:
            self._go_down(instance)
        super().teardown()


class RetiringSequenceMachine(SequenceMachine):
    """The same for sequences, which stay at an instance that is retired until they end."""

    def __init__(self) -> None:
        super().__init__()
        self.retired: dict[str, set[int | str]] = {}

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.up)))
        self.scheduler.retire(instance)
        self.up.remove(instance)
        sequences = self.scheduler._sequences.values()
        self.retired[instance] = {one.id for one in sequences if one.instance == instance}

    @rule()
    def let_go(self) -> None:
        for instance in sorted(self.retired):
            if self.scheduler.is_idle(instance):
                assert all(batch.instance != instance for batch in self.running.values())
                del self.retired[instance]
                self.known = {one for one in self.known if one[0] != instance}
                assert self.scheduler.instance_down(instance) == []

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def a_retired_one_dies(self, data: st.DataObject) -> None:
        instance = data.draw(st.sampled_from(sorted(self.retired)))
        del self.retired[instance]
        self._go_down(instance)

    @precondition(lambda self: len(self.up) + len(self.retired) < len(INSTANCES))
    @rule(data=st.data())
    def another_instance(self, data: st.DataObject) -> None:
        there = self.up | self.retired.keys()
        self.instance_up(data.draw(st.sampled_from(sorted(set(INSTANCES) - there))))

    def _may_run(self, batch: Batch) -> bool:
        if batch.instance in self.retired:
            return set(ids(batch)) <= self.retired[batch.instance]
        return super()._may_run(batch)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            gone, self.retired = sorted(self.retired), {}
            for instance in gone:
                self._go_down(instance)
        super().teardown()


class RetiringDeviceMachine(DeviceMachine):
    """The same where some requests must run on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.retired: set[str] = set()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.up)))
        self.scheduler.retire(name)
        self.up.remove(name)
        self.retired.add(name)
        self.pump()

    @rule(name=st.sampled_from("abcd"))
    def instance_up(self, name: str) -> None:
        if name not in self.up | self.retired:
            self.up.add(name)
            self.scheduler.instance_up(name, 1, DEVICES[name])
            self.pump()

    @invariant()
    def who_is_idle_goes(self) -> None:
        for name in sorted(getattr(self, "retired", ())):
            if self.scheduler.is_idle(name):
                assert self.scheduler.instance_down(name) == []
                self.retired.remove(name)


TestRetiring = RetiringMachine.TestCase
TestRetiring.settings = FEW
TestRetiringSequences = RetiringSequenceMachine.TestCase
TestRetiringSequences.settings = FEW
TestRetiringDevices = RetiringDeviceMachine.TestCase
TestRetiringDevices.settings = settings(FEW, max_examples=examples(100))


def test_a_retired_instance_finishes_and_gets_nothing() -> None:
    model = Model(instances=2, max_batch_size=1, prefetch=1)
    model.submit_many(6)
    batches = [model.must_next() for _ in range(4)]
    assert model.next() is None
    model.scheduler.retire("i1")
    assert (model.count("instances"), model.count("slots"), model.count("room")) == (1, 1, 0)
    for batch in [one for one in batches if one.instance == "i1"]:
        assert not model.scheduler.is_idle("i1")
        model.scheduler.complete(batch.batch_id)
        assert model.next() is None, "its room is nobody's"
    assert model.scheduler.is_idle("i1")
    assert model.scheduler.instance_down("i1") == []
    assert model.count("retried") == 0
    for batch in [one for one in batches if one.instance == "i0"]:
        model.scheduler.complete(batch.batch_id)
    assert model.run_all() == [1, 1]


def test_an_instance_that_is_not_up_can_be_retired() -> None:
    model = Model(instances=1)
    model.scheduler.retire("i7")
    assert model.scheduler.is_idle("i7")
    assert model.count("instances") == 1


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_sequences_end_where_they_are_and_new_ones_begin_elsewhere(strategy: str) -> None:
    model = Sequenced(strategy, instances=2)
    model.submit_all("a:s b:s")
    where = {ids(batch)[0]: batch for batch in (model.must_next(), model.must_next())}
    assert {batch.instance for batch in where.values()} == {"i0", "i1"}
    for batch in where.values():
        model.scheduler.complete(batch.batch_id)
    leaving, staying = where["a"].instance, where["b"].instance
    model.scheduler.retire(leaving)
    model.submit_all("c:s d:s a")
    seen: list[tuple[str, list[Any]]] = []
    while (batch := model.next()) is not None:
        seen.append((batch.instance, sorted(map(str, ids(batch)))))
        model.scheduler.complete(batch.batch_id)
    assert [("a" in names, instance) for instance, names in seen if "a" in names] == [(True, leaving)]
    assert {instance for instance, names in seen if "a" not in names} == {staying}
    assert not model.scheduler.is_idle(leaving)
    model.submit("a", "e")
    assert model.step() == ["a"]
    assert model.scheduler.is_idle(leaving)
    assert model.scheduler.instance_down(leaving) == []


def test_an_idle_sequence_keeps_a_retired_instance_for_its_idle_time_only() -> None:
    model = Sequenced(instances=1)
    model.submit("a", "s")
    model.step()
    model.scheduler.retire("i0")
    model.scheduler.instance_up("i1")
    for at_us in (0, 999):
        model.expire_at(at_us)
        assert not model.scheduler.is_idle("i0")
    model.expire_at(1000)
    assert model.scheduler.is_idle("i0")


def limited(count: int, limit: str) -> tuple[ModelScheduler, RateLimitedSource, SharedResources, list[Any]]:
    rate = Rate((Resource("R", 1),))
    instances = [InstanceSpec(f"cpu#{number}", "cpu", {}, rate) for number in range(count)]
    options = {"batching": BatchingSpec(), "queue": QueueSpec(), "retry_on_worker_death": True}
    scheduler = ModelScheduler(model_spec(max_batch_size=0, prefetch=0, **options))
    limiter = SharedResources([ResourceLimit.parse(limit)])
    made = RateLimitedSource(scheduler, instances[:1], limiter, lambda: None)
    scheduler.instance_up(instances[0].name)
    return scheduler, made, limiter, instances


def test_new_instances_share_the_resources_and_retired_ones_leave_them() -> None:
    scheduler, batches, limiter, instances = limited(3, "R:2")
    batches.resize(instances)
    for one in instances[1:]:
        scheduler.instance_up(one.name)
    for _ in range(5):
        scheduler.submit(QueuedRequest(1, 1, ""), 0.0)
    first, second = batches.next_batch(0.0), batches.next_batch(0.0)
    assert first is not None
    assert second is not None
    assert batches.next_batch(0.0) is None, "two of three may run"
    batches.retire(second.instance)
    assert batches.next_batch(0.0) is None
    batches.complete(second.batch_id)
    assert scheduler.is_idle(second.instance)
    assert batches.instance_down(second.instance) == []
    assert batches.instance_down(second.instance) == []
    third = present(batches.next_batch(0.0))
    assert third.instance not in {first.instance, second.instance}
    batches.complete(first.batch_id)
    batches.complete(third.batch_id)
    assert len(limiter._instances) == 2
    batches.close()
    assert not limiter._instances


@given(st.lists(st.sampled_from(["submit", "submit", "end", "retire", "up"]), max_size=40), st.integers(1, 3))
@settings(max_examples=examples(100), deadline=None)
def test_whatever_comes_and_goes_no_more_run_than_there_are_resources(events: list[str], most: int) -> None:
    scheduler, batches, _, _ = limited(1, f"R:{most}")
    running: list[Batch] = []
    up, retired, submitted = ["cpu#0"], list[str](), 0
    rate = Rate((Resource("R", 1),))
    for number, event in enumerate(events, 1):
        if event == "submit":
            scheduler.submit(QueuedRequest(1, 1, ""), 0.0)
            submitted += 1
        elif event == "end" and running:
            batches.complete(running.pop(0).batch_id)
        elif event == "retire" and len(up) > 1:
            retired.append(up.pop())
            batches.retire(retired[-1])
        elif event == "up":
            up.append(f"cpu#{number}")
            batches.resize([InstanceSpec(name, "cpu", {}, rate) for name in up])
            scheduler.instance_up(up[-1])
        while (batch := batches.next_batch(0.0)) is not None:
            assert batch.instance in up
            running.append(batch)
        for name in [one for one in retired if scheduler.is_idle(one)]:
            retired.remove(name)
            assert batches.instance_down(name) == []
        assert len(running) <= most
        waiting = submitted - scheduler.statistics().finished - len(running)
        assert not waiting or len(running) == most or len({one.instance for one in running}) >= len(up)
    assert scheduler.statistics().retried == 0


def test_a_bound_request_goes_to_an_instance_that_stays() -> None:
    machine = RetiringDeviceMachine()
    machine.start(0, 0, {"a", "b"})
    machine.scheduler.retire("a")
    request = BoundRequest(1, 1, "", device="cuda:0")
    machine.scheduler.submit(request, 0.0)
    batch = present(machine.scheduler.next_batch(0.0))
    assert batch.instance == "b"
