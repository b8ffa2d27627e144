"""Implicit state of sequences at one instance, without a server: when it is kept and when it is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpuserve.backends.sequences import SequenceStates
from gpuserve_worker.inference.inference_request import Request, RequestBatch
from gpuserve_worker.protocol.payloads import Sequence


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
