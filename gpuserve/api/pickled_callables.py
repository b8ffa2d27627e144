"""Callables on their way to worker processes: pickling with cloudpickle, and the detection of shared objects.

If a callable cannot be pickled, the error names the part at fault by its path, such as ``self.encoder.lock``.
The search descends from an object to its parts that cannot be pickled either, within bounds.

Callables in different processes have copies of the objects that they share in this program, so a change by
one of them is invisible to the others. ``SharedObjects`` detects this for the warning of ``bind()``. The
detection is incomplete on purpose: it does not follow references inside objects, and never changes an object.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import os
import sys
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import suppress
from logging import Logger, LoggerAdapter
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.core.errors import BindError

MAX_DEPTH: Final = 32
#: Maximum number of parts to pickle, which bounds the time of the search.
MAX_TRIED: Final = 1000
_MAX_KEY: Final = 40
#: Attributes that every class has.
_OF_EVERY_CLASS: Final = frozenset({"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__"})
_WAYS_OUT: Final = (
    "Either pass what makes it, a class or a function with a parameter named device, which then runs in the "
    'worker; or keep it in this process with isolation="thread"'
)


def pickled_sources(model_name: str, callables: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each callable as ``InstanceSpec.source``: its pickle, and the import path of this program. Large
    pickles are in sealed memory together, so the callables share their arrays. Raise BindError, with the
    cause and the remedies, if a callable cannot be pickled, or if memory is short.
    """
    from gpuserve_worker.memory import sealed_pickles  # here: a server with a config file does not need it

    objects = []
    for infer_func in callables:
        where = f"model {model_name!r}: {described(infer_func)} cannot be sent to a worker process"
        try:
            objects.append(sealed_pickles.PickledObject(infer_func))
        except Exception as error:  # objects of the user may raise anything
            why = f"{type(error).__name__}: {error}"
            path, value = find_fault(infer_func)
            kind = f"its {path!r} is of type {type(value).__qualname__}, which" if path else "it"
            raise BindError(f"{where}: {kind} cannot be pickled ({why}). {_WAYS_OUT}.") from error
    # Absolute paths, because the worker may run in another directory.
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path if isinstance(path, str))
    common = {"sys_path": list(paths)}
    if all(one.is_small for one in objects):
        return [{"pickle": bytes(one.data), **common} for one in objects]
    try:
        memory, ranges = sealed_pickles.seal_pickles(objects)
    except (sealed_pickles.NoSharedMemory, OSError) as error:
        text = f"model {model_name!r}: no memory for the arrays of its callables: {error}"
        raise BindError(text) from error
    return [{"memory": memory, "ranges": one, **common} for one in ranges]


def described(infer_func: Any) -> str:
    """Return the name of a callable for messages, such as "the callable 'infer'"."""
    name = getattr(infer_func, "__qualname__", None)
    return f"the callable {name!r}" if name else f"the {type(infer_func).__qualname__} object"


class PicklingFault(NamedTuple):
    """The innermost part that cannot be pickled. ``path`` is "" for the object itself."""

    path: str
    culprit: Any


def find_fault(whole: Any) -> PicklingFault:
    """Return the innermost part of ``whole`` that cannot be pickled. ``whole`` itself cannot be pickled."""
    fault, seen, n_tried = PicklingFault("", whole), {id(whole)}, 0
    for _ in range(MAX_DEPTH):
        for path, value in _parts(*fault):
            if id(value) in seen:  # a cycle, which leads back to a part that is known to fail
                continue
            n_tried += 1
            if n_tried > MAX_TRIED:
                return fault
            if not can_be_pickled(value):
                seen.add(id(value))
                fault = PicklingFault(path, value)
                break
        else:
            return fault
    return fault


def can_be_pickled(value: Any) -> bool:
    from gpuserve_worker.memory.sealed_pickles import SealedPickler

    try:
        with open(os.devnull, "wb") as nothing:
            SealedPickler(nothing).dump(value)
    except Exception:  # objects of the user may raise anything
        return False
    return True


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
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
        is_plain = isinstance(key, str | int | float | bytes)
        shown = repr(key)[:_MAX_KEY] if is_plain else type(key).__name__
        yield f"{path}[{shown}]", one
        yield f"{path}: key {shown}", key


