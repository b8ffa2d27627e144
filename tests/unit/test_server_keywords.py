"""What type checkers know of ``Server(…)``, ``Tensor`` and ``ModelConfig`` is what their tables say."""

from __future__ import annotations

import collections.abc
import typing
from typing import Any

import pytest

import gpuserve
from gpuserve.config.settings.keywords import ServerKeywords
from gpuserve.config.settings.server import ServerSettings
from gpuserve.model.declaration import MEMORIES
from gpuserve.model.options import OptionRow, element, rows
from gpuserve.model.spec import ARRAYS

KEYWORDS = typing.get_type_hints(ServerKeywords)


def flat(hint: Any) -> set[Any]:
    """The types and words that a value may be."""
    if typing.get_origin(hint) is collections.abc.Sequence:
        return {("list", one) for one in flat(typing.get_args(hint)[0])}
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return set(args)
    return {one for part in args for one in flat(part)} if args else {hint}


def meant(row: OptionRow) -> set[Any]:
    inner = element(row.hint)
    words = set(row.option.words)
    found = (
        (words or {inner}) if inner else words | ({row.hint} if row.hint is not str or not words else set())
    )
    found = {("list", one) for one in found} if inner else found
    if typing.get_origin(row.hint) is dict:
        found = set(typing.get_args(row.hint))
    return found | ({str} if row.option.unit else set()) | ({type(None)} if row.has_none else set())


def test_there_are_no_others() -> None:
    assert KEYWORDS.keys() == rows(ServerSettings).keys()


@pytest.mark.parametrize("name", KEYWORDS)
def test_each_takes_what_its_row_takes(name: str) -> None:
    assert flat(KEYWORDS[name]) == meant(rows(ServerSettings)[name])


def test_words_of_tensors_are_those_of_the_table() -> None:
    assert flat(typing.get_type_hints(gpuserve.Tensor)["memory"]) == {*MEMORIES, type(None)}
    assert set(ARRAYS) == {"numpy", "cupy", "torch"}  # as declare/model.py says it to type checkers


def test_a_time_may_be_said_with_its_unit() -> None:
    assert gpuserve.Server(drain_timeout_s="2m").settings.drain_timeout_s == 120
