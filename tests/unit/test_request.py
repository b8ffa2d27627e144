"""A request as the callable sees it."""

from __future__ import annotations

import numpy as np
import pytest

from gpuserve_worker.request import Request


def test_a_request_is_made_with_the_arguments_of_pytriton() -> None:
    x = np.zeros(1)
    request = Request({"x": x}, parameters={"p": 1}, span=None, requested_output_names=["y"])
    assert request["x"] is x
    assert request.parameters == {"p": 1}
    assert request.requested_output_names == ["y"]
    assert request.span is None
    assert request.cancelled is False


def test_a_traced_span_does_nothing() -> None:
    request = Request({})
    with request.traced_span("tokenize") as span:
        assert span is None
    with pytest.raises(ZeroDivisionError), request.traced_span("fails"):
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
