"""Clients whose requests kill workers: from when their requests run alone and last, and until when."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present
from scheduled import model_spec

from gpuserve.core.errors import DeadlineExceeded, QueueFull
from gpuserve.front.scheduling.device_scheduler import DeviceScheduler
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RemovalReason, RequestState
from gpuserve.front.scheduling.scheduler import Scheduler
from gpuserve.front.scheduling.slots import Batch
from gpuserve.front.scheduling.suspects import (
    DEATHS,
    FIRST_BACKOFF_S,
    FORGIVEN_AFTER_S,
    MAX_BACKOFF_S,
    MOST_CLIENTS,
    Suspects,
)
from gpuserve.model.spec import BatchingSpec, PolicySpec, QueueSpec

QUEUES = {
    "plain": QueueSpec(),
    "levels": QueueSpec(priority_levels=2, default_priority=1),
    "delaying": QueueSpec(policy=PolicySpec(default_timeout_us=50_000, timeout_action="delay")),
    "fair": QueueSpec(fairness="client"),
}


class Sent(QueuedRequest):
    """A request of a client that is known by name."""

    __slots__ = ("name", "on_device")

    def __init__(self, name: str, deadline: float | None = None, on_device: str = "") -> None:
        super().__init__(1, 1, "", deadline)
        self.name = name
        self.on_device = on_device

    @property
    def device(self) -> str:
        return self.on_device

    def client_of(self, header: bytes) -> str:
        return self.name


def scheduler(queue: str = "plain") -> ModelScheduler:
    """A scheduler with one instance."""
    options = {"max_batch_size": 8, "batching": BatchingSpec(), "retry_on_worker_death": True}
    of = ModelScheduler(model_spec(**options, queue=QUEUES[queue]))
    of.instance_up("i")
    return of


def kill(of: Scheduler, now: float) -> list[QueuedRequest]:
    """Have the only instance die and come back; the requests that are lost."""
    lost = of.instance_down("i", now)
    of.instance_up("i")
    return lost


def suspected(of: ModelScheduler, name: str = "poison", now: float = 0.0) -> None:
    """Make a client a suspect by one request, under which two workers die."""
    sent = submitted(of, name, now=now)
    assert must_next(of, now).requests == sent
    assert kill(of, now) == []
    assert of.blame is not None
    assert not of.blame.is_new
    assert must_next(of, now).requests == sent
    assert kill(of, now) == sent
    assert of.blame == (name, True, False)


def must_next(of: Scheduler, now: float = 0.0) -> Batch:
    assert of.expire(now) == []
    return present(of.next_batch(now))


def submitted(of: Scheduler, *names: str, now: float = 0.0) -> list[Sent]:
    sent = [Sent(name) for name in names]
    for one in sent:
        of.submit(one, now)
    return sent


def order(of: Scheduler, n_batches: int) -> list[list[QueuedRequest]]:
    """The requests of the next batches, each ending before the next is formed."""
    batches = []
    for _ in range(n_batches):
        batches.append(must_next(of, FIRST_BACKOFF_S))
        of.complete(batches[-1].batch_id)
    return [one.requests for one in batches]


# ---- clients ------------------------------------------------------------------------------------


def test_the_second_death_makes_a_suspect_and_time_forgives() -> None:
    suspects = Suspects()
    assert suspects.blame("a", 0.0) == ("a", False, False)
    assert "a" not in suspects
    assert suspects.blame("a", 1.0) == ("a", True, False)
    assert suspects.blame("a", 2.0) == ("a", False, True)
    suspects.forgive(1.9 + FORGIVEN_AFTER_S)
    assert "a" in suspects
    suspects.forgive(2.0 + FORGIVEN_AFTER_S)
    assert "a" not in suspects
    assert suspects.blame("a", 100.0) == ("a", False, False)
    suspects = Suspects()  # the first death was in company, and blamed nobody
    assert suspects.blame("a", 0.0, attempts=2) == ("a", True, False)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 3 * MOST_CLIENTS), st.floats(0.0, 1.0)), max_size=200))
def test_few_clients_are_remembered(deaths: list[tuple[int, float]]) -> None:
    suspects, now = Suspects(), 0.0
    for client in range(MOST_CLIENTS):
        suspects.blame(-client - 1, now)
    seen: dict[int, list[float]] = {}
    for client, later_s in deaths:
        now += later_s
        suspects.blame(client, now)
        seen.setdefault(client, []).append(now)
        assert len(suspects.deaths) <= MOST_CLIENTS
    for client, times in seen.items():  # too few deaths for any of them to be forgotten for others
        steady = all(after - before < FORGIVEN_AFTER_S for before, after in pairwise(times))
        if steady and now - times[-1] < FORGIVEN_AFTER_S:
            assert (client in suspects) == (len(times) >= DEATHS)


# ---- their requests -----------------------------------------------------------------------------


@pytest.mark.parametrize("queue", QUEUES)
def test_requests_of_a_suspect_run_alone_and_last(queue: str) -> None:
    of = scheduler(queue)
    suspected(of)
    first, good, second, other = submitted(of, "poison", "good", "poison", "good")
    assert order(of, 3) == [[good, other], [first], [second]]
    assert of.next_batch(FIRST_BACKOFF_S) is None


@pytest.mark.parametrize("queue", QUEUES)
def test_what_waits_already_is_isolated_too(queue: str) -> None:
    of = scheduler(queue)
    sent = submitted(of, "poison")
    must_next(of)
    first, good, second = submitted(of, "poison", "good", "poison")
    kill(of, 0.0)
    assert must_next(of).requests == sent
    assert kill(of, 0.0) == sent
    assert order(of, 3) == [[good], [first], [second]]


def test_an_isolated_request_that_kills_its_worker_is_lost_at_once() -> None:
    of = scheduler()
    suspected(of)
    (sent,) = submitted(of, "poison")
    must_next(of, FIRST_BACKOFF_S)
    assert kill(of, FIRST_BACKOFF_S) == [sent]
    assert of.blame == ("poison", False, True)
    assert sent.removal_reason is RemovalReason.ISOLATED


def test_a_suspect_backs_off_in_place_of_the_instance() -> None:
    of, now = scheduler(), 0.0
    suspected(of)
    for expected_s in (1.0, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF_S, MAX_BACKOFF_S):
        sent = submitted(of, "poison", now=now)
        assert of.next_batch(now) is None
        assert of.next_wakeup(now) == now + expected_s
        submitted(of, "good", now=now)  # who does not wait for that
        of.complete(must_next(of, now).batch_id)
        now += expected_s
        assert must_next(of, now).requests == sent
        assert kill(of, now) == sent


def test_one_suspect_does_not_wait_for_the_back_off_of_another() -> None:
    of = scheduler()
    suspected(of, "a", 0.0)
    suspected(of, "b", 10.0)
    _, due = submitted(of, "b", "a", now=10.0)
    assert must_next(of, 10.0).requests == [due]


def test_a_death_in_company_blames_nobody_and_one_that_is_none_neither() -> None:
    of = scheduler()
    for _ in range(3):
        submitted(of, "a", "b")
        assert len(must_next(of).requests) == 2
        kill(of, 0.0)
        assert of.blame is None
        for _ in range(2):
            of.complete(must_next(of).batch_id)
    for _ in range(3):
        submitted(of, "a")
        must_next(of)
        of.instance_down("i")  # it was retired
        assert of.blame is None
        of.instance_up("i")
        of.complete(must_next(of).batch_id)


def test_a_forgiven_client_has_company_again() -> None:
    of = scheduler()
    suspected(of)
    sent = submitted(of, "poison", "good", now=FORGIVEN_AFTER_S)
    assert must_next(of, FORGIVEN_AFTER_S).requests == sent


def test_a_suspect_has_an_instance_of_several_slots_for_itself() -> None:
    suspects = Suspects()
    suspects.blame("poison", 0.0, attempts=2)
    of = ModelScheduler(model_spec(max_batch_size=0, queue=QueueSpec()), suspects=suspects)
    of.instance_up("i", 4)
    submitted(of, "good")
    running = must_next(of)
    bad = submitted(of, "poison")
    assert of.next_batch(0.0) is None  # it would have company
    assert of.next_wakeup(0.0) is None
    of.complete(running.batch_id)
    assert of.next_wakeup(0.0) == FIRST_BACKOFF_S
    assert must_next(of, FIRST_BACKOFF_S).requests == bad
    submitted(of, "good", now=FIRST_BACKOFF_S)
    assert of.next_batch(FIRST_BACKOFF_S) is None


def test_a_suspect_is_one_for_all_devices() -> None:
    spec = model_spec(max_batch_size=8, queue=QueueSpec(), retry_on_worker_death=True)
    of = DeviceScheduler(lambda slots, suspects: ModelScheduler(spec, slots, suspects))
    of.instance_up("i", 1, "cuda:0")
    first = submitted(of, "poison")
    must_next(of)
    bound, good = Sent("poison", on_device="cuda:0"), Sent("good", on_device="cuda:0")
    of.submit(bound, 0.0)
    of.instance_down("i", 0.0)
    of.instance_up("i", 1, "cuda:0")
    assert must_next(of).requests == first
    of.instance_down("i", 0.0)
    of.instance_up("i", 1, "cuda:0")
    of.submit(good, 0.0)
    assert order(of, 2) == [[good], [bound]]


# ---- whatever happens ---------------------------------------------------------------------------

EVENTS = st.one_of(
    st.tuples(st.just("send"), st.sampled_from("abc"), st.one_of(st.none(), st.floats(0.01, 5.0))),
    st.tuples(st.just("death"), st.integers(0, 1), st.none()),
    st.tuples(st.just("end"), st.integers(0, 3), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.none()),
    st.tuples(st.just("wait"), st.floats(0.0, FORGIVEN_AFTER_S), st.none()),
)


class World:
    """Two instances, clients and a clock; every batch is formed as soon as it can be."""

    def __init__(self, queue: str, slots: int, **options: Any) -> None:
        self.suspects = Suspects()
        spec = model_spec(max_batch_size=4, queue=QUEUES[queue], retry_on_worker_death=True, **options)
        self.of = ModelScheduler(spec, suspects=self.suspects)
        self.slots, self.now = slots, 0.0
        self.sent: list[Sent] = []
        self.running: list[Batch] = []
        for number in range(2):
            self.of.instance_up(f"i{number}", slots)

    def happen(self, what: str, value: Any, more: float | None) -> None:
        if what == "send":
            self.sent.append(Sent(value, None if more is None else self.now + more))
            with contextlib.suppress(QueueFull, DeadlineExceeded):
                self.of.submit(self.sent[-1], self.now)
        elif what == "death":
            self.of.instance_down(f"i{value}", self.now)
            self.running = [batch for batch in self.running if batch.instance != f"i{value}"]
            self.of.instance_up(f"i{value}", self.slots)
        elif what == "end" and value < len(self.running):
            self.of.complete(self.running.pop(value).batch_id, 0.001, self.now)
        elif what == "cancel" and value < len(self.sent):
            self.of.cancel(self.sent[value])
        elif what == "wait":
            self.now += value
        self.form()

    def form(self) -> None:
        self.of.expire(self.now)
        while (batch := self.of.next_batch(self.now)) is not None:
            clients = {one.name for one in batch.requests if isinstance(one, Sent)}
            if any(name in self.suspects for name in clients):
                assert len(batch.requests) == 1, f"{clients} have company"
                beside = [one for one in self.running if one.instance == batch.instance]
                assert self.slots == 1 or not beside, f"{clients} run beside {beside}"
            self.running.append(batch)
            self.of.expire(self.now)

    @property
    def queued(self) -> int:
        return sum(one.state is RequestState.QUEUED for one in self.sent)


@pytest.mark.parametrize("queue", QUEUES)
@settings(max_examples=examples(150), deadline=None)
@given(
    events=st.lists(EVENTS, max_size=60),
    slots=st.integers(1, 3),
    delay_us=st.sampled_from([0, 20_000]),
    prefetch=st.integers(0, 1),
)
def test_no_request_of_a_suspect_has_company_and_none_is_forgotten(
    queue: str, events: list[Any], slots: int, delay_us: int, prefetch: int
) -> None:
    world = World(queue, slots, batching=BatchingSpec(max_queue_delay_us=delay_us), prefetch=prefetch)
    for event in events:
        world.happen(*event)
    counts = world.of.statistics()
    gone = counts.finished + counts.cancelled + counts.expired + counts.lost
    assert counts.queued == world.queued
    assert counts.accepted == counts.queued + counts.running_requests + gone
    for _ in range(2 * len(world.sent) + 2):  # with instances that end what they run, all get their turn
        if world.running:
            world.happen("end", 0, None)
        else:
            wakeup = world.of.next_wakeup(world.now)
            world.happen("wait", 0.0 if wakeup is None else wakeup - world.now, None)
    assert world.queued == 0
