"""What holds where some requests must run on one device, whatever happens, in whatever order."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from device_requests import BoundRequest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduled import model_spec

from gpuserve.core.errors import QueueFull
from gpuserve.front.scheduling.device_scheduler import DeviceScheduler
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import RequestState
from gpuserve.front.scheduling.scheduler import Scheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, QueueSpec

DEVICES = {"a": "cuda:0", "b": "cuda:0", "c": "cuda:1", "d": "cpu"}
ANY = ""
MAX_REQUESTS = 12


class DeviceMachine(RuleBasedStateMachine):
    """Clients, workers and time against a scheduler; every batch is formed as soon as it can be."""

    @initialize(
        max_batch_size=st.sampled_from([0, 1, 4]),
        prefetch=st.integers(0, 1),
        up=st.sets(st.sampled_from("abcd")),
    )
    def start(self, max_batch_size: int, prefetch: int, up: set[str]) -> None:
        self.scheduler = DeviceScheduler(
            lambda slots, suspects: ModelScheduler(
                model_spec(
                    max_batch_size=max_batch_size,
                    batching=BatchingSpec(),
                    queue=QueueSpec(max_requests=MAX_REQUESTS),
                    prefetch=prefetch,
                    retry_on_worker_death=True,
                ),
                slots,
                suspects,
            )
        )
        self.capacity = 1 + prefetch
        self.prefetch = prefetch
        self.now = 0.0
        self.up: set[str] = set()
        self.requests: list[BoundRequest] = []
        self.running: dict[int, Batch] = {}
        self.ended: set[BoundRequest] = set()
        for name in sorted(up):
            self.instance_up(name)

    def pump(self) -> None:
        for late in self.scheduler.expire(self.now):
            assert isinstance(late, BoundRequest)
            assert late.deadline is not None
            assert late.deadline <= self.now
            self.ended.add(late)
        while (batch := self.scheduler.next_batch(self.now)) is not None:
            assert batch.instance in self.up
            devices = {one.device for one in batch.requests}
            assert len(devices) == 1, "what must run on a device is apart from what need not"
            assert devices <= {ANY, DEVICES[batch.instance]}
            self.running[batch.batch_id] = batch

    @rule(
        device=st.sampled_from([ANY, ANY, "cuda:0", "cuda:1", "cpu"]),
        key=st.sampled_from("aab"),
        due=st.sampled_from([None, None, 2.0]),
    )
    def submit(self, device: str, key: str, due: float | None) -> None:
        deadline = None if due is None else self.now + due
        request = BoundRequest(1, 1, key, deadline, device=device)
        if self.scheduler.statistics().queued >= MAX_REQUESTS:
            with pytest.raises(QueueFull):
                self.scheduler.submit(request, self.now)
            return
        self.scheduler.submit(request, self.now)
        self.requests.append(request)
        self.pump()

    @rule()
    def time_passes(self) -> None:
        self.now += 1.0
        self.pump()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests[-15:]))
        was_queued = request.state is RequestState.QUEUED
        assert self.scheduler.cancel(request) is was_queued
        if was_queued:
            self.ended.add(request)
        self.pump()

    @rule(name=st.sampled_from("abcd"))
    def instance_up(self, name: str) -> None:
        if name not in self.up:
            self.up.add(name)
            self.scheduler.instance_up(name, 1, DEVICES[name])
            self.pump()

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def instance_down(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(name)
        here = [one for one in self.running.values() if one.instance == name]
        for batch in here:
            del self.running[batch.batch_id]
        for lost in self.scheduler.instance_down(name):
            assert lost.attempts == 2
        self.pump()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        assert self.scheduler.complete(batch.batch_id) is batch
        self.pump()

    @rule(device=st.sampled_from(["cuda:0", "cuda:1"]))
    def nothing_is_to_be_had_on(self, device: str) -> None:
        waiting = {one for one in self.requests if one.device == device and one.state is RequestState.QUEUED}
        assert set(self.scheduler.remove_all(device)) == waiting
        self.ended |= {one for one in self.requests if one in waiting}

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        counts = self.scheduler.statistics()
        assert counts.accepted == len(self.requests)
        assert counts.queued == sum(one.state is RequestState.QUEUED for one in self.requests)
        assert counts.accepted == (
            counts.queued + counts.running_requests + counts.finished + counts.cancelled + counts.expired
            + counts.lost
        )  # fmt: skip

    @invariant()
    def nothing_waits_beside_an_idle_instance_that_could_run_it(self) -> None:
        busy = {batch.instance for batch in self.running.values()}
        idle = [DEVICES[name] for name in self.up - busy]
        for request in self.requests:
            if request.state is RequestState.QUEUED:
                assert not idle if request.device == ANY else request.device not in idle


TestDevices = DeviceMachine.TestCase
TestDevices.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


EVENTS = st.lists(st.sampled_from(["submit", "submit", "submit", "end", "up", "down", "later"]), max_size=60)


@given(EVENTS, st.sampled_from([0, 4]), st.integers(0, 1), st.sampled_from([0, 1_500_000]))
@settings(max_examples=examples(150), deadline=None)
def test_where_no_request_names_a_device_it_is_the_scheduler_that_all_models_have(
    events: list[str], max_batch_size: int, prefetch: int, delay_us: int
) -> None:
    queue, batching = QueueSpec(max_requests=5), BatchingSpec(max_queue_delay_us=delay_us)
    options: dict[str, Any] = {"max_batch_size": max_batch_size, "batching": batching, "queue": queue}
    options |= {"prefetch": prefetch, "retry_on_worker_death": True}
    several = DeviceScheduler(partial(ModelScheduler, model_spec(**options)))
    both: list[Scheduler] = [ModelScheduler(model_spec(**options)), several]
    seen = [_play(scheduler, events) for scheduler in both]
    assert seen[0] == seen[1]
    assert both[0].statistics() == both[1].statistics()


def _play(scheduler: Scheduler, events: list[str]) -> list[object]:
    """What a scheduler does when all this happens to it."""
    seen: list[object] = []
    running: list[Batch] = []
    up: list[str] = []
    now = 0.0
    for number, event in enumerate(events):
        if event == "submit":
            with suppress(QueueFull):
                scheduler.submit(BoundRequest(1, number, ""), now)
        elif event == "end" and running:
            scheduler.complete(running.pop(0).batch_id)
        elif event == "up" and len(up) < len(DEVICES):
            up.append(next(name for name in DEVICES if name not in up))
            scheduler.instance_up(up[-1], 1, DEVICES[up[-1]])
        elif event == "down" and up:
            name = up.pop(0)
            running = [one for one in running if one.instance != name]
            seen.append([one.nbytes for one in scheduler.instance_down(name)])
        else:
            now += 1.0
        while (batch := scheduler.next_batch(now)) is not None:
            running.append(batch)
            seen.append((batch.instance, [one.nbytes for one in batch.requests]))
        seen.append(scheduler.next_wakeup(now))
    return seen
