"""What of a callable cannot be sent to a worker process is named by its path, with the ways out."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from gpuserve.api.pickled_callables import MAX_DEPTH, MAX_TRIED, find_fault, pickled_sources
from gpuserve.core.errors import BindError

LOCK = threading.Lock()


class Part:
    """An object with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __call__(self, requests: Any) -> Any:
        return requests

    def infer(self, requests: Any) -> Any:
        return requests


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = LOCK


class Careful(Part):
    """Leaves its lock out of its pickle, and brings something else that cannot be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class Stubborn(Part):
    def __reduce__(self) -> Any:
        raise ValueError("I stay here")


def closure(model: Any) -> Any:
    def infer(requests: Any) -> Any:
        return model

    return infer


def with_global(**variables: Any) -> Any:
    """A function of a program: pickled by value, with the variables of its module that it names."""
    namespace: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(f"def main(requests):\n    return [{', '.join(variables)}]", namespace)
    return namespace["main"]


def class_of_program() -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__", "lock": LOCK}
    exec("class Model:\n    guard = lock\n    def __call__(self, requests): ...", namespace)
    return namespace["Model"]()


CYCLE = Part(lock=None)
CYCLE.other = Part(back=CYCLE, lock=LOCK)  # type: ignore[attr-defined]
PATHS: dict[str, Any] = {
    "self.lock": Part(lock=LOCK),
    "self.encoder.layers[1].lock": Part(name="a", encoder=Part(layers=[1, Part(lock=LOCK)])),
    "self.inner.lock": Part(inner=Part(lock=LOCK)).infer,
    "model.encoder.lock": closure(Part(encoder=Part(lock=LOCK))),
    "net.encoder.lock": with_global(net=Part(encoder=Part(lock=LOCK))),
    "encode.<locals>.model": with_global(encode=closure(LOCK)),
    "args[0]": functools.partial(closure, LOCK),
    "keywords['model']['a']": functools.partial(closure, model={"a": LOCK}),
    "self.cache[tuple][1]": Part(cache={("a", 1): (1, LOCK)}),
    "self.locks[0].lock": Part(locks=[Slotted()]),
    "self.other.guard": Careful(lock=LOCK, other=Part(guard=LOCK)),
    "Model.guard": class_of_program(),
    "self.other.lock": CYCLE,
}


@pytest.mark.parametrize("path", PATHS)
def test_the_path_leads_to_what_cannot_be_pickled(path: str) -> None:
    fault = find_fault(PATHS[path])
    assert (fault.path, type(fault.culprit).__name__) == (path, "lock")


def test_what_refuses_by_itself_is_the_culprit() -> None:
    fault = find_fault(Part(model=Stubborn(name="a")))
    assert (fault.path, type(fault.culprit)) == ("self.model", Stubborn)


def test_the_search_is_bounded_in_depth_and_in_width() -> None:
    chain: Any = LOCK
    for _ in range(MAX_DEPTH + 5):
        chain = Part(inner=chain)
    assert find_fault(chain).path == "self" + ".inner" * MAX_DEPTH
    wide = Part(many=[*range(MAX_TRIED), LOCK])
    assert find_fault(wide).path == "self.many"


def test_the_text_names_the_model_the_path_the_type_and_both_ways_out() -> None:
    with pytest.raises(BindError) as error:
        pickled_sources("m", [closure(Part(encoder=Part(lock=LOCK)))])
    text = str(error.value)
    start = "model 'm': the callable 'closure.<locals>.infer' cannot be sent to a worker process: "
    assert text.startswith(start)
    assert "its 'model.encoder.lock' is of type lock, which cannot be pickled" in text
    assert "a class or a function with a parameter named device" in text
    assert 'isolation="thread"' in text
    itself = r"the Stubborn object .*: it cannot be pickled \(ValueError: I stay here\)"
    with pytest.raises(BindError, match=itself):
        pickled_sources("m", [Stubborn()])
