"""Ragged inputs under ``@batch``: padding, lengths, lists of rows, and the outputs of each request."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np
import pytest
from decorating import model, serving
from hypothesis import given
from hypothesis import strategies as st
from present import present

from gpuserve.backends.batch_tensors import KINDS, BatchOutput
from gpuserve.decorators import BatchError, batch, pad_batch
from gpuserve.front.scheduling.shape_groups import MixedShapes
from gpuserve.model.signature import signature_of
from gpuserve.typed import Float32, Int64, Shape
from gpuserve_worker.inference.inference_request import Batch
from gpuserve_worker.inference.ragged import RaggedNames, RaggedTensor
from gpuserve_worker.protocol.payloads import WireRequest


def ragged_batch(
    arrays: list[Any], outputs: dict[str, tuple[int, ...]], axes: tuple[int, ...] = (0,)
) -> Batch:
    flat = np.concatenate([one.ravel() for one in arrays])
    x = RaggedTensor(flat, [one.shape for one in arrays], axes)
    requests = [WireRequest(len(one), {}, ()) for one in arrays]
    return Batch({"x": x}, requests, ("y",), True, RaggedNames({"x": axes}, outputs))


Ragged: TypeAlias = Annotated[Float32, Shape(-1, ragged=True)]
SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=8)


@given(
    shapes=SHAPES,
    side=st.sampled_from(["right", "left"]),
    multiple=st.integers(1, 5),
    dtype=st.sampled_from([None, "float64"]),
)
def test_padded_rows_have_their_values_their_lengths_and_the_value_of_padding(
    shapes: list[tuple[int, int]], side: Any, multiple: int, dtype: Any
) -> None:
    arrays = [np.arange(1, 1 + rows * size, dtype=np.float32).reshape(rows, size) for rows, size in shapes]
    seen: list[Any] = []

    @batch(pad=-5, lengths="n", side=side, pad_to_multiple_of=multiple, dtype=dtype)
    def call(x: Any, n: Any) -> Any:
        seen.append((x, n))
        return {"y": x}

    answers = call(ragged_batch(arrays, {"y": (0,)}))
    x, n = seen[0]
    assert n.tolist() == [size for rows, size in shapes for _ in range(rows)]
    assert x.shape[1] % multiple == 0
    assert 0 <= x.shape[1] - max(n) < multiple
    assert x.dtype == np.dtype(dtype or "float32")
    assert (x == -5).sum() == x.size - sum(n)
    for answer, array in zip(answers, arrays, strict=True):
        assert np.array_equal(answer["y"], array)


def seen_by(arrays: list[Any]) -> tuple[Batch, Any]:
    """A batch of the arrays, and the one array that a padding callable gets."""
    made, seen = ragged_batch(arrays, {}), []
    batch(pad=0)(lambda x: (seen.append(x), {"y": np.zeros(len(x))})[1])(made)
    return made, seen[0]


def test_rows_that_have_one_length_are_not_copied_and_byte_strings_are_padded_with_empty_ones() -> None:
    made, x = seen_by([np.ones((2, 3)), np.ones((1, 3))])
    assert np.shares_memory(x, made.arrays["x"].flat)
    _, x = seen_by([np.array([[b"a", b"b"]], object), np.array([[b"c"]], object)])
    assert x.tolist() == [[b"a", b"b"], [b"c", b""]]


def test_images_are_padded_on_both_axes() -> None:
    arrays = [np.full((1, 2, 5, 3), 1.0), np.full((2, 4, 1, 3), 2.0)]

    @batch(pad=0, lengths="sizes")
    def call(x: Any, sizes: Any) -> Any:
        assert x.shape == (3, 4, 5, 3)
        assert sizes.tolist() == [[2, 5], [4, 1], [4, 1]]
        return {"y": x[..., 0]}

    first, second = call(ragged_batch(arrays, {"y": (0, 1)}, (0, 1)))
    assert (first["y"].shape, second["y"].shape) == ((1, 2, 5), (2, 4, 1))
    assert first["y"].all()


def test_a_generator_yields_the_outputs_of_each_request() -> None:
    @batch(pad=0)
    def call(x: Any) -> Any:
        yield {"y": x}
        yield {"y": -x}

    steps = list(call(ragged_batch([np.ones((1, 2)), np.ones((1, 3))], {"y": (0,)})))
    assert [[one["y"].shape for one in step] for step in steps] == [[(1, 2), (1, 3)]] * 2


def test_plain_requests_are_padded_as_by_a_server() -> None:
    @batch(pad=0, lengths="n")
    def call(x: Any, k: Any, n: Any) -> Any:
        return {"y": x.sum(axis=1) + k[:, 0] + n}

    requests = [{"x": np.ones((1, 2)), "k": np.ones((1, 1))}, {"x": np.ones((2, 3)), "k": np.ones((2, 1))}]
    assert call(requests).arrays["y"].tolist() == [5, 7, 7]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": "n"}, "have no effect without pad"),
        ({"pad": 0, "side": "top"}, "side of @batch must be 'right' or 'left', got 'top'"),
        ({"pad": 0, "pad_to_multiple_of": 0}, "pad_to_multiple_of of @batch must be an integer"),
        ({"pad": 0, "max_length": True}, "max_length of @batch must be an integer of at least 1"),
        ({"pad": 0, "lengths": "no name"}, "lengths of @batch must be the name of an argument"),
    ],
)
def test_options_that_cannot_be(options: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        batch(**options)


def test_types_declare_ragged_tensors_and_lengths_are_no_input() -> None:
    @batch(pad=0, lengths="n")
    def call(x: Ragged, k: Float32, n: Int64) -> Ragged: ...  # type: ignore[empty-body]

    signature = present(signature_of(call, "call"))
    assert [(one.name, one.ragged) for one in signature.inputs or ()] == [("x", True), ("k", False)]
    assert [one.ragged for one in signature.outputs or ()] == [True]


@pytest.mark.parametrize("sizes", [(3, 1), (3, 3)])
def test_pad_batch_repeats_the_last_row_and_its_length(sizes: tuple[int, int]) -> None:
    @batch(pad=0, lengths="n")
    @pad_batch
    def call(x: Any, n: Any) -> Any:
        assert n.tolist() == [sizes[0], *[sizes[1]] * 3]
        return {"y": x + 1}

    given_batch = ragged_batch([np.ones((1, one)) for one in sizes], {"y": (0,)})
    answers = serving(model(preferred_batch_sizes=(4,)), call, given_batch)
    assert [one["y"].tolist() for one in answers] == [[[2.0] * one] for one in sizes]


def test_an_output_of_other_sizes_cannot_be_cut() -> None:
    call = batch(pad=0)(lambda x: {"y": x[:, ::2]})
    text = r"ragged output 'y' has the sizes \[2\], but inputs were padded to \[3\]"
    with pytest.raises(BatchError, match=text):
        call(ragged_batch([np.ones((1, 3)), np.ones((1, 2))], {"y": (0,)}))


def test_values_of_batch_inputs_as_in_tritons_message() -> None:
    shapes = [(2, 3, 1), (1, 2, 2)]
    made = {kind: [np.asarray(one).tolist() for one in make(shapes)] for kind, make in KINDS.items()}
    assert made == {
        "BATCH_ELEMENT_COUNT": [[6], [4]],
        "BATCH_ACCUMULATED_ELEMENT_COUNT": [[6], [10]],
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [[0, 6], [10]],
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [[0.0] * 6, []],
        "BATCH_ITEM_SHAPE": [[[3, 1], [3, 1]], [[2, 2]]],
        "BATCH_ITEM_SHAPE_FLATTEN": [[3, 1, 3, 1], [2, 2]],
    }


def test_an_output_is_cut_by_the_shapes_of_an_input() -> None:
    output = BatchOutput("y", "x", (-1, -1, 2))
    parts = output.cut(np.arange(14), [(1, 3), (2, 2)])
    assert [one.shape for one in parts] == [(1, 3, 2), (2, 2, 2)]
    with pytest.raises(ValueError, match="output 'y' has 13 elements"):
        output.cut(np.arange(13), [(1, 3), (2, 2)])


def test_small_batches_of_many_shapes_are_reported_once() -> None:
    shapes = MixedShapes()
    assert not any(shapes.observe(1, 64, 10) for _ in range(MixedShapes.ENOUGH - 1))
    assert shapes.observe(1, 64, 10)
    assert not any(shapes.observe(1, 64, 10) for _ in range(1000))
    assert not any(MixedShapes().observe(32, 64, 10) for _ in range(1000))
