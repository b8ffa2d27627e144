"""One call for each kind of request or row, and the answers in the order in which they were asked for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from decorating import complete, model, rows, serving, worker_batch
from optional_packages import needs

from gpuserve.decorators import (
    BatchError,
    ConstantPadder,
    StackError,
    ValuesError,
    batch,
    group_by_keys,
    group_by_values,
)
from gpuserve_worker.inference.inference_request import Request, RequestBatch, accepts_batch
from gpuserve_worker.protocol.tensor import TensorSpec


def two_kinds() -> list[Request]:
    return [
        Request({"x": rows(1)}, {"p": 1}),
        Request({"x": rows(2), "k": rows(10)}, {"p": 2}),
        Request({"x": rows(3)}, {"p": 3}),
    ]


def total(requests: Any) -> list[Any]:
    return [{"y": sum(one.values())} for one in requests]


def values(responses: Any, name: str = "y") -> list[Any]:
    return [None if one is None else one[name].tolist() for one in responses]


# ---- group_by_keys ------------------------------------------------------------------------------


def test_group_by_keys_keeps_the_order() -> None:
    calls: list[Any] = []

    @group_by_keys
    def call(requests: Any) -> Any:
        calls.append([one.parameters["p"] for one in requests])
        return total(requests)

    assert values(call(two_kinds())) == [[[1]], [[12]], [[3]]]
    assert calls == [[1, 3], [2]]


def test_group_by_keys_over_batch() -> None:
    call = group_by_keys(batch(lambda x, k=0: {"y": x + k}))
    given = RequestBatch(two_kinds(), ["y"], True)
    assert values(call(given)) == [[[1]], [[12]], [[3]]]


def test_a_group_knows_what_the_whole_list_knows() -> None:
    seen: Any = []
    call = group_by_keys(lambda requests: seen.append(requests) or total(requests))
    call(RequestBatch(two_kinds(), ["y"], True))
    assert [one.output_names for one in seen] == [("y",), ("y",)]
    assert all(one.batching for one in seen)


def test_requests_of_one_kind_are_passed_on_as_they_are() -> None:
    seen: Any = []
    given = [{"x": rows(1)}, {"x": rows(2)}]
    group_by_keys(lambda requests: seen.append(requests) or requests)(given)
    assert seen[0] is given
    whole = worker_batch("y")
    call = group_by_keys(batch(lambda x: {"y": x}))
    assert accepts_batch(call)
    assert call(whole).arrays["y"] is whole.arrays["x"]
    assert not accepts_batch(group_by_keys(total))


def test_group_by_keys_of_an_async_function() -> None:
    async def call(requests: Any) -> Any:
        return total(requests)

    assert values(complete(group_by_keys(call)(two_kinds()))) == [[[1]], [[12]], [[3]]]


def test_group_by_keys_of_generators_has_responses_of_one_group_at_a_time() -> None:
    @group_by_keys
    def call(requests: Any) -> Any:
        yield total(requests)
        yield total(requests)

    @group_by_keys
    async def call_async(requests: Any) -> Any:
        yield total(requests)

    first, second = [[[1]], None, [[3]]], [None, [[12]], None]
    assert [values(one) for one in complete(call(two_kinds()))] == [first, first, second, second]
    assert [values(one) for one in complete(call_async(two_kinds()))] == [first, second]


@pytest.mark.parametrize(("answer", "given"), [([], "0"), (3, "an object of type int")])
def test_a_group_has_a_response_for_each_request(answer: Any, given: str) -> None:
    with pytest.raises(BatchError, match=f"given 2 requests and must .* but answered with {given}"):
        group_by_keys(lambda requests: answer)(two_kinds())


def test_group_by_keys_goes_above_batch() -> None:
    with pytest.raises(TypeError, match="@group_by_keys expected a list of requests"):
        batch(group_by_keys(lambda x: x))(worker_batch("y"))


# ---- group_by_values ----------------------------------------------------------------------------


def keyed(*keys: Any) -> list[dict[str, Any]]:
    """Requests of one row; x counts them."""
    return [
        {"x": rows(position), "k": np.array([[key]], object if isinstance(key, bytes) else None)}
        for position, key in enumerate(keys)
    ]


@pytest.mark.parametrize("keys", [(2, 1, 2, 1), (b"b", b"a", b"b", b"a"), (0.5, -1.0, 0.5, -1.0)], ids=repr)
@pytest.mark.parametrize("form", ["mapping", "list", "tuple", "array"])
def test_group_by_values_keeps_the_order(form: str, keys: Any) -> None:
    calls: Any = []

    @batch
    @group_by_values("k")
    def call(x: Any, k: Any) -> Any:
        calls.append(x.ravel().tolist())
        return {"mapping": {"y": x * 2}, "list": [x * 2], "tuple": (x * 2,), "array": x * 2}[form]

    (name,) = (outputs := call(keyed(*keys)))[0]
    assert outputs.arrays[name].tolist() == [[0], [2], [4], [6]]
    assert sorted(calls) == [[0, 2], [1, 3]]


def test_groups_run_in_the_order_of_their_values() -> None:
    calls: Any = []
    call = group_by_values("k")(lambda k: calls.append(k[0, 0]) or {"y": k})
    call(k=np.array([[3], [1], [2], [1]], np.uint8))
    assert calls == [1, 2, 3]


def test_rows_of_one_group_are_passed_on_without_a_copy() -> None:
    seen: Any = []
    x = rows(1, 1)
    answer = group_by_values("x")(lambda x: seen.append(x) or [x])(x=x)
    assert seen[0] is x
    assert answer[0] is x


def test_rows_of_a_group_that_follow_each_other_are_a_view() -> None:
    seen: Any = []
    x = rows(1, 1, 2)
    group_by_values("x")(lambda x: seen.append(x) or {"y": x})(x=x)
    assert all(np.shares_memory(one, x) for one in seen)


def test_a_request_with_rows_of_several_groups() -> None:
    call = batch(group_by_values("k")(lambda x, k: {"y": x + k}))
    first, second = call([{"x": rows(1, 2), "k": rows(5, 7)}, {"x": rows(3), "k": rows(5)}])
    assert first["y"].tolist() == [[6], [9]]
    assert second["y"].tolist() == [[8]]


def test_several_keys_and_keys_of_several_elements() -> None:
    calls: Any = []
    call = group_by_values("a", "b")(lambda a, b: calls.append(len(a)) or {"y": b})
    a = np.array([[1, 2], [1, 2], [1, 3]])
    b = np.array([[b"x"], [b"y"], [b"x"]], object)
    assert call(a=a, b=b)["y"].ravel().tolist() == [b"x", b"y", b"x"]
    assert calls == [1, 1, 1]


def wide(x: Any, k: Any) -> Any:
    return {"y": np.repeat(x + 1, int(k[0, 0]), axis=1), "s": np.full((len(x), 1), b"a" * int(k[0, 0]))}


def test_pad_fn_makes_the_groups_equal() -> None:
    outputs = batch(group_by_values("k", pad_fn=ConstantPadder(-1))(wide))(keyed(2, 1, 2)).arrays
    assert outputs["y"].tolist() == [[1, 1], [2, -1], [3, 3]]
    assert outputs["s"].tolist() == [[b"aa"], [b"a"], [b"aa"]]
    assert outputs["s"].dtype == np.dtype("S2")


def test_without_pad_fn_different_shapes_are_an_error() -> None:
    with pytest.raises(BatchError, match=r"output 'y' have the shapes \(1,\) and \(2,\) .* pass a pad_fn"):
        batch(group_by_values("k")(wide))(keyed(2, 1, 2))


def test_groups_with_different_outputs() -> None:
    call = group_by_values("k")(lambda k: {f"y{k[0, 0]}": k})
    with pytest.raises(BatchError, match="two groups with different outputs: 'y1' and 'y2'"):
        call(k=np.array([[1], [2]]))


def test_a_group_answers_with_its_rows() -> None:
    with pytest.raises(BatchError, match=r"output 'y' of shape \(2, 1\), but the batch has 1 row"):
        group_by_values("k")(lambda k: {"y": rows(1, 2)})(k=rows(1, 2))


def test_group_by_values_of_an_async_function() -> None:
    @batch
    @group_by_values("k")
    async def call(x: Any, k: Any) -> Any:
        return [x + k]

    assert complete(call(keyed(2, 1, 2))).arrays["OUTPUT_1"].tolist() == [[2], [2], [4]]


@needs("torch")
def test_tensors_of_a_subclass_are_tensors_of_torch() -> None:
    import torch

    class Features(torch.Tensor):
        """As torchvision's Image is."""

    def call(x: Any) -> Any:
        return {"y": torch.tensor(x, requires_grad=True).as_subclass(Features)}

    answer = group_by_values("x")(call)(x=np.array([[3.0], [1.0]], np.float32))
    assert isinstance(answer["y"], torch.Tensor)
    assert answer["y"].tolist() == [[3.0], [1.0]]


