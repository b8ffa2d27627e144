"""Which callable a file without a name means."""

from __future__ import annotations

import sys
import types

import pytest

from gpuserve.model.describe_child import sole_callable
from gpuserve_worker.inference.callable_loading import LoadError

HEAD = """
import functools
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
from gpuserve.typed import Float32, batch

def helper(x): return x
class Pair(NamedTuple): a: Float32; b: Float32
@dataclass
class Options: size: int = 1
class Kind(Enum): A = 1
"""
SERVED = {
    "the only function": ("def f(requests): ...", "f"),
    "what is private is not meant": ("def f(requests): ...\ndef _g(): ...\n_h = f", "f"),
    "what is imported is not meant": ("from json import dumps\ndef f(requests): ...", "f"),
    "a class with __call__": ("class Model:\n def __call__(self, requests): ...", "Model"),
    "an object": ("class _Model:\n def __call__(self, requests): ...\nmodel = _Model()", "model"),
    "the decorated one": (HEAD + "@batch\ndef f(x): ...", "f"),
    "a method's class": (HEAD + "class M:\n @batch\n def __call__(self, x): ...", "M"),
    "one with tensors": (HEAD + "def f(r): ...\nf.inputs = f.outputs = []", "f"),
    "one with declare": (HEAD + "class M:\n declare = classmethod(dict)\n def __call__(self, r): ...", "M"),
    "one for OpenAI's clients": ("class Bot:\n def chat(self, request: 'ChatRequest'): ...", "Bot"),
    "what __all__ says": ("__all__ = ['g']\ndef f(): ...\ndef g(): ...", "g"),
}
SEVERAL = "there are several callables, "
REFUSED = {
    "nothing": ("x = 1", "there is no public callable: expected a function or a class of its own"),
    "three": (
        "def a(): ...\ndef b(): ...\ndef c(): ...",
        f"{SEVERAL}'a', 'b' and 'c': name the one to serve, as m.py:a",
    ),
    "two that are decorated": (
        HEAD + "@batch\ndef f(x): ...\n@batch\ndef g(x): ...",
        f"{SEVERAL}'f' and 'g'",
    ),
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "m", types.ModuleType("m"))


def module(text: str) -> types.ModuleType:
    made = sys.modules["m"]
    exec(compile(text, "m.py", "exec"), vars(made))
    return made


@pytest.mark.parametrize(("text", "name"), SERVED.values(), ids=SERVED)
def test_the_one_that_is_meant(text: str, name: str) -> None:
    assert sole_callable(module(text), "m.py") == name


@pytest.mark.parametrize(("text", "complaint"), REFUSED.values(), ids=REFUSED)
def test_none_or_several(text: str, complaint: str) -> None:
    with pytest.raises(LoadError) as refused:
        sole_callable(module(text), "m.py")
    assert complaint in str(refused.value)
