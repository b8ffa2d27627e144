"""Which callable of a module is meant where none is named: the only one that says how it is served, else the
only public one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from gpuserve.decorators.wrapping import form_of
from gpuserve_worker.calling.callable import LoadError


def only_callable(module: ModuleType, file: str) -> str:
    """The name of the callable that ``file`` alone means. Raises LoadError: there is none, or several."""
    found = dict(_public_callables(module))
    names = [name for name, one in found.items() if _says_how(one)] or list(found)
    if len(names) == 1:
        return names[0]
    if not names:
        raise LoadError("there is no public callable: expected a function or a class of its own")
    raise LoadError(
        f"there are several callables, {_listed(names)}: name the one to serve, as {file}:{names[0]}"
    )


def _public_callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What can be called and is the module's own, by name; what it has imported is not meant."""
    exported = getattr(module, "__all__", None)
    for name, one in vars(module).items():
        if name.startswith("_") or (exported is not None and name not in exported):
            continue
        is_plain = isinstance(one, type | FunctionType)
        home = one.__module__ if is_plain else type(one).__module__
        if callable(one) and home == module.__name__ and not _is_data(one):
            yield name, one


def _is_data(one: Any) -> bool:
    """Whether this is a class that holds values, such as the outputs of a function, and serves nothing."""
    return isinstance(one, type) and not isinstance(
        inspect.getattr_static(one, "__call__", None), FunctionType
    )


def _says_how(one: Any) -> bool:
    """Whether a callable was made to be served: decorated, or with a declaration of its own."""
    called = one.__call__ if isinstance(one, type) else one
    if form_of(called) is not None or (isinstance(one, type) and callable(getattr(one, "declare", None))):
        return True
    return hasattr(one, "inputs") and hasattr(one, "outputs")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
