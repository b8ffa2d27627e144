"""A short-lived process that imports one callable and tells about it, run by ``asking.py``. A question comes
on stdin and the answer goes to stdout, both as msgpack. Only here does the command line run code of the user.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from gpuserve.describe.declaration import declaration, target_kind
from gpuserve.describe.public import only_callable
from gpuserve_worker.calling.callable import YIELDING, LoadError, locate, module_at
from gpuserve_worker.running.lifecycle import die_with_parent

#: A place in a traceback.
_PLACE: Final = re.compile(r'^ *File "([^"]+)", line (\d+)', re.MULTILINE)


def main() -> None:
    die_with_parent()  # what is imported may never come back
    question = msgpack.unpackb(sys.stdin.buffer.read())
    if os.getppid() != question.pop("asker"):  # it died before that word was given
        return
    with os.fdopen(os.dup(1), "wb") as answer_to:
        os.dup2(2, 1)  # what user code prints must not come between the answer
        answer_to.write(_packed(_answer(**question), question["path"]))
    sys.stderr.flush()
    os._exit(0)  # no waiting for threads that the user's module has started


def _packed(answer: dict[str, Any], path: str) -> bytes:
    try:
        return bytes(msgpack.packb(answer))
    except (TypeError, ValueError, OverflowError) as error:
        text = f"the declaration of {path!r} must be plain data as in a config file: {error}"
        return bytes(msgpack.packb({"error": text}))


def _answer(
    path: str, base_dir: str, kwargs: dict[str, Any], decoupled: bool | None, by_types: bool
) -> dict[str, Any]:
    """Find the callable as a worker does, so that what passes here loads there, and describe it."""
    try:
        if path.endswith(".py"):
            path = f"{path}:{only_callable(module_at(path, base_dir), path)}"
        target = locate({"path": path, "base_dir": base_dir})
        problem = _mismatch(path, target, kwargs) or _wrong_kind(path, target, decoupled)
        if problem:
            return {"error": problem}
        return {"path": path, "declared": declaration(target, path, kwargs, by_types=by_types)}
    except LoadError as error:
        sys.stderr.write(error.traceback)
        return {"error": _told(error, base_dir)}


def _told(error: LoadError, base_dir: str) -> str:
    """The sentence of an error, with its place where that is in a file of the user's own."""
    places = _PLACE.findall(error.traceback)
    file, line = places[-1] if places else ("", "")
    own = os.path.relpath(file, base_dir) if os.path.isfile(file) else os.pardir
    if own.startswith(os.pardir) or "site-packages" in own or f"line {line})" in str(error):
        return str(error)
    return f"{error} ({own}, line {line})"


def _mismatch(path: str, target: Any, kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with the object itself, or with what it is to be made with."""
    if not callable(target):
        return f"{path!r} is {type(target).__name__} and cannot be called"
    if not isinstance(target, type):
        return None
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return None  # a class of an extension module need not have one
    given = dict(kwargs)
    if "device" in signature.parameters:
        given.setdefault("device", "cpu")
    try:
        signature.bind(**given)
    except TypeError as error:
        return f"{path!r} cannot be made with these kwargs: {error}"
    return None


def _wrong_kind(path: str, target: Any, decoupled: bool | None) -> str | None:
    """What is wrong with how it answers. ``decoupled`` None: it is not known yet how it is to."""
    kind = target_kind(target)
    if kind not in YIELDING or decoupled is not False:
        return None
    return (
        f"{path!r} is {kind.value}, which gives any number of responses to a request; "
        "give the model `decoupled: true`, or let it return one response"
    )


if __name__ == "__main__":
    main()
