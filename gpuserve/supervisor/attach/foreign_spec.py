"""A model as an attached program describes it, looked at before anything is made of it. Pure. The program is
of the same user, but its version may differ and its memory may be broken: what the front could not live with
is refused here, since every front after it would be told the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

from gpuserve.errors import BindError
from gpuserve.model.rules import check_declared
from gpuserve.model.spec import ModelSpec, check_model_name
from gpuserve_worker.protocol.tensor import ITEMSIZE
from gpuserve_worker.protocol.wire import WireError


def checked_spec(plain: dict[str, Any]) -> ModelSpec:
    """Return the model behind another program's ``ModelSpec.to_wire``; ``WireError`` where it is none."""
    try:
        spec = ModelSpec.from_wire(plain)
        _check(spec, ModelSpec, "model")
        check_model_name(spec.name)
        check_declared(spec.sequence)
    except (TypeError, ValueError, LookupError, AttributeError, BindError) as error:
        raise WireError(f"it describes a model wrongly: {error}") from error
    for tensor in (*spec.inputs, *spec.outputs):
        if tensor.datatype not in ITEMSIZE:
            raise WireError(f"tensor {tensor.name!r} has the unknown datatype {tensor.datatype!r}")
    if spec.is_ensemble:
        raise WireError(f"model {spec.name!r} is an ensemble, which only the server itself has")
    names = {instance.name for instance in spec.instances}
    if not names or len(names) < len(spec.instances):
        raise WireError(f"model {spec.name!r} has no instances, or two of one name")
    return spec


def _check(value: Any, kind: Any, where: str) -> None:
    """Whether a value is what its annotation says, all the way down. Raises TypeError: it is not; ``where``
    leads to it; ValueError: a number below zero, other than -1 in a shape.
    """
    if kind is Any:
        return
    if get_origin(kind) is tuple:
        _check_tuple(value, get_args(kind), where)
    elif get_origin(kind) is Sequence:  # as users write it; a spec has a tuple
        _check_tuple(value, (*get_args(kind), ...), where)
    elif type(value) is not (get_origin(kind) or kind):
        raise TypeError(f"{where} is of type {type(value).__name__}")
    elif kind is int and value < (-1 if ".shape" in where else 0):
        raise ValueError(f"{where} is {value}")
    elif getattr(kind, "__annotations__", None):
        for name, one in get_type_hints(kind).items():
            _check(getattr(value, name), one, f"{where}.{name}")


def _check_tuple(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    if type(value) is not tuple:
        raise TypeError(f"{where} is of type {type(value).__name__}")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise TypeError(f"{where} has {len(value)} elements")
    for number, (one, kind) in enumerate(zip(value, kinds, strict=True)):
        _check(one, kind, f"{where}[{number}]")
