"""Which models of a program share an object that can change. Callables with processes of their own have
copies of it, and what one of them changes the other never sees; ``bind()`` says so. A guess that errs on the
silent side: what an object refers to in turn is not looked at. No process here, and no object is changed.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import types
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from logging import Logger, LoggerAdapter
from typing import Any, Final, TypeAlias

#: A model by its name and version.
Key: TypeAlias = tuple[str, int]
#: An object, or nothing where it is gone.
_Reference: TypeAlias = Callable[[], Any]

_OF_GLOBALS: Final = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL"})
_CONTAINERS: Final = (MutableMapping, MutableSequence, MutableSet)
#: What has attributes and is not thought of as state.
_NO_STATE: Final = (type, types.ModuleType, enum.Enum, BaseException, Logger, LoggerAdapter, Namespace)
_OWN: Final = __name__.partition(".")[0]
#: Packages whose objects do not change.
_UNCHANGING: Final = frozenset({_OWN, "jax", "jaxlib"})


class SharedStates:
    """The objects that the callables of each model lead to, as long as they are there."""

    def __init__(self) -> None:
        self._models: dict[Key, tuple[bool, list[_Reference]]] = {}

    def bind(self, model: Key, callables: Any, *, is_copied: bool) -> list[tuple[Key, str]]:
        """Note a model's callables; the models that share an object with them and have it apart, each with
        the object's type.
        """
        states = {id(one): one for infer_func in callables for one in states_of(infer_func)}
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


def states_of(infer_func: Any) -> Iterator[Any]:
    """The objects that can change, and that a callable leads to: that of a method, what a function closes
    over, names of its module, arguments of a partial, the callable itself.
    """
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
        elif callable(one) and hasattr(one, "__wrapped__"):  # a function behind a cache or a compiler
            left.append(one.__wrapped__)
        elif is_state(one):
            yield one


def is_state(value: Any) -> bool:
    """Whether a value is one that callables may change: a container, an array, an object with attributes."""
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
    """What a function reaches from outside; of ours, as decorators are, only the functions that it wraps."""
    found = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    if function.__module__ and function.__module__.partition(".")[0] == _OWN:
        return [one for one in found if isinstance(one, types.FunctionType | types.MethodType)]
    for name in set(_global_names(function.__code__)):
        value = function.__globals__.get(name)
        is_elsewhere = getattr(value, "__module__", None) != function.__module__
        if name.isupper() or (isinstance(value, types.FunctionType) and is_elsewhere):
            continue  # the name of a constant; what a library keeps for itself
        found.append(value)
    return found


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that was never assigned
        return False


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _OF_GLOBALS:
            yield instruction.argval
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _global_names(one)


def _reference(value: Any) -> _Reference:
    """A weak one where its type has such: an object must not live longer because its model was bound."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
