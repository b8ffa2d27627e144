"""A request as the callable sees it."""

from __future__ import annotations

import numpy as np
import pytest

from gpuserve_worker.inference.inference_request import Batch, Request
from gpuserve_worker.protocol.payloads import requests, requests_as_tuples


def test_a_request_is_made_with_the_arguments_of_pytriton() -> None:
    x = np.zeros(1)
    request = Request({"x": x}, parameters={"p": 1}, span=None, requested_output_names=["y"])
    assert request["x"] is x
    assert request.parameters == {"p": 1}
    assert request.requested_output_names == ["y"]
    assert request.span is None
    assert request.cancelled is False


def test_a_traced_span_hides_no_exception() -> None:
    with pytest.raises(ZeroDivisionError), Request({}).traced_span("fails"):
        _ = 1 / 0


def test_a_request_is_a_mutable_mapping() -> None:
    request = Request({"x": np.zeros(1)})
    request["z"] = np.ones(1)
    del request["x"]
    assert list(request) == ["z"]
    assert len(request) == 1
    assert request.get("x") is None


def test_other_data_of_the_same_request() -> None:
    request = Request({"x": np.zeros(1)}, {"p": 1}, None, ["y"])
    changed = request.with_data({"z": np.ones(1)})
    assert list(changed) == ["z"]
    assert list(request) == ["x"]
    assert (changed.parameters, changed.requested_output_names) == ({"p": 1}, ["y"])
    request.cancelled = True
    assert changed.cancelled
    assert changed.with_data({}).cancelled


def test_requests_that_travel_as_their_rows_have_all_fields_and_parameters_of_their_own() -> None:
    told = (2, (1, {"k": 1}, ("y",), (), None, (), None), 2)
    assert [tuple(one) for one in requests(told)] == [
        (2, {}, (), (), None, (), None),
        (1, {"k": 1}, ("y",), (), None, (), None),
        (2, {}, (), (), None, (), None),
    ]
    batch = Batch({"x": np.arange(5)}, requests_as_tuples(told), ("y", "z"), batching=True)
    assert batch.rows == (2, 1, 2)
    first, second, third = batch.as_list()
    first.parameters["mine"] = True
    assert (second.parameters, third.parameters) == ({"k": 1}, {})
    assert (first.requested_output_names, second.requested_output_names) == (["y", "z"], ["y"])
    assert (
        Batch({"x": np.arange(5)}, requests_as_tuples(told), (), batching=True).as_list()[0].parameters == {}
    )
