"""The declaration that the types of a callable imply: inputs, outputs, and the largest batch.

Inputs follow from the parameters, outputs from the return type, the batch from the decorator. Reading
evaluates annotations and calls nothing; it never happens while requests are served.

======================================  ========================================================
annotation                              meaning
======================================  ========================================================
``NDArray[np.float32]``, ``Float32``    a tensor of this dtype and shape ``[-1]``
``Annotated[…, Shape(3, -1)]``          its shape, and whether it is ragged
``Annotated[torch.Tensor, DType(…)]``   a tensor of this dtype, received as a torch tensor; also cupy
``… | None = None``                     an optional input
``Parameter[int]``                      a parameter of the request, which is no tensor
``Image``, ``Audio``, pydantic models   BYTES of shape ``[1]``, decoded and encoded in the worker;
                                        below ``@batch`` a list of them, one for each row
returned: one tensor                    the only output, OUTPUT_1 or the name in ``Name``
returned: a NamedTuple, a TypedDict     outputs by the names of its fields
returned: ``tuple[…]``                  OUTPUT_1, OUTPUT_2, …
returned: an Iterator of these          the same, any number of times
returned by ``step``                    a Sequence of ``StepResult`` of one of these
======================================  ========================================================
"""

from __future__ import annotations

import collections.abc
import functools
import importlib
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from gpuserve.decorators.batching import is_parameter_type, parameter_kind
from gpuserve.decorators.coded import STREAMS, Codec, codec_of
from gpuserve.decorators.tensor_marks import DType, Name, Shape
from gpuserve.decorators.wrapping import BATCH, SAMPLE
from gpuserve.model.declaration import Tensor
from gpuserve_worker.inference.callable_loading import is_required
from gpuserve_worker.inference.inference_request import argument_form_of, function_of
from gpuserve_worker.inference.stepping import Last, is_stepped
from gpuserve_worker.protocol.tensor import BYTES, datatype_of

DEFAULT_MAX_BATCH_SIZE: Final = 64
#: The shape of a tensor without a ``Shape``.
_ONE_AXIS: Final = (-1,)
#: The libraries whose array types set ``array`` of a model.
_LIBRARIES: Final = ("torch", "cupy")
#: Types of streams and awaitables, with the position of the response type among their arguments.
_ANSWERS: Final[dict[Any, int]] = {
    **dict.fromkeys((*STREAMS, collections.abc.Awaitable), 0),
    collections.abc.Coroutine: 2,
}
_CONTEXT: Final = "model_context"
_EXAMPLE: Final = "NDArray[np.float32]"
_Mark = TypeVar("_Mark", DType, Shape, Name)


class SignatureError(ValueError):
    """Types of a callable that no model can have. The text is one sentence."""


@dataclass(frozen=True)
class Signature:
    """The tensors and largest batch that types declare; None: not tensors. ``array`` None: numpy arrays."""

    inputs: tuple[Tensor, ...] | None
    outputs: tuple[Tensor, ...] | None
    max_batch_size: int
    array: str | None = None


