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
    learner, stateless = Learner(), Stateless()
    for others in ([learner.infer], [learner], [learner.train]):
        assert shared(learner.train, *others) == ["Learner"]
    assert shared(Learner().train, learner.infer) == []
    assert shared(learner.train, learner.infer, is_copied=False) == []
    assert shared(stateless.infer, stateless.infer) == [], "an object without attributes"


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


def test_which_models_share_an_object() -> None:
    states, learner = SharedObjects(), Learner()
    assert states.bind(("here", 1), [learner.train], is_copied=False) == []
    # A model in this process does not see a copy either.
    assert states.bind(("a", 1), [learner.infer], is_copied=True) == [(("here", 1), "Learner")]
    states.forget(("here", 1))
    assert states.bind(("a", 1), [learner.train], is_copied=True) == [], "it is bound again"
    states.forget(("a", 1))
    assert states.bind(("b", 1), [learner.infer], is_copied=True) == []
    for number in range(20):  # an object that is gone is not taken for one in its place
        assert states.bind((f"m{number}", 1), [Learner().train], is_copied=True) == []


def bind_both(server: Any, **how: Any) -> None:
    learner = Learner()
    tensors = [Tensor(name="x", dtype=np.float32, shape=(-1,))]
    server.bind("Train", learner.train, tensors, tensors, **how)
    server.bind("Infer", learner.infer, tensors, tensors, **how)


def test_bind_tells_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    bind_both(Server())
    (told,) = caplog.messages
    assert told.startswith("models 'Train' and 'Infer' share an object (Learner), and each has a copy of it")
    assert 'isolation="thread"' in told
    caplog.clear()
    bind_both(Server(), isolation="thread")
    monkeypatch.setenv("GPUSERVE_ISOLATION", "thread")
    bind_both(Triton())
    assert not caplog.records
    monkeypatch.setenv("GPUSERVE_ISOLATION", "process")
    bind_both(Triton())
    assert len(caplog.records) == 1
