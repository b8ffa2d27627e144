"""How a callable of this program gets to its worker process: cloudpickle, and what to say when it cannot.

Nothing is unpickled here, nor anywhere but in the worker that the pickle is for. What of a callable is to
blame is told as the path to it, ``self.encoder.lock``: the search goes from an object to those of its parts
that cannot be pickled either, until none of the parts is. It is bounded in depth and in the number of parts.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from gpuserve.errors import BindError

#: msgpack, which carries the pickle, counts bytes in 32 bits; the rest of the message is small.
MAX_PICKLE_NBYTES: Final = (4 << 30) - (1 << 20)
MAX_DEPTH: Final = 32
#: Each part that is tried is pickled, so this bounds the time.
MAX_TRIED: Final = 1000
_MAX_KEY: Final = 40
#: Attributes of every class, or made anew with it.
_OF_EVERY_CLASS: Final = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__"})
_WAYS_OUT: Final = (
    "Either pass what makes it, a class or a function with a parameter named device, which then runs in the "
    'worker; or keep it in this process with isolation="thread"'
)


def pickled_source(model_name: str, infer_func: Any) -> dict[str, Any]:
    """The callable as ``wire.Init.source``: its pickle, and where this program finds its modules. Raises
    BindError: it cannot be pickled, or is too large to be sent; the text names it and the ways out.
    """
    import cloudpickle  # a server of a config file does without

    where = f"model {model_name!r}: {described(infer_func)} cannot be sent to a worker process"
    try:
        data = cloudpickle.dumps(infer_func)
    except Exception as error:  # whatever an object of the user's raises while it is pickled
        why = f"{type(error).__name__}: {error}"
        raise BindError(f"{where}: {_culprit(infer_func)}({why}). {_WAYS_OUT}.") from error
    if len(data) > MAX_PICKLE_NBYTES:
        raise BindError(f"{where}: it takes {len(data)} bytes, over {MAX_PICKLE_NBYTES}. {_WAYS_OUT}.")
    return {"pickle": data, "sys_path": _import_paths()}


def _import_paths() -> list[str]:
    """``sys.path`` for another directory: "" stands for the current one, and any may be relative."""
    return list(dict.fromkeys(os.path.abspath(path) for path in sys.path if isinstance(path, str)))


def described(infer_func: Any) -> str:
    """A callable as messages name it, such as "the callable 'infer'"."""
    name = getattr(infer_func, "__qualname__", None)
    return f"the callable {name!r}" if name else f"the {type(infer_func).__qualname__} object"


def _culprit(infer_func: Any) -> str:
    """The part that cannot be pickled, where it is not the whole: "its 'self.lock' … "."""
    path, value = find_fault(infer_func)
    if not path:
        return "it cannot be pickled "
    return f"its {path!r} is of type {type(value).__qualname__}, which cannot be pickled "


# ---- what is to blame ---------------------------------------------------------------------------


class PicklingFault(NamedTuple):
    """The innermost part that is to blame. ``path`` is "" where it is the object itself."""

    path: str
    culprit: Any


class _Nowhere:
    """A file that keeps nothing: whether a pickle can be made is all that is asked."""

    def write(self, data: Any) -> int:
        return len(data)


def find_fault(whole: Any) -> PicklingFault:
    """The innermost part of ``whole``, which cannot be pickled, that cannot be pickled itself."""
    fault = PicklingFault("", whole)
    seen = {id(whole)}
    budget = itertools.count()
    for _ in range(MAX_DEPTH):
        inner = _first_bad(fault, seen, budget)
        if inner is None:
            return fault
        fault = inner
    return fault


def can_be_pickled(value: Any) -> bool:
    """Whether cloudpickle can pickle a value."""
    import cloudpickle

    try:
        cloudpickle.Pickler(_Nowhere()).dump(value)
    except Exception:  # whatever an object of the user's raises while it is pickled
        return False
    return True


def _first_bad(fault: PicklingFault, seen: set[int], budget: Iterator[int]) -> PicklingFault | None:
    """The first part that cannot be pickled; None where there is none, or no more may be tried."""
    for path, value in _parts(fault.path, fault.culprit):
        if id(value) in seen:  # a cycle: it leads back to what is known to be bad
            continue
        if next(budget) >= MAX_TRIED:
            return None
        if not can_be_pickled(value):
            seen.add(id(value))
            return PicklingFault(path, value)
    return None


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object is made of, one level deep, with the path to each part."""
    match value:
        case functools.partial():
            yield _below(path, "func"), value.func
            yield from _items(_below(path, "args"), value.args)
            yield from _entries(_below(path, "keywords"), value.keywords)
        case MethodType():
            yield path or "self", value.__self__
        case FunctionType():
            yield from _of_function(path, value)
        case type():
            for name, one in list(vars(value).items()):
                if name not in _OF_EVERY_CLASS:
                    yield _below(path or value.__name__, name), one
        case staticmethod() | classmethod():
            yield path, value.__func__
        case property():
            yield from ((path, one) for one in (value.fget, value.fset, value.fdel) if one is not None)
        case dict():
            yield from _entries(path, value)
        case list() | tuple():
            yield from _items(path, value)
        case set() | frozenset():
            yield from ((f"{path}{{…}}", one) for one in value)
        case _:
            yield from _of_object(path or "self", value)


def _items(path: str, items: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{path}[{position}]", one) for position, one in enumerate(items))


def _entries(path: str, entries: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, one in list(entries.items()):
        yield f"{path}[{_shown(key)}]", one
        yield f"{path}: key {_shown(key)}", key


def _shown(key: Any) -> str:
    return repr(key)[:_MAX_KEY] if isinstance(key, str | int | float | bytes) else type(key).__name__


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that it takes along: of the functions around it, of its module, its defaults."""
    prefix = f"{path}.<locals>." if path else ""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield prefix + name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(function.__code__):
        one = function.__globals__.get(name)
        if one is not None and not isinstance(one, ModuleType):
            yield name, one
    yield from _items(_below(path, "__defaults__"), function.__defaults__ or ())
    yield from _entries(_below(path, "__kwdefaults__"), function.__kwdefaults__ or {})
    yield from ((_below(path, name), one) for name, one in vars(function).items())


def _global_names(code: CodeType) -> Iterator[str]:
    """The names that the code may take from its module, that of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Its state as pickle asks for it, so that attributes which it leaves out are not blamed; its class."""
    try:
        state = value.__getstate__()
    except Exception:  # as it is the user's own
        return
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if isinstance(part, dict):
            yield from ((_below(path, str(name)), one) for name, one in list(part.items()))
        elif part is not None:
            yield f"{path}.__getstate__()", part
    yield type(value).__name__, type(value)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
