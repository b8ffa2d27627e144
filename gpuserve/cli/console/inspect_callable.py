"""A short-lived process that imports one callable and tells about it, run by ``preflight``. JSON comes on
stdin and goes to stdout. Only here does the command line run code of the user.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

from gpuserve.declare.model import Tensor
from gpuserve.declare.tensors import tensor_specs
from gpuserve.errors import BindError
from gpuserve_worker.calling.callable import YIELDING, CallableKind, LoadError, kind_of, locate
from gpuserve_worker.protocol.tensor import TensorSpec


def main() -> None:
    question = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer_to:
        os.dup2(2, 1)  # what user code prints must not come between the answer
        answer = _answer(question["path"], question["base_dir"], question["kwargs"], question["decoupled"])
        answer_to.write(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)  # no waiting for threads that the user's module has started


def _answer(
    path: str, base_dir: str, kwargs: dict[str, Any] | None, decoupled: bool | None
) -> dict[str, Any]:
    """Find the callable as a worker does, so that what passes here loads there, and describe it."""
    try:
        target = locate({"path": path, "base_dir": base_dir})
    except LoadError as error:
        sys.stderr.write(error.traceback)
        return {"error": str(error)}
    problem = _mismatch(path, target, kwargs) or _wrong_kind(path, target, decoupled)
    if problem is not None:
        return {"error": problem}
    try:
        return _declaration(target)
    except (BindError, TypeError, AttributeError) as error:
        return {"error": f"the declaration of {path!r} is wrong: {error}"}


def _mismatch(path: str, target: Any, kwargs: dict[str, Any] | None) -> str | None:
    """Say what is wrong with the object itself. ``kwargs`` None: it is not known yet what it is given."""
    if not callable(target):
        return f"{path!r} is {type(target).__name__} and cannot be called"
    if not isinstance(target, type) or kwargs is None:
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
    """Say what is wrong with how it answers. ``decoupled`` None: it is not known yet how it is to."""
    kind = _kind(target)
    if kind not in YIELDING or decoupled is not False:
        return None
    return (
        f"{path!r} is {kind.value}, which gives any number of responses to a request; "
        "give the model `decoupled: true`, or let it return one response"
    )


def _kind(target: Any) -> CallableKind:
    """Return the kind of the target, or of a class's instances. What a factory makes is not known."""
    return kind_of(target.__call__) if isinstance(target, type) else kind_of(target)


def _declaration(target: Any) -> dict[str, Any]:
    max_batch_size = getattr(target, "max_batch_size", None)
    array = getattr(target, "array", None)
    return {
        "array": array if isinstance(array, str) else None,
        "inputs": _tensors(getattr(target, "inputs", None), "INPUT"),
        "outputs": _tensors(getattr(target, "outputs", None), "OUTPUT"),
        "max_batch_size": max_batch_size if isinstance(max_batch_size, int) else None,
        "decoupled": _kind(target) in YIELDING or None,
    }


def _tensors(declared: Any, prefix: str) -> list[dict[str, Any]] | None:
    """Write tensors as a config file has them; None for an attribute that is not a list of ``Tensor``."""
    if not isinstance(declared, (list, tuple)) or not all(isinstance(one, Tensor) for one in declared):
        return None
    return [_tensor(one, spec) for one, spec in zip(declared, tensor_specs(declared, prefix), strict=True)]


def _tensor(declared: Tensor, spec: TensorSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": spec.name, "dtype": spec.datatype, "shape": list(spec.shape)}
    if spec.optional:
        entry["optional"] = True
    if declared.memory is not None:
        entry["memory"] = declared.memory
    return entry


if __name__ == "__main__":
    main()