def yielding(x: Any, k: Any) -> Any:
    yield {"y": x}
    yield {"y": x + k}


async def yielding_async(x: Any, k: Any) -> Any:
    yield {"y": x}
    yield {"y": x + k}


@pytest.mark.parametrize("function", [yielding, yielding_async])
def test_generators_answer_group_by_group(function: Any) -> None:
    answers = complete(batch(group_by_values("k")(function))(keyed(2, 1, 2)))
    assert [values(one) for one in answers] == [
        [None, [[1]], None],
        [None, [[2]], None],
        [[[0]], None, [[2]]],
        [[[2]], None, [[4]]],
    ]


def test_generators_under_two_groupings() -> None:
    @batch
    @group_by_values("k")
    @group_by_values("x")
    def call(x: Any, k: Any) -> Any:
        yield {"y": x + 10 * k}

    given = [{"x": rows(x), "k": rows(k)} for x, k in [(1, 2), (2, 1), (1, 2), (3, 2)]]
    assert [values(one) for one in complete(call(given))] == [
        [None, [[12]], None, None],
        [[[21]], None, [[21]], None],
        [None, None, None, [[23]]],
    ]


def test_a_request_that_a_generator_cannot_answer_fails_alone() -> None:
    given = [{"x": rows(1, 2), "k": rows(5, 7)}, {"x": rows(3), "k": rows(5)}]
    first, *_ = complete(batch(group_by_values("k")(yielding))(given))
    assert isinstance(first[0], BatchError)
    assert "rows of this request are in several groups" in str(first[0])
    assert first[1]["y"].tolist() == [[3]]


