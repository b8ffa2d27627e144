"""Sequences at one instance: their implicit state, and notice of those that are not continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from present import present

from gpuserve.backends.sequences import SequenceStates
from gpuserve_worker.execution.execution import track_sequences
from gpuserve_worker.execution.lifecycle import Reporter
from gpuserve_worker.inference.inference_request import Batch, Request, RequestBatch
from gpuserve_worker.protocol.payloads import Sequence, WireRequest


def requests(*given: tuple[int, Any, bool]) -> RequestBatch:
    """Return a batch of requests, each of a sequence, a value, and whether it is the last."""
    made = []
    for number, value, end in given:
        request = Request({"x": np.array([value])})
        request.sequence = Sequence(number, False, end)
        made.append(request)
    return RequestBatch(made, ("y",), True)


def grow(arrays: dict[str, Any]) -> Mapping[str, Any]:
    """Append the value to the state, and return the state's sum."""
    if (arrays["x"] < 0).any():
        raise ValueError("negative")
    state = np.concatenate([arrays["s"], arrays["x"]], axis=1)
    return {"y": state.sum(axis=1, keepdims=True), "t": state}


def add(arrays: dict[str, Any]) -> Mapping[str, Any]:
    total = arrays["s"] + arrays["x"]
    return {"y": total, "t": total}


def states(**more: Any) -> SequenceStates:
    return SequenceStates([["s", "t", "INT64", [1], "", *more.values()]], (), np.array)


def sums(found: Any) -> list[int]:
    return [int(one["y"].item()) for one in found]


def test_a_batch_of_states_of_several_shapes_keeps_the_order_of_its_requests() -> None:
    kept = states()
    for value in ([1], [2]):
        kept.run(requests((1, value, False)), grow)
    found = kept.run(requests((1, [3], False), (2, [10], False), (3, [20], False)), grow)
    assert sums(found) == [6, 10, 20]
    assert all(set(one) == {"y"} for one in found)  # the state is no declared output


def test_no_state_changes_if_a_run_of_the_batch_fails() -> None:
    kept = states()
    kept.run(requests((1, [5], False)), grow)
    with pytest.raises(ValueError, match="negative"):
        kept.run(requests((1, [1], False), (2, [-1], False)), grow)
    assert sums(kept.run(requests((1, [1], False)), grow)) == [6]


@pytest.mark.parametrize("ends", [True, False])
def test_a_sequence_that_ended_or_was_dropped_begins_with_the_initial_state(ends: bool) -> None:
    kept = states()
    kept.run(requests((1, [5], False), (2, [7], False)), grow)
    if ends:
        kept.run(requests((1, [1], True)), grow)
    else:
        kept.drop(1)
    assert sums(kept.run(requests((1, [1], False), (2, [1], False)), grow)) == [1, 8]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_in_place_never_changes_the_initial_state(in_place: bool) -> None:
    kept = states(in_place=in_place)
    for expected in (2, 4, 6):
        assert sums(kept.run(requests((1, [2], False)), add)) == [expected]
    assert sums(kept.run(requests((2, [2], False)), add)) == [2]


# ---- notice to a callable of sequences that are not continued ----


class Log(Reporter):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def error(self, text: str, traceback: str = "") -> None:
        self.lines.append(text)


class Told:
    """A callable that is told; it does not know what to do with one id."""

    def __init__(self) -> None:
        self.dropped: list[int | str] = []

    def __call__(self, requests: Any) -> Any:
        return requests

    def sequence_dropped(self, sequence_id: int | str) -> None:
        self.dropped.append(sequence_id)
        if sequence_id == "bad":
            raise KeyError(sequence_id)


def request(*sequence: Any) -> WireRequest:
    return WireRequest(1, {}, (), (), sequence or None)


def told_by(log: Log) -> tuple[Told, Any]:
    told = Told()
    return told, present(track_sequences(told, log))


def test_a_callable_is_told_once() -> None:
    told, known = told_by(Log())
    known.before([request("a", True, False), request("b", True, False), request()], ())
    known.before([request("a", False, True)], ("b",))
    assert told.dropped == ["b"]
    known.forget()
    assert told.dropped == ["b"]
    assert track_sequences(lambda requests: requests, Log()) is None, "it does not ask"


def test_without_its_front_it_forgets_all_that_had_begun() -> None:
    told, known = told_by(Log())
    known.before([request(2, True, False), request("x", True, False), request(1, True, True)], ())
    known.forget()
    known.forget()
    assert told.dropped == [2, "x"]


def test_what_it_raises_is_logged_and_nothing_else() -> None:
    log = Log()
    told, known = told_by(log)
    known.before([], ("bad", "good"))
    assert told.dropped == ["bad", "good"]
    assert log.lines == ["sequence_dropped raised KeyError: 'bad' for sequence 'bad'"]


def test_a_request_says_which_sequence_it_belongs_to() -> None:
    batch = Batch({}, [request("a", True, False), request()], (), False)
    first, second = batch.as_list()
    assert (first.sequence, second.sequence) == (("a", True, False), None)
    assert first.sequence is not None
    assert first.sequence.start
    assert first.with_data({}).sequence == first.sequence
