"""The scheduler of sequences: places, order, ends, and what is told of them."""

from __future__ import annotations

import pytest
from present import present
from sequenced import Sequenced, ids

from gpuserve.core.errors import InvalidArgument, QueueFull, Unavailable
from gpuserve.front.scheduling.request_queue import RemovalReason, RequestState
from gpuserve.front.scheduling.sequence_scheduler import MAX_LOST, LostSequences
from gpuserve.model.spec import BatchingSpec, SequenceBatching, SequenceControl

START_TEXT = "sequence {} to model 'm' must specify the START flag on the first request of the sequence"


@pytest.mark.parametrize(("correlation_id", "other"), [(7, "7"), ("seven", 7)])
def test_the_first_request_must_be_a_start_also_after_the_end(
    correlation_id: int | str, other: int | str
) -> None:
    model = Sequenced()
    model.submit(other, "s")  # the number and the text are two sequences
    with pytest.raises(InvalidArgument, match=f"inference request for {START_TEXT.format(correlation_id)}"):
        model.submit(correlation_id)
    assert model.count("rejected") == 1
    model.submit(other, "e")
    with pytest.raises(InvalidArgument, match="START"):
        model.submit(other)
    model.submit(other, "s")
    assert model.run_all() == [str(other)] * 3


def test_requests_of_a_sequence_run_one_at_a_time_and_in_order() -> None:
    model = Sequenced("oldest", prefetch=1)
    requests = model.submit_all("a:s a a:e")
    ran = []
    for _ in requests:
        batch = model.must_next()
        assert model.next() is None
        ran += batch.requests
        model.scheduler.complete(batch.batch_id)
    assert ran == requests


CANDIDATES = SequenceBatching("oldest", max_candidate_sequences=3)


@pytest.mark.parametrize(
    ("model", "requests", "steps"),
    [
        pytest.param(Sequenced("direct"), "a:s a b:s b c:s c", ["abc", "abc"], id="one of every sequence"),
        pytest.param(Sequenced("oldest"), "a:s a b:s b c:s c", ["abc", "abc"], id="oldest"),
        pytest.param(
            Sequenced(max_batch_size=2, sequence=CANDIDATES),
            "a:se b:s c:s d:s",
            ["ab", "cd"],
            id="a candidate has a seat whatever the batch size",
        ),
        pytest.param(
            Sequenced(max_batch_size=1),
            "a:s b:s a:s a:e",
            ["a", "a", "a", "b"],
            id="a start goes on where the sequence is",
        ),
        pytest.param(
            Sequenced(max_batch_size=1),
            "a:s a:e a:s a:e b:se",
            ["a", "a", "b", "a", "a"],
            id="a sequence that starts again after its end waits behind the others",
        ),
    ],
)
def test_the_sequences_of_each_step(model: Sequenced, requests: str, steps: list[str]) -> None:
    model.submit_all(requests)
    assert model.run_all() == steps


def test_a_sequence_meets_one_instance_and_new_ones_go_where_there_is_room() -> None:
    model = Sequenced(instances=2, max_batch_size=2)
    model.submit_all("a:s b:s c:s d:s")
    where = {}
    for _ in range(2):
        batch = model.must_next()
        where.update(dict.fromkeys(ids(batch), batch.instance))
        model.scheduler.complete(batch.batch_id)
    assert sorted(where.values()) == ["i0", "i0", "i1", "i1"]
    for name in "dcba":
        model.submit(name)
        batch = model.must_next()
        assert batch.instance == where[name]
        model.scheduler.complete(batch.batch_id)


def test_without_a_seat_sequences_wait_in_their_order_and_another_shape_makes_a_step_of_its_own() -> None:
    model = Sequenced(max_batch_size=2)
    model.submit_all("a:s b:s c:s d:s")
    assert model.run_all() == ["ab"]
    model.submit("b", "e")
    assert model.run_all() == ["b", "c"]
    model.submit("a", "e")
    assert model.run_all() == ["a", "d"]
    model = Sequenced()
    for name, key in (("a", "4"), ("b", "8"), ("c", "4")):
        model.submit(name, "s", key=key)
    assert model.run_all() == ["ac", "b"]


@pytest.mark.parametrize(
    ("sequence", "preferred"),
    [(SequenceBatching("oldest"), (2,)), (SequenceBatching("direct", minimum_slot_utilization=0.5), ())],
    ids=["oldest", "direct"],
)
def test_a_step_waits_for_its_preferred_size_or_rows(
    sequence: SequenceBatching, preferred: tuple[int, ...]
) -> None:
    batching = BatchingSpec(max_queue_delay_us=100, preferred_batch_sizes=preferred)
    model = Sequenced(sequence=sequence, batching=batching)
    model.submit("a", "s")
    assert (model.next(), model.wakeup_us()) == (None, 100)
    model.at_us = 50
    model.submit("b", "s")
    assert model.step() == ["a", "b"]
    model.submit("a")
    assert model.next() is None
    model.at_us = 151
    assert model.step() == ["a"]


