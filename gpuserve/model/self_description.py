"""The declaration that an object itself carries, as plain data in the form of a model's entry in a config
file.

The object is in this process; processes that only have its path ask a child process (``describe.py``).

============================================  =======================================================
source in the object                          declared values
============================================  =======================================================
a classmethod ``declare(**kwargs)``           its return value, for the ``kwargs`` of the entry
attributes ``inputs``, ``outputs``, …         values that ``declare`` left out
OpenAI's requests (``gpuserve/openai``)       ``openai: true``, if no tensors are declared
types of tensors (``gpuserve.typed``)         values still missing: tensors, batch size, array
a body with ``yield``                         ``decoupled: true``
methods ``admit`` and ``step``                ``max_active`` and ``decoupled: true``
============================================  =======================================================
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuserve.core.errors import BindError
from gpuserve.model.declaration import Tensor, tensor_specs
from gpuserve.model.openai_declaration import OPENAI, completed, is_for_openai
from gpuserve.model.signature import SignatureError, signature_of
from gpuserve_worker.inference.callable_loading import YIELDING, CallableKind, LoadError, kind_of
from gpuserve_worker.inference.failure import log_text, log_traceback
from gpuserve_worker.inference.stepping import is_stepped, max_active_of
from gpuserve_worker.protocol.tensor import datatype_of

#: Attributes with common names: values of another type are not meant for gpuserve.
_ATTRIBUTES: Final[dict[str, type]] = {"array": str, "max_batch_size": int}
_TENSORS: Final = {"inputs": "INPUT", "outputs": "OUTPUT"}


def declaration(
    target: Any, name: str, kwargs: Mapping[str, Any], *, by_types: bool = True
) -> dict[str, Any]:
    """Return a target's declaration, ``by_types`` too; raise LoadError, with ``name``, if it is wrong."""
    found: dict[str, Any] = {}
    if is_stepped(target):
        found = {"max_active": max_active_of(target), "decoupled": True, "max_batch_size": 0}
    found |= _attributes(target, name) | _declared(target, name, kwargs)
    if not found.keys() & _TENSORS.keys() and is_for_openai(target):
        return completed({OPENAI: True}) | found
    if by_types and not found.keys() >= _TENSORS.keys():
        found = _typed(target, name) | found
    if "decoupled" not in found and target_kind(target) in YIELDING:
        found["decoupled"] = True
    return found


def target_kind(target: Any) -> CallableKind:
    """Return the kind of the target, or of a class's instances. The kind of a factory's result is unknown."""
    return kind_of(getattr(target, "__call__", target)) if isinstance(target, type) else kind_of(target)  # noqa: B004


def _declared(target: Any, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    declare = getattr(target, "declare", None)
    if not isinstance(target, type) or not callable(declare):
        return {}
    try:
        given = declare(**kwargs)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise any exception
        raise LoadError(f"{name}.declare() raised {log_text(error)}", log_traceback(error)) from None
    if not isinstance(given, Mapping):
        raise LoadError(
            f"{name}.declare() must return a mapping such as {{'inputs': […], 'outputs': […]}}, "
            f"it returned {type(given).__name__}"
        )
    plain = {key: one for key, one in given.items() if one is not None}
    return plain | {key: plain_tensors(plain[key], key, name) for key in _TENSORS if key in plain}


def plain_tensors(given: Any, key: str, name: str) -> list[dict[str, Any]]:
    """Return declared ``inputs`` or ``outputs`` in a file's form; raise LoadError if they are wrong."""
    if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
        return _entries(given, key, name)
    entries = [dict(one) for one in given]  # whose mistakes are reported when the file is checked
    for entry in entries:
        dtype, shape = entry.get("dtype"), entry.get("shape")
        if dtype is not None and not isinstance(dtype, str):
            entry["dtype"] = datatype_of(dtype)
        if isinstance(shape, Sequence) and not isinstance(shape, str):
            entry["shape"] = [operator.index(dim) for dim in shape]
    return entries


def _attributes(target: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, kind in _ATTRIBUTES.items():
        value = getattr(target, key, None)
        if isinstance(value, kind):
            found[key] = value
    for key in _TENSORS:
        tensors = getattr(target, key, None)
        if isinstance(tensors, list | tuple) and all(isinstance(one, Tensor) for one in tensors):
            found[key] = _entries(tensors, key, name)
    return found


def _typed(target: Any, name: str) -> dict[str, Any]:
    try:
        signature = signature_of(target, name)
        if signature is None:
            return {}
    except SignatureError as error:
        raise LoadError(str(error)) from None
    tensors = {"inputs": signature.inputs, "outputs": signature.outputs}
    given = {key: _entries(one, key, name) for key, one in tensors.items() if one is not None}
    library = {} if signature.array is None else {"array": signature.array}
    return {**given, "max_batch_size": signature.max_batch_size, **library}


def _entries(tensors: Sequence[Tensor], key: str, name: str) -> list[dict[str, Any]]:
    """Return ``inputs`` or ``outputs`` in a file's form; raise LoadError if they are wrong."""
    entries = []
    try:
        for declared, spec in zip(tensors, tensor_specs(tensors, _TENSORS[key]), strict=True):
            labels = None if declared.labels is None else list(declared.labels)
            entry: dict[str, Any] = {"name": spec.name, "dtype": spec.datatype, "shape": list(spec.shape)}
            further = {"optional": spec.optional, "ragged": spec.ragged, "schema": spec.schema}
            entry |= {name: one for name, one in further.items() if one}
            given = {"memory": declared.memory, "labels": labels}
            entries.append(entry | {name: one for name, one in given.items() if one is not None})
    except (BindError, TypeError, AttributeError) as error:
        raise LoadError(f"the declaration of {name!r} is wrong: {error}") from None
    return entries
