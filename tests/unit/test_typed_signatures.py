"""What the types of a callable say of its model, and in which words it is told what they cannot say."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, Optional, TypedDict

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from optional_packages import needs
from present import present
from typing_extensions import TypeAliasType

from gpuserve import Last, StepResult, typed
from gpuserve.decorators import first_value, group_by_keys, model_context
from gpuserve.model.signature import DEFAULT_MAX_BATCH_SIZE, Signature, SignatureError, signature_of
from gpuserve.typed import BFloat16, Bool, Bytes, DType, Float32, Int32, Name, Parameter, Shape, batch, sample
from gpuserve_worker.protocol.tensor import ITEMSIZE

Image = Annotated[Float32, Shape(3, 224, -1)]


class Two(NamedTuple):
    scores: Annotated[Float32, Shape(10)]
    label: Bytes


class Named(TypedDict):
    y: Float32
    z: Annotated[Int32, Shape()]


def read(target: Any) -> Signature:
    return present(signature_of(target, "f"))


def inputs(target: Any) -> list[Any]:
    return [(one.name, one.dtype, one.shape, one.optional) for one in read(target).inputs or ()]


def outputs(target: Any) -> list[Any]:
    return [(one.name, one.dtype, one.shape) for one in read(target).outputs or ()]


def test_types_of_a_stepped_callable() -> None:
    for result in (
        StepResult[Two], Two | None, Last[Two] | None, list[Two] | Last[Any] | Exception | None, Last[Two]
    ):  # fmt: skip
        made = stepped(sample(admitted), list[result])
        assert inputs(made) == [("n", "INT32", (1,), False)]
        assert outputs(made) == [("scores", "FP32", (10,)), ("label", "BYTES", (-1,))]
        assert read(made).max_batch_size == 0
    for plain in (Any, Sequence[StepResult[dict[str, Any]]], Sequence[Last], Sequence[None]):
        assert signature_of(stepped(lambda request: request, plain), "f") is None
    with pytest.raises(SignatureError, match="put @sample over it"):
        signature_of(stepped(admitted, Any), "f")
    with pytest.raises(SignatureError, match=r"f\.step"):
        signature_of(stepped(sample(admitted), Sequence[StepResult[np.ndarray]]), "f")


def admitted(n: Annotated[Int32, Shape(1)], top: Parameter[int] = 1) -> None: ...


def stepped(admit: Any, returns: Any) -> Any:
    def step(active: Any) -> Any: ...

    step.__annotations__["return"] = returns
    return types.SimpleNamespace(admit=admit, step=step)


# ---- inputs -------------------------------------------------------------------------------------


NOTHING = np.zeros(1, np.uint8)


def every_form(
    a: Float32,
    b: NDArray[np.float64],
    c: Image,
    d: Annotated[Image, Shape(1)],
    e: Annotated[Bool, Shape()] | None = None,
    f: Optional[Bytes] = None,  # noqa: UP045 - people write it
    g: Annotated[Int32 | None, Shape(2)] = None,
    h: Annotated[NDArray[Any], DType("uint8")] = NOTHING,
    *,
    i: BFloat16,
    top: Parameter[int] = 5,
    verbose: bool = False,
    **rest: object,
) -> Float32: ...


def test_every_form_of_an_input() -> None:
    assert inputs(batch(every_form)) == [
        ("a", "FP32", (-1,), False),
        ("b", "FP64", (-1,), False),
        ("c", "FP32", (3, 224, -1), False),
        ("d", "FP32", (1,), False),
        ("e", "BOOL", (), True),
        ("f", "BYTES", (-1,), True),
        ("g", "INT32", (2,), True),
        ("h", "UINT8", (-1,), True),
        ("i", "BF16", (-1,), False),
    ]


ALIASES = {"BOOL": "Bool", "FP16": "Float16", "BF16": "BFloat16", "FP32": "Float32", "FP64": "Float64"}
ALIASES |= {f"{sign}INT{size}": f"{sign}Int{size}" for sign in ("", "U") for size in (8, 16, 32, 64)}
ALIASES["BYTES"] = "Bytes"


@given(st.sampled_from(sorted(ITEMSIZE)), st.none() | st.lists(st.integers(-1, 1 << 40), max_size=6))
def test_every_dtype_and_shape_comes_through(datatype: str, dims: list[int] | None) -> None:
    alias = getattr(typed, ALIASES[datatype])
    hint = alias if dims is None else Annotated[alias, Shape(*dims)]

    @sample
    def function(x: Any, k: Any = None) -> Any: ...

    hints = {"x": hint, "k": hint | None, "return": Annotated[hint, Name("y")]}
    function.__wrapped__.__annotations__ |= hints
    shape = (-1,) if dims is None else tuple(dims)
    assert inputs(function) == [("x", datatype, shape, False), ("k", datatype, shape, True)]
    assert outputs(function) == [("y", datatype, shape)]


# ---- outputs ------------------------------------------------------------------------------------


ALONE = [(None, "FP32", (-1,))]
PAIR = [("scores", "FP32", (10,)), ("label", "BYTES", (-1,))]
OUTPUTS: list[tuple[Any, Any]] = [
    (Float32, ALONE),
    (Annotated[Float32, Name("y"), Shape(2)], [("y", "FP32", (2,))]),
    (Two, PAIR),
    (Named, [("y", "FP32", (-1,)), ("z", "INT32", ())]),
    (tuple[Float32, Annotated[Bytes, Name("b")]], [(None, "FP32", (-1,)), ("b", "BYTES", (-1,))]),
    (Iterator[Two], PAIR),
    (Generator[Float32, None, None], ALONE),
    (AsyncIterator[Float32], ALONE),
    (AsyncGenerator[Two, None], PAIR),
    (Awaitable[Iterator[Float32]], ALONE),
    (typing.Iterator[Float32], ALONE),
]


def returning(hint: Any) -> Any:
    @batch
    def f(x: Float32) -> Any: ...

    f.__wrapped__.__annotations__["return"] = hint  # type: ignore[attr-defined]
    return f


@pytest.mark.parametrize(("hint", "expected"), OUTPUTS, ids=lambda one: str(one)[:40])
def test_what_is_returned(hint: Any, expected: Any) -> None:
    assert outputs(returning(hint)) == expected


@pytest.mark.parametrize("hint", [None, Any, dict[str, Float32], list[Float32], tuple[Float32, ...]])
def test_a_type_that_names_no_outputs_says_nothing_of_them(hint: Any) -> None:
    assert read(returning(hint)).outputs is None


# ---- callables ----------------------------------------------------------------------------------


class Model:
    def __init__(self, features: int) -> None: ...

    @batch(max_batch_size=8)
    def __call__(self, x: Float32) -> Float32: ...

    @sample
    async def later(self, x: Float32) -> Float32: ...


@batch
def with_amount(x: Float32, amount: float) -> Float32: ...


@group_by_keys
@batch(max_batch_size=3)
@first_value("k")
def stacked(x: Float32, k: Int32) -> Float32: ...


@batch
@model_context
def in_context(x: Float32, model_context: Any) -> Float32: ...


X = ("x", "FP32", (-1,), False)
CALLABLES: dict[str, tuple[Any, list[Any], int]] = {
    "a class": (Model, [X], 8),
    "an object": (Model(3), [X], 8),
    "a method": (Model(3).later, [X], 0),
    "a partial": (functools.partial(with_amount, amount=3.0), [X], DEFAULT_MAX_BATCH_SIZE),
    "a stack": (stacked, [X, ("k", "INT32", (-1,), False)], 3),
    "with its model": (in_context, [X], DEFAULT_MAX_BATCH_SIZE),
    "a pickled one": (cloudpickle.loads(cloudpickle.dumps(stacked)), [X, ("k", "INT32", (-1,), False)], 3),
}


@pytest.mark.parametrize("which", CALLABLES)
def test_every_kind_of_callable(which: str) -> None:
    target, expected, size = CALLABLES[which]
    assert (inputs(target), read(target).max_batch_size) == (expected, size)


def untyped(requests: list[Any]) -> list[dict[str, Any]]: ...


@batch
def half_typed(x: Any, k: int) -> dict[str, Any]: ...


def elsewhere(x: Missing) -> Missing: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("target", [untyped, half_typed, elsewhere, len, dict, object(), print, type])
def test_what_has_no_types_of_tensors_says_nothing(target: Any) -> None:
    assert signature_of(target, "f") is None


def only_outputs(x: Any) -> Float32: ...


def test_only_outputs() -> None:
    made = batch(only_outputs)
    assert (read(made).inputs, outputs(made)) == (None, ALONE)


# ---- what is told -------------------------------------------------------------------------------


def undecorated(x: Float32) -> Float32: ...


def annotated(hints: dict[str, Any], function: Callable[..., Any]) -> Any:
    made = types.FunctionType(function.__code__, globals(), "f", function.__defaults__)
    made.__annotations__ = hints
    return batch(made)


def x(hint: Any) -> Any:
    """A function whose parameter ``x`` has this type."""
    return annotated({"x": hint}, one)


def one(x: Any) -> Any: ...


def two(x: Any, y: Any) -> Any: ...


def before(x: Any, /) -> Any: ...


def several(*x: Any) -> Any: ...


REFUSED: dict[str, tuple[Any, str]] = {
    "undecorated": (undecorated, "f has types of tensors, but not how it is called: put @batch over it"),
    "no dtype": (
        x(np.ndarray),
        "parameter 'x' of f is ndarray, which has no dtype: write NDArray[np.float32]",
    ),
    "complex": (x(NDArray[np.complex64]), "of f: complex64 has no v2 datatype"),
    "strings of numpy": (x(NDArray[np.str_]), "use bytes"),
    "a size": (
        x(Annotated[Float32, Shape(3, -2)]),
        "parameter 'x' of f has Shape(3, -2): expected integers of at least 0, or -1 for any size",
    ),
    "a size that is none": (x(Annotated[Float32, Shape("a")]), "has Shape('a')"),  # type: ignore[arg-type]
    "a mark on a list": (
        x(Annotated[list[float], Shape(3)]),
        "parameter 'x' of f is list[float], which is no array: expected NDArray[np.float32]",
    ),
    "no default": (x(Float32 | None), "parameter 'x' of f may be None but has no default"),
    "a name": (x(Annotated[Float32, Name("y")]), "parameter 'x' of f has a Name"),
    "another parameter": (
        annotated({"x": Float32, "y": int}, two),
        "parameter 'y' of f is neither a tensor nor a Parameter: annotate it, as y: NDArray[np.float32]",
    ),
    "a parameter that is a list": (
        annotated({"x": Float32, "y": Parameter[list[int]]}, two),
        "f: Parameter 'y' must be an int, float, bool or str, but its type is list[int]",
    ),
    "by position": (annotated({"x": Float32}, before), "a tensor that cannot be given by name"),
    "any number": (annotated({"x": Float32}, several), "a tensor that cannot be given by name"),
    "an output that may be None": (
        annotated({"return": Float32 | None}, one),
        "what f returns may be None, but an output is always there",
    ),
    "an output that is no tensor": (
        annotated({"return": tuple[Float32, int]}, one),
        "what f returns is int, which is no tensor",
    ),
    "not there at run time": (
        x("Missing"),
        "the annotation 'Missing' of 'x' in f cannot be evaluated: name 'Missing' is not defined",
    ),
}


@pytest.mark.parametrize(("target", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_told_in_a_sentence(target: Any, text: str) -> None:
    with pytest.raises(SignatureError) as error:
        signature_of(target, "f")
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@needs("torch")
def test_tensors_of_torch_are_arrays_of_torch() -> None:
    import torch

    hints = {"x": Annotated[torch.Tensor, DType("float32"), Shape(3)], "y": Bytes, "return": Float32}
    typed_function = annotated(hints, two)
    assert inputs(typed_function) == [("x", "FP32", (3,), False), ("y", "BYTES", (-1,), False)]
    assert read(typed_function).array == "torch"
    with pytest.raises(SignatureError, match="parameter 'x' of f is Tensor, which has no dtype"):
        signature_of(x(torch.Tensor), "f")
    both = annotated({"x": Float32, "y": Annotated[torch.Tensor, DType("FP32")]}, two)
    with pytest.raises(SignatureError, match="arrays of numpy and torch: all of them come from one library"):
        signature_of(both, "f")


Element = typing.TypeVar("Element", bound=np.generic)
#: As numpy 2.5 has it, where the language has ``type`` statements.
AliasedArray = TypeAliasType("AliasedArray", np.ndarray[Any, np.dtype[Element]], type_params=(Element,))
AliasedFloats = TypeAliasType("AliasedFloats", AliasedArray[np.float32])  # type: ignore[misc]


Both = TypeAliasType("Both", tuple[AliasedFloats, AliasedArray[np.int64]])  # type: ignore[valid-type]


def test_an_alias_of_a_type_is_that_type() -> None:
    @batch
    def through(
        x: AliasedArray[np.float32],  # type: ignore[valid-type]
        y: Annotated[AliasedFloats, Shape(2)],
        z: AliasedFloats | None = None,
    ) -> Both: ...  # type: ignore[empty-body]

    sizes = {"x": ((-1,), False), "y": ((2,), False), "z": ((-1,), True)}
    assert inputs(through) == [(name, "FP32", *one) for name, one in sizes.items()]
    assert [one[1] for one in outputs(through)] == ["FP32", "INT64"]
