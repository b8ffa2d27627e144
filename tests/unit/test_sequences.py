"""The scheduler of sequences: places, order, ends, and what is told of them."""

from __future__ import annotations

import pytest
from sequenced import Sequenced, ids

from gpuserve.core.errors import InvalidArgument, QueueFull, Unavailable
from gpuserve.core.states import IllegalTransition
from gpuserve.front.scheduling.request_queue import RemovalReason, RequestState
from gpuserve.front.scheduling.sequence_scheduler import MAX_LOST, LostSequences
from gpuserve.front.scheduling.sequence_slots import ActiveSequence, SequenceState
from gpuserve.model.spec import BatchingSpec, SequenceBatching, SequenceControl

START_TEXT = (
    r"inference request for sequence {} to model 'm' must specify the START flag on the first request of the "
    r"sequence"
)


@pytest.mark.parametrize("correlation_id", [7, "seven"])
def test_the_first_request_must_be_a_start(correlation_id: int | str) -> None:
    model = Sequenced()
    with pytest.raises(InvalidArgument, match=START_TEXT.format(correlation_id)):
        model.submit(correlation_id)
    assert model.count("rejected") == 1


def test_the_number_and_the_text_are_two_sequences() -> None:
    model = Sequenced()
    model.submit(7, "s")
    with pytest.raises(InvalidArgument, match=START_TEXT.format(7)):
        model.submit("7")


def test_after_its_end_a_sequence_must_start_again() -> None:
    model = Sequenced()
    model.submit(1, "s")
    model.submit(1, "e")
    with pytest.raises(InvalidArgument, match="START"):
        model.submit(1)
    model.submit(1, "s")
    assert [model.step() for _ in range(4)] == [[1], [1], [1], None]


def test_requests_of_a_sequence_run_one_at_a_time_and_in_order() -> None:
    model = Sequenced("oldest", prefetch=1)
    requests = [model.submit(1, "s"), model.submit(1), model.submit(1, "e")]
    ran = []
    for _ in requests:
        batch = model.must_next()
        assert model.next() is None
        ran += batch.requests
        model.scheduler.complete(batch.batch_id)
    assert ran == requests


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_a_step_has_one_request_of_every_sequence(strategy: str) -> None:
    model = Sequenced(strategy)
    for name in "abc":
        model.submit(name, "s")
        model.submit(name)
    assert [model.step() for _ in range(3)] == [["a", "b", "c"], ["a", "b", "c"], None]


def test_a_sequence_meets_one_instance_and_new_ones_go_where_there_is_room() -> None:
    model = Sequenced(instances=2, max_batch_size=2)
    for name in "abcd":
        model.submit(name, "s")
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


def test_without_a_seat_sequences_wait_in_their_order() -> None:
    model = Sequenced(max_batch_size=2)
    for name in "abcd":
        model.submit(name, "s")
    assert model.step() == ["a", "b"]
    assert model.step() is None
    model.submit("b", "e")
    assert [model.step(), model.step(), model.step()] == [["b"], ["c"], None]
    model.submit("a", "e")
    assert [model.step(), model.step()] == [["a"], ["d"]]


def test_a_candidate_is_given_its_seat_whatever_the_batch_size() -> None:
    sequence = SequenceBatching("oldest", max_candidate_sequences=3)
    model = Sequenced(max_batch_size=2, sequence=sequence)
    for name in "abcd":
        model.submit(name, "se" if name == "a" else "s")
    assert [model.step(), model.step(), model.step()] == [["a", "b"], ["c", "d"], None]


def test_oldest_merges_by_the_rules_of_the_batcher() -> None:
    batching = BatchingSpec(max_queue_delay_us=100, preferred_batch_sizes=(2,))
    model = Sequenced("oldest", batching=batching)
    model.submit("a", "s")
    assert model.next() is None
    assert model.wakeup_us() == 100
    model.at_us = 50
    model.submit("b", "s")
    assert model.step() == ["a", "b"]
    model.submit("a")
    model.at_us = 151
    assert model.step() == ["a"]


def test_direct_waits_for_its_rows() -> None:
    sequence = SequenceBatching("direct", minimum_slot_utilization=0.5)
    model = Sequenced(sequence=sequence, batching=BatchingSpec(max_queue_delay_us=100))
    model.submit("a", "s")
    assert (model.next(), model.wakeup_us()) == (None, 100)
    model.submit("b", "s")
    assert model.step() == ["a", "b"]
    model.submit("b")
    assert model.next() is None
    model.at_us = 101
    assert model.step() == ["b"]


def test_requests_of_another_shape_make_a_step_of_their_own() -> None:
    model = Sequenced()
    for name, key in (("a", "4"), ("b", "8"), ("c", "4")):
        model.submit(name, "s", key=key)
    assert [model.step(), model.step(), model.step()] == [["a", "c"], ["b"], None]


def test_direct_steps_follow_each_other_even_where_an_instance_takes_more() -> None:
    model = Sequenced(instances=0, prefetch=1)
    model.scheduler.instance_up("i0", 4)
    model.submit("a", "s")
    batch = model.must_next()
    model.submit("b", "s")
    assert model.next() is None
    model.scheduler.complete(batch.batch_id)
    assert model.step() == ["b"]


