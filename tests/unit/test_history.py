"""The history of the live page: the last points of each model, and of no other."""

from __future__ import annotations

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuserve.front.observability.metrics.rates import FIELDS, NBYTES_OF_MODEL, POINTS, History

ECHO, OTHER = ("echo", "1"), ("other", "2")


def row(value: float | None) -> list[float | None]:
    return [value, *[None] * (len(FIELDS) - 1)]


def first_of(document: Any) -> list[float | None]:
    return list(document["series"][FIELDS[0]])


@given(st.integers(1, 9), st.lists(st.integers(0, 999), max_size=40))
def test_the_last_points_are_kept_in_their_order(points: int, values: list[int]) -> None:
    history = History(points)
    for time, value in enumerate(values):
        history.add(float(time), {ECHO: row(value)})
    document = history.document(ECHO)
    assert (document is None) is (not values)
    if document is not None:
        assert first_of(document) == values[-points:]
        assert document["times"] == [float(time) for time in range(len(values))][-points:]
        assert set(document["series"]) == set(FIELDS)


def test_a_model_that_comes_later_has_no_values_before() -> None:
    history = History(3)
    history.add(1.0, {ECHO: row(5.0)})
    history.add(2.0, {ECHO: row(6.0), OTHER: row(7.0)})
    assert first_of(history.document(OTHER)) == [None, 7.0]


def test_a_model_that_went_is_forgotten_at_once() -> None:
    history = History(3)
    history.add(1.0, {ECHO: row(5.0), OTHER: row(1.0)})
    history.add(2.0, {OTHER: row(1.0)})
    assert history.document(ECHO) is None
    assert len(history) == 1


def test_what_is_not_known_is_null_and_numbers_are_short() -> None:
    history = History(2)
    history.add(1.0, {ECHO: [0.123456789, None, 12345.678, *[None] * (len(FIELDS) - 3)]})
    series = history.document(ECHO)["series"]  # type: ignore[index]
    assert [series[field] for field in FIELDS[:3]] == [[0.1235], [None], [12350.0]]


def test_two_hundred_models_take_a_megabyte_and_no_more_however_long() -> None:
    models = [(f"model-{number}", "1") for number in range(200)]
    history = History()
    tracemalloc.start()
    try:
        for time in range(POINTS + 9):
            history.add(float(time), {of: row(float(time)) for of in models})
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 200 * NBYTES_OF_MODEL <= nbytes < 1.15 * 200 * NBYTES_OF_MODEL
