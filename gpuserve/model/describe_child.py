"""The short-lived process that imports one callable and returns its declaration, started by ``describe.py``.

The question comes on stdin and the answer goes to stdout, both as msgpack. Of all processes of the command
line only this one runs user code. Of a file without a named attribute the process serves the only callable
that declares how it is served, else the only public callable.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

import msgpack

from gpuserve.model.openai_declaration import has_openai_method, is_for_openai
from gpuserve.model.self_description import declaration, target_kind
from gpuserve_worker.execution.lifecycle import die_with_parent
from gpuserve_worker.inference.call_check import call_problem
from gpuserve_worker.inference.callable_loading import (
    YIELDING,
    CallableKind,
    LoadError,
    kwargs_problem,
    locate,
    makes_callable,
    module_at,
    unused_kwargs,
)
from gpuserve_worker.inference.inference_request import argument_form_of
from gpuserve_worker.inference.stepping import is_stepped


def sole_callable(module: ModuleType, file: str) -> str:
    """Return the name of a file's only callable; raise LoadError if it has none, or several."""
    found = dict(_public_callables(module))
    names = [name for name, one in found.items() if _is_meant_to_be_served(one)] or list(found)
    if len(names) == 1:
        return names[0]
    if not names:
        raise LoadError("there is no public callable: expected a function or a class of its own")
    listed = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
    raise LoadError(f"there are several callables, {listed}: name the one to serve, as {file}:{names[0]}")


def _public_callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the callables that the module itself defines, by name; imported callables are left out."""
    exported = getattr(module, "__all__", None)
    for name, one in vars(module).items():
        if name.startswith("_") or (exported is not None and name not in exported):
            continue
        is_plain = isinstance(one, type | FunctionType)
        home = one.__module__ if is_plain else type(one).__module__
        if not (callable(one) or is_stepped(one)) or home != module.__name__:
            continue
        called = inspect.getattr_static(one, "__call__", None)
        is_served = isinstance(called, FunctionType) or is_stepped(one) or is_for_openai(one)
        if is_served or not isinstance(one, type):  # else a class of values, such as a function's outputs
            yield name, one


def _is_meant_to_be_served(one: Any) -> bool:
    called = one.__call__ if isinstance(one, type) else one
    has_declaration = isinstance(one, type) and callable(getattr(one, "declare", None))
    if argument_form_of(called) is not None or has_declaration or is_stepped(one):
        return True
    return hasattr(one, "inputs") and hasattr(one, "outputs")


_PLACE: Final = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)


def main() -> None:
    die_with_parent()  # the import of user code may block for ever
    sys.argv = [""]  # as in a worker
    question = msgpack.unpackb(sys.stdin.buffer.read())
    if os.getppid() != question.pop(
        "asker"
    ):  # the asking process died before this process asked for its signal
        return
    # They show where a slow import stands before the asking process gives up.
    faulthandler.dump_traceback_later(max(0.1, question.pop("stacks_at") - time.monotonic()))
    with os.fdopen(os.dup(1), "wb") as answer_to:
        os.dup2(2, 1)  # output of user code must not get into the answer
        answer = _answer(**question)
        try:
            packed = msgpack.packb(answer)
        except (TypeError, ValueError, OverflowError) as error:
            text = f"the declaration of {question['path']!r} must be plain data as in a config file: {error}"
            packed = msgpack.packb({"error": text})
        answer_to.write(packed)
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that the user's module has started


def _answer(
    path: str,
    base_dir: str,
    kwargs: dict[str, Any],
    decoupled: bool | None,
    by_types: bool,
    inputs: list[str] | None,
    openai: bool,
    ranks: int,
) -> dict[str, Any]:
    """Return the declaration of the callable, which is located as a worker locates it, or the error."""
    try:
        if path.endswith(".py"):
            path = f"{path}:{sole_callable(module_at(path, base_dir), path)}"
        target = locate({"path": path, "base_dir": base_dir})
        adapted = openai or is_for_openai(target)
        problem = (
            _mismatch(path, target, kwargs, adapted)
            or _wrong_kind(path, target, decoupled, ranks)
            or (None if adapted else call_problem(target, path, kwargs, inputs))
        )
        if problem:
            return {"error": problem}
        return {"path": path, "declared": declaration(target, path, kwargs, by_types=by_types)}
    except LoadError as error:
        sys.stderr.write(error.traceback)
        return {"error": _error_text(error, base_dir)}


def _error_text(error: LoadError, base_dir: str) -> str:
    """Return the text of an error, with file and line if the user's own file raised it."""
    places = _PLACE.findall(error.traceback)
    file, line = places[-1] if places else ("", "")
    own = os.path.relpath(file, base_dir) if os.path.isfile(file) else os.pardir
    if own.startswith(os.pardir) or "site-packages" in own or f"line {line})" in str(error):
        return str(error)
    return f"{error} ({own}, line {line})"


def _mismatch(path: str, target: Any, kwargs: Mapping[str, Any], adapted: bool) -> str | None:
    """Return the error in the object itself or in its arguments, or None."""
    if not (callable(target) or is_stepped(target) or (adapted and has_openai_method(target))):
        expected = "which cannot be called; expected a function or a class"
        return f"{path!r} is an object of type {type(target).__name__}, {expected}"
    if not isinstance(target, type):
        return unused_kwargs(repr(path), kwargs) if kwargs and not makes_callable(target, kwargs) else None
    return kwargs_problem(target, path, kwargs)


def _wrong_kind(path: str, target: Any, decoupled: bool | None, ranks: int) -> str | None:
    """Return the error in the way the callable responds, or None. ``decoupled`` None: not determined yet."""
    kind = target_kind(target)
    if ranks > 1 and (is_stepped(target) or kind is not CallableKind.PLAIN):
        what = "a stepped callable" if is_stepped(target) else kind.value
        return f"{path!r} is {what}, and ranks needs a plain callable, which runs one batch at a time"
    if kind not in YIELDING or decoupled is not False:
        return None
    return (
        f"{path!r} is {kind.value}, which gives any number of responses to a request; "
        "give the model `decoupled: true`, or let it return one response"
    )


if __name__ == "__main__":
    main()
