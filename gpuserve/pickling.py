"""How a callable of this program gets to its worker process: cloudpickle, and what to say when it cannot.

Nothing is unpickled here, nor anywhere but in the worker that the pickle is for.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any, Final

from gpuserve.errors import BindError

#: msgpack, which carries the pickle, counts bytes in 32 bits; the rest of the message is small.
MAX_PICKLE_NBYTES: Final = (4 << 30) - (1 << 20)
_WAYS_OUT: Final = (
    "Either pass what makes it, a class or a function with a parameter named device, which then runs in the "
    'worker; or keep it in this process with isolation="thread"'
)


def pickled_source(model_name: str, infer_func: Any) -> dict[str, Any]:
    """The callable as ``wire.Init.source``: its pickle, and where this program finds its modules.

    Raises:
        BindError: it cannot be pickled, or is too large to be sent; the text names it and the ways out.
    """
    import cloudpickle  # a server of a config file does without

    where = f"model {model_name!r}: {_described(infer_func)} cannot be sent to a worker process"
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


def _described(infer_func: Any) -> str:
    name = getattr(infer_func, "__qualname__", None)
    return f"the callable {name!r}" if name else f"the {type(infer_func).__qualname__} object"


def _culprit(infer_func: Any) -> str:
    """The part that cannot be pickled, where it is near: "its attribute 'lock' … "."""
    for kind, name, value in _parts(infer_func):
        if not _can_be_pickled(value):
            return f"its {kind} {name!r} is of type {type(value).__qualname__}, which cannot be pickled "
    return "it cannot be pickled "


def _parts(infer_func: Any) -> Iterator[tuple[str, str, Any]]:
    """What a callable is made of, one level deep: (kind, name, value)."""
    if isinstance(infer_func, functools.partial):
        yield from (("argument", str(position), value) for position, value in enumerate(infer_func.args, 1))
        yield from (("argument", name, value) for name, value in infer_func.keywords.items())
        yield from _parts(infer_func.func)
    elif isinstance(infer_func, MethodType):
        yield from _parts(infer_func.__self__)
    elif isinstance(infer_func, FunctionType):
        yield from _variables(infer_func)
    else:
        yield from (("attribute", name, value) for name, value in getattr(infer_func, "__dict__", {}).items())


def _variables(function: FunctionType) -> Iterator[tuple[str, str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield "variable", name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield "variable", name, function.__globals__[name]


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:  # as above
        return False
    return True