def _of_function(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects in a pickled function: closure variables, globals, defaults and attributes."""
    prefix = f"{path}.<locals>." if path else ""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield prefix + name, cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
    for name in dict.fromkeys(_loaded_globals(function.__code__)):
        one = function.__globals__.get(name)
        if one is not None and not isinstance(one, ModuleType):
            yield name, one
    yield from _items(_below(path, "__defaults__"), function.__defaults__ or ())
    yield from _entries(_below(path, "__kwdefaults__"), function.__kwdefaults__ or {})
    yield from ((_below(path, name), one) for name, one in vars(function).items())


def _of_object(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the state of an object as pickle would read it, and its class."""
    try:
        state = value.__getstate__()
    except Exception:  # a method of the user may raise anything
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


Key: TypeAlias = tuple[str, int]
#: Returns an object, or None if it does not exist any more.
_Reference: TypeAlias = Callable[[], Any]

_OF_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL"})
_CONTAINERS: Final = (MutableMapping, MutableSequence, MutableSet)
#: Types whose objects have attributes but do not count as state.
_NO_STATE: Final = (type, types.ModuleType, enum.Enum, BaseException, Logger, LoggerAdapter, Namespace)
_OWN: Final = __name__.partition(".")[0]
_UNCHANGING: Final = frozenset({_OWN, "jax", "jaxlib"})


class SharedObjects:
    """The mutable objects that the callables of each model reach, as long as the objects exist."""

    def __init__(self) -> None:
        self._models: dict[Key, tuple[bool, list[_Reference]]] = {}

    def bind(self, model: Key, callables: Any, *, is_copied: bool) -> list[tuple[Key, str]]:
        """Add a model's callables; return models that share an object with them of which one has a copy."""
        states = {id(one): one for infer_func in callables for one in mutable_objects(infer_func)}
        self._models.pop(model, None)
        shared = []
        for other, (other_is_copied, references) in self._models.items():
            both = [one for one in (reference() for reference in references) if id(one) in states]
            if both and (is_copied or other_is_copied):
                shared.append((other, type(both[0]).__name__))
        self._models[model] = is_copied, [_reference(one) for one in states.values()]
        return shared

    def forget(self, model: Key) -> None:
        self._models.pop(model, None)


def mutable_objects(infer_func: Any) -> Iterator[Any]:
    """Yield the mutable objects that a callable reaches: itself, its object, closure, globals, arguments."""
    left, seen = [infer_func], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            left += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            left += [one.__self__, one.__func__]
        elif isinstance(one, types.FunctionType):
            left += _around(one)
        elif callable(one) and hasattr(one, "__wrapped__"):  # a function wrapped by a cache or a compiler
            left.append(one.__wrapped__)
        elif is_mutable(one):
            yield one


def is_mutable(value: Any) -> bool:
    """Return whether callables may change a value: a container, an array, or an object with attributes."""
    kind = type(value)
    if isinstance(value, _NO_STATE) or kind.__module__.partition(".")[0] in _UNCHANGING:
        return False
    if isinstance(value, _CONTAINERS):
        return True
    flags = getattr(value, "flags", None)
    if hasattr(kind, "__array_interface__"):
        return bool(getattr(flags, "writeable", True))
    parameters = getattr(kind, "__dataclass_params__", None)
    if dataclasses.is_dataclass(value) and getattr(parameters, "frozen", False):
        return False
    return bool(getattr(value, "__dict__", None)) or hasattr(kind, "__dlpack__")


def _around(function: types.FunctionType) -> list[Any]:
    """Return the outside objects of a function; of gpuserve's own, as decorators, only wrapped functions."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable was never assigned
            found += [cell.cell_contents] if cell.cell_contents is not None else []
    if function.__module__ and function.__module__.partition(".")[0] == _OWN:
        return [one for one in found if isinstance(one, types.FunctionType | types.MethodType)]
    for name in set(_loaded_globals(function.__code__)):
        value = function.__globals__.get(name)
        is_elsewhere = getattr(value, "__module__", None) != function.__module__
        if name.isupper() or (isinstance(value, types.FunctionType) and is_elsewhere):
            continue  # a constant by its name, or a function of a library with state of its own
        found.append(value)
    return found


def _loaded_globals(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code uses, including the code of nested functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_GLOBALS:
            yield instruction.argval
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _loaded_globals(one)


def _reference(value: Any) -> _Reference:
    """Return a weak reference if the type allows one: binding a model must not keep its objects alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