def signature_of(target: Any, name: str) -> Signature | None:
    """Return the declaration in the types of ``target``, or None if the types have no tensor; raise
    SignatureError. Of a class, the types of ``__call__`` count; of a stepped callable, the parameters of
    ``admit`` and the return type of ``step``. ``name`` stands for the target in messages.
    """
    stepped = is_stepped(target)
    called = target.admit if stepped else target.__call__ if isinstance(target, type) else target
    function = _function_of(called)
    if function is None:
        return None
    form = argument_form_of(called)
    hints = _evaluated(function, name, strictly=form is not None)
    if form is None:  # pydantic's models are no tensors of a factory, nor of a function of requests
        hints = {key: one for key, one in hints.items() if not (codec := codec_of(one)) or not codec.model}
    lengths = _attribute(called, "lengths_arguments", ())
    parameters = [one for one in _parameters(called, isinstance(target, type)) if one.name not in lengths]
    inputs, array = _inputs(parameters, hints, name)
    if stepped:
        step = _function_of(target.step)
        given = {} if step is None else _evaluated(step, f"{name}.step", strictly=form is not None)
        outputs = _outputs(_step_response(given.get("return")), f"{name}.step")
        if inputs and form != SAMPLE:
            raise SignatureError(f"{name}.admit has types of tensors: put @sample over it")
        form = SAMPLE
    else:
        outputs = _outputs(hints.get("return"), name)
    if not inputs and not outputs:
        return None
    for key, hint in hints.items():
        hint = _without_none(_answer(hint))[0]
        if form is not None and codec_of(hint) and (typing.get_origin(hint) is list) != (form == BATCH):
            raise SignatureError(
                f"{key!r} of {name} is {_shown(hint)}: below @batch it is a list of such objects, one for "
                "each row, and below @sample one object"
            )
    if form is None:
        raise SignatureError(
            f"{name} has types of tensors, but not how it is called: put @batch over it, which gives it the "
            "rows of many requests as one array, or @sample, which gives it one request at a time"
        )
    max_batch_size = _attribute(called, "max_batch_size", DEFAULT_MAX_BATCH_SIZE) if form == BATCH else 0
    return Signature(inputs, outputs, max_batch_size, array)


def _attribute(called: Any, name: str, default: Any) -> Any:
    """Return what ``@batch`` set on its function, for every kind of callable."""
    while isinstance(called, functools.partial):
        called = called.func
    return getattr(function_of(called), name, default)


# ---- the function and its annotations -----------------------------------------------------------


def _function_of(called: Any) -> types.FunctionType | None:
    """Return the function that has the annotations: the innermost one, below decorators and partials."""
    while True:
        if isinstance(called, functools.partial):
            called = called.func
        elif isinstance(called, types.MethodType):
            called = called.__func__
        elif isinstance(called, types.FunctionType):
            if not hasattr(called, "__wrapped__"):
                return called
            called = called.__wrapped__
        elif isinstance(getattr(type(called), "__call__", None), types.FunctionType):  # noqa: B004
            called = type(called).__call__
        else:
            return None


def _parameters(called: Any, is_method: bool) -> list[inspect.Parameter]:
    """Return the parameters of a callable without ``self`` and without the arguments of a partial."""
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return []
    return parameters[1:] if is_method else parameters


def _evaluated(function: types.FunctionType, name: str, *, strictly: bool) -> dict[str, Any]:
    """Return the annotations as objects, without those that fail; ``strictly`` these raise SignatureError."""
    hints: dict[str, Any] = {}
    for key, annotation in inspect.get_annotations(function).items():
        holder = types.SimpleNamespace(__annotations__={key: annotation})
        try:
            hints |= typing.get_type_hints(holder, function.__globals__, include_extras=True)
        except Exception as error:  # annotations are user code
            if strictly:
                raise SignatureError(
                    f"the annotation {annotation!r} of {key!r} in {name} cannot be evaluated: {error}; it "
                    "needs names of its module that are there at run time, not only under TYPE_CHECKING"
                ) from None
    return hints


# ---- inputs and outputs -------------------------------------------------------------------------


def _inputs(
    parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], name: str
) -> tuple[tuple[Tensor, ...] | None, str | None]:
    """Return the input tensors, or None if the parameters are no tensors, and the library of the arrays."""
    found: list[_Type] = []
    other_parameters: list[str] = []
    for one in parameters:
        hint = hints.get(one.name)
        tensor = _tensor(hint, f"parameter {one.name!r} of {name}")
        if tensor is not None:
            _check_parameter(one, tensor, name)
            optional = one.default is not one.empty
            found.append(tensor._replace(name=one.name, optional=optional))
        elif is_parameter_type(hint):
            try:
                parameter_kind(one.name, hint)
            except TypeError as error:
                raise SignatureError(f"{name}: {error}") from None
        elif one.name != _CONTEXT and is_required(one):
            other_parameters.append(one.name)
    if other_parameters and found:
        raise SignatureError(
            f"parameter {other_parameters[0]!r} of {name} is neither a tensor nor a Parameter: annotate it, "
            f"as {other_parameters[0]}: NDArray[np.float32], or give it a default"
        )
    if other_parameters:
        return None, None
    libraries = {one.library for one in found if one.datatype != BYTES}
    if len(libraries) > 1:
        listed = " and ".join(sorted(one or "numpy" for one in libraries))
        raise SignatureError(
            f"the inputs of {name} are arrays of {listed}: all of them come from one library"
        )
    return tuple(_declared(one, "validation") for one in found), libraries.pop() if libraries else None


