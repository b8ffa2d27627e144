"""Stacks of decorators in a real server, asked with tritonclient."""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import model, served, tensor
from serving import Addresses
from tritonclient.utils import InferenceServerException

TIMEOUT_S = 20.0
MODELS = Path(__file__).resolve().parents[1] / "models" / "decorated.py"
X, K = tensor("x", "FP32", 1), tensor("k", "FP32", 1)
OPTIONAL_K = tensor("k", "FP32", 1, optional=True)
Y, TOLD = tensor("y", "FP32", -1), tensor("told", "BYTES", 1)
#: Four requests of one row become one batch.
OF_FOUR = {"batching": {"max_queue_delay_us": 5_000_000, "preferred_batch_sizes": [4]}}


def models() -> list[dict[str, Any]]:
    entries = [
        model("Stack", "Stack", [X, OPTIONAL_K], [Y, TOLD], 4, **OF_FOUR),
        model("stack_async", "stack_async", [X, OPTIONAL_K], [Y, TOLD], 4, **OF_FOUR),
        model("wide", "wide", [X, K], [Y], 4, **OF_FOUR),
        model("equal", "equal", [X, K], [Y], 4, **OF_FOUR),
        model("total", "total", [X, OPTIONAL_K], [Y], 4),
        model("added", "added", [X], [Y], 4),
        model("misfit", "misfit", [X, OPTIONAL_K], [Y], 4),
        model("count", "count", [X, K], [Y], 4, decoupled=True, **OF_FOUR),
        model("count_async", "count_async", [X, K], [Y], 4, decoupled=True),
        model("pieces", "pieces", [tensor("x", "FP32", -1)], [Y], 0, decoupled=True),
    ]
    return [{**one, "callable": f"{MODELS}:{one['name']}"} for one in entries]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with served(tmp_path_factory.mktemp("decorated"), models()) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as one:
        yield one


def inputs_of(library: Any, arrays: dict[str, Any]) -> list[Any]:
    made = []
    for name, values in arrays.items():
        array = np.asarray(values, np.float32)
        one = library.InferInput(name, array.shape, "FP32")
        one.set_data_from_numpy(array)
        made.append(one)
    return made


def infer(client: Any, name: str, **arrays: Any) -> Any:
    return client.infer(name, inputs_of(tritonclient.grpc, arrays), client_timeout=TIMEOUT_S)


def infer_together(client: Any, name: str, *requests: dict[str, Any]) -> list[Any]:
    """The results, or errors, of requests that fill one batch."""
    heard: queue.Queue[tuple[int, Any]] = queue.Queue()

    def hear(number: int, result: Any, error: Any) -> None:
        heard.put((number, error or result))

    for number, arrays in enumerate(requests):
        client.async_infer(name, inputs_of(tritonclient.grpc, arrays), functools.partial(hear, number))
    found = dict(heard.get(timeout=TIMEOUT_S) for _ in requests)
    return [found[number] for number in range(len(requests))]


def stream(client: Any, name: str, *requests: dict[str, Any]) -> list[list[Any]]:
    """The values of output y in each response to each of the requests."""
    heard: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: heard.put(error or result), stream_timeout=TIMEOUT_S)
    for number, arrays in enumerate(requests):
        client.async_stream_infer(
            name,
            inputs_of(tritonclient.grpc, arrays),
            request_id=str(number),
            enable_empty_final_response=True,
        )
    answers: list[list[Any]] = [[] for _ in requests]
    open_requests = len(requests)
    while open_requests:
        result = heard.get(timeout=TIMEOUT_S)
        assert not isinstance(result, Exception), result
        response = result.get_response()
        if (y := result.as_numpy("y")) is not None:
            answers[int(response.id)].append(y.ravel().tolist())
        open_requests -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    return answers


def row(x: float, k: float) -> dict[str, Any]:
    return {"x": [[x]], "k": [[k]]}


@pytest.mark.parametrize("name", ["Stack", "stack_async"])
def test_a_whole_stack_over_a_batch_of_several_requests(client: Any, name: str) -> None:
    results = infer_together(client, name, row(1, 10), row(2, 20), row(3, 10), row(4, 20))
    assert [one.as_numpy("y").tolist() for one in results] == [[[10]], [[40]], [[30]], [[80]]]
    assert {one.as_numpy("told")[0, 0] for one in results} == {f"{name} 4".encode()}


@pytest.mark.parametrize("name", ["Stack", "stack_async"])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_default_in_the_place_of_an_optional_input(server: Addresses, protocol: str, name: str) -> None:
    library: Any = {"grpc": tritonclient.grpc, "http": tritonclient.http}[protocol]
    with library.InferenceServerClient(getattr(server, protocol)) as client:
        result = client.infer(name, inputs_of(library, {"x": [[1], [2], [3], [4]]}))
        assert result.as_numpy("y").tolist() == [[7], [14], [21], [28]]


def test_groups_with_outputs_of_different_shapes(client: Any) -> None:
    results = infer_together(client, "wide", row(1, 1), row(2, 3), row(3, 1), row(4, 2))
    found = [one.as_numpy("y").tolist() for one in results]
    assert found == [[[1, -1, -1]], [[2, 2, 2]], [[3, -1, -1]], [[4, 4, -1]]]


def test_requests_with_and_without_an_input(client: Any) -> None:
    results = infer_together(client, "total", {"x": [[1]]}, row(2, 10), {"x": [[3]]})
    assert [one.as_numpy("y").tolist() for one in results] == [[[1]], [[12]], [[3]]]


def test_a_partial(client: Any) -> None:
    assert infer(client, "added", x=[[1]]).as_numpy("y").tolist() == [[6]]


def test_generators_stream_to_each_client_what_its_group_yields(client: Any) -> None:
    answers = stream(client, "count", row(1, 2), row(10, 3), row(100, 2), row(1000, 1))
    assert answers == [[[1], [2]], [[10], [11], [12]], [[100], [101]], [[1000]]]


def test_async_generators_and_samples_stream(client: Any) -> None:
    assert stream(client, "count_async", row(1, 3)) == [[[1], [2], [3]]]
    assert stream(client, "pieces", {"x": [1, 2, 3]}) == [[[1], [2], [3]]]


def test_a_function_that_does_not_take_the_inputs_tells_so(client: Any) -> None:
    with pytest.raises(InferenceServerException) as error:
        infer(client, "misfit", x=[[1]])
    assert "misfit(x, k) cannot be called with the inputs x: misfit() missing" in str(error.value)
    assert "; k is optional and not in the request" in str(error.value)
    assert infer(client, "added", x=[[1]]).as_numpy("y").tolist() == [[6]]


def test_values_that_are_not_equal_over_the_batch(client: Any) -> None:
    results = infer_together(client, "equal", row(1, 1), row(2, 2), row(3, 3), row(4, 4))
    assert all("The values of input 'k' are not equal over the batch" in str(one) for one in results)
    equal = infer_together(client, "equal", row(1, 2), row(2, 2), row(3, 2), row(4, 2))
    assert [one.as_numpy("y").tolist() for one in equal] == [[[2]], [[4]], [[6]], [[8]]]
