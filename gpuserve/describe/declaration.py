"""What an object says of itself, as plain data in the form of a model's entry in a config file. The object is
at hand here: who has only its path asks a child process (``asking.py``).

==========================================  ===================================================
the target has                              what it says
==========================================  ===================================================
a classmethod ``declare(**kwargs)``         what that returns, given the ``kwargs`` of the entry
attributes ``inputs``, ``outputs``, …       those that ``declare`` did not say
requests of OpenAI's (``gpuserve/openai``)   ``openai: true``, where it says no tensors
types of tensors (``gpuserve/typed``)       what is still not said: tensors, batch size, array
a body with ``yield``                       ``decoupled: true``
==========================================  ===================================================
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.declare.model import Tensor
from gpuserve.declare.openai import declared_by
from gpuserve.declare.tensors import tensor_specs
from gpuserve.errors import BindError
from gpuserve.typed.signature import SignatureError, signature_of
from gpuserve_worker.calling.callable import YIELDING, CallableKind, LoadError, kind_of
from gpuserve_worker.calling.failure import log_text, log_traceback
from gpuserve_worker.protocol.tensor import TensorSpec, datatype_of

#: Where an attribute may be anything's: what has another type is not meant for us.
_ATTRIBUTES: Final[dict[str, type]] = {"array": str, "max_batch_size": int}
_TENSORS: Final = {"inputs": "INPUT", "outputs": "OUTPUT"}


def declaration(
    target: Any, name: str, kwargs: Mapping[str, Any], *, by_types: bool = True
) -> dict[str, Any]:
    """What the target, called ``name`` in messages, says of itself; ``by_types``: by its types too. Raises
    LoadError: it says it wrongly, or fails while it is asked.
    """
    found = _attributes(target, name) | _declared(target, name, kwargs)
    if not found.keys() & _TENSORS.keys() and (openai := declared_by(target)):
        return openai | found
    if by_types and not found.keys() >= _TENSORS.keys():
        found = _typed(target, name) | found
    if "decoupled" not in found and target_kind(target) in YIELDING:
        found["decoupled"] = True
    return found


def target_kind(target: Any) -> CallableKind:
    """The kind of the target, or of a class's instances. What a factory makes is not known."""
    return kind_of(target.__call__) if isinstance(target, type) else kind_of(target)


# ---- declare() ----------------------------------------------------------------------------------


def _declared(target: Any, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declare = getattr(target, "declare", None)
    if not isinstance(target, type) or not callable(declare):
        return {}
    try:
        said = declare(**kwargs)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise LoadError(f"{name}.declare() raised {log_text(error)}", log_traceback(error)) from None
    if not isinstance(said, Mapping):
        raise LoadError(
            f"{name}.declare() must return a mapping such as {{'inputs': […], 'outputs': […]}}, "
            f"it returned {type(said).__name__}"
        )
    plain = {key: one for key, one in said.items() if one is not None}
    return plain | {key: plain_tensors(plain[key], key, name) for key in _TENSORS if key in plain}


def plain_tensors(said: Any, key: str, name: str) -> list[dict[str, Any]]:
    """The ``inputs`` or ``outputs`` that were said of ``name`` as a file has them; raises LoadError."""
    if isinstance(said, Sequence) and all(isinstance(one, Mapping) for one in said):
        return [_plain_tensor(one) for one in said]
    try:
        return _entries(said, _TENSORS[key])
    except BindError as error:
        raise LoadError(f"the declaration of {name!r} is wrong: {error}") from None


def _plain_tensor(said: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor that is written as in a file; what is wrong with it is told where the file is checked."""
    entry = dict(said)
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if dtype is not None and not isinstance(dtype, str):
        entry["dtype"] = datatype_of(dtype)
    if isinstance(shape, Sequence) and not isinstance(shape, str):
        entry["shape"] = [operator.index(dim) for dim in shape]
    return entry


# ---- attributes ---------------------------------------------------------------------------------


def _attributes(target: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, kind in _ATTRIBUTES.items():
        value = getattr(target, key, None)
        if isinstance(value, kind):
            found[key] = value
    for key, prefix in _TENSORS.items():
        tensors = getattr(target, key, None)
        if isinstance(tensors, list | tuple) and all(isinstance(one, Tensor) for one in tensors):
            try:
                found[key] = _entries(tensors, prefix)
            except (BindError, TypeError, AttributeError) as error:
                raise LoadError(f"the declaration of {name!r} is wrong: {error}") from None
    return found


# ---- types --------------------------------------------------------------------------------------


def _typed(target: Any, name: str) -> dict[str, Any]:
    try:
        signature = signature_of(target, name)
        if signature is None:
            return {}
        tensors = {"inputs": signature.inputs, "outputs": signature.outputs}
        said = {key: _entries(one, _TENSORS[key]) for key, one in tensors.items() if one is not None}
    except (SignatureError, BindError) as error:
        raise LoadError(str(error)) from None
    library = {} if signature.array is None else {"array": signature.array}
    return {**said, "max_batch_size": signature.max_batch_size, **library}


# ---- tensors ------------------------------------------------------------------------------------


def _entries(tensors: Sequence[Tensor], prefix: str) -> list[dict[str, Any]]:
    return [_entry(one, spec) for one, spec in zip(tensors, tensor_specs(tensors, prefix), strict=True)]


def _entry(declared: Tensor, spec: TensorSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": spec.name, "dtype": spec.datatype, "shape": list(spec.shape)}
    if spec.optional:
        entry["optional"] = True
    if declared.memory is not None:
        entry["memory"] = declared.memory
    if declared.labels is not None:
        entry["labels"] = list(declared.labels)
    return entry