def _check_parameter(parameter: inspect.Parameter, tensor: _Type, name: str) -> None:
    if parameter.kind not in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
        raise SignatureError(
            f"parameter {parameter.name!r} of {name} is a tensor that cannot be given by name: each input is "
            "a parameter of its own, without * and before no /"
        )
    if tensor.name is not None:
        raise SignatureError(
            f"parameter {parameter.name!r} of {name} has a Name: an input is called as its parameter"
        )
    if tensor.optional and parameter.default is parameter.empty:
        raise SignatureError(
            f"parameter {parameter.name!r} of {name} may be None but has no default: write "
            f"{parameter.name}: … | None = None for an input that a request may leave out"
        )


def _outputs(hint: Any, name: str) -> tuple[Tensor, ...] | None:
    """Return the output tensors, or None if the return type declares none."""
    where = f"what {name} returns"
    hint = _answer(hint)
    parts = _fields(hint) if _tensor(hint, where) is None else [(None, hint)]
    outputs: list[Tensor] = []
    for key, one in parts:
        place = where if key is None else f"{key!r} of {where}"
        tensor = _tensor(one, place)
        if tensor is None:
            if key is None and not outputs:
                return None
            raise SignatureError(f"{place} is {_shown(one)}, which is no tensor: expected {_EXAMPLE}")
        if tensor.optional:
            text = "an output is always there: only inputs are optional"
            raise SignatureError(f"{place} may be None, but {text}")
        named = tensor if key is None else tensor._replace(name=key)
        outputs.append(_declared(named, "serialization"))
    return tuple(outputs) or None


def _answer(hint: Any) -> Any:
    """Return the type of one response, also of a generator or an async function."""
    hint = _unaliased(hint)
    while typing.get_origin(hint) in _ANSWERS:
        arguments = typing.get_args(hint)
        position = _ANSWERS[typing.get_origin(hint)]
        hint = _unaliased(arguments[position]) if position < len(arguments) else None
    return hint


def _step_response(hint: Any) -> Any:
    """Return the type of a response in the return type of ``step``, a list or Sequence of step results."""
    hint = _answer(hint)
    if typing.get_origin(hint) not in {list, collections.abc.Sequence}:
        return None
    result = _unaliased(typing.get_args(hint)[0])
    is_union = typing.get_origin(result) in {typing.Union, types.UnionType}
    for one in typing.get_args(result) if is_union else [result]:
        while typing.get_origin(one) in {list, Last}:
            one = typing.get_args(one)[0]
        if one is not type(None) and one not in {Last, Exception}:
            return one
    return None


def _fields(hint: Any) -> list[tuple[str | None, Any]]:
    """Return output types by name, or by position if they have no names; empty for any other type."""
    if isinstance(hint, type) and (typing.is_typeddict(hint) or hasattr(hint, "_fields")):
        return list(typing.get_type_hints(hint, include_extras=True).items())
    if typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint):
        return [(None, one) for one in typing.get_args(hint)]
    return []


class _Type(NamedTuple):
    """A tensor as its annotation declares it. ``library`` None: numpy."""

    datatype: str
    shape: tuple[int, ...]
    name: str | None
    library: str | None
    optional: bool
    ragged: bool
    codec: Codec | None = None


