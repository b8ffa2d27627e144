"""What notebooks show: small tables, in which no name and no value is markup."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuserve import ModelConfig, Server, Tensor
from gpuserve.api.notebook_html import line, table
from gpuserve.client import ClientModelConfig, ModelClient
from gpuserve.client.request_builder import Arrays
from gpuserve.compat.pytriton.triton import Triton
from gpuserve.testing import TestClient
from gpuserve.typed import Float32, batch


@batch(max_batch_size=4)
def double(x: Float32) -> Float32:
    return 2 * x


def test_every_text_is_escaped() -> None:
    hostile = "<script>alert('x')</script>&"
    for html in (
        table([hostile], [[hostile]]),
        line(hostile, hostile),
        Arrays({hostile: np.ones(1)})._repr_html_(),
    ):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_arrays_are_shown_by_how_they_begin() -> None:
    arrays = Arrays({"long": np.arange(100), "text": np.array([b"<b>" * 100], object), "no": np.ones((0, 2))})
    html = arrays._repr_html_()
    assert "<td>int64</td><td>[100]</td><td>0, 1, 2, 3, 4, 5, …</td>" in html
    assert "<td>[0, 2]</td><td></td>" in html
    assert len(html) < 700
    assert arrays == dict(arrays)


def test_a_server_says_its_models_and_where_it_is() -> None:
    server = Server(http_port=0)
    assert repr(server) == "<Server: no models; not running>"
    server.bind("double", double)
    tensors = [Tensor(name="x", dtype=bytes, shape=(1,))]
    server.bind("echo", lambda requests: requests, tensors, tensors, 2, ModelConfig(batching=False))
    assert repr(server) == "<Server: double, echo 2; not running>"
    html = server._repr_html_()
    assert "<td>double</td><td>1</td><td>cpu</td><td>x: FP32 [-1]</td><td>OUTPUT_1: FP32 [-1]</td>" in html
    assert "<td>up to 4</td>" in html
    assert "<td>x: BYTES [1]</td><td>none</td>" in html


def test_a_program_for_pytriton_shows_the_same() -> None:
    triton = Triton()
    triton.bind("echo", lambda requests: requests, [Tensor((1,), np.float32)], [Tensor((1,), np.float32)])
    assert repr(triton) == "<Triton: echo; not running>"
    assert "<td>INPUT_1: FP32 [1]</td>" in triton._repr_html_()


def test_a_client_says_whose_it_is_and_not_its_token() -> None:
    known: Any = ClientModelConfig("m", inputs=[], outputs=[])
    with ModelClient("localhost:1", "m", model_config=known, access_token="hidden") as client:
        assert repr(client) == "<ModelClient of m/<latest> at http://localhost:1>"
        html = client._repr_html_()
    assert "<b>ModelClient</b> of m/&lt;latest&gt; at http://localhost:1" in html
    assert "hidden" not in html + repr(client)


def test_what_a_test_is_answered_shows_parameters_too() -> None:
    with TestClient(double) as client:
        assert repr(client) == "<TestClient of double>"
        html = client.infer(x=[[1.0]])._repr_html_()
    assert "<td>OUTPUT_1</td><td>float32</td><td>[1, 1]</td><td>2.0</td>" in html
    assert repr(client) == "<TestClient of double, not open>"


def test_another_pytriton_is_not_replaced_under_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    import gpuserve.compat

    other = types.ModuleType("pytriton")
    other.__file__ = "/elsewhere/pytriton/__init__.py"
    monkeypatch.setitem(sys.modules, "pytriton", other)
    with pytest.raises(ImportError, match=r"imported already, from /elsewhere/pytriton/__init__\.py"):
        gpuserve.compat.install()
