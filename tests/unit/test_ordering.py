"""Answers leave in the order in which their requests were accepted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.models.model_answers import AnswerOrder

Pair = tuple[int, str]


def expecting(count: int) -> AnswerOrder[int, str]:
    order: AnswerOrder[int, str] = AnswerOrder()
    for request in range(count):
        order.expect(request)
    return order


def test_an_answer_waits_for_those_before_it() -> None:
    order = expecting(4)
    assert order.answer(0, "a") == [(0, "a")]
    assert order.answer(3, "d") == []
    assert order.answer(2, "c") == []
    assert len(order) == 3
    assert order.answer(1, "b") == [(1, "b"), (2, "c"), (3, "d")]
    assert len(order) == 0


def test_a_dropped_request_gives_back_its_answer_whether_that_was_kept_or_comes_later() -> None:
    order = expecting(3)
    assert order.answer(1, "b") == []
    assert order.drop(1) == [(1, "b")]
    assert order.drop(2) == []
    assert order.answer(2, "too late") == [(2, "too late")]
    assert order.drop(2) == []
    assert len(order) == 1
    assert order.answer(0, "a") == [(0, "a")]


def test_a_dropped_request_leaves_no_gap() -> None:
    order = expecting(4)
    assert order.answer(1, "b") == []
    assert order.drop(2) == []
    assert order.answer(3, "d") == []
    assert order.drop(0) == [(1, "b"), (3, "d")]
    assert len(order) == 0


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_whatever_the_order_of_the_ends_every_answer_goes_once_and_in_order(
    ends: list[int], dropped: set[int]
) -> None:
    order = expecting(8)
    left: list[Pair] = []
    for request in ends:
        left += order.drop(request) if request in dropped else order.answer(request, str(request))
    assert left == [(request, str(request)) for request in range(8) if request not in dropped]
    assert len(order) == 0