def test_sequences_wait_for_an_instance_and_direct_steps_follow_each_other_though_it_takes_more() -> None:
    model = Sequenced(instances=0, prefetch=1)
    model.submit("a", "s")
    assert (model.next(), model.wakeup_us()) == (None, None)
    model.scheduler.instance_up("i0", 4)
    with pytest.raises(ValueError, match="up already"):
        model.scheduler.instance_up("i0")
    batch = model.must_next()
    model.submit("b", "s")
    assert model.next() is None
    model.scheduler.complete(batch.batch_id)
    assert model.step() == ["b"]


def test_rows_are_kept_where_the_callable_is_told_which_are_ready() -> None:
    sequence = SequenceBatching("direct", controls=(SequenceControl("READY", "ready", "INT32"),))
    model = Sequenced(sequence=sequence)
    model.submit_all("a:s b:s c:s")
    batch = model.must_next()
    assert batch.seats == (0, 1, 2)
    model.scheduler.complete(batch.batch_id)
    model.submit("c")
    batch = model.must_next()
    assert (ids(batch), batch.seats, batch.position_of(batch.requests[0])) == (["c"], (2,), 2)


def test_an_idle_sequence_is_dropped_and_its_instance_told() -> None:
    model = Sequenced(max_batch_size=1)
    model.submit("a", "s")
    assert model.step() == ["a"]
    assert model.wakeup_us() == 1000
    model.submit("b", "s")
    model.at_us = 999
    assert model.next() is None
    model.at_us = 1000
    assert model.expired() == []
    batch = model.must_next()
    assert (ids(batch), batch.dropped) == (["b"], ("a",))
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("a")


def test_a_sequence_is_not_idle_while_a_request_runs_nor_after_its_end() -> None:
    model = Sequenced()
    model.submit("a", "s")
    batch = model.must_next()
    model.at_us = 5000
    model.scheduler.complete(batch.batch_id)
    assert (model.expired(), model.wakeup_us()) == ([], 6000)
    model.at_us = 5999
    model.submit("a")
    model.at_us = 9000
    assert model.step() == ["a"]
    model.submit_all("a:e b:se")
    assert model.must_next().dropped == ()
    assert model.wakeup_us() is None


def test_cancelling_one_queued_request_cancels_the_rest() -> None:
    model = Sequenced()
    first, second, third = model.submit_all("a:s a a")
    batch = model.must_next()
    assert model.scheduler.cancel(second) is True
    assert model.wakeup_us() == 0
    assert model.expired() == [third]
    assert (third.removal_reason, third.state) == (RemovalReason.CANCELLED, RequestState.FINISHED)
    assert batch.requests == [first]
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("a")
    model.scheduler.complete(batch.batch_id)
    model.submit("b", "s")
    assert model.must_next().dropped == ("a",)


@pytest.mark.parametrize("dies", [False, True])
def test_cancelling_the_running_request_cancels_the_rest(dies: bool) -> None:
    model = Sequenced()
    running, waiting = model.submit_all("a:s a:e")
    batch = model.must_next()
    assert model.scheduler.cancel(running) is False
    assert model.expired() == [waiting]
    if dies:
        assert model.scheduler.instance_down("i0") == []
    else:
        model.scheduler.complete(batch.batch_id)
    assert [model.count(one) for one in ("cancelled", "finished", "lost")] == [2, 0, 0]
    assert model.scheduler.cancel(waiting) is False


def test_cancelling_leaves_what_begins_anew() -> None:
    model = Sequenced()
    old, anew, _ = model.submit_all("a:s a:s a:e")
    model.scheduler.cancel(old)
    assert model.expired() == []
    batch = model.must_next()
    assert batch.requests == [anew]
    model.scheduler.complete(batch.batch_id)
    assert model.run_all() == ["a"]


def test_a_start_after_a_cancel_finds_the_seat_and_nothing_is_dropped() -> None:
    model = Sequenced()
    running = model.submit("a", "s")
    batch = model.must_next()
    model.scheduler.cancel(running)
    model.submit("a", "s")
    assert model.next() is None
    model.scheduler.complete(batch.batch_id)
    batch = model.must_next()
    assert (ids(batch), batch.dropped) == (["a"], ())


def test_time_in_the_backlog_is_over_for_the_whole_sequence() -> None:
    model = Sequenced(max_batch_size=1)
    model.submit("a", "s")
    late = [model.submit("b", "s", timeout_us=50), model.submit("b")]
    model.step()
    assert model.wakeup_us() == 50
    model.at_us = 50
    assert model.next() is None
    assert model.expired() == late
    assert [one.removal_reason for one in late] == [RemovalReason.LATE_IN_BACKLOG] * 2
    assert (model.count("expired"), model.count("cancelled")) == (1, 1)