def _declared(one: _Type, mode: str) -> Tensor:
    """Return the tensor of a type. ``mode`` of a schema: "validation" for inputs, "serialization"."""
    schema = None if one.codec is None else json.dumps(one.codec.schema(mode))
    return Tensor(one.shape, one.datatype, one.name, one.optional, ragged=one.ragged, schema=schema)


def _tensor(hint: Any, where: str) -> _Type | None:
    """Return the tensor that an annotation declares, or None for any other annotation."""
    hint, optional = _without_none(hint)
    if (codec := codec_of(hint)) is not None:
        try:
            importlib.import_module(codec.library)
        except ImportError:
            raise SignatureError(f"{where} needs {codec.library}: pip install 'gpuserve[media]'") from None
        except OSError as error:  # soundfile without the library of the system
            raise SignatureError(f"{where} needs {codec.library}, which cannot be loaded: {error}") from error
        name = _last(getattr(hint, "__metadata__", ()), Name)
        return _Type(BYTES, (1,), None if name is None else name.name, None, optional, False, codec)
    marks = getattr(hint, "__metadata__", ())
    base = hint.__origin__ if marks else hint
    base, inner_optional = _without_none(base)
    origin = typing.get_origin(base) or base
    marked = [one for one in marks if isinstance(one, DType | Shape | Name)]
    library = _library_of(origin)
    if library is None:
        if marked:
            raise SignatureError(f"{where} is {_shown(base)}, which is no array: expected {_EXAMPLE}")
        return None
    shape = _last(marks, Shape)
    name = _last(marks, Name)
    datatype = _datatype(_last(marks, DType), base, where)
    dims = _ONE_AXIS if shape is None else shape.dims
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= -1 for one in dims):
        raise SignatureError(f"{where} has {shape!r}: expected integers of at least 0, or -1 for any size")
    return _Type(
        datatype,
        dims,
        None if name is None else name.name,
        library if library in _LIBRARIES else None,
        optional or inner_optional,
        shape is not None and shape.ragged,
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return ``X`` and True for ``X | None``, else the type and False."""
    hint = _unaliased(hint)
    if typing.get_origin(hint) not in {typing.Union, types.UnionType}:
        return hint, False
    others = [one for one in typing.get_args(hint) if one is not type(None)]
    is_optional = len(others) == 1 < len(typing.get_args(hint))
    return (_unaliased(others[0]), True) if is_optional else (hint, False)


def _unaliased(hint: Any) -> Any:
    """Return the type that a ``type`` alias stands for; ``NDArray`` is such an alias from numpy 2.5 on."""
    while True:
        alias = typing.get_origin(hint) or hint
        if not (hasattr(alias, "__value__") and hasattr(alias, "__type_params__")):
            return hint
        arguments = typing.get_args(hint)
        hint = alias.__value__[arguments] if arguments else alias.__value__


def _last(marks: Sequence[Any], kind: type[_Mark]) -> _Mark | None:
    """Return the outermost mark of a kind: a mark around an alias replaces the mark in the alias."""
    return next((one for one in reversed(marks) if isinstance(one, kind)), None)


def _library_of(origin: Any) -> str | None:
    """Return the library of an array type, without importing the library; None for other types."""
    if origin is np.ndarray:
        return "numpy"
    if isinstance(origin, type):
        library = origin.__module__.partition(".")[0]
        if library in _LIBRARIES and origin.__name__ in {"Tensor", "ndarray"}:
            return library
    return None


def _datatype(mark: DType | None, base: Any, where: str) -> str:
    dtype = None if mark is None else mark.dtype
    for one in typing.get_args(base) if mark is None else ():  # of ``np.ndarray[…, np.dtype[…]]``
        if typing.get_origin(one) is np.dtype:
            (dtype,) = typing.get_args(one)
    if dtype is None or dtype is Any:
        raise SignatureError(
            f"{where} is {_shown(base)}, which has no dtype: write NDArray[np.float32], or "
            'Annotated[…, DType("float32")]'
        )
    try:
        return datatype_of(dtype)
    except ValueError as error:
        raise SignatureError(f"{where}: {error}") from None


def _shown(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)
