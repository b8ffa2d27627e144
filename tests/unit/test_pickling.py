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
    exec(
        "class Model:\n    guard = lock\n    def __call__(self, requests):\n        return requests",
        namespace,
    )
    return namespace["Model"]()


@pytest.mark.parametrize(
    ("infer_func", "path"),
    [
        pytest.param(Part(lock=LOCK), "self.lock", id="attribute"),
        pytest.param(
            Part(name="a", encoder=Part(layers=[1, Part(lock=LOCK)])),
            "self.encoder.layers[1].lock",
            id="deep",
        ),
        pytest.param(Part(lock=LOCK).infer, "self.lock", id="method"),
        pytest.param(closure(Part(encoder=Part(lock=LOCK))), "model.encoder.lock", id="closure"),
        pytest.param(with_global(model=Part(encoder=Part(lock=LOCK))), "model.encoder.lock", id="global"),
        pytest.param(with_global(encode=closure(LOCK)), "encode.<locals>.model", id="closure-in-global"),
        pytest.param(functools.partial(closure, LOCK), "args[0]", id="partial"),
        pytest.param(
            functools.partial(closure, model={"a": LOCK}), "keywords['model']['a']", id="partial-keyword"
        ),
        pytest.param(Part(cache={("a", 1): (1, LOCK)}), "self.cache[tuple][1]", id="dict-of-tuples"),
        pytest.param(Part(locks=[Slotted()]), "self.locks[0].lock", id="slots"),
        pytest.param(Careful(lock=LOCK, other=Part(guard=LOCK)), "self.other.guard", id="getstate"),
        pytest.param(class_of_program(), "Model.guard", id="class"),
    ],
)
def test_the_path_leads_to_what_cannot_be_pickled(infer_func: Any, path: str) -> None:
    fault = find_fault(infer_func)
    assert (fault.path, type(fault.culprit).__name__) == (path, "lock")


def test_a_cycle_ends() -> None:
    first = Part(lock=None)
    first.other = Part(back=first, lock=LOCK)  # type: ignore[attr-defined]
    assert find_fault(first).path == "self.other.lock"


def test_what_refuses_by_itself_is_the_culprit() -> None:
    fault = find_fault(Part(model=Stubborn(name="a")))
    assert (fault.path, type(fault.culprit)) == ("self.model", Stubborn)


def test_the_search_is_bounded_in_depth() -> None:
    chain: Any = LOCK
    for _ in range(MAX_DEPTH + 5):
        chain = Part(inner=chain)
    assert find_fault(chain).path == "self" + ".inner" * MAX_DEPTH


def test_the_search_is_bounded_in_width() -> None:
    wide = Part(many=[*range(MAX_TRIED), LOCK])
    assert find_fault(wide).path == "self.many"


def test_the_text_names_the_model_the_path_the_type_and_both_ways_out() -> None:
    with pytest.raises(BindError) as error:
        pickled_sources("m", [closure(Part(encoder=Part(lock=LOCK)))])
    text = str(error.value)
    assert text.startswith(
        "model 'm': the callable 'closure.<locals>.infer' cannot be sent to a worker process: "
    )
    assert "its 'model.encoder.lock' is of type lock, which cannot be pickled" in text
    assert "a class or a function with a parameter named device" in text
    assert 'isolation="thread"' in text


def test_a_callable_that_is_the_culprit_itself_is_named() -> None:
    with pytest.raises(
        BindError, match=r"the Stubborn object .*: it cannot be pickled \(ValueError: I stay here\)"
    ):
        pickled_sources("m", [Stubborn()])
