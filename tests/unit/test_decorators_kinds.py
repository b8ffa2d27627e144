"""Every decorator over every kind of callable and in every kind of use."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import cloudpickle
import numpy as np
import pytest
from decorating import DECORATORS, complete, model, rows, serving, worker_batch

from gpuserve.decorators import (
    ConstantPadder,
    NoModelError,
    batch,
    current_model,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    model_context,
    pad_batch,
    sample,
)
from gpuserve_worker.inference.callable_loading import CallableKind, kind_of
from gpuserve_worker.inference.inference_request import BatchedOutputs, Request, accepts_batch


def plain(x: Any, **others: Any) -> Any:
    return {"y": x}


async def coroutine(x: Any, **others: Any) -> Any:
    return {"y": x}


def generator(x: Any, **others: Any) -> Any:
    yield {"y": x}
    yield {"y": x + 1}


async def async_generator(x: Any, **others: Any) -> Any:
    yield {"y": x}
    yield {"y": x + 1}


class Plain:
    def __call__(self, x: Any, **others: Any) -> Any:
        return {"y": x}


class Coroutine:
    async def __call__(self, x: Any, **others: Any) -> Any:
        return {"y": x}


class Generator:
    def __call__(self, x: Any, **others: Any) -> Any:
        yield {"y": x}
        yield {"y": x + 1}


class AsyncGenerator:
    async def __call__(self, x: Any, **others: Any) -> Any:
        yield {"y": x}
        yield {"y": x + 1}


def add(amount: float, x: Any, **others: Any) -> Any:
    return {"y": x + amount}


async def add_later(amount: float, x: Any, **others: Any) -> Any:
    return {"y": x + amount}


KINDS = {
    CallableKind.PLAIN: plain,
    CallableKind.COROUTINE: coroutine,
    CallableKind.GENERATOR: generator,
    CallableKind.ASYNC_GENERATOR: async_generator,
}
OBJECTS = {
    CallableKind.PLAIN: Plain(),
    CallableKind.COROUTINE: Coroutine(),
    CallableKind.GENERATOR: Generator(),
    CallableKind.ASYNC_GENERATOR: AsyncGenerator(),
}
RESULTS = {
    CallableKind.COROUTINE: inspect.iscoroutine,
    CallableKind.GENERATOR: inspect.isgenerator,
    CallableKind.ASYNC_GENERATOR: inspect.isasyncgen,
}


# ---- kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS)
@pytest.mark.parametrize("functions", [KINDS, OBJECTS], ids=["functions", "objects"])
@pytest.mark.parametrize("kind", CallableKind)
def test_the_kind_is_seen_through_a_decorator(kind: CallableKind, functions: Any, decorator: Any) -> None:
    assert kind_of(decorator(functions[kind])) is kind
    assert kind_of(decorator(functools.partial(functions[kind], other=1))) is kind


def test_a_partial_is_decorated_and_a_decorated_callable_made_partial() -> None:
    assert batch(functools.partial(add, 3))(worker_batch("y")).arrays["y"].tolist() == [[4], [5], [6]]
    later = complete(batch(functools.partial(add_later, 3))(worker_batch("y")))
    assert later.arrays["y"].tolist() == [[4], [5], [6]]
    assert kind_of(functools.partial(batch(add_later), 3)) is CallableKind.COROUTINE


@pytest.mark.parametrize("functions", [KINDS, OBJECTS], ids=["functions", "objects"])
@pytest.mark.parametrize("kind", RESULTS)
def test_batch_gives_what_its_function_gives(kind: CallableKind, functions: Any) -> None:
    result = batch(functions[kind])(worker_batch("y"))
    assert RESULTS[kind](result)
    answers = complete(result)
    answers = answers if isinstance(answers, list) else [answers]
    assert all(isinstance(one, BatchedOutputs) for one in answers)
    assert [one.arrays["y"].tolist() for one in answers] == [[[1], [2], [3]], [[2], [3], [4]]][: len(answers)]
    assert [len(one) for one in answers] == [2] * len(answers)


@pytest.mark.parametrize("kind", RESULTS)
def test_sample_gives_what_its_function_gives(kind: CallableKind) -> None:
    result = sample(KINDS[kind])(worker_batch("y", batching=False))
    assert RESULTS[kind](result)
    answers = complete(result)
    (first,) = answers if kind is CallableKind.COROUTINE else answers[0]
    assert first["y"].tolist() == [[1], [2]]


def test_a_generator_is_not_begun_before_it_is_asked() -> None:
    begun = []

    @batch
    def call(x: Any) -> Any:
        begun.append(True)
        yield x

    result = call(worker_batch("y"))
    assert begun == []
    assert next(result).arrays["y"] is not None
    assert begun == [True]


@pytest.mark.parametrize(
    "decorator",
    [batch, lambda f: batch(group_by_values("x")(f)), group_by_keys],
    ids=["batch", "values", "keys"],
)
def test_a_generator_that_is_given_up_ends_at_once(decorator: Any) -> None:
    ended = []

    def call(*requests: Any, **inputs: Any) -> Any:
        try:
            while True:
                yield [{"y": rows(1)}] if requests else {"y": rows(1)}
        finally:
            ended.append(True)

    result = decorator(call)([{"x": rows(1)}])
    next(result)
    result.close()
    assert ended == [True]


@pytest.mark.parametrize(
    "decorator", [batch, lambda f: batch(group_by_values("x")(f))], ids=["batch", "values"]
)
def test_an_async_generator_that_is_given_up_ends_at_once(decorator: Any) -> None:
    ended = []

    async def call(x: Any) -> Any:
        try:
            while True:
                yield {"y": x}
        finally:
            ended.append(True)

    async def first() -> Any:
        result = decorator(call)([{"x": rows(1)}, {"x": rows(2)}])
        answer = await anext(result)
        await result.aclose()
        assert ended == [True]
        return answer

    assert len(complete(first())) == 2


@pytest.mark.parametrize(
    "decorator", [batch, lambda f: batch(group_by_values("x")(f))], ids=["batch", "values"]
)
def test_what_a_generator_returns_is_passed_on(decorator: Any) -> None:
    def call(x: Any) -> Any:
        yield x
        return "meant to be yielded"

    result = decorator(call)([{"x": rows(1)}, {"x": rows(2)}])
    next(result)
    with pytest.raises(StopIteration) as end:
        next(result)
    assert end.value.value == "meant to be yielded"


@pytest.mark.parametrize("kind", RESULTS)
def test_an_output_that_does_not_fit_is_an_error_when_it_comes(kind: CallableKind) -> None:
    call = batch(group_by_values("x")(functools.partial(KINDS[kind])))
    wrong = batch(lambda x: KINDS[kind](x[:1]))(worker_batch("y"))
    with pytest.raises(ValueError, match="but the batch has 3 rows"):
        complete(wrong)
    assert complete(call([{"x": rows(1)}])) is not None


# ---- stacks -------------------------------------------------------------------------------------


def full_stack(function: Any) -> Any:
    for decorator in (
        model_context,
        pad_batch,
        first_value("k"),
        group_by_values("k", pad_fn=ConstantPadder(0)),
        batch,
        group_by_keys,
        fill_optionals(k=np.array([7], np.float32)),
    ):
        function = decorator(function)
    return function


def told(x: Any, k: Any, model_context: Any) -> Any:
    return {"y": x * k + len(x) * 100 + model_context.version}


async def told_later(x: Any, k: Any, model_context: Any) -> Any:
    return told(x, k, model_context)


def told_piecewise(x: Any, k: Any, model_context: Any) -> Any:
    yield [told(x, k, model_context)["y"]]


@pytest.mark.parametrize("function", [told, told_later])
def test_all_decorators_at_once(function: Any) -> None:
    given = [{"x": rows(1)}, {"x": rows(2, 3), "k": rows(2, 2)}, {"x": rows(4)}]
    responses = serving(model(), full_stack(function), given)
    assert [one["y"].ravel().tolist() for one in responses] == [[208], [205, 207], [229]]


def test_all_decorators_at_once_over_a_generator() -> None:
    given = [{"x": rows(1)}, {"x": rows(2, 3), "k": rows(2, 2)}, {"x": rows(4)}]
    answers = serving(model(), full_stack(told_piecewise), given)
    found = [[None if one is None else one["y"].ravel().tolist() for one in answer] for answer in answers]
    assert found == [[None, [205, 207], None], [[208], None, [229]]]


def test_all_decorators_on_a_method_and_on_an_object() -> None:
    class Model:
        @fill_optionals(k=np.array([7], np.float32))
        @batch
        @group_by_values("k")
        @first_value("k")
        @pad_batch
        @model_context
        def infer(self, x: Any, k: Any, model_context: Any) -> Any:
            return [x * k + model_context.version]

        __call__ = infer

    for call in (Model().infer, Model(), batch(first_value("k")(model_context(CallableModel())))):
        assert accepts_batch(call)
        given = [{"x": rows(1), "k": rows(7)}]
        (output,) = serving(model(), call, given).arrays.values()
        assert output.tolist() == [[8]]


class CallableModel:
    def __call__(self, x: Any, k: Any, model_context: Any) -> Any:
        return {"y": x * k + model_context.version}


def test_parameters_are_read_above_batch() -> None:
    inner = batch(lambda x, factor: {"y": x * factor})

    def outer(requests: Any) -> Any:
        return [inner([one], factor=one.parameters["factor"])[0] for one in requests]

    given = [Request({"x": rows(1)}, {"factor": 2}), Request({"x": rows(1)}, {"factor": 3})]
    assert [one["y"].tolist() for one in group_by_keys(outer)(given)] == [[[2]], [[3]]]


def test_a_stack_survives_the_way_to_a_worker() -> None:
    call = cloudpickle.loads(cloudpickle.dumps(full_stack(told)))
    assert accepts_batch(call)
    assert serving(model(), call, [{"x": rows(1)}])[0]["y"].tolist() == [[208]]


# ---- the model ----------------------------------------------------------------------------------


def test_model_context_over_requests_and_over_arrays() -> None:
    over_requests = model_context(lambda requests, model_context: [model_context.name])
    assert serving(model(), over_requests, [{"x": rows(1)}]) == ["m"]
    above = model_context(batch(lambda x, model_context: {"y": x + model_context.max_batch_size}))
    assert accepts_batch(above)
    assert serving(model(), above, worker_batch("y")).arrays["y"].tolist() == [[9], [10], [11]]
    assert serving(model(), lambda: current_model().name) == "m"


def test_a_model_context_that_is_given_by_hand() -> None:
    call = model_context(lambda requests, model_context: model_context)
    assert call([], model_context="mine") == "mine"
    with pytest.raises(NoModelError, match="@model_context needs to know the model, but the callable was"):
        call([])


def test_model_context_needs_its_parameter() -> None:
    with pytest.raises(TypeError, match=r"argument model_context, which f\(requests\) does not take"):

        @model_context
        def f(requests: Any) -> Any:
            return requests