def test_rows_are_kept_where_the_callable_is_told_which_are_ready() -> None:
    sequence = SequenceBatching("direct", controls=(SequenceControl("READY", "ready", "INT32"),))
    model = Sequenced(sequence=sequence)
    for name in "abc":
        model.submit(name, "s")
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


def test_a_request_keeps_a_sequence_from_being_idle() -> None:
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


def test_a_sequence_that_came_to_its_end_is_not_dropped() -> None:
    model = Sequenced()
    model.submit("a", "se")
    model.step()
    model.submit("b", "s")
    assert model.must_next().dropped == ()
    assert model.wakeup_us() is None


def test_a_start_goes_on_where_the_sequence_was() -> None:
    model = Sequenced(max_batch_size=1)
    model.submit("a", "s")
    model.submit("b", "s")
    model.step()
    model.submit("a", "s")
    model.submit("a", "e")
    assert [model.step() for _ in range(3)] == [["a"], ["a"], ["b"]]


def test_a_sequence_that_begins_anew_after_its_end_waits_behind_the_others() -> None:
    model = Sequenced(max_batch_size=1)
    for flags in ("s", "e", "s", "e"):
        model.submit("a", flags)
    model.submit("b", "se")
    assert [model.step() for _ in range(5)] == [["a"], ["a"], ["b"], ["a"], ["a"]]


def test_cancelling_one_queued_request_cancels_the_rest() -> None:
    model = Sequenced()
    first, second, third = model.submit("a", "s"), model.submit("a"), model.submit("a")
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


def test_cancelling_the_running_request_cancels_the_rest() -> None:
    model = Sequenced()
    running, waiting = model.submit("a", "s"), model.submit("a", "e")
    batch = model.must_next()
    assert model.scheduler.cancel(running) is False
    assert model.expired() == [waiting]
    model.scheduler.complete(batch.batch_id)
    assert (model.count("cancelled"), model.count("finished")) == (2, 0)
    assert model.scheduler.cancel(waiting) is False


def test_cancelling_leaves_what_begins_anew() -> None:
    model = Sequenced()
    old, anew = model.submit("a", "s"), model.submit("a", "s")
    model.submit("a", "e")
    model.scheduler.cancel(old)
    assert model.expired() == []
    batch = model.must_next()
    assert batch.requests == [anew]
    model.scheduler.complete(batch.batch_id)
    assert model.step() == ["a"]


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
    reasons = [one.removal_reason for one in late]
    assert reasons == [RemovalReason.LATE_IN_BACKLOG, RemovalReason.LATE_IN_BACKLOG]
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
    model.submit("here", "s")
    model.submit("here", "e")
    with pytest.raises(InvalidArgument, match="START"):
        model.submit("here")
    model.at_us = 999
    with pytest.raises(
        Unavailable, match=r"sequence a of .* lost with the front process that died: .* START"
    ):
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
    model.submit("a", "s")
    waiting = model.submit("b", "s")
    batch = model.must_next()
    other = {"i0": "i1", "i1": "i0"}[batch.instance]
    assert model.scheduler.instance_down(other) == []
    model.submit("a", "e")
    model.scheduler.complete(batch.batch_id)
    assert model.step() == ["a"]
    assert model.must_next().requests == [waiting]


def test_a_cancelled_request_finishes_with_its_instance() -> None:
    model = Sequenced()
    running = model.submit("a", "s")
    model.must_next()
    model.scheduler.cancel(running)
    assert model.scheduler.instance_down("i0") == []
    assert (model.count("cancelled"), model.count("lost")) == (1, 0)


def test_sequences_wait_for_an_instance() -> None:
    model = Sequenced(instances=0)
    model.submit("a", "s")
    assert (model.next(), model.wakeup_us()) == (None, None)
    model.scheduler.instance_up("i0")
    assert model.step() == ["a"]
    with pytest.raises(ValueError, match="up already"):
        model.scheduler.instance_up("i0")


def test_all_that_waits_can_be_taken_out() -> None:
    model = Sequenced(max_batch_size=1)
    running = model.submit("a", "s")
    batch = model.must_next()
    waiting = [model.submit("a"), model.submit("b", "s"), model.submit("b")]
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


def test_a_sequence_that_has_ended_stays_so() -> None:
    sequence = ActiveSequence("a")
    sequence.become(SequenceState.ENDED)
    with pytest.raises(IllegalTransition, match="sequence 'a' is ENDED and cannot become SEATED"):
        sequence.become(SequenceState.SEATED)


def test_a_named_instance_is_the_one_that_gets_a_batch() -> None:
    model = Sequenced(instances=2, max_batch_size=1)
    model.submit("a", "s")
    model.submit("b", "s")
    assert sorted(model.scheduler.with_room()) == ["i0", "i1"]
    batch = model.scheduler.next_batch(model.now, "i1")
    assert batch is not None
    assert batch.instance == "i1"
    assert model.scheduler.next_batch(model.now, "i1") is None
    assert model.scheduler.next_wakeup(model.now, ["i1"]) is None
