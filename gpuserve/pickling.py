"""How a callable of this program gets to its worker process: cloudpickle, and what to say when it cannot.

Nothing is unpickled here, nor anywhere but in the worker that the pickle is for.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from gpuserve.errors import BindError
from gpuserve.pickling_fault import find_fault

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
    """A callable as a sentence names it."""
    name = getattr(infer_func, "__qualname__", None)
    return f"the callable {name!r}" if name else f"the {type(infer_func).__qualname__} object"


def _culprit(infer_func: Any) -> str:
    """The part that cannot be pickled, where it is not the whole: "its 'self.lock' … "."""
    path, value = find_fault(infer_func)
    if not path:
        return "it cannot be pickled "
    return f"its {path!r} is of type {type(value).__qualname__}, which cannot be pickled "