def test_a_sequence_with_a_seat_takes_the_time_that_it_needs() -> None:
    """As in Triton: a part left out would change what comes after it."""
    model = Sequenced()
    model.submit("a", "s", timeout_us=50)
    batch = model.must_next()
    model.submit("a", timeout_us=50)
    model.submit("a", timeout_us=70)
    model.at_us = 60
    assert model.expired() == []
    for _ in range(2):
        model.scheduler.complete(batch.batch_id)
        batch = model.must_next()
        assert batch.requests[0].deadline is None
    model.scheduler.complete(batch.batch_id)
    assert (model.count("finished"), model.count("expired")) == (3, 0)


def test_what_had_begun_is_lost_with_its_instance() -> None:
    model = Sequenced(instances=2, max_batch_size=1)
    running, waiting = model.submit("a", "s"), model.submit("a")
    model.submit("b", "s")
    gone = next(one for one in (model.must_next(), model.must_next()) if running in one.requests)
    assert model.scheduler.instance_down(gone.instance) == [running, waiting]
    assert (model.count("lost"), model.count("retried")) == (2, 0)
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"sequence a of .* lost with its instance: .* START"):
            model.submit("a")
    model.submit("a", "se")
    with pytest.raises(InvalidArgument, match="START"):  # it began anew, and this is not about what was lost
        model.submit("a")
    with pytest.raises(KeyError):
        model.scheduler.complete(gone.batch_id)


def test_a_sequence_that_was_over_or_had_not_begun_is_not_lost() -> None:
    model = Sequenced(max_batch_size=1)
    model.submit("over", "se")
    model.submit("waits", "s")
    model.must_next()
    model.scheduler.instance_down("i0")
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("over")
    model.submit("waits")
    assert model.count("queued") == 2


def test_what_goes_on_with_a_sequence_of_a_front_that_died_is_told_so() -> None:
    """As long as that sequence could have been idle; what began here is known."""
    model = Sequenced(front_lost_at=0.0)
    model.submit_all("here:s here:e")
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("here")
    model.at_us = 999
    said = r"sequence a of .* lost with the front process that died: .* START"
    with pytest.raises(Unavailable, match=said):
        model.submit("a")
    model.at_us = 1000
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("a")


def test_of_sequences_that_are_lost_the_latest_are_remembered() -> None:
    lost = LostSequences()
    for number in range(MAX_LOST + 1):
        lost.remember(number)
    assert (len(lost), 0 in lost, MAX_LOST in lost) == (MAX_LOST, False, True)


def test_another_load_of_the_model_is_given_the_sequences_that_have_not_begun() -> None:
    old, new = Sequenced(max_batch_size=1), Sequenced(max_batch_size=1)
    old.submit("begun", "s")
    batch = old.must_next()
    follower = old.submit("begun")
    waiting = [old.submit("waits", "s"), old.submit("waits")]
    assert old.scheduler.transfer(new.scheduler, 0) == []
    assert old.scheduler.transfer(new.scheduler, 1 << 20) == waiting
    assert old.scheduler.transfer(new.scheduler, 1 << 20) == []
    for request in waiting:
        new.scheduler.submit(request, new.now)
    with pytest.raises(Unavailable, match="lost with its instance"):
        new.submit("begun")
    new.submit("waits", "e")
    assert [new.step() for _ in range(3)] == [["waits"]] * 3
    old.scheduler.complete(batch.batch_id)
    assert old.must_next().requests == [follower]  # it is still answered where its state is


def test_what_had_not_begun_goes_elsewhere() -> None:
    model = Sequenced(instances=2, max_batch_size=1)
    _, waiting = model.submit_all("a:s b:s")
    batch = model.must_next()
    other = {"i0": "i1", "i1": "i0"}[batch.instance]
    assert model.scheduler.instance_down(other) == []
    model.submit("a", "e")
    model.scheduler.complete(batch.batch_id)
    assert model.step() == ["a"]
    assert model.must_next().requests == [waiting]


def test_all_that_waits_can_be_taken_out() -> None:
    model = Sequenced(max_batch_size=1)
    running = model.submit("a", "s")
    batch = model.must_next()
    waiting = model.submit_all("a b:s b")
    assert model.scheduler.remove_all() == waiting
    assert model.next() is None
    model.scheduler.complete(batch.batch_id)
    assert running.state is RequestState.FINISHED
    assert model.wakeup_us() is None


def test_limits_and_the_end_hold_here_too() -> None:
    model = Sequenced(max_requests=1)
    model.submit("a", "s")
    with pytest.raises(QueueFull):
        model.submit("a")
    model.scheduler.draining = True
    with pytest.raises(Unavailable, match="stopped accepting"):
        model.submit("a")
    assert model.scheduler.draining
    assert model.step() == ["a"]


def test_a_named_instance_is_the_one_that_gets_a_batch() -> None:
    model = Sequenced(instances=2, max_batch_size=1)
    model.submit_all("a:s b:s")
    assert sorted(model.scheduler.with_room()) == ["i0", "i1"]
    batch = present(model.scheduler.next_batch(model.now, "i1"))
    assert batch.instance == "i1"
    assert model.scheduler.next_batch(model.now, "i1") is None
    assert model.scheduler.next_wakeup(model.now, ["i1"]) is None
