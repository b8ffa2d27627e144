"""Which callables lead to one object that can change, and which only look like it."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuserve import Server
from gpuserve.api.pickled_callables import SharedObjects, is_mutable, mutable_objects
from gpuserve.compat.pytriton.triton import Triton
from gpuserve.decorators import batch
from gpuserve.model.declaration import Tensor

seen: list[int] = []
LABELS = ["cat", "dog"]
lock = threading.Lock()
logger = logging.getLogger(__name__)


class Learner:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def train(self, requests: Any) -> Any:
        self.seen += requests
        return requests

    @batch
    def infer(self, x: Any) -> Any:
        return len(self.seen) * x

    def __call__(self, requests: Any) -> Any:
        return requests


class Stateless:
    def infer(self, requests: Any) -> Any:
        return requests


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: int = 2


class Colour(enum.Enum):
    RED = 1


def closing_over(value: Any) -> Callable[..., Any]:
    def infer(requests: Any) -> Any:
        return [value, *requests]

    return infer


def batched_over(value: Any) -> Callable[..., Any]:
    @batch
    def infer(x: Any) -> Any:
        return [value, x]

    return infer


def notes(requests: Any) -> Any:
    seen.append(len(requests))
    return requests


def notes_within(requests: Any) -> Any:
    return [notes([one]) for one in requests]


def reads_constants(requests: Any) -> Any:
    logger.info("%s", LABELS)
    return np.mean(requests), Path("x"), lock


def shared(*callables: Any, is_copied: bool = True) -> list[str]:
    """Types of what the last one shares with those before."""
    states = SharedObjects()
    found: list[Any] = []
    for number, infer in enumerate(callables):
        found = states.bind((f"m{number}", 1), [infer], is_copied=is_copied)
    return [kind for _, kind in found]


def test_methods_of_one_object() -> None:
    learner = Learner()
    assert shared(learner.train, learner.infer) == ["Learner"]
    assert shared(learner.train, learner) == ["Learner"]
    assert shared(learner.train, learner.train) == ["Learner"]
    assert shared(Learner().train, learner.infer) == []
    assert shared(learner.train, learner.infer, is_copied=False) == []


@pytest.mark.parametrize(
    "value",
    [[1], {"a": 1}, {1}, bytearray(1), Counter("a"), np.zeros(1), Learner()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("made", [closing_over, batched_over, lambda value: functools.partial(print, value)])
def test_what_functions_close_over(value: Any, made: Callable[[Any], Any]) -> None:
    assert is_mutable(value)
    assert shared(made(value), made(value)) == [type(value).__name__]


FIXED = np.zeros(1)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "value",
    [
        1, "a", b"a", None, (1, [2]), frozenset({1}), np.float32(1), FIXED, np.dtype("f4"), np, Learner, len,
        Settings(), Colour.RED, logger, lock, Path("x"), Stateless(), argparse.Namespace(a=1), ValueError(1),
        functools.lru_cache(print), re.compile("a"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_state(value: Any) -> None:
    assert shared(closing_over(value), closing_over(value)) == []


def test_names_of_the_module() -> None:
    assert shared(notes, notes_within) == ["list"]
    assert shared(reads_constants, reads_constants) == []
    assert list(mutable_objects(closing_over(reads_constants))) == []


def test_methods_of_an_object_without_attributes() -> None:
    one = Stateless()
    assert shared(one.infer, one.infer) == []


def test_one_that_is_in_this_process_does_not_see_a_copy_either() -> None:
    states, learner = SharedObjects(), Learner()
    assert states.bind(("a", 1), [learner.train], is_copied=False) == []
    assert states.bind(("b", 1), [learner.infer], is_copied=True) == [(("a", 1), "Learner")]


def test_a_model_that_is_bound_again_or_forgotten_shares_nothing() -> None:
    states, learner = SharedObjects(), Learner()
    states.bind(("a", 1), [learner.train], is_copied=True)
    assert states.bind(("a", 1), [learner.train], is_copied=True) == []
    states.forget(("a", 1))
    assert states.bind(("b", 1), [learner.infer], is_copied=True) == []


def test_an_object_that_is_gone_is_not_taken_for_one_in_its_place() -> None:
    states = SharedObjects()
    for number in range(20):
        assert states.bind((f"m{number}", 1), [Learner().train], is_copied=True) == []


def bind_both(server: Any, learner: Learner, **how: Any) -> None:
    tensors = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
    server.bind("Train", learner.train, tensors, tensors, **how)
    server.bind("Infer", learner.infer, tensors, tensors, **how)


def test_bind_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    bind_both(Server(), Learner())
    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("models 'Train' and 'Infer' share an object (Learner), and each has a copy of it")
    assert 'isolation="thread"' in told
    caplog.clear()
    bind_both(Server(), Learner(), isolation="thread")
    assert not caplog.records


@pytest.mark.parametrize(("isolation", "told"), [("thread", 0), ("process", 1)])
def test_programs_of_pytriton_are_told_it_with_processes(
    isolation: str, told: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSERVE_ISOLATION", isolation)
    bind_both(Triton(), Learner())
    assert len(caplog.records) == told
