"""Clients of one model who take turns: what each of them gets, and who has to go when the queue is full."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import model_spec, must_next

from gpuserve.core.errors import QueueFull
from gpuserve.front.scheduling.model_scheduler import ModelScheduler
from gpuserve.front.scheduling.request_queue import QueuedRequest, RemovalReason, RequestState
from gpuserve.front.scheduling.slots import Batch
from gpuserve.model.spec import BatchingSpec, PolicySpec, QueueSpec


class OfClient(QueuedRequest):
    """A request whose client is known by name."""

    __slots__ = ("name",)

    def __init__(self, name: str, rows: int = 1, nbytes: int = 1, priority: int = 0, shape: str = "") -> None:
        super().__init__(rows, nbytes, shape, priority=priority)
        self.name = name

    def client_of(self, header: bytes) -> str:
        return self.name


def scheduler(max_batch_size: int = 1, *, instances: int = 1, **queue: Any) -> ModelScheduler:
    batching = queue.pop("batching", BatchingSpec())
    spec = model_spec(
        max_batch_size=max_batch_size, batching=batching, queue=QueueSpec(**{"fairness": "client"} | queue)
    )
    made = ModelScheduler(spec)
    for number in range(instances):
        made.instance_up(f"i{number}")
    return made


def send(to: ModelScheduler, names: str, **more: Any) -> list[OfClient]:
    sent = [OfClient(name, **more) for name in names]
    for one in sent:
        to.submit(one, 0.0)
    return sent


def run_all(of: ModelScheduler) -> list[list[Any]]:
    """The requests of each batch that is formed, each ending before the next is."""
    batches: list[list[Any]] = []
    while (batch := of.next_batch(0.0)) is not None:
        batches.append(batch.requests)
        of.complete(batch.batch_id)
    return batches


def names(requests: list[list[Any]]) -> str:
    return "".join(one.name for one in itertools.chain(*requests))


# ---- turns --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_batch_size", "sent", "batches"),
    [
        (1, "aaaaabbb", "a b a b a b a a"),
        (4, "aaaaaabb", "abab aaaa"),  # a batch holds requests of several clients
    ],
)
def test_clients_alternate(max_batch_size: int, sent: str, batches: str) -> None:
    model = scheduler(max_batch_size)
    send(model, sent)
    assert [names([one]) for one in run_all(model)] == batches.split()


def test_who_comes_later_is_next_in_turn() -> None:
    model = scheduler()
    send(model, "aaaa")
    first = must_next(model, 0.0)
    send(model, "ba")
    model.complete(first.batch_id)
    assert names(run_all(model)) == "abaaa"


def test_a_turn_is_counted_in_rows() -> None:
    model = scheduler(8)
    send(model, "aaaaa", rows=4)
    send(model, "bbbbbbbb", rows=1)
    rows = Counter[str]()
    for one in itertools.chain(*run_all(model)[:2]):
        rows[one.name] += one.rows
    assert rows == {"a": 8, "b": 8}


def test_priorities_go_before_turns() -> None:
    model = scheduler(priority_levels=2, default_priority=2)
    send(model, "aab")
    send(model, "aab", priority=1)
    assert names(run_all(model)) == "abaaba"


def test_what_is_cut_off_a_batch_is_in_the_next() -> None:
    model = scheduler(8, batching=BatchingSpec(0, (2,)))
    sent = send(model, "aaabbb")
    assert list(itertools.chain(*run_all(model))) == [sent[n] for n in (0, 3, 1, 4, 2, 5)]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 8), min_size=40, max_size=40), min_size=2, max_size=5),
    st.sampled_from([0, 8, 16]),
)
def test_saturated_clients_get_the_same(rows_of: list[list[int]], max_batch_size: int) -> None:
    model = scheduler(max_batch_size)
    left = Counter[str]()
    for number, its in enumerate(rows_of):
        for rows in its:
            send(model, str(number), rows=rows)
            left[str(number)] += 1
    quantum = max(itertools.chain(*rows_of))
    got = Counter(dict.fromkeys(left, 0))
    for one in itertools.chain(*run_all(model)):
        got[one.name] += one.rows
        left[one.name] -= 1
        # A quantum for the turn that one has had already, and less than one that was left over.
        assert max(got.values()) - min(got.values()) < 2 * quantum
        if not left[one.name]:
            break
    if len(set(itertools.chain(*rows_of))) == 1:
        assert max(got.values()) - min(got.values()) <= quantum


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(1, 8), max_size=40), st.sampled_from([0, 8]), st.sets(st.integers(1, 8), max_size=2)
)
def test_a_client_alone_is_served_as_without_fairness(
    rows: list[int], max_batch_size: int, preferred: set[int]
) -> None:
    batching = BatchingSpec(0, tuple(sorted(preferred)) if max_batch_size else ())
    found = []
    for fairness in ("none", "client"):
        model = scheduler(max_batch_size, fairness=fairness, batching=batching)
        for number in rows:
            send(model, "a", rows=number)
        found.append([[one.rows for one in requests] for requests in run_all(model)])
    assert found[0] == found[1]


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("aaaabbc"), st.integers(1, 4), st.integers(1, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["next", "next", "complete", "down"])),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(ACTIONS, max_size=80),
    st.sampled_from([4, 12]),
    st.sampled_from([6, 1000]),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 5]),
)
def test_nothing_is_lost_and_each_client_keeps_its_order(
    actions: list[Any], most: int, most_nbytes: int, most_of_level: int, delay_us: int
) -> None:
    model = scheduler(
        4,
        batching=BatchingSpec(delay_us, (2,)),
        max_requests=most,
        max_nbytes=most_nbytes,
        priority_levels=2,
        default_priority=1,
        policies=((2, PolicySpec(max_requests=most_of_level)),),
    )
    sent: list[OfClient] = []
    running: list[Batch] = []
    ends = Counter[OfClient]()
    begun: dict[tuple[str, int], int] = {}

    def next_batch() -> bool:
        for one in model.expire(1.0):
            assert one.removal_reason is RemovalReason.CROWDING
            ends[one] += 1  # type: ignore[index]
        batch = model.next_batch(1.0)
        if batch is None:
            return False
        running.append(batch)
        for one in batch.requests:
            assert isinstance(one, OfClient)
            if not one.attempts:
                key = one.name, one.priority
                assert begun.get(key, -1) < one.sequence, "a client's requests of a level keep their order"
                begun[key] = one.sequence
        return True

    def complete() -> None:
        for one in running[0].requests:
            ends[one] += 1  # type: ignore[index]
        model.complete(running.pop(0).batch_id)

    for action, *more in actions:
        if action == "submit":
            one = OfClient(more[0], more[1], more[1], more[2])
            try:
                model.submit(one, 0.0)
                sent.append(one)
            except QueueFull:
                pass
        elif action == "cancel" and sent:
            one = sent[more[0] % len(sent)]
            if model.cancel(one):
                ends[one] += 1
        elif action == "next":
            next_batch()
        elif action == "complete" and running:
            complete()
        elif action == "down":
            for lost in model.instance_down("i0"):
                ends[lost] += 1  # type: ignore[index]
            for one in itertools.chain(*[batch.requests for batch in running]):
                ends[one] += one.cancelled and one.state is RequestState.FINISHED  # type: ignore[index]
            running.clear()
            model.instance_up("i0")
        counts = model.statistics()
        assert counts.queued <= most + counts.retried
        assert counts.accepted == len(sent) == (
            counts.queued + counts.running_requests + counts.finished + counts.cancelled + counts.expired
            + counts.lost
        )  # fmt: skip
    while running or next_batch():
        complete()
    assert +ends == dict.fromkeys(sent, 1), "every request ends once"


# ---- turns with several shapes ------------------------------------------------------------


def send_shapes(to: ModelScheduler, text: str) -> list[OfClient]:
    """Send requests that are written as client and shape: "ax by"."""
    return [send(to, client, shape=shape)[0] for client, shape in text.split()]


def shown(batches: list[list[Any]]) -> str:
    return " | ".join(" ".join(one.name + one.merge_key for one in batch) for batch in batches)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("ax ay bx by ax ay bx by", "ax bx ax bx | ay by ay by"),
        ("ax ax ax ax ax ax by", "ax ax ax ax | by | ax ax"),
        ("ap aq ar as bx bx bx bx bx", "ap | bx bx bx bx | aq | bx | ar | as"),  # a turn is a batch
        ("ax ax bx bx cx cx dx dx ey ey", "ax bx cx dx | ey ey | ax bx cx dx"),  # a ride is a turn
        ("cx cx ay ax ax bz", "cx ax cx ax | ay | bz"),  # but not if an older request stays
        ("ay ax ax ax ax ax bx dz", "ay | bx ax ax ax | dz | ax ax"),  # a turn begins with its client
    ],
)
def test_a_batch_has_the_shape_of_the_client_whose_turn_it_is(sent: str, expected: str) -> None:
    model = scheduler(4)
    send_shapes(model, sent)
    assert shown(run_all(model)) == expected


def test_cancelled_requests_do_not_use_up_turns() -> None:
    model = scheduler(2, batching=BatchingSpec(1000))
    sent = send_shapes(model, "ax ax ax by ax bx ax bx")
    for one in sent[:3]:
        model.cancel(one)
    first = must_next(model, 0.0)
    assert shown([first.requests]) == "ax bx", "the turn of a is not over"


def test_a_turn_does_not_wait_for_its_delay_beside_a_full_batch() -> None:
    model = scheduler(4, batching=BatchingSpec(1000))
    send_shapes(model, "ay bx")
    assert model.next_batch(0.0) is None
    send_shapes(model, "bx bx bx")
    assert shown(run_all(model)) == "ay | bx bx bx bx"


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("submit"), st.sampled_from("aaabbcd"), st.sampled_from("xxxyyz"), st.integers(1, 3),
                st.sampled_from([1, 1, 1, 2]), st.integers(1, 6),
            ),
            st.tuples(st.just("cancel"), st.integers(0, 40)),
            st.tuples(st.sampled_from(["next", "next", "down", "delay"])),
        ),
        min_size=10,
        max_size=120,
    ),
    st.sampled_from([0, 1000]),
    st.sampled_from([(), (2,)]),
)  # fmt: skip
def test_no_client_leads_twice_while_the_oldest_request_of_another_waits(
    actions: list[Any], delay_us: int, preferred: tuple[int, ...]
) -> None:
    delaying = PolicySpec(timeout_action="delay", default_timeout_us=5_000)
    model = scheduler(
        4,
        batching=BatchingSpec(delay_us, preferred),
        priority_levels=2,
        default_priority=1,
        policies=((2, delaying),),
    )
    now = 0.0
    waiting: list[OfClient] = []
    ends = Counter[OfClient]()
    begun: dict[tuple[Any, ...], int] = {}
    #: The clients that led batches while a request was the oldest of its client in its lane.
    led: dict[tuple[OfClient, Any], list[str]] = {}

    def oldest() -> dict[tuple[Any, str], OfClient]:
        found: dict[tuple[Any, str], OfClient] = {}
        for one in waiting:
            found.setdefault((one.lane, one.name), one)
        return found

    def next_batch() -> bool:
        model.expire(now)
        in_turns = model.statistics().shape_groups > 0
        waited = oldest()
        batch = model.next_batch(now)
        if batch is None:
            return False
        first = batch.requests[0]
        assert isinstance(first, OfClient)
        for one in batch.requests:
            assert isinstance(one, OfClient)
            assert one.merge_key == first.merge_key
            ends[one] += 1
            if not batch.alone:
                waiting.remove(one)
                key = one.lane, one.name, one.merge_key
                assert begun.get(key, -1) < one.sequence, "a client and shape keep their order"
                begun[key] = one.sequence
        if not in_turns:
            led.clear()
        elif not batch.alone:
            assert first is waited[first.lane, first.name], "a turn begins with the client's oldest request"
            assert first.lane == min(lane for lane, _ in waited)
            for (lane, name), one in waited.items():
                if lane == first.lane and name != first.name and one in waiting:
                    clients = led.setdefault((one, lane), [])
                    assert first.name not in clients
                    clients.append(first.name)
            alike = [one for one in waiting if one.merge_key == first.merge_key]
            assert preferred or not alike or batch.rows + max(one.rows for one in alike) > 4
        model.complete(batch.batch_id)
        return True

    for action, *more in actions:
        if action == "submit":
            client, shape, rows, priority, copies = more
            for _ in range(copies):
                waiting.append(OfClient(client, rows, 1, priority, shape))
                model.submit(waiting[-1], now)
        elif action == "cancel" and waiting:
            one = waiting.pop(more[0] % len(waiting))
            assert model.cancel(one)
            ends[one] += 1
        elif action == "next":
            next_batch()
        elif action == "delay":
            now += 0.004
        elif action == "down":
            batch = model.next_batch(now) if not model.expire(now) else None
            if batch is not None:
                for one in batch.requests:
                    if not batch.alone:
                        waiting.remove(one)
                lost = model.instance_down("i0")
                ends.update(lost)  # type: ignore[arg-type]
                model.instance_up("i0")
                led.clear()
    now += 1.0
    while next_batch():
        pass
    assert not waiting
    assert model.statistics().queued == 0
    assert set(ends.values()) <= {1}


def test_turns_cost_the_same_with_thousands_of_clients_and_shapes() -> None:
    def calls_per_request(count: int) -> float:
        model, calls = scheduler(2, max_requests=0), 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in {"call", "c_call"}

        requests = [OfClient(str(n % count), shape=str(n * 7 % count)) for n in range(3 * count)]
        sys.setprofile(counted)
        try:
            for one in requests:
                model.submit(one, 0.0)
            run_all(model)
        finally:
            sys.setprofile(None)
        return calls / len(requests)

    assert calls_per_request(2_000) < 1.3 * calls_per_request(100)


@pytest.mark.parametrize("fairness", ["none", "client"])
def test_beside_five_times_its_share_a_client_gets_its_share(fairness: str) -> None:
    model = scheduler(fairness=fairness, max_requests=64)
    got = Counter[str]()
    for tick in range(2000):
        for name in "aaaaab" if tick % 2 else "":  # five times its half of the capacity, and just that half
            with contextlib.suppress(QueueFull):
                send(model, name)
        model.expire(0.0)
        batch = model.next_batch(0.0)
        if batch is not None:
            model.complete(batch.batch_id)
            got.update(one.name for one in batch.requests)  # type: ignore[attr-defined]
    part = got["b"] / 1000
    assert part > 0.99 if fairness == "client" else part < 0.35


# ---- a full queue -------------------------------------------------------------------------


def test_a_quiet_client_is_let_into_a_full_queue() -> None:
    model = scheduler(max_requests=4)
    loud = send(model, "aaaa")
    send(model, "b")
    assert model.expire(0.0) == [loud[3]], "the newest of who has the most"
    assert loud[3].removal_reason is RemovalReason.CROWDING
    assert loud[3].state is RequestState.FINISHED
    assert names(run_all(model)) == "abaa"


def test_who_has_the_most_is_refused() -> None:
    model = scheduler(max_requests=4)
    send(model, "aaab")
    with pytest.raises(QueueFull):
        send(model, "a")
    send(model, "b")
    for name in "ab":  # two each: nobody has more than its share
        with pytest.raises(QueueFull):
            send(model, name)
    assert len(model.expire(0.0)) == 1
    counts = model.statistics()
    assert (counts.queued, counts.rejected, counts.expired) == (4, 3, 1)


def test_nobody_gives_way_where_all_have_one() -> None:
    model = scheduler(max_requests=3)
    send(model, "abc")
    with pytest.raises(QueueFull):
        send(model, "d")


def test_many_clients_each_get_their_share_of_the_queue() -> None:
    model = scheduler(max_requests=12)
    send(model, "a" * 12)
    for _ in range(8):
        for name in "bcd":
            try:
                send(model, name)
            except QueueFull:
                pass
    model.expire(0.0)
    assert Counter(names(run_all(model))) == {"a": 3, "b": 3, "c": 3, "d": 3}


def test_bytes_are_shared_as_well() -> None:
    model = scheduler(max_nbytes=100)
    loud = send(model, "aaa", nbytes=30)
    send(model, "b", nbytes=20)
    assert model.expire(0.0) == [loud[2]]
    with pytest.raises(QueueFull):
        send(model, "b", nbytes=40)  # it would have as much as there was to take
    assert model.expire(0.0) == [], "nobody goes in vain"


def test_a_level_s_own_limit_is_shared_within_it() -> None:
    limit = ((1, PolicySpec(max_requests=2)),)
    model = scheduler(priority_levels=2, default_priority=2, policies=limit)
    send(model, "bbbb")
    loud = send(model, "aa", priority=1)
    send(model, "b", priority=1)
    assert model.expire(0.0) == [loud[1]]


def test_a_request_that_a_worker_died_under_is_not_the_newest() -> None:
    model = scheduler(4, max_requests=4)
    sent = send(model, "aa")
    model.next_batch(0.0)
    sent += send(model, "aa")
    model.instance_down("i0")
    model.instance_up("i0")
    send(model, "b")
    assert model.expire(0.0) == [sent[3]]


def test_what_has_left_is_forgotten() -> None:
    model = scheduler(2, max_requests=1000)
    for number in range(100):
        sent = send(model, [f"c{number}", f"d{number}"])  # type: ignore[arg-type]
        assert model.cancel(sent[0])
        run_all(model)
    queue: Any = model._queue
    assert (len(queue._shares._by_client), len(queue._shares._by_count), queue._shares._most) == (0, 0, 0)
    assert not queue.waiting