def test_an_optional_input_that_is_absent_groups_nothing() -> None:
    call = group_by_values("k")(lambda x: {"y": x})
    assert serving(model(), call, x=rows(1, 2))["y"].tolist() == [[1], [2]]


def test_one_row_that_first_value_took_goes_to_every_group() -> None:
    three = model(inputs=(TensorSpec("x", "FP32", (1,)), TensorSpec("w", "FP32", (2,))))
    seen: Any = []
    call = group_by_values("x")(lambda x, w: seen.append(w.tolist()) or {"y": x})
    serving(three, call, x=rows(1, 2), w=np.array([7, 8], np.float32))
    assert seen == [[7, 8], [7, 8]]


@pytest.mark.parametrize("use", [lambda: group_by_values()(len), lambda: group_by_values(len)])
def test_group_by_values_is_given_names(use: Any) -> None:
    with pytest.raises(TypeError, match=r"names of inputs, as @group_by_values\('name'\), but was given"):
        use()


def test_pad_fn_has_to_be_callable() -> None:
    with pytest.raises(TypeError, match=r"pad_fn must be callable, as ConstantPadder\(0\) is, got 3"):
        group_by_values("k", pad_fn=3)  # type: ignore[arg-type]


def test_group_by_values_goes_below_batch() -> None:
    with pytest.raises(StackError, match="@group_by_values works on the arrays that @batch makes"):
        group_by_values("k")(batch(lambda x: x))

    def joins(requests: Any) -> Any:
        joined = batch(lambda x: x)
        return joined(requests)

    with pytest.raises(StackError, match="@group_by_values must be below @batch"):
        group_by_values("k")(joins)([{"x": rows(1)}])


def test_group_by_values_of_what_is_no_input() -> None:
    with pytest.raises(BatchError, match="groups by the input 'z', but the inputs are 'x'"):
        group_by_values("z")(lambda x: x)(x=rows(1))
    with pytest.raises(BatchError, match="input 'k' to have rows"):
        group_by_values("k")(lambda k: k)(k=np.float32(1))
    with pytest.raises(BatchError, match="can only be used with models that batch"):
        serving(model(max_batch_size=0), group_by_values("x")(lambda x: x), x=rows(1))


# ---- ConstantPadder -----------------------------------------------------------------------------


def test_the_padder_pads_every_axis_but_the_first() -> None:
    first, second = ConstantPadder(9)([{"y": np.zeros((1, 2, 1))}, {"y": np.ones((2, 1, 2))}])
    assert first["y"].tolist() == [[[0, 9], [0, 9]]]
    assert second["y"].tolist() == [[[1, 1], [9, 9]]] * 2


def test_the_padder_pads_byte_strings_with_empty_ones() -> None:
    objects = [{"y": np.array([[b"a", b"b"]], object)}, {"y": np.array([[b"c"]], object)}]
    assert ConstantPadder()(objects)[1]["y"].tolist() == [[b"c", b""]]
    texts = [{"y": np.array([["long", "b"]])}, {"y": np.array([["c"]])}]
    assert ConstantPadder()(texts)[1]["y"].tolist() == [["c", ""]]


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (rows(1), np.array([[1]]), "'y' cannot be padded: it is float32 and int64 in the groups"),
        (rows(1), np.ones(1, np.float32), "'y' cannot be padded: it has 1 and 2 axes"),
        (np.array([[b"a"]]), np.array([["a"]]), "'y' cannot be padded: it is <U1 and |S1"),
    ],
    ids=["dtype", "axes", "text"],
)
def test_what_cannot_be_padded(first: Any, second: Any, text: str) -> None:
    with pytest.raises(ValuesError, match=re.escape(text)):
        ConstantPadder()([{"y": first}, {"y": second}])
