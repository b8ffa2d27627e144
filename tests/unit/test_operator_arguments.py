"""What an operator's verbs take, and what is said where it is something else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from gpuserve.core.errors import InvalidArgument, RequestError
from gpuserve.supervisor.control import operator_protocol as arguments_of

ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text() | some.binary(),
    lambda inner: some.lists(inner) | some.dictionaries(some.text() | some.integers(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("verb", arguments_of.VERBS)
def test_verbs_take_what_they_take(verb: str) -> None:
    arguments_of.check_verb(verb, dict.fromkeys(arguments_of.VERBS[verb]))
    with pytest.raises(InvalidArgument, match=f"{verb} has no argument 'other'"):
        arguments_of.check_verb(verb, {"other": 1})


@given(verb=ANYTHING, arguments=ANYTHING)
def test_whatever_is_asked_is_answered_by_a_short_sentence(verb: Any, arguments: Any) -> None:
    said = ""
    try:
        arguments_of.check_verb(verb, arguments)
    except RequestError as error:
        said = str(error)
    assert len(said) < 600


@given(value=ANYTHING)
def test_values_are_good_or_refused(value: Any) -> None:
    for read, kind in (
        (arguments_of.timeout_s, float | None),
        (arguments_of.undo, bool),
        (arguments_of.counts, dict),
    ):
        name = "counts" if kind is dict else read.__name__
        try:
            found = read({name: value})
        except InvalidArgument:
            continue
        assert isinstance(found, kind)


def test_a_time_is_a_number_of_seconds() -> None:
    assert arguments_of.timeout_s({}) is None
    assert arguments_of.timeout_s({"timeout_s": 3}) == 3.0
    for wrong in (True, -1, float("nan"), float("inf"), 10**400, 16**5000, 86_401, "3", [3]):
        with pytest.raises(InvalidArgument, match="timeout_s: expected 0 to 86400 seconds"):
            arguments_of.timeout_s({"timeout_s": wrong})


def test_counts_are_names_with_numbers() -> None:
    assert arguments_of.counts({"counts": {"m": 1, "n": 7}}) == {"m": 1, "n": 7}
    for wrong in (None, {}, {"m": 0}, {"m": True}, {"m": 1.0}, {"": 1}, {3: 1}, [["m", 1]]):
        with pytest.raises(InvalidArgument, match="scale: "):
            arguments_of.counts({"counts": wrong})


def test_a_name_that_is_nearly_right() -> None:
    known = ["linear", "other"]
    assert str(arguments_of.unknown_model("linaer", known)).endswith("; did you mean 'linear'?")
    assert str(arguments_of.unknown_model("zzz", known)).endswith("; there is linear, other")
    many = [f"model_{number:02}" for number in range(40)]
    assert str(arguments_of.unknown_model("zzz", many)).endswith(", model_30, model_31 and 8 more")
    assert str(arguments_of.unknown_model("zzz", [])) == "there is no model 'zzz'"
